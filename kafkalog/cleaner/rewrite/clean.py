"""One round of cleaning one partition: two passes over closed segments, then the swaps.

The first pass learns the latest offset of every key of the dirty section (`latest_records`). The
second pass decides what stays of all segments below the round's end (`retention_rules`) and writes
it (`batch_writer`), group by group. Records keep their offsets.

A round changes the log only by swaps, under the commit lock and the exclusive segments lock. The
swaps come after the rewriting, except in very large rounds (`SWAP_SIZE`). Before the first swap the
journal records the round's end (`cleaning_offset`), so that no snapshot of an older offset opens on
a log that lacks records. After the last swap the journal records that all below is clean
(`first_dirty_offset`). If a cleaner dies in between, the next one repeats the round, with the same
result. A round that fails swaps in its finished segments. Every round ends below all live pins
(`pins`), and checks for new ones after it has written to the journal.

Kafka: Cleaner.doClean, cleanSegments.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.dedup.latest_records import find_latest_records
from kafkalog.cleaner.dedup.log_to_clean import LogToClean, group_segments_by_size, log_to_clean
from kafkalog.cleaner.dedup.transactions import CleanedTransactions, mapped_batches
from kafkalog.cleaner.rewrite.active_producers import ActiveProducers, active_producers
from kafkalog.cleaner.rewrite.batch_writer import BatchWriter
from kafkalog.cleaner.rewrite.cleaned_segment import CleanedSegment
from kafkalog.cleaner.rewrite.retention_rules import RetentionRules
from kafkalog.cleaner.rewrite.swap import (
    LiveFiles,
    RewrittenGroup,
    adjacent_groups,
    drop_replaced_gaps,
    end_swaps,
    keep_key_index,
    list_gaps,
    replace_segments,
)
from kafkalog.cleaner.rewrite.unchanged_segments import UnchangedSegments
from kafkalog.cleaner.state.delete_horizon import write_delete_horizon
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.directory.pins import LivePins
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.checkpoints import write_cleaner_checkpoint
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.segment.gaps import SourceGaps
from kafkalog.storage_engine.segment.index import TimeIndex
from kafkalog.storage_engine.segment.segments import SegmentFiles

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.directory.transaction import Transaction

_log = logging.getLogger(__name__)

SWAP_SIZE: Final = 1 << 30
"""Bytes of outputs that are swapped in before the rewriting ends, to bound the work that a crash
costs. The next swap waits for as many bytes as all before."""
GAPS_MAX: Final = 1 << 20
"""Gaps in memory that cause an early swap: 16 MiB."""


class CleaningAborted(Exception):
    """A cleaning stops because it was asked to, or its topic is gone; finished swaps stay."""


def clean_round(
    engine: DirectoryLog,
    topic: str,
    partition: int,
    *,
    now_ms: int,
    config: CleanerConfig,
    stats: CleanerStats,
    check_abort: Callable[[], None],
    is_forced: bool = False,
    only_if_due: bool = False,
    erased: ErasedKeys | None = None,
    segment_of: Callable[[int], int] = lambda base_offset: base_offset,
    limit: int = layout.INT64_MAX,
    high_watermark: int | None = None,
) -> LogToClean | None:
    """Clean as much of a partition as one round can; return the plan, or None if there was no work.

    The caller holds the partition's cleaner lock, and no swap is pending. The round takes `now_ms`
    as the time (C41), except for leases of pins. If `is_forced`, only pins of active readers hold
    it back. Tombstones of `erased` keys wait for no horizon. `segment_of` is that of
    `group_segments_by_size`. Nothing at `limit` or above is cleaned. `high_watermark` is that of
    the log of which this is a part (None: it is the log). The round plans under the cleaner lock,
    and with `only_if_due` leaves a partition that this plan does not find due. Adds to `stats`;
    returns the plan. Raises CorruptLogError, StorageError, OSError and CleaningAborted; finished
    swaps stay.
    """
    directory = engine.partition_directory(topic, partition)
    described = engine.describe(
        topic
    )  # once: id and config of one topic, even if it is created again
    topic_id, topic_config = described.topic_id, TopicConfig.parse(described.config)
    load_state = _state_of(engine, topic, topic_id, partition)
    began = time.monotonic()

    def load_pins() -> LivePins:
        # A long round meets pins that are younger than it is.
        elapsed_ms = round((time.monotonic() - began) * 1e3)
        return LivePins(engine.root, now_ms + elapsed_ms, held_only=is_forced)

    def check() -> None:
        check_abort()
        load_state()  # whoever deletes the topic waits for this round to end

    opened = open_snapshot(directory, topic, partition, load_state, held=True, late=engine.late)
    with opened as snapshot:
        pins = load_pins()
        log = log_to_clean(
            topic,
            partition,
            directory=directory,
            config=topic_config,
            state=snapshot.state,
            segments=snapshot.segments,
            now_ms=now_ms,
            pinned=min((limit, 0), pins.holder(topic, topic_id, partition)),
            is_awaited=pins.has_changelog,
        )
        is_wanted = log.is_eligible if only_if_due else log.has_work or erased is not None
        if not is_wanted:
            return None
        started = time.perf_counter()
        unchanged = UnchangedSegments(snapshot, log, check)
        latest, end = find_latest_records(
            snapshot,
            log,
            make_is_mapped=lambda start: mapped_batches(snapshot, is_strict=True),
            config=config,
            stats=stats,
            check_abort=check,
            on_records=unchanged.add if unchanged.wants_keys else None,
        )
        with contextlib.closing(latest):
            stats.map_ms += (time.perf_counter() - started) * 1e3
            stats.buffer_utilization = latest.utilization
            stats.tombstones_kept = 0
            publisher = _Publisher(
                engine=engine,
                load_state=load_state,
                load_pins=load_pins,
                snapshot=snapshot,
                topic_id=topic_id,
                end=end,
                now_ms=now_ms,
                stats=stats,
            )
            rules = RetentionRules(
                snapshot=snapshot,
                latest=latest,
                transactions=CleanedTransactions(snapshot),
                now_ms=now_ms,
                new_delete_horizon_ms=_delete_horizon_ms(topic_config, now_ms),
                chunk_size=config.io_buffer_size,
                stats=stats,
                check_abort=check,
                high_watermark=high_watermark or snapshot.state.high_watermark,
                erased=erased,
            )
            merges = config.merge_batches and topic_config.kafkalog_cleaner_merge_batches
            second = _SecondPass(log, rules, publisher, unchanged, segment_of, merges=merges)
            second.clean(end)
        publisher.finish(rules.earliest_delete_horizon_ms)
        stats.rounds += 1
        stats.end_offset = end
        return log


def _state_of(
    engine: DirectoryLog, topic: str, topic_id: str, partition: int
) -> Callable[[], PartitionState]:
    """Return a function that loads the state, and aborts a cleaning that must not continue."""

    def load_state() -> PartitionState:
        known = engine.state().topics.get(topic)
        if known is None or known.topic_id != topic_id:
            raise CleaningAborted(f"{topic}: the topic was deleted meanwhile")
        if not TopicConfig.parse(known.config).is_compacted:
            raise CleaningAborted(f"{topic}: cleanup.policy no longer includes compact")
        return known.partitions[partition]

    return load_state


def _delete_horizon_ms(config: TopicConfig, now_ms: int) -> int | None:
    """Return the delete horizon of tombstones found now; None if it exceeds a timestamp (C61)."""
    horizon = now_ms + config.delete_retention_ms
    return horizon if horizon <= layout.INT64_MAX else None


@dataclass(frozen=True, slots=True)
class _SecondPass:
    log: LogToClean
    rules: RetentionRules
    publisher: _Publisher
    unchanged: UnchangedSegments
    segment_of: Callable[[int], int]
    merges: bool

    def clean(self, end: int) -> None:
        try:
            self._rewrite(end)
        except Exception:
            # Nothing that is finished is done twice; and on a full disk it may make room.
            try:
                self.publisher.swap_finished()
            except Exception as fault:  # the first one is the reason
                files.pass_on(fault)
                _log.warning("%s: not swapped in: %s", self.log.directory, fault)
            raise
        else:
            self.publisher.swap_finished()
        finally:
            self.publisher.discard_finished()

    def _rewrite(self, end: int) -> None:
        log, stats = self.log, self.rules.stats
        active_base = self.rules.snapshot.state.active_base
        closed = [s for s in log.segments if s.base_offset < active_base]
        sources = [s for s in closed if s.base_offset < end]
        groups = group_segments_by_size(
            sources,
            max_size=log.config.segment_bytes,
            max_index_size=log.config.segment_index_bytes,
            end=log.first_uncleanable_offset,
            segment_of=self.segment_of,
        )
        stats.segments_before += len(sources)
        left = self.unchanged.bases_to_leave(self.rules.latest)
        bases = [group[0].base_offset for group in groups]
        last_end = closed[len(sources)].base_offset if closed[len(sources) :] else active_base
        for group, group_end in zip(groups, [*bases, last_end][1:], strict=True):
            if len(group) == 1 and group[0].base_offset in left:
                stats.segments_after += 1
                continue
            rewritten = self._write(group, group_end)
            if rewritten.is_changed:
                self.publisher.add_finished(rewritten)
            else:
                keep_key_index(log.directory, rewritten)
                rewritten.discard()
            kept = rewritten.outputs if rewritten.is_changed else group
            stats.segments_after += len(kept)

    def _write(self, group: Sequence[SegmentFiles], end: int) -> RewrittenGroup:
        """Write what stays of a group to `.cleaned` files; leave no file after an error."""
        rules, transactions = self.rules, self.rules.transactions
        records_before, bytes_before = rules.stats.left_out
        start = group[0].base_offset
        active = self.publisher.active_producers()
        writer = BatchWriter(
            self.log.directory,
            start,
            self.log.config,
            new_delete_horizon_ms=rules.new_delete_horizon_ms,
            merges=self.merges,
            stats=rules.stats,
            key_secret=self.unchanged.secret,
        )
        source_gaps = {
            segment.base_offset: SourceGaps(segment.base_offset, segment.size) for segment in group
        }
        try:
            for run, records, retained in rules.retained(start, end, active):
                source_gaps[run.segment_base].add(run.table)
                writer.add(run, records, retained)
            entries = transactions.take_entries()
            writer.add_transactions(entries)
            outputs = writer.finish(_modified_ns(group))
        except BaseException:
            writer.discard()
            raise
        is_indexed_alike = entries == b"".join(_transactions(segment) for segment in group)
        is_indexed_alike &= [
            _last_time(output.path(layout.TIME_INDEX), output.base_offset) for output in outputs
        ] == [_last_time(segment.time_index, segment.base_offset) for segment in group]
        records_after, bytes_after = rules.stats.left_out
        return RewrittenGroup(
            group,
            end,
            outputs,
            [output.section(following) for output, following in _followed(outputs, end)],
            [
                source_gaps[s.base_offset].section(following)
                for s, following in _followed(group, end)
            ],
            writer.is_changed or len(group) > 1 or not is_indexed_alike,
            records_after - records_before,
            bytes_after - bytes_before,
        )


def _last_time(time_index: Path, base_offset: int) -> int | None:
    """Return the timestamp of the last entry; if only this is wrong, the new file is better."""
    entry = TimeIndex(time_index, base_offset).last_entry()
    return None if entry is None else entry[0]


_Segment = TypeVar("_Segment", SegmentFiles, CleanedSegment)


def _followed(segments: Sequence[_Segment], end: int) -> Iterator[tuple[_Segment, int]]:
    """Yield each segment with the offset of the next one, the last one with `end`."""
    return zip(segments, [*(segment.base_offset for segment in segments[1:]), end], strict=True)


def _modified_ns(group: Sequence[SegmentFiles]) -> int:
    """Return the modification time of the last segment of a group that still exists."""
    for segment in reversed(group):
        with contextlib.suppress(FileNotFoundError):
            return segment.log.stat().st_mtime_ns
    return 0


def _transactions(segment: SegmentFiles) -> bytes:
    try:
        return files.read_file(segment.transaction_index)
    except FileNotFoundError:
        return b""


@dataclass(slots=True, kw_only=True)
class _Publisher:
    """Swaps a round's segments in, and records the round in the journal before and after."""

    engine: DirectoryLog
    load_state: Callable[[], PartitionState]
    load_pins: Callable[[], LivePins]
    snapshot: DirectorySnapshot
    topic_id: str
    end: int
    now_ms: int
    stats: CleanerStats
    _active: ActiveProducers = field(default_factory=ActiveProducers)
    _active_at: int = -1
    _live: LiveFiles = field(init=False)
    _finished: list[RewrittenGroup] = field(default_factory=list)
    _waiting_size: int = 0
    _waiting_gaps: int = 0
    _swapped_size: int = 0
    _has_swapped: bool = False

    def __post_init__(self) -> None:
        self._live = {(segment.base_offset, segment.size) for segment in self.snapshot.segments}

    def active_producers(self) -> ActiveProducers:
        """Return the active producers by the journal's current producer snapshot (C50)."""
        producer_snapshot = self.load_state().producer_snapshot
        if producer_snapshot != self._active_at:  # the same snapshot says the same
            with self.engine.transaction():  # else an append may replace it meanwhile
                state = self.load_state()
                self._active = active_producers(self.snapshot.directory, state, self.now_ms)
                self._active_at = state.producer_snapshot
        return self._active

    def add_finished(self, group: RewrittenGroup) -> None:
        self._finished.append(group)
        self._waiting_size += group.size
        self._waiting_gaps += group.gap_count
        is_large = self._waiting_size >= max(SWAP_SIZE, self._swapped_size)
        if is_large or self._waiting_gaps >= GAPS_MAX:
            self.swap_finished()

    def swap_finished(self) -> None:
        """Swap in the waiting outputs.

        A swap that fails after its first rename keeps its files: a `.cleaned` file may be the only
        sign that the sources are live. The next cleaner recovers (`finish_swaps`).
        """
        if not self._finished:
            return
        directory, groups, self._finished = self.snapshot.directory, self._finished, []
        swaps = list(adjacent_groups(groups))
        try:
            files.all_at_once(
                [sync for group in groups for output in group.outputs for sync in output.syncs()]
            )
            self._announce()
            with self._changing() as transaction:
                number = transaction.state.number
                list_gaps(directory, groups, self._live, number=number)
            while swaps:
                self._swap(swaps[0])
                del swaps[0]
        except Exception:
            outputs = [output for group in swaps[0] for output in group.outputs]
            is_whole = all(output.path(layout.LOG).exists() for output in outputs)
            for swap in swaps if is_whole else swaps[1:]:
                for group in swap:  # on a full disk they would keep writers waiting
                    group.discard()
            raise
        with self._changing() as transaction:
            drop_replaced_gaps(directory, groups, self._live, number=transaction.state.number)
        self._has_swapped = True
        self._swapped_size += self._waiting_size
        self._waiting_size = self._waiting_gaps = 0

    def discard_finished(self) -> None:
        for group in self._finished:
            group.discard()

    def _swap(self, groups: Sequence[RewrittenGroup]) -> None:
        snapshot = self.snapshot
        with self._changing() as transaction:
            # Under the lock: who pins this record finds the segments as they are after the swap.
            transaction.change_partition(
                snapshot.topic, snapshot.partition, swapped_at=transaction.state.number + 1
            )
            transaction.publish(self.now_ms)
            producer_snapshot = self.load_state().producer_snapshot
            replace_segments(snapshot.directory, groups, producer_snapshot=producer_snapshot)
        for group in groups:
            self._live.difference_update(section.key for section in group.source_sections)
            self._live.update(section.key for section in group.sections)
            self.stats.records_removed += group.records_removed
            self.stats.bytes_removed += group.bytes_removed

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Transaction]:
        """Hold the locks for replacing files of the partition."""
        with self.engine.transaction() as transaction:
            if transaction.state.unsynced:
                # After a power cut the journal must not name an active segment that is swapped.
                transaction.sync_on_publish()
                transaction.publish(self.now_ms)
            transaction.check_lock()  # which nothing else does where nothing is published
            with locks.SegmentsLock(self.snapshot.directory).exclusive():
                yield transaction

    def _announce(self) -> None:
        """Record the round's end in the journal; undo this if a reader has pinned meanwhile.

        A reader pins, then reads the journal, so that one of the two notices the other.
        """
        snapshot = self.snapshot
        with self.engine.transaction() as transaction:
            before = self.load_state()
            if before.cleaned_to >= self.end:
                return
            self._check_pins()
            transaction.change_partition(
                snapshot.topic, snapshot.partition, cleaning_offset=self.end
            )
            transaction.publish(self.now_ms)
            try:
                self._check_pins()
            except CleaningAborted:
                transaction.change_partition(
                    snapshot.topic, snapshot.partition, cleaning_offset=before.cleaning_offset
                )
                transaction.publish(self.now_ms)
                raise

    def _check_pins(self) -> None:
        snapshot = self.snapshot
        pinned = self.load_pins().limit(snapshot.topic, self.topic_id, snapshot.partition)
        if pinned < self.end:
            raise CleaningAborted(
                f"{snapshot.topic}-{snapshot.partition}: a reader needs the log as of offset "
                f"{pinned}, this round would have gone to {self.end}"
            )

    def finish(self, earliest_delete_horizon_ms: int | None) -> None:
        """Record in the journal that everything below the round's end is clean."""
        self._announce()  # unless a swap has
        if self._has_swapped:
            with self._changing() as transaction:
                number = transaction.state.number
                end_swaps(self.snapshot.directory, self._live, number=number)
        snapshot = self.snapshot
        with self.engine.transaction() as transaction:
            state = self.load_state()
            # Records that were deleted while the round went on may lie beyond its end.
            clean_to = max(self.end, state.log_start_offset)
            # Before the offset it belongs to: a crash between the two repeats the round.
            write_delete_horizon(
                DirectoryNotes(snapshot.directory), clean_to, earliest_delete_horizon_ms
            )
            if state.first_dirty_offset != clean_to:
                transaction.change_partition(
                    snapshot.topic, snapshot.partition, first_dirty_offset=clean_to
                )
                transaction.publish(self.now_ms)
            write_cleaner_checkpoint(self.engine.root, self.engine.state())
