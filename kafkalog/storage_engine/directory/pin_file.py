"""The file of a snapshot pin: a state of the journal, as JSON with a checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.state import PartitionState, State

_VERSION: Final = 1


class PinnedPartition(NamedTuple):
    """A partition in a pin."""

    log_start_offset: int
    high_watermark: int
    last_stable_offset: int


@dataclass(frozen=True, slots=True)
class Pin:
    """One state of the journal, stored in a file."""

    path: Path
    number: int
    """Number of the journal record."""
    topics: Mapping[str, tuple[str, tuple[PinnedPartition, ...]]]
    """By name: a topic's id, and its partitions in order."""

    def partition(self, topic: str, topic_id: str, partition: int) -> PinnedPartition | None:
        """Return a partition of the pin, or None if that topic did not have it."""
        known = self.topics.get(topic)
        if known is None or known[0] != topic_id or partition >= len(known[1]):
            return None
        return known[1][partition]


def encoded(state: State) -> bytes:
    """Return the content of a pin for a state."""
    topics = {
        topic.name: [topic.topic_id, [_pinned(held) for held in topic.partitions]]
        for topic in state.topics.values()
    }
    content = {"version": _VERSION, "number": state.number, "topics": topics}
    return _json({**content, "crc": crc32c(_json(content))}) + b"\n"


def _json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _pinned(held: PartitionState) -> PinnedPartition:
    return PinnedPartition(held.log_start_offset, held.high_watermark, held.last_stable_offset)


def read(path: Path) -> Pin | None:
    """Return a pin, or None if the file is missing. Raises CorruptLogError."""
    try:
        found = _decoded(path, files.read_file(path))
    except FileNotFoundError:
        return None
    if found is None:
        raise CorruptLogError(
            path,
            0,
            f"a pin of version {_VERSION}",
            "one of a later release",
            advice="run one release everywhere",
        )
    return found


def read_either(path: Path) -> Pin | None:
    """Return a pin under its listed name, or the final name that it got since.

    Returns None for a pin of a later release. Raises OSError and CorruptLogError.
    """
    try:
        return _decoded(path, files.read_file(path))
    except FileNotFoundError:
        path = path.with_suffix("")
        return _decoded(path, files.read_file(path))


def _decoded(path: Path, data: bytes) -> Pin | None:
    try:
        content = json.loads(data)
        if content["version"] != _VERSION:
            return None
        if content.pop("crc") != crc32c(_json(content)):
            raise ValueError("wrong checksum")
        topics = {
            str(name): (str(topic_id), tuple(PinnedPartition(*map(int, held)) for held in rows))
            for name, (topic_id, rows) in content["topics"].items()
        }
        return Pin(path, int(content["number"]), topics)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as fault:
        raise CorruptLogError(
            path,
            0,
            "the JSON of a pin",
            f"{data[:40]!r}",
            advice="remove it and run the action again",
        ) from fault
