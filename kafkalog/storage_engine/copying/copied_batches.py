"""The batches of one partition that a copy still lacks, in runs that its destination can append.

A batch is copied as it is. Only the first one may be cut: a cleaning of the source may have merged
records that were copied already with later ones. A cleaning while a copy runs does so too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError, StorageError
from kafkalog.storage_engine.writing.copied_run import CopiedRun

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk

COMMIT_BYTES: Final = 64 << 20
"""Bytes of batches in one commit, unless one batch has more; a copy holds them in memory."""


GIVE_RETENTION: Final = (
    "Give what the broker had since the last copy (--config {}:delete.retention.ms=...; config= in "
    "Python), or copy to a new destination."
)


@dataclass(frozen=True, slots=True)
class CopiedMoment:
    """How far a partition was cleaned at a time; a cleaning since may have removed deletions."""

    time_s: float
    """By `time.monotonic`."""
    swapped_at: int
    cleaned_to: int

    @classmethod
    def of(cls, state: PartitionState) -> Self:
        """Return the present one of a state that was just loaded."""
        return cls(time.monotonic(), state.swapped_at, state.cleaned_to)

    def is_of(self, state: PartitionState) -> bool:
        """Return whether nothing was cleaned since."""
        return (self.swapped_at, self.cleaned_to) == (state.swapped_at, state.cleaned_to)


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
    planned: CopiedMoment
    """The source when this was found out."""
    copied_ms: int
    """How long before that the last copy began, in ms; -1 if the destination has no records."""
    deletions_ms: int | None
    """How long both sides' configs let deletions stay (`deletions_stay_ms`); None: not known."""

    @property
    def name(self) -> str:
        """The name of the partition."""
        return f"{self.topic}-{self.partition}"


def deletions_stay_ms(found: TopicState, known: TopicState | None = None) -> int | None:
    """Return the smaller `delete.retention.ms` of a topic and of its copy; None if not known.

    A copy of a broker's topic has the config only if the broker's topic had it.
    """
    times = [found.delete_retention_ms]
    if known is not None and (found.knows_defaults or "delete.retention.ms" in known.config):
        times.append(known.delete_retention_ms)
    if None in times:
        return None
    return min(time for time in times if time is not None)


def copied_runs(
    source: Log, wanted: PartitionToCopy, room: Callable[[], int]
) -> Iterator[tuple[CopiedRun, bool]]:
    """Yield the runs that a copy lacks, each of at most `room()` bytes, or of one chunk.

    Each comes with whether it is the last one, which knows the source's producers. It reaches to
    the end, or further. A cleaner of the source may pass the end meanwhile. Older records of keys
    are gone then, so the runs continue to the log end as it is by now. The log start may rise
    meanwhile; each run has that of its snapshot, below which records may be missing. Raises
    InvalidInputError for messages v0 and v1, CorruptBatchError, StorageError; also if a cleaner had
    the time to remove deletions of what was copied.
    """
    data = bytearray()
    start = position = wanted.start
    end, log_start = wanted.end, wanted.log_start
    before: CopiedMoment | None = wanted.planned if wanted.copied_ms >= 0 else None
    run = CopiedRun(
        wanted.topic,
        wanted.topic_id,
        wanted.partition,
        start,
        start,
        min(log_start, start),
        b"",
        source=f"{source.root}: {wanted.name}",
    )
    while True:
        first = max(position, log_start)
        with source.snapshot(wanted.topic, wanted.partition, start=first) as snapshot:
            _topic(source, wanted)  # the one of these segments
            before = before or CopiedMoment.of(snapshot.state)
            run = replace(run, stable=snapshot.state.last_stable_offset)
            log_start = max(log_start, snapshot.state.log_start_offset)
            try:
                for chunk in snapshot.chunks(min(max(position, log_start), end), end):
                    piece, next_offset = _batches(chunk, position)
                    if data and len(data) + len(piece) > room():
                        run = _noted(run, source, wanted)
                        yield _run(run, start, position, log_start, data), False
                        data.clear()
                        start = position
                    data += piece
                    position = max(position, next_offset)
            except OffsetOutOfRangeError as fault:
                if fault.log_start <= log_start:
                    raise
                continue  # retention has taken segments that were not open yet
        topic = _topic(source, wanted)
        state = topic.partitions[wanted.partition]
        position = end = max(position, end)
        if not before.is_of(state):
            _check_deletions(source, wanted, topic, before)
        if min(state.cleaned_to, state.high_watermark) <= end:
            break
        end = state.high_watermark
    producers = source.producers(wanted.topic, wanted.partition)
    if producers is not None and producers.end_offset == end:
        run = replace(run, producers=list(producers.entries.values()))
    yield _run(_noted(run, source, wanted), start, end, log_start, data), True


def _noted(run: CopiedRun, source: Log, wanted: PartitionToCopy) -> CopiedRun:
    """Return a run with the deletions that the source may lack by now, after it was read."""
    return replace(run, deletions_gone_to=source.deletions_gone_to(wanted.topic, wanted.partition))


def _run(run: CopiedRun, start: int, end: int, log_start: int, data: bytearray) -> CopiedRun:
    log_start = min(log_start, end)
    return replace(run, start=start, end=end, log_start=log_start, data=bytes(data))


def _topic(source: Log, wanted: PartitionToCopy) -> TopicState:
    """Return the topic's state; raises StorageError if the topic is another one by now."""
    known = source.describe(wanted.topic)
    if known.topic_id != wanted.topic_id:
        raise StorageError(
            f"{source.root}: topic {wanted.topic!r} was deleted and created again meanwhile "
            f"(expected id {wanted.topic_id}, found {known.topic_id}). Copy again."
        )
    return known


def _check_deletions(
    source: Log, wanted: PartitionToCopy, topic: TopicState, before: CopiedMoment
) -> None:
    """Raise StorageError if a cleaning may have removed a deletion of a record that was copied.

    The source keeps a tombstone, and a marker, for `delete.retention.ms` (`continuation`).
    """
    retention_ms = wanted.deletions_ms
    if topic.knows_defaults and retention_ms is not None:
        retention_ms = min(retention_ms, deletions_stay_ms(topic) or 0)
    elapsed_ms = (time.monotonic() - before.time_s) * 1000 + max(0, wanted.copied_ms)
    if retention_ms is None:
        raise StorageError(
            f"{source.root}: {wanted.name} was cleaned while it was copied, and its "
            f"delete.retention.ms is not known. {GIVE_RETENTION.format(wanted.topic)}"
        )
    if elapsed_ms >= retention_ms:
        raise StorageError(
            f"{source.root}: {wanted.name} was cleaned while it was copied, so that deletions may "
            f"be missing (expected a copy every {retention_ms} ms, which is the smaller "
            "delete.retention.ms of both logs). Copy to a new destination."
        )


def _batches(chunk: Chunk, start: int) -> tuple[bytes | memoryview, int]:
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
