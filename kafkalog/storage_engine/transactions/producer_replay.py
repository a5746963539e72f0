"""Replay the batches of a log to find the state of its producers.

Between two markers, only a producer's first transactional batch and its last batch affect the state
after them. The replay therefore reads only these and the control batches one by one. The result
equals that of replaying every batch.

`adopt` uses the replay for a broker's partition, and `recorded_producers` for a partition of ours
whose producer snapshot is missing or damaged.

Kafka: UnifiedLog.rebuildProducerState, UnifiedLog.loadProducersFromRecords.
"""

from __future__ import annotations

import dataclasses
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kafkalog.errors import CorruptBatchError, CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.records.tables import BatchTable
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.locate import locate
from kafkalog.storage_engine.segment.log_scanner import (
    RECOVER,
    REPLAY,
    LogScanner,
    ScannedBatches,
)
from kafkalog.storage_engine.segment.segments import SegmentFiles, list_segments
from kafkalog.storage_engine.transactions import producer_snapshot
from kafkalog.storage_engine.transactions.control_record import read_control_record
from kafkalog.storage_engine.transactions.producers import Producers
from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction

_logger = logging.getLogger(__name__)


def recorded_producers(
    directory: Path, state: PartitionState, *, now_ms: int
) -> tuple[Producers, bool]:
    """Return the producers at a partition's high watermark, and whether they were rebuilt.

    They come from the snapshot that the journal names. If that is unreadable, they are rebuilt,
    with a warning, from the latest sound snapshot before it and the batches that follow, as in a
    broker. Raises CorruptBatchError if these batches are damaged, StorageError, OSError. The caller
    holds the commit lock, or the root lock exclusively, but not the segments lock.
    """
    offset, end = state.producer_snapshot, state.high_watermark
    if offset < 0:
        return Producers(end_offset=end), False
    try:
        producers = producer_snapshot.read_snapshot(directory, offset)
    except (CorruptLogError, StorageError) as fault:
        reason = str(fault)
        if isinstance(fault, CorruptLogError):
            reason = f"{fault.path}: expected {fault.expected}, found {fault.found}"
        _logger.warning("%s; rebuilding the producers from the log", reason)
        return _rebuilt(directory, state, now_ms), True
    producers.end_offset = end
    return producers, False


def _rebuilt(directory: Path, state: PartitionState, now_ms: int) -> Producers:
    # Only this lock permits the listing to finish a swap of segments.
    with locks.SegmentsLock(directory).shared():
        segments = [s for s in list_segments(directory) if s.base_offset <= state.active_base]
        if segments and segments[-1].base_offset == state.active_base:
            # The bytes beyond are preallocated, or were never committed.
            segments[-1] = dataclasses.replace(segments[-1], size=state.active_size)
        history = ProducerHistory(
            directory,
            segments,
            log_start=state.log_start_offset,
            now_ms=now_ms,
            is_bounded=True,
        )
        producers = history.at(state.high_watermark)
    if history.faults:
        raise history.faults[0]
    return producers


class ProducerHistory:
    """The producers of a partition at any offset: those of a snapshot, plus the batches after it.

    `segments` are the partition's, ascending. `faults` collects the damage that the replay met.
    """

    def __init__(
        self,
        directory: Path,
        segments: Sequence[SegmentFiles],
        *,
        log_start: int,
        now_ms: int = 0,
        is_bounded: bool = False,
    ) -> None:
        """Name the partition. Entries of a snapshot that have expired by `now_ms` are dropped.

        With `is_bounded`, the replay does not read a file beyond the segment's `size`.
        """
        self.directory = directory
        self.segments = segments
        self.log_start = log_start
        self.faults: list[CorruptBatchError] = []
        self._now_ms = now_ms
        self._is_bounded = is_bounded

    @property
    def damage(self) -> list[str]:
        """The faults, one sentence each."""
        return [
            f"{fault.damage}; later batches of the segment do not count for its producers"
            for fault in self.faults
        ]

    def at(self, offset: int) -> Producers:
        """Return the state at an offset, without comparing checksums."""
        producers = self.snapshot(offset)
        self.extend(producers, offset)
        return producers

    def snapshot(self, end: int) -> Producers:
        """Return the state of the latest snapshot at or below `end`."""
        producers = producer_snapshot.latest_snapshot(
            self.directory, log_start=self.log_start, end=end
        )
        producers.expire(self._now_ms)
        return producers

    def extend(self, producers: Producers, end: int) -> None:
        """Replay the batches between a state's end and `end`."""
        if producers.end_offset < end:
            bases = [segment.base_offset for segment in self.segments]
            first = max(0, bisect_right(bases, producers.end_offset) - 1)
            for segment in self.segments[first : bisect_left(bases, end)]:
                self.replay(segment, producers, end=end)
            producers.end_offset = end

    def replay(self, segment: SegmentFiles, producers: Producers, *, end: int) -> None:
        """Replay the batches of one segment from the state's end up to `end`."""
        start = producers.end_offset
        position = _position_of(segment, start) if start > segment.base_offset else 0
        limit = segment.size if self._is_bounded else None
        scanned = LogScanner.opened(
            segment.log, REPLAY, next_offset=segment.base_offset, position=position, limit=limit
        )
        with scanned as scan:
            for found in scan:
                replay(producers, scan, found, start=start, end=end)
                if scan.next_offset >= end:
                    return
        if scan.fault is not None:
            self.faults.append(scan.fault)

    def check(
        self,
        segment: SegmentFiles,
        producers: Producers,
        observe: Callable[[ScannedBatches], None],
    ) -> tuple[list[AbortedTransaction], LogScanner]:
        """Replay a whole segment from the state at its base offset, and compare its checksums.

        No checksum covers a batch's offset, so one that reaches into the next segment is damage.
        Calls `observe` with its sound batches. Returns the entries of its transaction index, and
        the scan, which knows the segment's sound end. Kafka: LogSegment.recover.
        """
        base_offset = segment.base_offset
        producers.end_offset = max(producers.end_offset, base_offset)
        aborted: list[AbortedTransaction] = []
        bases = (other.base_offset for other in self.segments)
        bound = next((base for base in bases if base > base_offset), layout.INT64_MAX)
        with LogScanner.opened(segment.log, RECOVER, next_offset=base_offset) as scan:
            for scanned in scan:
                found = _below(bound, scan, scanned)
                if not len(found.table):
                    break
                aborted += replay(producers, scan, found, start=base_offset)
                sound = int(found.table.base_offsets.searchsorted(scan.next_offset))
                if sound:
                    observe(found.first(sound))
        return aborted, scan


