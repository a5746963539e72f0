"""Clean one partition: its turn, its rounds, aborts and errors.

Only one cleaner, of any process, works on a partition at a time. Others skip it. A partition that
fails is marked uncleanable with the reason, and does not stop the others.

Kafka: LogCleaner.CleanerThread.tryCleanFilthiestLog, LogCleanerManager.doneCleaning (C122, C131).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.plan import WHAT_FOR, may_be_tried, valid_first_dirty_offset
from kafkalog.cleaner.rewrite.round import clean_round
from kafkalog.cleaner.schedule.throttle import Throttler, bytes_moved
from kafkalog.cleaner.shelf import CleaningAborted, LostRaceError, RoundOrder
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.errors import KafkaLogError, LockedByBrokerError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.cleaner.plan import Plan
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.cleaner.shelf import Shelf

_log = logging.getLogger(__name__)


def never() -> None:
    """Abort no cleaning."""


def unwatched(_: object) -> None:
    """Ignore what is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCleaner:
    """Cleans partitions of one log, one after the other."""

    shelf: Shelf
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
    waits: bool = False
    """Whether to wait for another cleaner that has the partition, or to go on after it."""

    def clean(
        self, topic: str, partition: int, *, force: bool = False, until_clean: bool = False
    ) -> CleanerStats | None:
        """Clean a partition, one round or until it is clean; return None if nothing was done.

        Nothing is done if another cleaner has it (unless `waits`), if it is paused, or, without
        `force`, no longer due. With `force` its active segment is closed first. The result's
        `error` has the reason of a failure. Raises LockedByBrokerError, and StorageError if a store
        refuses even the mark.
        """
        topic_id = self.shelf.topic_id(topic, partition)
        if topic_id is None:
            return None  # deleted, or created again with fewer partitions
        stats = CleanerStats(topic, partition)
        pace = _Pace(self, stats, time.perf_counter())
        try:
            self._clean(pace, topic_id, force=force, until_clean=until_clean)
        except LostRaceError as fault:  # nothing is published, and nobody broke it off
            _log.info("%s-%d: the cleaning was in vain: %s", topic, partition, fault)
        except CleaningAborted as fault:
            _log.info("%s-%d: the cleaning was aborted: %s", topic, partition, fault)
            self.on_aborted(stats)
        except LockedByBrokerError:
            raise
        except Exception as fault:  # the lock failed, or the topic is gone
            files.pass_on(fault)
            if self.shelf.topic_id(topic, partition) != topic_id:
                return None
            if pace.is_marking:
                raise
            stats.error = self._mark(topic, partition, fault)
        finally:
            pace.count()
        pace.note_time()
        if stats.rounds and not stats.error:
            pace.tell()
        return stats if stats.rounds or stats.error else None

    def _clean(self, pace: _Pace, topic_id: str, *, force: bool, until_clean: bool) -> None:
        stats, shelf, now_ms = pace.stats, self.shelf, self.now_ms
        with (
            shelf.turn(
                stats.topic, stats.partition, now_ms=now_ms, force=force, waits=self.waits
            ) as turn,
            self._marking_faults(pace, topic_id),
        ):
            if turn is None:
                return
            turn.begin(force=force, now_ms=now_ms)
            moment = shelf.moment(now_ms)
            known = moment.state.topic(stats.topic)
            mark = read_uncleanable(moment.notes(stats.topic, stats.partition))
            if not force and not may_be_tried(mark, known, now_ms):
                return  # another cleaner has found it uncleanable
            first_dirty = valid_first_dirty_offset(known.partitions[stats.partition])
            stats.start_offset = stats.end_offset = first_dirty
            is_retry = mark is not None
            while True:
                order = RoundOrder(
                    now_ms=self._now_ms(),
                    config=self.config,
                    stats=stats,
                    check_abort=pace.check,
                    time_ms=self._now_ms,
                    ended_ms=pace.ended_ms,
                    is_forced=force,
                    only_if_due=not force and not stats.rounds and not is_retry,
                    erased=self.erased,
                )
                before = replace(stats)
                try:
                    with turn.round(order) as work:
                        if work is not None:
                            clean_round(work)
                except LostRaceError as fault:
                    if not self.waits:
                        raise
                    _log.info("%s-%d: again, as %s", stats.topic, stats.partition, fault)
                    pace.go_back(before)
                    continue
                if work is None and not force and not stats.rounds and not is_retry:
                    return  # another cleaner was quicker
                if work is not None:
                    pace.what_for = pace.what_for or _what_for(work.plan, is_forced=force)
                    stats.compaction_delay_ms = (
                        stats.compaction_delay_ms or work.plan.compaction_delay_ms
                    )
                if work is None or not until_clean or stats.end_offset >= work.plan.end:
                    break
            turn.end(order)

    def _now_ms(self) -> int:
        return self.now_ms if self.clock is None else self.clock()

    @contextlib.contextmanager
    def _marking_faults(self, pace: _Pace, topic_id: str) -> Iterator[None]:
        """Mark the partition after any error, in its turn: no other cleaner shall repeat it."""
        try:
            yield
        except (CleaningAborted, LockedByBrokerError):
            raise
        except Exception as fault:  # no error may stop the other partitions
            files.pass_on(fault)
            stats = pace.stats
            if self.shelf.topic_id(stats.topic, stats.partition) != topic_id:
                raise
            pace.is_marking = True
            stats.error = self._mark(stats.topic, stats.partition, fault)

    def _mark(self, topic: str, partition: int, fault: Exception) -> str | None:
        reason = self.shelf.mark(topic, partition, fault, now_ms=self._now_ms())
        if reason is None:
            _log.info("%s-%d: another process was quicker: %s", topic, partition, fault)
            return None
        is_ordinary = isinstance(fault, KafkaLogError | OSError)
        _log.log(
            logging.WARNING if is_ordinary else logging.ERROR,
            "%s-%d cannot be cleaned: %s",
            topic,
            partition,
            reason,
            exc_info=None if is_ordinary else fault,
        )
        return reason


