"""A log directory, for the cleaner: locks, notes in files, and what others left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.cleaner.dedup.presence import announced, may_clean
from kafkalog.cleaner.dedup.spill.spill_file import sweep_spill_files
from kafkalog.cleaner.directory.directory_moment import DirectoryMoment
from kafkalog.cleaner.directory.directory_round import open_round
from kafkalog.cleaner.directory.pause import is_paused
from kafkalog.cleaner.shelf import CleaningAborted
from kafkalog.cleaner.state.first_dirty_offset import heal_first_dirty_offsets
from kafkalog.cleaner.state.last_cleaning import write_last_cleaning
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import fault_reason, mark_uncleanable
from kafkalog.errors import KafkaLogError, StorageError, UnknownTopicError
from kafkalog.storage_engine.directory.pins import sweep_pins
from kafkalog.storage_engine.directory.topic_deletion import try_deletions
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, files, locks
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.swaps import finish_swaps, sweep_deleted

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import Moment, Round, RoundOrder, Turn
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog


@dataclass(frozen=True, slots=True)
class DirectoryShelf:
    """A log directory."""

    log: DirectoryLog

    @property
    def place(self) -> str:
        """The absolute path."""
        return str(self.log.root.absolute())

    def check_cleanable(self) -> None:
        """Raise InvalidInputError where the log is only read, StorageError for a read-only disk.

        Raises LockedByBrokerError while a broker holds the directory.
        """
        self.log.check_writable()
        if not may_clean(self.log.root):
            raise StorageError(
                f"{self.log.root}: may not be written here (a read-only mount, or no permission), "
                "and a cleaner writes; run it on a host and as a user that may"
            )
        with locks.RootLock(self.log.root).shared():
            pass

    def announced(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock that shows a running cleaner."""
        return announced(self.log.root)

    def moment(self, now_ms: int) -> Moment:
        """Return the log as of now."""
        return DirectoryMoment(self.log, now_ms)

    def topic_id(self, topic: str, partition: int) -> str | None:
        """Return the id of the topic if it has the partition here, else None."""
        known = self.log.state().topics.get(topic)
        return known.topic_id if known is not None and known.is_here(partition) else None

    def prepare(
        self,
        topic: str | None = None,
        partition: int | None = None,
        *,
        force: bool = False,
        now_ms: int,
        check_abort: Callable[[], None] = lambda: None,
    ) -> list[CleanerStats]:
        """Correct first dirty offsets that lie outside their log."""
        heal_first_dirty_offsets(self.log, now_ms=now_ms)
        return []

    def check(self, topic: str, partition: int) -> None:
        """Abort if the partition is paused."""
        if is_paused(self.log.partition_directory(topic, partition)):
            raise CleaningAborted("the partition is paused")

    @contextlib.contextmanager
    def turn(
        self, topic: str, partition: int, *, now_ms: int, force: bool, waits: bool
    ) -> Iterator[Turn | None]:
        """Hold the cleaner lock; None if another cleaner has it, or if the partition is paused."""
        directory = self.log.partition_directory(topic, partition)
        with (
            locks.FileLock(directory / layout.CLEANER_LOCK).exclusive(wait=waits) as is_held,
            locks.RootLock(self.log.root).shared(),
        ):
            if is_held and not is_paused(directory):
                yield _Turn(self.log, topic, partition, directory)
            else:
                yield None

    def mark(self, topic: str, partition: int, fault: Exception, *, now_ms: int) -> str | None:
        """Write the mark into the directory."""
        reason = fault_reason(fault)
        if isinstance(fault, OSError) and not fault.filename:  # an error of a file descriptor
            reason = f"{self.log.root / layout.partition_directory(topic, partition)}: {reason}"
        # A topic that was deleted meanwhile cannot be marked.
        with contextlib.suppress(UnknownTopicError, StorageError):
            notes = DirectoryNotes(self.log.partition_directory(topic, partition))
            config = self.log.describe(topic).config
            mark_uncleanable(notes, fault, config, now_ms=now_ms, reason=reason)
        return reason

    def tidy(self, *, now_ms: int) -> int:
        """Remove stale staged files, ended pins, and what was replaced or deleted."""
        count = 0
        with files.ignoring():
            count += self.log.sweep_staged(now_ms=now_ms)
        with files.ignoring(KafkaLogError):
            # Readers renew pins by the system's clock, whatever time the caller gives.
            count += sweep_pins(self.log.root, clock.now_ms())
        for name, topic in sorted(self.log.state().topics.items()):
            delay_ms = TopicConfig.parse(topic.config).file_delete_delay_ms
            for partition in topic.numbers():
                directory = self.log.partition_directory(name, partition)
                with files.ignoring():
                    count += sweep_deleted(directory, older_than_ms=delay_ms, now_ms=now_ms)
        try_deletions(self.log, now_ms=now_ms)
        return count


@dataclass(frozen=True, slots=True)
class _Turn:
    """The cleaner lock of a partition is held."""

    log: DirectoryLog
    topic: str
    partition: int
    directory: Path

    def begin(self, *, force: bool, now_ms: int) -> None:
        """Finish what a dead cleaner left; close the active segment if it will be cleaned."""
        leftovers = (layout.CLEANED, layout.SWAP)
        if any(name.endswith(leftovers) for name in files.list_names(self.directory)):
            with locks.SegmentsLock(self.directory).exclusive():
                finish_swaps(self.directory)
        # Without the sync, a power failure could bring back a .swap file of a finished swap, which
        # a new .cleaned file of ours would mark as unfinished.
        files.sync_directory(self.directory)
        sweep_spill_files(self.directory)
        described = self.log.describe(self.topic)
        delay_ms = TopicConfig.parse(described.config).file_delete_delay_ms
        sweep_deleted(self.directory, older_than_ms=delay_ms, now_ms=now_ms)
        if described.partitions[self.partition].active_size == 0:
            return
        if force or self._closes_active(now_ms):
            with self.log.transaction() as transaction:
                if force or self._closes_active(now_ms):  # still
                    transaction.roll(self.topic, self.partition, now_ms)
                    transaction.publish(now_ms)

    def _closes_active(self, now_ms: int) -> bool:
        plan = DirectoryMoment(self.log, now_ms).plan(self.topic, self.partition)
        return plan.closing_bytes > 0

    def round(self, order: RoundOrder) -> contextlib.AbstractContextManager[Round | None]:
        return open_round(self.log, order)

    def end(self, order: RoundOrder) -> None:
        notes = DirectoryNotes(self.directory)
        notes.remove(layout.UNCLEANABLE)
        if order.stats.rounds:
            write_last_cleaning(notes, order.stats, ended_ms=order.ended_ms())
