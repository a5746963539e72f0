"""The second pass decides which records and batches stay; `batch_writer` writes them.

A record stays if it lies beyond the round's end. Otherwise it needs a key, must be the latest known
of its key, and if it is a tombstone, its batch's *delete horizon* must lie ahead. Aborted data goes
at once.

Tombstones go in two stages, so that slow readers see them. The first round gives the batch a
horizon, `delete.retention.ms` ahead; a round at that time or later removes it. A marker whose data
is gone goes the same way. A tombstone of an *erased* key goes at once. A batch without records
keeps its header at the end of the log, or if it is its producer's last.

Decisions depend only on the batch, the latest offsets, the transactions before it, the active
producers and the round's fixed time.

Kafka: Cleaner.cleanInto (checkBatchRetention, shouldRetainRecord); rules C51 to C64, C82, C83, C86.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.dedup import kernels
from kafkalog.cleaner.dedup.offset_map import Int64s
from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.latest_records import LatestRecords
    from kafkalog.cleaner.dedup.transactions import CleanedTransactions, Seen
    from kafkalog.cleaner.rewrite.active_producers import ActiveProducers
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
    from kafkalog.storage_engine.records.tables import BatchTable, RecordTable

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Retained:
    """The records that stay of a run, with n decoded records and b batches."""

    keep: Flags
    """(n)"""
    kept: Int64s
    """(b) records that stay."""
    tombstones: Int64s
    """(b) tombstones among them."""
    stays_empty: Flags
    """(b) the batch keeps its header even without records (Kafka: RETAIN_EMPTY)."""
    gets_horizon: Flags
    """(b) the batch gets its first delete horizon."""


@dataclass(slots=True, kw_only=True)
class RetentionRules:
    """Decides for one round, group by group."""

    snapshot: PartitionSnapshot
    latest: LatestRecords
    transactions: CleanedTransactions
    now_ms: int
    new_delete_horizon_ms: int | None
    """For batches whose horizon begins now; None if it exceeds a timestamp (C61)."""
    chunk_size: int
    """Bytes read at once."""
    stats: CleanerStats
    check_abort: Callable[[], None]
    erased: ErasedKeys | None = None
    """Keys whose tombstones wait for no horizon."""
    earliest_delete_horizon_ms: int | None = None
    """The next time at which a later round may remove something that stays now."""

    def retained(
        self, start: int, end: int, active: ActiveProducers
    ) -> Iterator[tuple[Chunk, RecordTable, Retained]]:
        """Yield the log from `start` to `end` in runs, with what stays of each.

        Ranges must follow the order of the log, and begin and end with segments. Raises
        CorruptBatchError, CorruptLogError, StorageError, and what `check_abort` raises.
        """
        end_offset = self.snapshot.state.high_watermark  # the log's last batch keeps its header
        for chunk in self.snapshot.chunks(start, end, chunk_size=self.chunk_size):
            seen = self.transactions.see(chunk)
            discards = seen.can_discard & (~seen.is_control | _is_expired(chunk.table, self.now_ms))
            stays_empty = active.are_last(chunk.table)
            stays_empty |= chunk.table.last_offsets + 1 == end_offset
            # Batches that are wholly obsolete need not be decoded.
            is_gone = self.latest.obsolete_batches(chunk.table) & ~discards
            self.stats.records_read += int(chunk.table.counts[is_gone].sum())
            first = 0
            for run, records in chunk.runs(~discards & ~is_gone):
                self.check_abort()
                place = slice(first, first + len(run.table))
                first += len(run.table)
                yield run, records, self._decide(run, records, seen, place, stays_empty[place])

    def _decide(
        self, run: Chunk, records: RecordTable, seen: Seen, place: slice, stays_empty: Flags
    ) -> Retained:
        """Decide for a run: the batches `place` of its chunk."""
        table = run.table
        is_control = seen.is_control[place]
        keep: Flags = np.empty(len(records), dtype=np.bool_)
        kept = np.zeros(len(table), dtype=np.int64)
        tombstones = np.zeros(len(table), dtype=np.int64)
        obsolete = self.latest.obsolete(run, records)
        keyless = kernels.keep_records(
            obsolete,
            records.key_sizes,
            records.value_sizes,
            records.offsets,
            records.batch_index,
            is_control,
            _is_expired(table, self.now_ms),
            self.latest.latest_offset,
            keep,
            kept,
            tombstones,
        )
        if self.erased is not None:
            is_deletion = keep & (records.value_sizes < 0) & ~is_control[records.batch_index]
            is_deletion &= records.offsets <= self.latest.latest_offset
            gone, _ = self.erased.find(records, np.flatnonzero(is_deletion))
            keep[gone] = False
            counts = np.bincount(records.batch_index[gone], minlength=len(table))
            kept -= counts
            tombstones -= counts
        nulls = np.flatnonzero(records.value_sizes < 0)  # in most logs there are few
        is_ended = ~keep[nulls] & ~np.asarray(obsolete, dtype=np.bool_)[nulls]
        is_ended &= (records.key_sizes[nulls] >= 0) & ~is_control[records.batch_index[nulls]]
        ends = records.offsets[nulls[is_ended]] + 1
        self.stats.deletions_gone_to = int(ends.max(initial=self.stats.deletions_gone_to))
        # Tombstones, and markers whose data is gone, wait for a horizon.
        waits = (tombstones > 0) | (is_control & seen.can_discard[place] & (kept > 0))
        has_horizon = (table.attributes & layout.DELETE_HORIZON_BIT) != 0
        gets_horizon = waits & ~has_horizon & (self.new_delete_horizon_ms is not None)
        self._note_horizons(table.base_timestamps[waits & has_horizon], gets_horizon)
        stats = self.stats
        stats.bytes_read += int(table.sizes.sum())
        stats.records_read += len(records)
        stats.records_kept += int(np.count_nonzero(keep))
        stats.tombstones_kept += int(tombstones.sum())
        stats.keyless_records += int(keyless)
        return Retained(keep, kept, tombstones, stays_empty, gets_horizon)

    def _note_horizons(self, known: Int64s, gets_horizon: Flags) -> None:
        """Remember the earliest horizon that lies ahead; a past one would only repeat the round."""
        horizons = known[known > self.now_ms].tolist()
        if self.new_delete_horizon_ms is not None and gets_horizon.any():
            horizons.append(self.new_delete_horizon_ms)
        if self.earliest_delete_horizon_ms is not None:
            horizons.append(self.earliest_delete_horizon_ms)
        self.earliest_delete_horizon_ms = min(horizons, default=None)


def _is_expired(table: BatchTable, now_ms: int) -> Flags:
    """Return the batches (b) whose delete horizon has passed."""
    has_horizon = (table.attributes & layout.DELETE_HORIZON_BIT) != 0
    is_expired: Flags = has_horizon & (table.base_timestamps <= now_ms)
    return is_expired
