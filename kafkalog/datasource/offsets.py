"""Offsets of many partitions, and their JSON: `{"topic":{"0":23,"1":-1}}`.

The JSON is that of Spark's Kafka source, in options and in checkpoints. Two numbers are resolved
later: -2 is the partition's earliest offset, -1 the offset of its next record. All other numbers
are the offset of the next record to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format.layout import INT64_MAX

LATEST: Final = -1
EARLIEST: Final = -2
_NAMES: Final = {"earliest": EARLIEST, "latest": LATEST}
_EXAMPLE: Final = '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}'


class TopicPartition(NamedTuple):
    """A partition of a topic; sorts by topic, then by number (Kafka: TopicPartition)."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


Offsets = dict[TopicPartition, int]
OffsetJson = dict[str, dict[str, int]]


def to_json(offsets: Mapping[TopicPartition, int]) -> OffsetJson:
    """Return the offsets as Spark stores them.

    Spark compares offsets as text, so equal offsets must give equal text. Topics are sorted, and
    the partitions of a topic by number.
    """
    nested: OffsetJson = {}
    for (topic, partition), offset in sorted(offsets.items()):
        nested.setdefault(topic, {})[str(partition)] = offset
    return nested


def from_json(nested: Mapping[str, Mapping[str, int]]) -> Offsets:
    """Return the offsets of a checkpoint's JSON; raises InvalidInputError for another form."""
    offsets: Offsets = {}
    for topic, partitions in nested.items():
        if not add_partitions(offsets, topic, partitions, option="offsets", least=EARLIEST):
            raise InvalidInputError(f"Expected e.g. {_EXAMPLE}, got {nested}")
    return offsets


def add_partitions(
    found: Offsets, topic: str, partitions: object, *, option: str, least: int
) -> bool:
    """Add the numbers of a topic's partitions from JSON: `{"0": 23, "1": -1}`.

    Return False for another form and for a number below `least`. Raises InvalidInputError, which
    names the option, for a partition that is named twice (`0` and `00`).
    """
    if not isinstance(partitions, Mapping):
        return False
    for text, number in partitions.items():
        is_partition = text.isascii() and text.isdigit() and len(text) <= 10
        if not is_partition or type(number) is not int or not least <= number <= INT64_MAX:
            return False
        named = TopicPartition(topic, int(text))
        if named in found:
            raise InvalidInputError(f"{option}: {named} is named twice; name it once")
        found[named] = number
    return True


@dataclass(frozen=True, slots=True)
class StartOrEnd:
    """The start or end of a read, as its option gives it, before it is resolved.

    `everywhere` holds for all partitions; else each one is named, alone or through its topic.
    """

    everywhere: int | None = None
    partitions: Mapping[TopicPartition, int] = field(default_factory=dict)
    topics: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, option: str) -> StartOrEnd:
        """Parse `earliest`, `latest` (any letter case) or JSON.

        In the JSON a topic's value is a map of partitions, or `"earliest"` or `"latest"` for all of
        them. Raises InvalidInputError, which names the option.
        """
        word = text.strip().lower()
        if word in _NAMES:
            return cls(everywhere=_NAMES[word])
        document = parse_object(text)
        fault = InvalidInputError(f"{option}: Expected e.g. {_EXAMPLE}, got {text}")
        if document is None:
            raise fault
        partitions: Offsets = {}
        topics: dict[str, int] = {}
        for topic, value in document.items():
            if isinstance(value, str) and value.strip().lower() in _NAMES:
                topics[topic] = _NAMES[value.strip().lower()]
            elif not add_partitions(partitions, topic, value, option=option, least=EARLIEST):
                raise fault
        return cls(partitions=partitions, topics=topics)

    @property
    def is_specific(self) -> bool:
        """Whether the option was JSON."""
        return self.everywhere is None

    def named(self, assigned: Iterable[TopicPartition]) -> Offsets:
        """Return the offsets that are named; `assigned` are all partitions."""
        if self.everywhere is not None:
            return dict.fromkeys(assigned, self.everywhere)
        named = {p: offset for p in assigned if (offset := self.topics.get(p.topic)) is not None}
        return named | dict(self.partitions)

    def offsets(self, assigned: Iterable[TopicPartition], *, option: str) -> Offsets:
        """Return an offset, -1 and -2 included, for each assigned partition.

        Raises InvalidInputError, which names the option, if its JSON does not name exactly these
        partitions.
        """
        wanted = sorted(assigned)
        named = self.named(wanted)
        if not self.is_specific:
            return named
        topics = {partition.topic for partition in wanted}
        if not topics.issuperset(self.topics):
            raise InvalidInputError(
                f"[KAFKA_TOPIC_OFFSET_DOES_NOT_MATCH_ASSIGNED] {option}: no partition is assigned "
                f"of {listed(self.topics.keys() - topics)}; assigned topics: {listed(topics)}"
            )
        if named.keys() != set(wanted):
            raise InvalidInputError(
                "[KAFKA_START_OFFSET_DOES_NOT_MATCH_ASSIGNED] Partitions specified for Kafka start "
                f"offsets don't match what are assigned. If {option} contains specific "
                "offsets, you must specify all TopicPartitions. Use -1 for latest, -2 for "
                "earliest, if you don't care. "
                f"Specified: {listed(named)}. Assigned: {listed(wanted)}"
            )
        return {partition: named[partition] for partition in wanted}


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`; None for other texts, and if a key appears twice.

    Raises InvalidInputError if one of two equal keys has a text as its value (Spark: JsonUtils).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        kinds: dict[str, bool] = {}
        for key, value in pairs:
            if kinds.setdefault(key, isinstance(value, str)) is not isinstance(value, str):
                raise InvalidInputError(
                    f"{key} has both a topic-level offset and per-partition offsets in {text}"
                )
        if len(kinds) < len(pairs):
            raise ValueError("a key appears twice")
        return dict(pairs)

    try:
        document = json.loads(text, object_pairs_hook=unique)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def listed(names: Iterable[TopicPartition] | Iterable[str]) -> str:
    """Return topics or partitions as text for an error, sorted."""
    return ", ".join(map(str, sorted(names))) or "none"
