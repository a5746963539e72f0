"""A round in a log directory: what it reads, and the swaps that publish it.

A round changes the log only by swaps, under the commit lock and the exclusive segments lock. The
swaps come after the rewriting, except in very large rounds (`SWAP_SIZE`). Before the first swap the
journal records the round's end (`cleaning_offset`), so that no snapshot of an older offset opens on
a log that lacks records. After the last swap the journal records that all below is clean
(`first_dirty_offset`). If a cleaner dies in between, the next one repeats the round, with the same
result. A round that fails swaps in its finished segments. Every round ends below all live pins
(`pins`), and checks for new ones after it has written to the journal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.directory.log_to_clean import live_segments, log_to_clean
from kafkalog.cleaner.directory.swap import (
    LiveFiles,
    adjacent_groups,
    drop_replaced_gaps,
    end_swaps,
    keep_key_index,
    list_gaps,
    replace_segments,
)
from kafkalog.cleaner.key_index.key_index import KeyIndex
from kafkalog.cleaner.rewrite.active_producers import ActiveProducers, active_producers
from kafkalog.cleaner.shelf import CleaningAborted, Round
from kafkalog.cleaner.state.delete_horizon import write_delete_horizon
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.storage_engine.directory.pins import LivePins
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.checkpoints import write_cleaner_checkpoint
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.segment.index import TimeIndex
from kafkalog.storage_engine.segment.open_segment_file import OpenSegmentFile
from kafkalog.storage_engine.transactions.transaction_index import aborted_transactions

if TYPE_CHECKING:
    from kafkalog.cleaner.plan import Plan
    from kafkalog.cleaner.rewrite.groups import RewrittenGroup
    from kafkalog.cleaner.shelf import RoundOrder
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.directory.transaction import Transaction
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.segment.open_segment import OpenSegment
    from kafkalog.storage_engine.segment.segments import SegmentFiles
    from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction

SWAP_SIZE: Final = 1 << 30
"""Bytes of outputs that are swapped in before the rewriting ends, to bound the work that a crash
costs. The next swap waits for as many bytes as all before."""
GAPS_MAX: Final = 1 << 20
"""Gaps in memory that cause an early swap: 16 MiB."""


@contextlib.contextmanager
def open_round(log: DirectoryLog, order: RoundOrder) -> Iterator[DirectoryRound | None]:
    """Plan and begin a round of a partition; None if the plan asks for none.

    The caller holds the partition's cleaner lock, and no swap is pending. Raises CorruptLogError,
    StorageError, OSError and CleaningAborted.
    """
    topic, partition = order.stats.topic, order.stats.partition
    directory = log.partition_directory(topic, partition)
    described = log.describe(topic)  # once: id and config of one topic, even if it comes again
    topic_id = described.topic_id
    began = time.monotonic()

    def load_state() -> PartitionState:
        known = log.state().topics.get(topic)
        if known is None or known.topic_id != topic_id:
            raise CleaningAborted(f"{topic}: the topic was deleted meanwhile")
        if not TopicConfig.parse(known.config).is_compacted:
            raise CleaningAborted(f"{topic}: cleanup.policy no longer includes compact")
        return known.partitions[partition]

    def load_pins() -> LivePins:
        # A long round meets pins that are younger than it is.
        elapsed_ms = round((time.monotonic() - began) * 1e3)
        return LivePins(log.root, order.now_ms + elapsed_ms, held_only=order.is_forced)

    with open_snapshot(directory, topic, partition, load_state, held=True) as snapshot:
        pins = load_pins()
        plan = log_to_clean(
            topic,
            partition,
            directory=directory,
            config=TopicConfig.parse(described.config),
            state=snapshot.state,
            segments=snapshot.segments,
            now_ms=order.now_ms,
            pinned=pins.holder(topic, topic_id, partition),
            is_awaited=pins.has_changelog,
        )
        if not order.is_wanted(plan):
            yield None
            return
        yield DirectoryRound(
            log,
            order,
            topic_id,
            snapshot=snapshot,
            plan=plan,
            load_state=load_state,
            load_pins=load_pins,
        )


@dataclass(frozen=True, slots=True)
class _FileSource:
    """A closed segment in files."""

    files: SegmentFiles

    @property
    def base_offset(self) -> int:
        return self.files.base_offset

    @property
    def size(self) -> int:
        return self.files.size

    @property
    def segment(self) -> int:
        return self.files.base_offset

    def index_sizes(self) -> tuple[int, int]:
        return _size(self.files.index), _size(self.files.time_index)

    def last_time(self) -> int | None:
        return TimeIndex(self.files.time_index, self.files.base_offset).last_time()

    def transactions(self) -> bytes:
        try:
            return files.read_file(self.files.transaction_index)
        except FileNotFoundError:
            return b""

    def modified_ns(self) -> int | None:
        try:
            return self.files.log.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class DirectoryRound(Round):
    """Reads a partition's files, swaps its outputs in, and tells the journal before and after."""

    def __init__(
        self,
        log: DirectoryLog,
        order: RoundOrder,
        topic_id: str,
        *,
        snapshot: DirectorySnapshot,
        plan: Plan,
        load_state: Callable[[], PartitionState],
        load_pins: Callable[[], LivePins],
    ) -> None:
        """`load_state` returns the newest state, and aborts a cleaning that must not continue."""
        end = snapshot.state.active_base
        live = live_segments(snapshot.segments, snapshot.state)
        super().__init__(
            order,
            plan,
            snapshot=snapshot,
            scratch=snapshot.directory,
            sources=[_FileSource(each) for each in live if each.base_offset < end],
            sources_end=end,
        )
        self._log = log
        self._topic_id = topic_id
        self._load_state = load_state
        self._load_pins = load_pins
        self._active = ActiveProducers()
        self._active_at = -1
        self._live: LiveFiles = {(each.base_offset, each.size) for each in snapshot.segments}
        self._finished: list[RewrittenGroup] = []
        self._waiting_size = 0
        self._waiting_gaps = 0
        self._swapped_size = 0
        self._has_swapped = False

    def check(self) -> None:
        """Abort if the caller asks to, or if the topic is gone or no longer compacted."""
        super().check()
        self._load_state()  # whoever deletes the topic waits for this round to end

    def aborted_entries(self, base_offset: int) -> Sequence[AbortedTransaction]:
        """Return the transaction index of a segment."""
        name = layout.segment_file(base_offset, layout.TRANSACTION_INDEX)
        return aborted_transactions(self.scratch / name)

    @contextlib.contextmanager
    def key_index_of(self, segment: OpenSegment) -> Iterator[KeyIndex | None]:
        """Open the key index of a segment; None if it has no valid one."""
        assert isinstance(segment, OpenSegmentFile)
        with locks.SegmentsLock(self.scratch).shared():
            index = KeyIndex.open(self.scratch, segment)
        try:
            yield index
        finally:
            if index is not None:
                index.close()

    def active_producers(self) -> ActiveProducers:
        """Return the active producers by the journal's current producer snapshot (C50)."""
        producer_snapshot = self._load_state().producer_snapshot
        if producer_snapshot != self._active_at:  # the same snapshot says the same
            with self._log.transaction():  # else an append may replace it meanwhile
                state = self._load_state()
                self._active = active_producers(self.scratch, state, self.order.now_ms)
                self._active_at = state.producer_snapshot
        return self._active

    def add_finished(self, group: RewrittenGroup) -> None:
        """Take outputs for a later swap; swap now if many wait. Unchanged sources stay."""
        if not group.is_changed:
            keep_key_index(self.scratch, group)
            group.discard()
            return
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
        directory, groups, self._finished = self.scratch, self._finished, []
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

    def discard(self) -> None:
        """Remove the outputs that wait for a swap."""
        for group in self._finished:
            group.discard()

    def _swap(self, groups: Sequence[RewrittenGroup]) -> None:
        snapshot = self.snapshot
        with self._changing() as transaction:
            # Under the lock: who pins this record finds the segments as they are after the swap.
            held = self._load_state()
            gone_to = max(held.deletions_gone_to, self.order.stats.deletions_gone_to)
            transaction.change_partition(
                snapshot.topic,
                snapshot.partition,
                swapped_at=transaction.state.number + 1,
                deletions_gone_to=gone_to,
            )
            transaction.publish(self.order.now_ms)
            producer_snapshot = self._load_state().producer_snapshot
            replace_segments(self.scratch, groups, producer_snapshot=producer_snapshot)
        for group in groups:
            self._live.difference_update(section.key for section in group.source_sections)
            self._live.update(section.key for section in group.sections)
            self.order.stats.records_removed += group.records_removed
            self.order.stats.bytes_removed += group.bytes_removed

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Transaction]:
        """Hold the locks for replacing files of the partition."""
        with self._log.transaction() as transaction:
            if transaction.state.unsynced:
                # After a power cut the journal must not name an active segment that is swapped.
                transaction.sync_on_publish()
                transaction.publish(self.order.now_ms)
            transaction.check_lock()  # which nothing else does where nothing is published
            with locks.SegmentsLock(self.scratch).exclusive():
                yield transaction

    def _announce(self) -> None:
        """Record the round's end in the journal; undo this if a reader has pinned meanwhile.

        A reader pins, then reads the journal, so that one of the two notices the other.
        """
        snapshot = self.snapshot
        with self._log.transaction() as transaction:
            before = self._load_state()
            if before.cleaned_to >= self.end:
                return
            self._check_pins()
            transaction.change_partition(
                snapshot.topic, snapshot.partition, cleaning_offset=self.end
            )
            transaction.publish(self.order.now_ms)
            try:
                self._check_pins()
            except CleaningAborted:
                transaction.change_partition(
                    snapshot.topic, snapshot.partition, cleaning_offset=before.cleaning_offset
                )
                transaction.publish(self.order.now_ms)
                raise

    def _check_pins(self) -> None:
        snapshot = self.snapshot
        pinned = self._load_pins().limit(snapshot.topic, self._topic_id, snapshot.partition)
        if pinned < self.end:
            raise CleaningAborted(
                f"{snapshot.topic}-{snapshot.partition}: a reader needs the log as of offset "
                f"{pinned}, this round would have gone to {self.end}"
            )

    def finish(self, earliest_delete_horizon_ms: int | None) -> None:
        """Swap in what waits; record in the journal that everything below the end is clean."""
        self.swap_finished()
        self._announce()  # unless a swap has
        if self._has_swapped:
            with self._changing() as transaction:
                number = transaction.state.number
                end_swaps(self.scratch, self._live, number=number)
        snapshot = self.snapshot
        with self._log.transaction() as transaction:
            state = self._load_state()
            # Records that were deleted while the round went on may lie beyond its end.
            clean_to = max(self.end, state.log_start_offset)
            # Before the offset it belongs to: a crash between the two repeats the round.
            write_delete_horizon(DirectoryNotes(self.scratch), clean_to, earliest_delete_horizon_ms)
            if state.first_dirty_offset != clean_to:
                transaction.change_partition(
                    snapshot.topic, snapshot.partition, first_dirty_offset=clean_to
                )
                transaction.publish(self.order.now_ms)
            write_cleaner_checkpoint(self._log.root, self._log.state())
