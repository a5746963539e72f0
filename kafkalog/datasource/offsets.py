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

__all__ = [
    "EARLIEST",
    "LATEST",
    "OffsetJson",
    "Offsets",
    "StartOrEnd",
    "TopicPartition",
    "from_json",
    "parse_object",
    "partition_number",
    "to_json",
]

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
        if not isinstance(partitions, Mapping):
            raise _bad_json(nested)
        for partition, offset in partitions.items():
            number = partition_number(partition)
            if number is None or not _is_offset(offset):
                raise _bad_json(nested)
            offsets[TopicPartition(topic, number)] = offset
    return offsets


@dataclass(frozen=True, slots=True)
class StartOrEnd:
    """The start or end of a read, as its option gives it, before it is resolved.

    `everywhere` holds for all partitions; else each one is named, alone or through its topic.
    """

    everywhere: int | None = None
    partitions: Mapping[TopicPartition, int] = field(default_factory=dict)
    topics: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, option: str | None = None) -> StartOrEnd:
        """Parse `earliest`, `latest` (any letter case) or JSON.

        In the JSON a topic's value is a map of partitions, or `"earliest"` or `"latest"` for all of
        them. Raises InvalidInputError, which names the option.
        """
        word = text.strip().lower()
        if word in _NAMES:
            return cls(everywhere=_NAMES[word])
        document = parse_object(text)
        fault = _bad_json(text, option)
        if document is None:
            raise fault
        partitions: Offsets = {}
        topics: dict[str, int] = {}
        for topic, value in document.items():
            if isinstance(value, str) and value.strip().lower() in _NAMES:
                topics[topic] = _NAMES[value.strip().lower()]
            elif isinstance(value, dict):
                for partition, offset in value.items():
                    number = partition_number(partition)
                    if number is None or not _is_offset(offset):
                        raise fault
                    named = TopicPartition(topic, number)
                    if named in partitions:
                        where = "" if option is None else f"{option}: "
                        raise InvalidInputError(f"{where}{named} is named twice; name it once")
                    partitions[named] = offset
            else:
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
                f"of {_join(set(self.topics) - topics)}; assigned topics: {_join(topics)}"
            )
        if named.keys() != set(wanted):
            raise InvalidInputError(
                "[KAFKA_START_OFFSET_DOES_NOT_MATCH_ASSIGNED] Partitions specified for Kafka start "
                f"offsets don't match what are assigned. If {option} contains specific "
                "offsets, you must specify all TopicPartitions. Use -1 for latest, -2 for "
                f"earliest, if you don't care. Specified: {_join(named)}. Assigned: {_join(wanted)}"
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


def partition_number(text: str) -> int | None:
    """Return a partition's number; None if `text` is not one."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    return int(text)


def _is_offset(value: object) -> bool:
    return type(value) is int and EARLIEST <= value <= INT64_MAX


def _bad_json(found: object, option: str | None = None) -> InvalidInputError:
    where = "" if option is None else f"{option}: "
    return InvalidInputError(f"{where}Expected e.g. {_EXAMPLE}, got {found}")


def _join(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"