def _what_for(plan: Plan, *, is_forced: bool) -> str:
    if is_forced:
        return "it was forced"
    due = plan.due
    return WHAT_FOR[due[0]] if due else "an earlier cleaning had failed"


@dataclass(slots=True)
class _Pace:
    """With every chunk: abort if asked to, report progress, and keep the rate."""

    cleaner: PartitionCleaner
    stats: CleanerStats
    started: float
    counted: int = 0
    is_marking: bool = False
    """Whether a fault is to be noted in the partition's mark."""
    what_for: str = ""
    """Why the first round was made."""

    def tell(self) -> None:
        stats = self.stats
        start, end = stats.start_offset, stats.end_offset
        _log.info(
            "%s-%d: cleaned %s, because %s: records removed: %d, bytes removed: %d, "
            "bytes written: %d, seconds: %.2f",
            stats.topic,
            stats.partition,
            f"offsets {start} to {end - 1}" if start < end else f"again below offset {end}",
            self.what_for,
            stats.records_removed,
            stats.bytes_removed,
            stats.bytes_written,
            stats.elapsed_ms / 1e3,
        )

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

    def go_back(self, before: CleanerStats) -> None:
        """Forget the figures of a round that is made again; the bytes that it moved count."""
        self.count()
        for each in fields(before):
            setattr(self.stats, each.name, getattr(before, each.name))
        self.counted = bytes_moved(self.stats)

    def note_time(self) -> None:
        self.stats.elapsed_ms = (time.perf_counter() - self.started) * 1e3

    def ended_ms(self) -> int:
        """Note how long the cleaning took so far; return the time of its end."""
        self.note_time()
        if self.cleaner.clock is None:
            return self.cleaner.now_ms + round(self.stats.elapsed_ms)
        return self.cleaner.clock()

    def _abort_if_asked(self) -> None:
        self.cleaner.check_abort()
        self.cleaner.shelf.check(self.stats.topic, self.stats.partition)
