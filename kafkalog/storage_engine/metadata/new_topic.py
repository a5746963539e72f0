"""A topic before it is created, and the rules that it has to meet.

Kafka: Topic.validate, ReplicationControlManager.createTopics.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.whole_number import whole_number
from kafkalog.storage_engine.metadata.config import TopicConfig, as_texts, check_mapping


@dataclass(frozen=True, slots=True)
class NewTopic:
    """How to create a topic that does not exist yet: its partitions and Kafka's topic configs."""

    partitions: int
    config: Mapping[str, str]

    @classmethod
    def of(cls, partitions: int, config: Mapping[str, str]) -> Self:
        """Return a topic that is compacted, unless `config` says otherwise.

        Raises InvalidInputError if `partitions` is not a whole number, or `config` not a mapping.
        """
        check_mapping(config)
        texts = as_texts({"cleanup.policy": "compact", **config})
        return cls(whole_number("partitions", partitions), texts)

    def check(self, name: str) -> None:
        """Raise InvalidInputError unless a topic of this name can be created so."""
        fault = layout.topic_name_fault(name)
        if fault:
            raise InvalidInputError(fault)
        if name in layout.INTERNAL_TOPICS:
            raise InvalidInputError(f"topic {name!r} belongs to Kafka itself and is only read")
        if not 1 <= self.partitions <= layout.PARTITIONS_MAX:
            raise InvalidInputError(
                f"topic {name!r}: expected 1 to {layout.PARTITIONS_MAX} partitions, "
                f"found {self.partitions}"
            )
        TopicConfig.parse(self.config)


def new_topic_id() -> str:
    """Draw a topic id in Kafka's form: 22 characters, never beginning with `-`."""
    while True:
        text = layout.topic_id_text(uuid.uuid4().bytes)
        if not text.startswith("-"):
            return text