def _below(bound: int, scan: LogScanner, found: ScannedBatches) -> ScannedBatches:
    """Return the batches before the first one that reaches `bound`; the scan ends there."""
    above = np.flatnonzero(found.table.last_offsets >= bound)
    if not len(above):
        return found
    batch = int(above[0])
    fault = CorruptBatchError(
        found.path,
        found.position_of(batch),
        f"a batch below offset {bound}, where the next segment begins",
        f"one up to offset {found.table.last_offsets[batch]}",
    )
    scan.refuse(found, batch, fault)
    return found.first(batch)


def replay(
    producers: Producers,
    scan: LogScanner,
    found: ScannedBatches,
    *,
    start: int,
    end: int = layout.INT64_MAX,
) -> list[AbortedTransaction]:
    """Replay the batches that end at or above `start` and begin below `end`.

    Returns the entries that they add to the transaction index. A control record that does not
    decode ends the scan before its batch, like a wrong checksum.
    """
    table = found.table
    first = int(table.last_offsets.searchsorted(start))
    stop = int(table.base_offsets.searchsorted(end))
    if first >= stop:
        return []
    aborted = []
    for row in (first + _telling(table.select(slice(first, stop)))).tolist():
        position = int(table.positions[row])
        header = parse_header(found.buffer, position)
        try:
            control = read_control_record(
                found.buffer,
                position,
                header,
                path=scan.path,
                file_position=found.position_of(row),
            )
        except CorruptBatchError as error:
            scan.refuse(found, row, error)
            stop = row
            break
        entry = producers.append(header, control)
        if entry is not None:
            aborted.append(entry)
    if stop > first:
        producers.end_offset = int(table.last_offsets[stop - 1]) + 1
    return aborted


def _telling(table: BatchTable) -> npt.NDArray[np.int64]:
    """Return the rows, ascending, that determine the state after all of them."""
    rows = np.flatnonzero((table.producer_ids >= 0) & (table.magics == layout.MAGIC))
    is_control = table.attributes[rows] & layout.CONTROL_BIT != 0
    is_transactional = table.attributes[rows] & layout.TRANSACTIONAL_BIT != 0
    # A group is the data batches of one producer between two control batches.
    stretch = np.cumsum(is_control)
    wanted = is_control.copy()
    data = np.flatnonzero(~is_control)
    groups = np.stack((table.producer_ids[rows[data]], stretch[data]))
    _, last = np.unique(groups[:, ::-1], axis=1, return_index=True)
    wanted[data[len(data) - 1 - last]] = True
    opening = np.flatnonzero(~is_control & is_transactional)
    groups = np.stack((table.producer_ids[rows[opening]], stretch[opening]))
    _, begin = np.unique(groups, axis=1, return_index=True)
    wanted[opening[begin]] = True
    result: npt.NDArray[np.int64] = rows[wanted]
    return result


def _position_of(segment: SegmentFiles, offset: int) -> int:
    with files.closing(files.open_to_read(segment.log)) as fd:
        index = OffsetIndex(segment.index, segment.base_offset)
        return locate(FileBytes(fd), segment.size, index, offset)
