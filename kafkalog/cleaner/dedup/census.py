"""Count how much of each segment is obsolete: replaced records, and those of aborted transactions.

The count shows what a cleaning of everything would remove. All committed records are read once. A
batch counts as obsolete by its share of obsolete records. Kafka has no such count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kafkalog.cleaner.dedup.latest_records import build_offset_map
from kafkalog.cleaner.dedup.offset_map import HashPart, Int64s, OffsetMap, parts_that_fit
from kafkalog.cleaner.dedup.transactions import mapped_batches

if TYPE_CHECKING:
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
    from kafkalog.storage_engine.records.tables import BatchTable, RecordTable


@dataclass(slots=True)
class SegmentCensus:
    """The live and the obsolete records of one segment."""

    base_offset: int
    records: int = 0
    """Data records, including those of aborted transactions; markers do not count."""
    tombstones: int = 0
    """Records with a null value, obsolete or not."""
    obsolete_records: int = 0
    """Aborted records, obsolete ones, and those without a key."""
    obsolete_bytes: int = 0
    """Their share of the `.log` file, in bytes on disk."""


def census(
    snapshot: PartitionSnapshot, *, budget_bytes: int, check_abort: Callable[[], None] | None = None
) -> list[SegmentCensus]:
    """Count the obsolete records of each segment, from the log start up to the last stable offset.

    The snapshot was opened `whole`. If the keys exceed the budget, the log is read once per part of
    them. Raises CorruptBatchError, StorageError, and what `check_abort` raises between runs.
    """
    start, end = snapshot.state.log_start_offset, snapshot.state.last_stable_offset
    bases = np.array([each.base_offset for each in snapshot.whole_segments()], dtype=np.int64)
    offset_map = OffsetMap.for_parts(end - start, budget_bytes=budget_bytes)
    found = _Sums(bases)
    tombstones = np.zeros(len(bases), dtype=np.int64)

    def put(part: HashPart, left: int) -> bool:
        tombstones[:] = 0
        offset_map.clear()
        known_to = build_offset_map(
            snapshot, start, end, offset_map,
            is_mapped=mapped_batches(snapshot, is_strict=True), part=part,
            check_abort=check_abort, on_records=_counting(tombstones, bases, start, end),
        )  # fmt: skip
        return known_to == end

    for _ in parts_that_fit(put):
        found.add_latest(snapshot, start, end, offset_map.take_offsets())
    return found.told(tombstones)


def _counting(
    tombstones: Int64s, bases: Int64s, start: int, end: int
) -> Callable[[RecordTable], None]:

    def see(records: RecordTable) -> None:
        offsets = records.offsets
        is_tombstone = (records.value_sizes < 0) & (records.key_sizes >= 0)
        offsets = offsets[is_tombstone & (offsets >= start) & (offsets < end)]
        places = bases.searchsorted(offsets, side="right") - 1
        np.add.at(tombstones, places, 1)

    return see


class _Sums:
    """Records and live records, summed by segment; shares of bytes are fractions."""

    def __init__(self, bases: Int64s) -> None:
        self._bases = bases
        self._records = np.zeros(len(bases), dtype=np.int64)
        self._bytes = np.zeros(len(bases), dtype=np.int64)
        self._live_records = np.zeros(len(bases), dtype=np.int64)
        self._live_bytes = np.zeros(len(bases), dtype=np.float64)
        self._is_counted = False

    def add_latest(self, snapshot: PartitionSnapshot, start: int, end: int, latest: Int64s) -> None:
        for chunk in snapshot.chunks(start, end):
            table = chunk.table
            table = table.select(
                ~table.is_control & (table.counts != 0) & (table.base_offsets < end)
            )
            place = int(self._bases.searchsorted(chunk.segment_base))
            counts = _counts(table)
            first = latest.searchsorted(table.base_offsets)
            live = latest.searchsorted(table.last_offsets, side="right") - first
            self._live_records[place] += live.sum()
            self._live_bytes[place] += (table.sizes * (live / counts)).sum()
            if not self._is_counted:
                self._records[place] += counts.sum()
                self._bytes[place] += table.sizes.sum()
        self._is_counted = True

    def told(self, tombstones: Int64s) -> list[SegmentCensus]:
        columns = (
            self._bases,
            self._records,
            tombstones,
            self._records - self._live_records,
            np.rint(self._bytes - self._live_bytes).astype(np.int64),
        )
        return [
            SegmentCensus(*figures)
            for figures in zip(*(column.tolist() for column in columns), strict=True)
        ]


def _counts(table: BatchTable) -> Int64s:
    """Return the record count of batches (b); of a wrapper count the offsets."""
    counts: Int64s = np.where(
        table.counts < 0, table.last_offsets - table.base_offsets + 1, table.counts
    )
    return counts
