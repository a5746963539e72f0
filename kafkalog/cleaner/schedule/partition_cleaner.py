"""Clean one partition: its lock, aborts and errors.

Only one cleaner, of any process, works on a partition at a time. Others skip it. A partition that
fails is marked uncleanable with the reason, and does not stop the others.

Kafka: LogCleaner.CleanerThread.tryCleanFilthiestLog, LogCleanerManager.doneCleaning (C122, C131).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.dedup.spill.spill_file import sweep_spill_files
from kafkalog.cleaner.directory.pause import is_paused
from kafkalog.cleaner.plan import may_be_tried
from kafkalog.cleaner.rewrite.clean import CleaningAborted, clean_round
from kafkalog.cleaner.schedule.throttle import Throttler, bytes_moved
from kafkalog.cleaner.state.last_cleaning import write_last_cleaning
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.cleaner.state.uncleanable import (
    clear_uncleanable,
    fault_reason,
    mark_uncleanable,
    read_uncleanable,
)
from kafkalog.errors import KafkaLogError, LockedByBrokerError, StorageError, UnknownTopicError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.swaps import finish_swaps, sweep_deleted

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog

_log = logging.getLogger(__name__)


def never() -> None:
    """Abort no cleaning."""


def unwatched(_: object) -> None:
    """Ignore what is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCleaner:
    """Cleans partitions of one log, one after the other."""

    engine: DirectoryLog
    now_ms: int
    clock: Callable[[], int] | None = None
    """Returns the time at which a round begins; None for `now_ms`."""
    config: CleanerConfig = field(default_factory=CleanerConfig)
    check_abort: Callable[[], None] = never
    """Called with every chunk; an exception ends the cleaning, CleaningAborted without an error."""
    progress: Callable[[CleanerStats], None] = unwatched
    """Receives the figures with every chunk."""
    throttler: Throttler | None = None
    """None for no limit."""
    on_aborted: Callable[[CleanerStats], None] = unwatched
    """Receives the figures of an aborted cleaning."""
    erased: ErasedKeys | None = None
    """Keys whose tombstones wait for no delete horizon."""
    is_due: bool = False
    """Whether the caller has found the partition due, so that this is not decided again."""
    limit: int = layout.INT64_MAX
    """Nothing at this offset or above is cleaned."""
    high_watermark: int | None = None
    """That of the log of which the engine has a part; None if it has the log."""
    segment_of: Callable[[int], int] = lambda base_offset: base_offset
    """Returns the segment of a file, as `group_segments_by_size` takes it."""
    waits: bool = False
    """Whether to wait for another cleaner that has the partition."""

    def clean(
        self, topic: str, partition: int, *, force: bool = False, until_clean: bool = False
    ) -> CleanerStats | None:
        """Clean a partition, one round or until it is clean; return None if nothing was done.

        Nothing is done if another cleaner has it (unless `waits`), if it is paused, or, without
        `force`, no longer due. With `force` its active segment is rolled first. The result's
        `error` has the reason of a failure. Raises LockedByBrokerError.
        """
        known = self.engine.state().topics.get(topic)
        if known is None or not known.is_here(partition):
            return None  # deleted, or created again with fewer partitions
        stats = CleanerStats(topic, partition)
        pace = _Pace(self, self.engine.partition_directory(topic, partition), stats)
        started = time.perf_counter()
        try:
            self._clean(pace, known.topic_id, started, force=force, until_clean=until_clean)
        except CleaningAborted as fault:
            _log.info("%s-%d: the cleaning was aborted: %s", topic, partition, fault)
            self.on_aborted(stats)
        except LockedByBrokerError:
            raise
        except Exception as fault:  # the lock failed, or the topic is gone
            files.pass_on(fault)
            if not self.engine.has_topic(topic, known.topic_id):
                return None
            stats.error = self._mark(topic, partition, fault)
        finally:
            pace.count()
        stats.elapsed_ms = (time.perf_counter() - started) * 1e3
        return stats if stats.rounds or stats.error else None

    def _clean(
        self, pace: _Pace, topic_id: str, started: float, *, force: bool, until_clean: bool
    ) -> None:
        stats, directory = pace.stats, pace.directory
        notes = DirectoryNotes(directory)
        topic, partition = stats.topic, stats.partition
        with (
            locks.FileLock(directory / layout.CLEANER_LOCK).exclusive(wait=self.waits) as is_held,
            locks.RootLock(self.engine.root).shared(),
            self._marking_faults(stats, topic_id),
        ):
            if not is_held or is_paused(directory):
                return
            self._finish_what_others_left(topic, directory)
            described = self.engine.describe(topic)
            if force:
                self._roll(topic, partition)
            elif not may_be_tried(read_uncleanable(notes), described, self.now_ms):
                return  # another cleaner has found it uncleanable
            first_dirty = described.partitions[partition].first_dirty_offset
            stats.start_offset = stats.end_offset = first_dirty
            while True:
                log = clean_round(
                    self.engine,
                    topic,
                    partition,
                    now_ms=self._now_ms(),
                    config=self.config,
                    stats=stats,
                    check_abort=pace.check,
                    is_forced=force,
                    only_if_due=not force and not self.is_due and not stats.rounds,
                    erased=self.erased,
                    segment_of=self.segment_of,
                    limit=self.limit,
                    high_watermark=self.high_watermark,
                )
                if log is None and not force and not stats.rounds:
                    return  # another cleaner was quicker
                if log is not None and not stats.compaction_delay_ms:
                    stats.compaction_delay_ms = log.compaction_delay_ms
                if log is None or not until_clean or stats.end_offset >= log.end:
                    break
            clear_uncleanable(notes)
            if stats.rounds:
                stats.elapsed_ms = (time.perf_counter() - started) * 1e3
                ended_ms = (
                    self.now_ms + round(stats.elapsed_ms) if self.clock is None else self.clock()
                )
                write_last_cleaning(notes, stats, ended_ms=ended_ms)

    def _now_ms(self) -> int:
        return self.now_ms if self.clock is None else self.clock()

    @contextlib.contextmanager
    def _marking_faults(self, stats: CleanerStats, topic_id: str) -> Iterator[None]:
        """Mark the partition after any error, under its lock: no other cleaner shall repeat it."""
        try:
            yield
        except (CleaningAborted, LockedByBrokerError):
            raise
        except Exception as fault:  # no error may stop the other partitions
            files.pass_on(fault)
            if not self.engine.has_topic(stats.topic, topic_id):
                raise
            stats.error = self._mark(stats.topic, stats.partition, fault)

    def _finish_what_others_left(self, topic: str, directory: Path) -> None:
        leftovers = (layout.CLEANED, layout.SWAP)
        if any(name.endswith(leftovers) for name in files.list_names(directory)):
            with locks.SegmentsLock(directory).exclusive():
                finish_swaps(directory)
        # Without the sync, a power failure could bring back a .swap file of a finished swap, which
        # a new .cleaned file of ours would mark as unfinished.
        files.sync_directory(directory)
        sweep_spill_files(directory)
        config = TopicConfig.parse(self.engine.describe(topic).config)
        sweep_deleted(directory, older_than_ms=config.file_delete_delay_ms, now_ms=self.now_ms)

    def _roll(self, topic: str, partition: int) -> None:
        if self.engine.describe(topic).partitions[partition].active_size > 0:
            with self.engine.transaction() as transaction:
                transaction.roll(topic, partition, self.now_ms)
                transaction.publish(self.now_ms)

    def _mark(self, topic: str, partition: int, fault: Exception) -> str:
        reason = fault_reason(fault)
        if isinstance(fault, OSError) and not fault.filename:  # an error of a file descriptor
            reason = f"{self.engine.root / layout.partition_directory(topic, partition)}: {reason}"
        is_ordinary = isinstance(fault, KafkaLogError | OSError)
        _log.log(
            logging.WARNING if is_ordinary else logging.ERROR,
            "%s-%d cannot be cleaned: %s",
            topic,
            partition,
            reason,
            exc_info=None if is_ordinary else fault,
        )
        # A topic that was deleted meanwhile cannot be marked.
        with contextlib.suppress(UnknownTopicError, StorageError):
            mark_uncleanable(
                DirectoryNotes(self.engine.partition_directory(topic, partition)),
                reason,
                dict(self.engine.describe(topic).config),
                now_ms=self._now_ms(),
                is_disk_fault=isinstance(fault, OSError) or isinstance(fault.__cause__, OSError),
            )
        return reason


@dataclass(slots=True)
class _Pace:
    """With every chunk: abort if asked to, report progress, and keep the rate."""

    cleaner: PartitionCleaner
    directory: Path
    stats: CleanerStats
    counted: int = 0

    def check(self) -> None:
        self._abort_if_asked()
        self.cleaner.progress(self.stats)
        self.count()
        if self.cleaner.throttler is not None:
            self.cleaner.throttler.wait(self._abort_if_asked)

    def count(self) -> None:
        if self.cleaner.throttler is not None:
            moved = bytes_moved(self.stats)
            self.cleaner.throttler.count(moved - self.counted)
            self.counted = moved

    def _abort_if_asked(self) -> None:
        self.cleaner.check_abort()
        if is_paused(self.directory):
            raise CleaningAborted("the partition is paused")
