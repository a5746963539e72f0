"""A log with transactions, written batch by batch as a follower does, and cleaned at will.

And its cleaning said slowly: Kafka's rules over lists, with the aborted transactions from what the
test itself ended, not from any file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.directory.directory_round import open_round
from kafkalog.cleaner.rewrite.round import clean_round
from kafkalog.cleaner.shelf import RoundOrder
from kafkalog.cleaner.state.delete_horizon import write_delete_horizon
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import locks
from tests.builders.batch_builder import CONTROL, TRANSACTIONAL
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.naive import Batch, dump
from tests.unit.rules.acts import BatchByBatch, Entry

DAY = 86_400_000


def kafkas(slots: int = 5_000) -> CleanerConfig:
    """What makes batches and rounds Kafka's own."""
    return CleanerConfig(dedupe_buffer_size=24 * slots, merge_batches=False, spill=False)


class Log(BatchByBatch):
    """A log of one partition in a directory; every append is one batch at its end."""

    def __init__(self, engine: DirectoryLog, end: int = 0) -> None:
        super().__init__(end)
        self.engine = engine

    @classmethod
    def create(cls, root: Path, **config: str) -> Log:
        return cls(LogBuilder(root).topic(**config).engine)

    @property
    def directory(self) -> Path:
        return self.engine.partition_directory("t", 0)

    @property
    def first_dirty_offset(self) -> int:
        return self.engine.describe("t").partitions[0].first_dirty_offset

    def _add(self, batch: Batch) -> None:
        self.engine.append_raw("t", 0, batch.data, now_ms=0)

    def roll(self) -> None:
        LogBuilder(self.engine, now_ms=0).roll()

    # --- cleaning ---

    def clean(
        self,
        now_ms: int = 0,
        *,
        config: CleanerConfig | None = None,
        from_offset: int | None = None,
        check_abort: Callable[[], None] = lambda: None,
    ) -> CleanerStats:
        """Clean one round, due or not; `from_offset` is the first dirty offset then."""
        stats = CleanerStats("t", 0)
        if from_offset is not None:
            with self.engine.transaction() as transaction:
                transaction.change_partition("t", 0, first_dirty_offset=from_offset)
                transaction.publish(0)
        write_delete_horizon(DirectoryNotes(self.directory), self.first_dirty_offset, now_ms)
        order = RoundOrder(
            now_ms=now_ms,
            config=config or kafkas(),
            stats=stats,
            check_abort=check_abort,
            time_ms=lambda: now_ms,
            ended_ms=lambda: now_ms,
        )
        with locks.RootLock(self.engine.root).shared(), open_round(self.engine, order) as work:
            if work is not None:
                clean_round(work)
        return stats

    def clean_twice(self, now_ms: int = 0, **options: int) -> None:
        """Give horizons, then come back when they are over."""
        self.clean(now_ms, **options)
        self.clean(now_ms + DAY + 1)

    # --- looking ---

    def batches(self) -> list[Batch]:
        return dump(self.engine)

    def indexed(self) -> list[Entry]:
        """The entries of all transaction indexes, without their last stable offsets."""
        found = []
        for path in sorted(self.directory.glob("*.txnindex")):
            for _, *entry, _ in struct.iter_unpack(">hqqqq", path.read_bytes()):
                found.append((entry[0], entry[1], entry[2]))
        return found


# --- the rules, slowly ---------------------------------------------------------------------------


def active(log: Log, now_ms: int) -> dict[int, int]:
    """Producer -> last offset of its data, or -1, of those that wrote within a day."""
    return {
        producer: last
        for producer, (last, time) in log.lasts.items()
        if producer in log.running or now_ms - time < DAY
    }


def is_aborted(batch: Batch, aborted: Iterable[Entry]) -> bool:
    return bool(batch.attributes & TRANSACTIONAL) and any(
        producer == batch.producer and first <= batch.base < last
        for producer, first, last in aborted
    )


def naive_round(
    batches: Sequence[Batch],
    first_dirty: int,
    end: int,
    *,
    now: int,
    high_watermark: int,
    active: dict[int, int],
    aborted: Sequence[Entry],
) -> tuple[list[Batch], list[Entry]]:
    """What a round leaves of `batches`, all below `end`, and of the transaction index."""
    latest: dict[bytes, int] = {}
    for batch in batches:
        if not batch.attributes & CONTROL and not is_aborted(batch, aborted):
            for record in batch.records:
                if record.key is not None and first_dirty <= record.offset < end:
                    latest[record.key] = record.offset
    left: list[Batch] = []
    entries: list[Entry] = []
    seen: set[int] = set()
    for batch in batches:
        is_control = bool(batch.attributes & CONTROL)
        can_discard = is_aborted(batch, aborted)
        if is_control:
            has_seen = batch.producer in seen
            can_discard = not batch.records or not has_seen
            if batch.records:
                seen.discard(batch.producer)
                if has_seen:
                    entries += [e for e in aborted if (e[0], e[2]) == (batch.producer, batch.base)]
        elif batch.attributes & TRANSACTIONAL:
            seen.add(batch.producer)
        is_over = batch.horizon is not None and batch.horizon <= now
        kept = [
            record
            for record in batch.records
            if (is_control and not (can_discard and is_over))
            or (
                not is_control
                and not can_discard
                and record.key is not None
                and latest.get(record.key, -1) <= record.offset
                and not (record.value is None and is_over)
            )
        ]
        horizon = batch.horizon
        waits = any(record.value is None for record in kept) or (is_control and can_discard)
        if horizon is None and kept and waits:
            horizon = now + DAY
        if kept:
            left.append(replace(batch, records=tuple(kept), horizon=horizon))
        elif batch.last + 1 == high_watermark or _is_last(batch, active):
            left.append(replace(batch, records=(), horizon=None))
    return left, entries


def _is_last(batch: Batch, active: dict[int, int]) -> bool:
    last = active.get(batch.producer)
    if last is None:
        return False
    return batch.last == last if last >= 0 else bool(batch.attributes & CONTROL)
