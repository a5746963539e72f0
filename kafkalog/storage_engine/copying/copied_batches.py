"""The batches of one partition that a copy still lacks, in runs that its destination can append.

A batch is copied as it is. Only the first one may be cut: a cleaning of the source may have merged
records that were copied already with later ones. A cleaning while a copy runs does so too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.writing.copied_run import CopiedRun

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log_engine import LogEngine
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk

COMMIT_BYTES: Final = 64 << 20
"""Bytes of batches in one commit, unless one batch has more; a copy holds them in memory."""


@dataclass(frozen=True, slots=True)
class PartitionToCopy:
    """A partition, and what of it a copy lacks: the offsets of [start, end)."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    log_start: int
    """Where the source's log begins."""
    planned_s: float
    """When this was found out (`time.monotonic`)."""

    @property
    def name(self) -> str:
        """The name of the partition."""
        return f"{self.topic}-{self.partition}"


def copied_runs(
    source: LogEngine, wanted: PartitionToCopy, room: Callable[[], int]
) -> Iterator[tuple[CopiedRun, bool]]:
    """Yield the runs that a copy lacks, each of at most `room()` bytes, or of one chunk.

    Each comes with whether it is the last one, which knows the source's producers. It reaches to
    the end, or further. A cleaner of the source may pass the end meanwhile. Older records of keys
    are gone then, so the runs go on to the log end as it is by now. Raises InvalidInputError for
    messages v0 and v1, CorruptBatchError, StorageError; also if a cleaner passes the end and has
    had the time to remove deletions.
    """
    data = bytearray()
    start = position = wanted.start
    end = wanted.end
    run = CopiedRun(
        wanted.topic,
        wanted.topic_id,
        wanted.partition,
        start,
        start,
        min(wanted.log_start, start),
        b"",
        source=f"{source.root}: {wanted.name}",
    )
    while True:
        first = max(position, wanted.log_start)
        with source.snapshot(wanted.topic, wanted.partition, start=first) as snapshot:
            _state(source, wanted)  # the topic of these segments
            for chunk in snapshot.chunks(first, end):
                piece, next_offset = _batches(chunk, wanted, position)
                if data and len(data) + len(piece) > room():
                    log_start = min(wanted.log_start, position)
                    yield (
                        replace(
                            run, start=start, end=position, log_start=log_start, data=bytes(data)
                        ),
                        False,
                    )
                    data.clear()
                    start = position
                data += piece
                position = max(position, next_offset)
        state = _state(source, wanted)
        position = end = max(position, end)
        cleaned_to = min(state.cleaned_to, state.high_watermark)
        if cleaned_to > wanted.end:
            _check_deletions(source, wanted, cleaned_to)
        if cleaned_to <= end:
            break
        end = state.high_watermark
    producers = source.producers(wanted.topic, wanted.partition)
    if producers is not None and producers.end_offset == end:
        run = replace(run, producers=list(producers.entries.values()))
    log_start = min(wanted.log_start, end)
    yield replace(run, start=start, end=end, log_start=log_start, data=bytes(data)), True


def _state(source: LogEngine, wanted: PartitionToCopy) -> PartitionState:
    """Return the partition's state; raises StorageError if the topic is another one by now."""
    known = source.describe(wanted.topic)
    if known.topic_id != wanted.topic_id:
        raise StorageError(
            f"{source.root}: topic {wanted.topic!r} was deleted and created again meanwhile "
            f"(expected id {wanted.topic_id}, found {known.topic_id}). Copy again."
        )
    return known.partitions[wanted.partition]


def _check_deletions(source: LogEngine, wanted: PartitionToCopy, cleaned_to: int) -> None:
    """Raise StorageError if a tombstone or marker since the plan may have been cleaned away."""
    config = TopicConfig.parse(source.describe(wanted.topic).config)
    if (time.monotonic() - wanted.planned_s) * 1000 >= config.delete_retention_ms:
        raise StorageError(
            f"{source.root}: {wanted.name} was cleaned up to offset {cleaned_to} while it was "
            f"copied up to {wanted.end}, so that deletions may be missing (expected a copy within "
            f"{config.delete_retention_ms} ms, which is delete.retention.ms). Copy to a new "
            "destination."
        )


def _batches(chunk: Chunk, wanted: PartitionToCopy, start: int) -> tuple[bytes | memoryview, int]:
    """Return the batches of a chunk from `start` on, and the offset after the last one."""
    table = chunk.table
    if table.has_messages:
        raise InvalidInputError(
            f"{chunk.path}: a message of format v0 or v1 cannot be copied as it is (expected "
            "batches v2). Read its records and append those (`kafkalog read`, `kafkalog append`)."
        )
    end = int(table.last_offsets[-1]) + 1
    is_whole = table.base_offsets >= start
    first = len(table) if not is_whole.any() else int(np.argmax(is_whole))
    head = b"".join(_cut(chunk, row, start) for row in range(first))
    if first == len(table):
        return head, end
    stop = int(table.positions[-1] + table.sizes[-1])
    rest = memoryview(chunk.buffer)[int(table.positions[first]) : stop]
    return (head + rest if head else rest), end


def _cut(chunk: Chunk, row: int, start: int) -> bytes:
    """Return a batch without its records below `start`; nothing if none is left."""
    from kafkalog.storage_engine.records import records

    table = chunk.table.select(slice(row, row + 1))
    found = records.index_records(
        chunk.buffer, table, path=chunk.path, file_position=chunk.file_position
    )
    rows = np.flatnonzero(found.offsets >= start)
    if not len(rows):
        return b""
    return records.rebuild_batch(
        found, replace(table, base_offsets=np.array([start], dtype=np.int64)), 0, rows
    )
