"""The partitions of a log directory, for the cleaner: locks, marks in files, what others left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.cleaner.dedup.spill.spill_file import sweep_spill_files
from kafkalog.cleaner.directory.directory_round import open_round
from kafkalog.cleaner.directory.pause import is_paused
from kafkalog.cleaner.shelf import CleaningAborted
from kafkalog.cleaner.state.last_cleaning import write_last_cleaning
from kafkalog.cleaner.state.uncleanable import (
    clear_uncleanable,
    fault_reason,
    mark_uncleanable,
    read_uncleanable,
)
from kafkalog.errors import StorageError, UnknownTopicError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.segments import finish_swaps, sweep_deleted

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import Round, RoundOrder, Turn
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog


@dataclass(frozen=True, slots=True)
class DirectoryShelf:
    """A log directory."""

    log: DirectoryLog

    def topic_id(self, topic: str, partition: int) -> str | None:
        """Return the id of a topic that has the partition here; None if there is none."""
        known = self.log.state().topics.get(topic)
        return known.topic_id if known is not None and known.is_here(partition) else None

    def has_topic(self, topic: str, topic_id: str) -> bool:
        """Return whether the topic of that name is still the one of that id."""
        return self.log.has_topic(topic, topic_id)

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
            mark_uncleanable(
                self.log.partition_directory(topic, partition),
                reason,
                dict(self.log.describe(topic).config),
                now_ms=now_ms,
                is_disk_fault=isinstance(fault, OSError) or isinstance(fault.__cause__, OSError),
            )
        return reason


@dataclass(frozen=True, slots=True)
class _Turn:
    """The cleaner lock of a partition is held."""

    log: DirectoryLog
    topic: str
    partition: int
    directory: Path

    def prepare(self, now_ms: int) -> None:
        leftovers = (layout.CLEANED, layout.SWAP)
        if any(name.endswith(leftovers) for name in files.list_names(self.directory)):
            with locks.SegmentsLock(self.directory).exclusive():
                finish_swaps(self.directory)
        # Without the sync, a power failure could bring back a .swap file of a finished swap, which
        # a new .cleaned file of ours would mark as unfinished.
        files.sync_directory(self.directory)
        sweep_spill_files(self.directory)
        delay_ms = TopicConfig.parse(self.log.describe(self.topic).config).file_delete_delay_ms
        sweep_deleted(self.directory, older_than_ms=delay_ms, now_ms=now_ms)

    def is_due(self, now_ms: int) -> bool:
        mark = read_uncleanable(self.directory)
        if mark is not None and not mark.is_due(self.log.describe(self.topic).config, now_ms):
            return False
        return not is_paused(self.directory)

    def first_dirty_offset(self) -> int:
        return self.log.describe(self.topic).partitions[self.partition].first_dirty_offset

    def close_active(self, now_ms: int) -> None:
        if self.log.describe(self.topic).partitions[self.partition].active_size > 0:
            with self.log.transaction() as transaction:
                transaction.roll(self.topic, self.partition, now_ms)
                transaction.publish(now_ms)

    def round(self, order: RoundOrder) -> contextlib.AbstractContextManager[Round | None]:
        return open_round(self.log, order)

    def end(self, order: RoundOrder) -> None:
        clear_uncleanable(self.directory)
        if order.stats.rounds:
            write_last_cleaning(self.directory, order.stats, ended_ms=order.ended_ms())
