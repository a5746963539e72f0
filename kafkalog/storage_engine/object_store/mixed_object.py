"""A mixed object: the runs of whole record batches that one task wrote, and a footer.

The runs are sorted by (topic id, partition). In a run the batches keep offsets from 0: a reader
stamps base offset and leader epoch. An object is written by one PUT, so it is whole or not there.
The commit names the runs too; the footer is for those who find an object without its commit.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.format.stamping import stamp
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.writing.staged_message import BatchFigures, Run, StagedFile

OBJECT_SIZE_MAX: Final = 64 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Batches(NamedTuple):
    """Finished batches of one log partition, to be written; they are stamped in place."""

    topic_id: str
    """'' for a topic to create."""
    topic: str
    partition: int
    parts: Sequence[memoryview]


@dataclass(slots=True)
class _OpenRun:
    """A run that is being added to an object."""

    topic_id: str
    topic: str
    partition: int
    position: int
    size: int = 0
    rows: int = 0
    max_timestamp: int = layout.NO_TIMESTAMP
    batches: list[BatchFigures] = field(default_factory=list)


class MixedObjects:
    """The mixed objects of one attempt; each is full before the next one begins."""

    def __init__(self, client: ObjectClient, seen: int, attempt: str) -> None:
        """`seen` and `attempt` are those of `layout.stored_data`."""
        self.files: list[StagedFile] = []
        self.runs: list[Run] = []
        self._client = client
        self._name = seen, attempt, secrets.token_hex(8)
        self._parts: list[memoryview] = []
        self._size = 0
        self._open: list[_OpenRun] = []

    def write(self, batches: Iterable[Batches]) -> None:
        """Write batches to one object, or to several if they take more than 64 MiB."""
        for topic_id, topic, partition, parts in sorted(batches, key=lambda each: each[:3]):
            run: _OpenRun | None = None
            for part in parts:
                position = 0
                while position < len(part):
                    if run is None:
                        run = _OpenRun(topic_id, topic, partition, self._size)
                        self._open.append(run)
                    end = self._fitting(run, part, position)
                    self._parts.append(part[position:end])
                    position = end
                    if position < len(part):
                        self._put()
                        run = None
        self._put()

    def _fitting(self, run: _OpenRun, part: memoryview, position: int) -> int:
        """Add whole batches to a run, and stamp them; return where those end that have room."""
        while position < len(part):
            header = parse_header(part, position)
            if self._size and self._size + header.size > OBJECT_SIZE_MAX:
                break
            if header.base_offset != run.rows:
                stamp(part, position, run.rows)
            rows = header.last_offset_delta + 1
            run.batches.append(BatchFigures(rows, header.size, header.max_timestamp))
            run.rows += rows
            run.size += header.size
            run.max_timestamp = max(run.max_timestamp, header.max_timestamp)
            self._size += header.size
            position += header.size
        return position

    def _put(self) -> None:
        """Write the object, if it has any batches."""
        opened, self._open = [run for run in self._open if run.size], []
        if not opened:
            return
        number = len(self.files)
        footer = _encode([_fields(run) for run in opened]).encode("ascii")
        trailer = layout.MIXED_TRAILER.pack(
            len(footer), crc32c(footer), layout.MIXED_VERSION, layout.MIXED_MAGIC
        )
        data = b"".join([*self._parts, footer, trailer])
        self._parts, self._size = [], 0
        file = StagedFile(layout.stored_data(*self._name, number), len(data), crc32c(data))
        self.files.append(file)  # before it is written: a failed attempt deletes it, if it is there
        self._client.put_unique(file.name, data)
        self.runs += [
            Run(
                run.topic,
                run.partition,
                number,
                run.position,
                run.size,
                run.rows,
                max_timestamp=run.max_timestamp,
                batches=tuple(run.batches),
            )
            for run in opened
        ]

    def discard(self) -> None:
        """Delete the objects of a failed attempt."""
        self._client.delete([file.name for file in self.files])


def _fields(run: _OpenRun) -> list[Any]:
    names = ("topic", "topic_id", "partition", "position", "size", "rows", "max_timestamp")
    return [getattr(run, name) for name in names]


def footer_of(place: str, data: bytes) -> Sequence[Sequence[Any]]:
    """Return the runs that an object's footer names; `data` may be the object's end alone.

    Each is [topic, topic id, partition, position, size, rows, largest timestamp]. Raises
    CorruptLogError.
    """
    end = len(data) - layout.MIXED_TRAILER.size
    if end < 0:
        raise CorruptLogError(place, len(data), "a footer", "the end")
    size, crc, version, magic = layout.MIXED_TRAILER.unpack_from(data, end)
    if (magic, version) != (expected := (layout.MIXED_MAGIC, layout.MIXED_VERSION)):
        raise CorruptLogError(place, end, f"{expected}", f"{(magic, version)}")
    payload = data[max(0, end - size) : end]
    if size > end or crc32c(payload) != crc:
        raise CorruptLogError(place, end, "the footer of its checksum", "another one")
    try:
        return [_run(each) for each in json.loads(payload)]
    except (ValueError, TypeError, RecursionError) as fault:
        found = f"{type(fault).__name__}: {str(fault)[:80]}"
        raise CorruptLogError(place, end - size, "a list of runs", found) from fault


def _run(values: Sequence[Any]) -> Sequence[Any]:
    """Return a run of a footer; raises ValueError or TypeError for values that aren't one."""
    topic, topic_id, *numbers, max_timestamp = values
    partition, position, size, rows = map(int, numbers)
    if min(partition, position, size, rows) < 0:
        raise ValueError(f"{numbers}: no run")
    return [str(topic), str(topic_id), partition, position, size, rows, int(max_timestamp)]
