"""A log directory as it is read and locked: what every reader and every writer of it needs.

It has the root, the journal and its state, the locks, a transaction, and snapshots of partitions.
The façade `directory_log.DirectoryLog` adds the acts. A task that reads imports no more than this.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import (
    CorruptLogError,
    InvalidInputError,
    LockedByBrokerError,
    LogMovedError,
    StorageError,
    UnknownTopicError,
)
from kafkalog.storage_engine.broker import owner
from kafkalog.storage_engine.directory.recorded_records import journal_of
from kafkalog.storage_engine.format import layout, leader_epochs
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.fs.change_signal import ChangeSignal
from kafkalog.storage_engine.log.readable_log import ReadableLog
from kafkalog.storage_engine.metadata import address, checkpoints, directory_signs, new_log
from kafkalog.storage_engine.metadata.state import PartitionState, State, TopicState

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.kept_appenders import KeptAppenders
    from kafkalog.storage_engine.directory.transaction import Transaction
    from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot
    from kafkalog.storage_engine.transactions.producers import Producers
    from kafkalog.storage_engine.writing.staging_target import AttemptName, StagingTarget

_journal_of_tasks = functools.lru_cache(maxsize=4)(journal_of)


class ReadableDirectory(ReadableLog):
    """One process's access to a log directory; a context manager.

    `read_only` never writes a byte. A broker's log directory, or those of several brokers of a
    cluster (a list, or paths with commas between), is only read, as is a copy of partitions. Raises
    InvalidInputError for a path that is a file, or lacks a log and may not get one.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        read_only: bool = False,
        create: bool = True,
        is_task: bool = False,
        is_left: bool = False,
    ) -> None:
        """With `is_task`, which only reads, take over what this process's tasks read before.

        With `is_left` read what an adoption has left to the broker: Kafka's own topics.
        """
        roots = address.directories(path)
        self.root: Path = roots[0]
        self._brokers = owner.left_by_adoption(roots) if is_left else owner.open_broker(roots)
        self.roots: Sequence[Path] = roots
        """The log directory, or all that a broker, or several brokers, have (`log.dirs`)."""
        self.is_brokers = self._brokers is not None
        self.read_only = read_only or self.is_brokers
        self._is_closed = False
        self._kept: KeptAppenders | None = None
        commit_file = self.root / layout.COMMIT
        self._journal = _journal_of_tasks(self.root) if is_task else journal_of(self.root)
        self._root_lock = locks.RootLock(self.root)
        self._commit_lock = locks.FileLock(self.root / layout.COMMIT_LOCK)
        if self._brokers is not None:
            return
        if create and not read_only and not commit_file.exists():
            directory_signs.check_journal_is_not_lost(self.root)
            new_log.create_log(self.root)
        else:
            directory_signs.check_is_log(self.root)
            if not read_only:
                self._recover_if_free()

    def _recover_if_free(self) -> None:
        """Recover the journal, unless somebody is at work here, or we may only read: so we can."""
        with files.disk_faults(self.root), contextlib.suppress(LockedByBrokerError):
            try:
                if self._journal.is_recovered():
                    return
                with self._root_lock.shared(), self._commit_lock.exclusive(wait=False) as is_free:
                    if is_free:
                        self._journal.recover()
            except (OSError, StorageError) as fault:
                files.pass_on(fault)
                cause = fault.__cause__ or fault
                if not isinstance(cause, OSError) or cause.errno not in files.NOT_WRITABLE:
                    raise

    def state(self) -> State:
        """Return the published state; costs one small read when nothing has changed."""
        with files.reading_faults(self.root):
            return (self._brokers or self._journal).published()

    def with_internal_topics(self) -> ReadableLog:
        """Return the log that has Kafka's own topics; an adopted one leaves them to the broker."""
        if self.is_brokers or not (self.root / layout.META_ASIDE).exists():
            return self
        return ReadableDirectory(self.root, read_only=True, create=False, is_left=True)

    def check_is_here(self) -> None:
        """Raise LogMovedError if the directory, or its journal, is no longer there."""
        marks = () if self.is_brokers else (layout.COMMIT, layout.COMMIT_RELEASED)
        for root in self.roots:
            is_here = not marks or any(os.path.lexists(root / name) for name in marks)
            if not (root.is_dir() and is_here):
                raise LogMovedError(
                    f"{root}: the directory of this log was moved or removed since it was opened "
                    "(expected the log that was there). Open the log again where it is now."
                )

    def change_signal(self) -> ChangeSignal:
        """Return what tells of the next commit: its writer then closes the journal."""
        return ChangeSignal(self.root / layout.COMMIT)

    def is_live(self, topic: str, partition: int) -> bool:
        """Return whether a broker that runs has the partition."""
        directory = self.partition_directory(topic, partition)
        return self.is_brokers and locks.RootLock(directory.parent).is_held_alone()

    def partition_directory(self, topic: str, partition: int) -> Path:
        """Return where a partition's files are."""
        if self._brokers is not None:
            return self._brokers.directory(topic, partition)
        return self.root / layout.partition_directory(topic, partition)

    def cleaned_to(self, topic: str, partition: int) -> int:
        """Return the offset below which a cleaning may have removed records."""
        if self._brokers is not None:
            return self._brokers.cleaned_to(topic, partition)
        return super().cleaned_to(topic, partition)

    def deletions_gone_to(self, topic: str, partition: int) -> int:
        """Return the offset below which a deletion may be gone; of a broker's, as it may clean."""
        if self._brokers is not None:
            return self._brokers.cleaned_to(topic, partition)
        return super().deletions_gone_to(topic, partition)

    def why_absent(self, topic: str, partition: int) -> str:
        """Return why a partition that the topic has cannot be read here."""
        if self._brokers is not None:
            return self._brokers.why_absent(topic, partition)
        return super().why_absent(topic, partition)

    def listing_lock(self, directory: Path) -> contextlib.AbstractContextManager[None]:
        """Keep a partition's set of files as it is; of a broker's it is not ours to do so."""
        if self._brokers is not None:
            return contextlib.nullcontext()
        return locks.SegmentsLock(directory).shared()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Hold the commit lock with a recovered journal; what is not published is undone.

        An OSError becomes a StorageError that says which file it was about.
        """
        from kafkalog.storage_engine.directory.kept_appenders import KeptAppenders
        from kafkalog.storage_engine.directory.transaction import Transaction

        self.check_writable()
        with (
            files.disk_faults(self.root),
            self._root_lock.shared() as check_lock,
            self._commit_lock.exclusive(),
            self._journal,
        ):
            if self._kept is None:
                self._kept = KeptAppenders()
            state = self._journal.recover()
            transaction = Transaction(self.root, self._journal, state, check_lock, self._kept)
            try:
                yield transaction
            except BaseException as fault:
                transaction.abandon(fault)
                raise
            transaction.close()

    def check_writable(self) -> None:
        """Raise InvalidInputError where the log is a broker's, read-only, or closed."""
        if self._brokers is not None:
            self._brokers.refuse_write()
        if self.read_only:
            raise InvalidInputError(f"{self.root}: the log was opened read-only")
        if self._is_closed:
            raise InvalidInputError(f"{self.root}: the log is closed: open it again to write")

    def snapshot(
        self,
        topic: str,
        partition: int,
        *,
        whole: bool = False,
        start: int | None = None,
        known_end: int = 0,
        check: Callable[[TopicState], None] = lambda topic: None,
    ) -> DirectorySnapshot:
        """Open a snapshot of a partition, as `ReadableLog` says; close it after use."""
        from kafkalog.storage_engine.reading.directory_snapshot import open_snapshot

        topic_id = self.check_partition(topic, partition)
        if self._brokers is not None:
            return self._brokers.snapshot(
                topic, partition, whole=whole, start=start, known_end=known_end
            )

        def same_topic() -> TopicState:
            known = self.describe(topic)
            if known.topic_id != topic_id:
                raise UnknownTopicError(
                    f"topic {topic!r} was deleted and created again: read again"
                )
            return known

        def load_state() -> PartitionState:
            known = same_topic()
            check(known)
            return known.partitions[partition]

        directory = self.partition_directory(topic, partition)
        try:
            return open_snapshot(
                directory,
                topic,
                partition,
                load_state,
                whole=whole,
                start=start,
                check_topic=same_topic,
            )
        except (StorageError, FileNotFoundError):
            load_state()  # was it deleted meanwhile?
            raise

    def producers(self, topic: str, partition: int) -> Producers | None:
        """Return the producers at a partition's high watermark; None if their file is not there."""
        from kafkalog.storage_engine.transactions import producer_snapshot
        from kafkalog.storage_engine.transactions.producers import Producers

        if self._brokers is not None:
            return self._brokers.loaded(topic, partition).producers
        state = self.describe(topic).partitions[partition]
        if state.producer_snapshot < 0:
            return Producers(end_offset=state.high_watermark)
        try:
            found = producer_snapshot.read_snapshot(
                self.partition_directory(topic, partition), state.producer_snapshot
            )
        except (CorruptLogError, StorageError):
            return None
        found.end_offset = state.high_watermark
        return found

    def size_of(self, topic: str, partition: int) -> int:
        """Return the bytes of a partition's committed batches, as far as they can be listed."""
        from kafkalog.storage_engine.segment.segments import list_segments

        directory = self.partition_directory(topic, partition)
        try:
            with self.listing_lock(directory):
                state = self.describe(topic).partitions[partition]
                found = list_segments(directory)
        except (OSError, StorageError) as raised:
            files.pass_on(raised)
            return 0
        closed = sum(each.size for each in found if each.base_offset < state.active_base)
        return closed + state.active_size

    def staging_target(self, name: AttemptName) -> StagingTarget:
        """Return where a task attempt writes: files below the root."""
        from kafkalog.storage_engine.directory.staged_directory import StagedDirectory

        return StagedDirectory(self.root, name)

    def leader_epoch_at(self, topic: str, partition: int, offset: int) -> int:
        """Return the leader epoch of an existing or future offset, or -1."""
        if self._brokers is not None:
            found = list(self._brokers.loaded(topic, partition).leader_epochs)
            return max((epoch for epoch, start in found if start <= offset), default=-1)
        state = self.describe(topic).partitions[partition]
        found = checkpoints.read_leader_epochs(self.partition_directory(topic, partition))
        epochs = leader_epochs.committed(found, state.high_watermark, state.leader_epoch)
        return max((epoch for epoch, start in epochs if start <= offset), default=-1)

    def close(self) -> None:
        """Refuse writes from now on."""
        self._is_closed = True
