"""One holder's turn at a log: the recovered state, its changes, and the record that commits them.

The order of events: `ReadableDirectory.transaction` takes the root lock, shared, and the commit
lock, and the journal is recovered. Then come any number of changes. `sync_appended` syncs the logs
that they touched. `record` checks the root lock, writes the journal's record, syncs it, and
publishes it. An exception before `record` leaves nothing: the files are truncated at once, or by
the next holder.

If the previous holder died or failed, its changes are made durable before anything is built on
them. It may have truncated what an earlier holder left, and a power cut could bring that back among
committed records.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kafkalog.errors import CommitInDoubtError, InvalidInputError, StorageError
from kafkalog.storage_engine.directory import partition
from kafkalog.storage_engine.directory.kept_appenders import KeptAppenders
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.log_change import LogChange
from kafkalog.storage_engine.metadata.new_topic import NewTopic, new_topic_id
from kafkalog.storage_engine.metadata.state import Change, DeletedTopic, State, TopicState
from kafkalog.storage_engine.segment import gaps, partition_directory

_logger = logging.getLogger(__name__)
_FILES_EACH = 3
"""Open files of a partition that is appended to: the log and two indexes."""


class DeletionUnfinishedError(StorageError):
    """The directories of a deleted topic still have the names that a new topic needs.

    Moving them requires their cleaner locks, which a holder of the commit lock must not wait for.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r}: its deletion is not finished; create it again")
        self.topic = topic


class Transaction(LogChange):
    """Changes to a log under the commit lock; `state` is recovered and published.

    Commits and the cleaner use it; it may publish more than once.
    """

    def __init__(
        self,
        root: Path,
        journal: Journal,
        state: State,
        check_lock: Callable[[], None],
        kept: KeptAppenders | None = None,
    ) -> None:
        super().__init__(state, Change())
        self._kept = kept or KeptAppenders()
        self._kept.check(state)
        self._root = root
        self._journal = journal
        self.check_lock = check_lock
        """Raises LockedByBrokerError if this holder has lost the root lock."""
        self._appenders: dict[tuple[str, int], partition.Appender] = {}
        self._open: set[tuple[str, int]] = set()
        """Partitions whose appenders have open files; the others closed them in between."""
        self._touched: set[str] = set()
        self._unrecorded: list[Path] = []
        """Directories of partitions that this change adds."""
        self._synced: tuple[dict[str, Any], bool] | None = None
        """The change that `record` is to write, and whether it is to sync it."""
        self._needs_sync = False
        self._may_work = False
        self._uncertain: dict[tuple[str, int], OSError] = {}
        """Partitions where the changes of an earlier holder could not be made durable, and why.

        The others stay usable, as long as no commit in such a partition waits for its own sync."""

    def create_topic(self, name: str, new: NewTopic) -> TopicState:
        """Create a topic and its directories; it exists once published.

        Raises InvalidInputError for a topic that `NewTopic.check` refuses, or that exists already.
        """
        self.check_new(name, new)
        topic_id = new_topic_id()
        self._create_directories(name, topic_id, dict.fromkeys(range(new.partitions), 0))
        return self.add_topic(name, topic_id, new)

    def copy_topic(self, topic: TopicState, starts: Mapping[int, int]) -> None:
        """Add a topic of another log, and create its directories; it exists once published."""
        self.check_copied(topic)
        self._create_directories(topic.name, topic.topic_id, starts)
        super().copy_topic(topic, starts)

    def add_partitions(self, topic: TopicState, count: int) -> None:
        """Create the directories of a topic's new partitions; they exist once published."""
        starts = dict.fromkeys(range(len(topic.partitions), count), 0)
        self._create_directories(topic.name, topic.topic_id, starts)

    def _create_directories(self, name: str, topic_id: str, starts: Mapping[int, int]) -> None:
        """Create the directory of each partition, which begins at an offset."""
        self._refuse_residuals(name, starts)
        self._refuse_other_case(name, starts)
        for number, start in starts.items():
            directory = self._root / layout.partition_directory(name, number)
            partition_directory.create_partition(directory, topic_id, start)
            self._unrecorded.append(directory)
        files.sync_directory(self._root)

    def _refuse_residuals(self, name: str, numbers: Iterable[int]) -> None:
        for deleted in self.state.deleting.values():
            if self._is_directory_of(deleted, name, numbers):
                raise DeletionUnfinishedError(deleted.name)

    def _refuse_other_case(self, name: str, numbers: Iterable[int]) -> None:
        for other in (*self.state.topics, *self._created):
            if other != name and self._is_directory_of(self.topic(other), name, numbers):
                raise InvalidInputError(
                    f"topic {name!r}: this file system does not tell upper case from lower case "
                    f"(expected a name that differs in more from {other!r}). Choose another one."
                )

    def _is_directory_of(
        self, topic: TopicState | DeletedTopic, name: str, numbers: Iterable[int]
    ) -> bool:
        """Tell whether the file system takes a directory of a topic for one of a name."""
        if topic.name.lower() != name.lower():
            return False
        directories = (self._root / layout.partition_directory(name, each) for each in numbers)
        return any(checkpoints.read_topic_id(each) == topic.topic_id for each in directories)

    def appender(self, topic: str, number: int, now_ms: int) -> partition.Appender:
        """Return a partition's appender; the first call truncates it to its recorded state."""
        key = topic, number
        if key not in self._open:
            if _FILES_EACH * len(self._open) >= files.descriptor_limit() // 2:
                self._close_opened()  # leave half of the descriptors to the rest of the process
            try:
                self._appenders[key] = self._opened(topic, number, now_ms)
            except OSError as fault:
                files.pass_on(fault)
                if fault.errno != errno.EMFILE:
                    raise
                if not self._close_opened() and not files.raise_descriptor_limit():
                    raise
                self._appenders[key] = self._opened(topic, number, now_ms)
            self._open.add(key)
        return self._appenders[key]

    def appenders(
        self, keys: Sequence[tuple[str, int]], now_ms: int
    ) -> Iterator[dict[tuple[str, int], partition.Appender]]:
        """Yield the appenders of partitions: all at once, to be used side by side, if possible.

        A process that may have few files open gets one after the other.
        """
        for _ in range(2):  # again, as one may have been closed to open another
            opened = {key: self.appender(*key, now_ms) for key in keys}
        if self._open.issuperset(keys):
            yield opened
            return
        for key in keys:
            yield {key: self.appender(*key, now_ms)}

    def _opened(self, topic: str, number: int, now_ms: int) -> partition.Appender:
        appender = self._appenders.get((topic, number))
        if appender is None:
            known = self.topic(topic)
            known.check_is_here(number)
            self._begin_work()
            if (topic, number) in self._uncertain:
                raise self._uncertain[topic, number]
            state, config = known.partitions[number], TopicConfig.parse(known.config)
            kept = self._kept.take((topic, number))
            if kept is not None and kept.resume(known.topic_id, state, config, now_ms):
                return kept
            directory = self._root / layout.partition_directory(topic, number)
            gaps.check_moment(directory, self.state.number, state.swapped_at)
            return partition.Appender(directory, known.topic_id, state, config, now_ms)
        try:
            appender.active.reopen()
        except OSError as raised:
            files.pass_on(raised)
            appender.active.close()
            raise
        return appender

    def _close_opened(self) -> bool:
        """Sync and close the appended files; return False if none is open.

        A commit of many partitions thus keeps the process's limit of open files. It raises the
        limit only if not even one partition can be opened.
        """
        opened = [self._appenders[key] for key in self._open]
        files.all_at_once([appender.sync for appender in opened])
        for appender in opened:
            appender.close()
        self._open.clear()
        return bool(opened)

    def roll(self, topic: str, number: int, now_ms: int) -> None:
        """Finish a partition's active segment and begin a new one at the log end."""
        self.appender(topic, number, now_ms).roll()

    def undo(self, topic: str, number: int, now_ms: int) -> None:
        """Truncate what was appended to a partition; otherwise the next holder would do it."""
        appender = self._appenders.pop((topic, number), None)
        self._open.discard((topic, number))
        if appender is not None:
            appender.close()
            self.appender(topic, number, now_ms)

    def sync_on_publish(self) -> None:
        """Make the next `publish` durable, whatever `flush.messages` and `flush.ms` say.

        Files that the published state names outside the logs, such as a producer snapshot, then
        match the last durable state too.
        """
        self._needs_sync = True

    def change_partition(self, topic: str, number: int, **fields: int) -> None:
        """Set fields of a partition's state.

        The next `publish` syncs even if commits are relaxed, because files are replaced or removed
        after it.
        """
        self._needs_sync = True
        appender = self._appenders.get((topic, number))
        if appender is not None:
            appender.state = dataclasses.replace(appender.state, **fields)
            return
        super().change_partition(topic, number, **fields)

    def publish(self, now_ms: int, *, rows: int = 0) -> State:
        """Make the changes durable and visible: `sync_appended`, then `record`."""
        self.sync_appended(now_ms, rows=rows)
        return self.record()

    def sync_appended(self, now_ms: int, *, rows: int = 0) -> None:
        """Sync what was appended, unless `flush.messages` and `flush.ms` let it wait.

        Nothing may change between this and `record`, which records what is synced here.
        """
        self._begin_work()
        for (topic, number), appender in self._appenders.items():
            if appender.state != self.topic(topic).partitions[number]:
                self._change.partition(topic, number, appender.state)
                self._touched.add(topic)
        change = self._change.record(now_ms)
        change["rows"] = rows
        is_synced = self._needs_sync or self._must_sync(change, rows, now_ms)
        if is_synced:
            self._sync()
        self._synced = change, is_synced

    def record(self) -> State:
        """Write the record of the changes, sync it (the commit point), and publish it.

        Raises CommitInDoubtError if the record was written and its sync failed. Nothing may be
        undone then.
        """
        assert self._synced is not None, "sync first"
        change, is_synced = self._synced
        self.check_lock()
        self.state = self._journal.append(change, sync=is_synced, ends_work=not self._uncertain)
        self._let_go()
        for directory in self._unrecorded:
            partition_directory.note_recorded(directory)
        self._change, self._synced = Change(), None
        self._created.clear()
        self._unrecorded.clear()
        self._touched.clear()
        self._needs_sync = self._may_work = False
        return self.state

    def _must_sync(self, change: Mapping[str, Any], rows: int, now_ms: int) -> bool:
        """Decide by `flush.messages` and `flush.ms` of the touched topics; unset means now.

        `flush.ms` also counts for topics that wait for their sync, and after the clock went back.
        """
        configs = [TopicConfig.parse(self.topic(name).config) for name in self._touched]
        only_rows = set(change) <= {"time_ms", "rows", "partitions", "writers", "ends"}
        if not configs or not only_rows or not all(config.is_relaxed for config in configs):
            return True
        waiting = {name for name, _ in self.state.unsynced} - self._touched
        all_flush_ms = [config.flush_ms for config in configs]
        all_flush_ms += [TopicConfig.parse(self.topic(name).config).flush_ms for name in waiting]
        return (
            self.state.unsynced_rows + rows >= min(config.flush_messages for config in configs)
            or abs(now_ms - self.state.synced_ms) >= min(all_flush_ms)
            or self._journal.is_full(change)
        )

    def _sync(self) -> None:
        for key in self.state.unsynced:
            if key in self._uncertain:  # a sync after a failed one proves nothing
                raise self._uncertain[key]
        files.all_at_once([appender.sync for appender in self._appenders.values()])
        for directory, start, _ in self._unsynced():
            partition_directory.sync_segments(directory, start)

    def _begin_work(self) -> None:
        """Make the changes of earlier holders durable, before files are changed or synced.

        After a failed sync of relaxed commits, the pages look clean: another sync would write
        nothing and succeed. After a holder's death its truncations are unknown: the next one finds
        nothing to truncate, and syncs nothing.
        """
        if self._may_work:
            return
        if self.state.unsynced and not self._journal.begin_syncs():
            self._write_unsynced_again()
        if not self._journal.begin_work():
            self._kept.clear()  # the dead holder may have worked in any partition
            files.all_at_once(
                [
                    functools.partial(self._sync_truncation, topic.name, number, state.active_base)
                    for topic in self.state.topics.values()
                    for number, state in topic.present()
                ]
            )
        self._may_work = True

    def _sync_truncation(self, topic: str, number: int, active_base: int) -> None:
        try:
            directory = self._root / layout.partition_directory(topic, number)
            partition_directory.sync_truncation(directory, active_base)
        except OSError as fault:
            files.pass_on(fault)
            if fault.errno == errno.EMFILE:  # not this partition's fault: see `appender`
                raise
            self._uncertain[topic, number] = fault

    def close(self) -> None:
        """Close the partitions' files; the next holder truncates what was not published."""
        for appender in self._appenders.values():
            appender.close()
        self._appenders.clear()
        self._open.clear()

    def _let_go(self) -> None:
        """Close the published files; from here on no failure undoes them."""
        published, self._appenders = self._appenders, {}
        self._open.clear()
        for appender in published.values():
            try:
                appender.close()
            except OSError as raised:
                files.pass_on(raised)
                _logger.exception("%s: a file could not be closed", appender.directory)
        self._kept.keep(published, self.state)

    def abandon(self, fault: BaseException) -> None:
        """Undo unpublished changes, unless they are in doubt; only log a second failure.

        Published relaxed commits are not undone. Their bytes are written again at once, while the
        pages are in memory, or else before the next sync.
        """
        self._kept.clear()
        in_doubt = isinstance(fault, CommitInDoubtError)
        for appender in self._appenders.values():
            try:
                if in_doubt or not files.is_systems(fault):
                    appender.close()  # the next holder truncates
                else:
                    appender.abandon()
            except OSError as raised:
                files.pass_on(raised)
                _logger.exception(
                    "%s: could not be truncated; the next commit does it", appender.directory
                )
        self._appenders.clear()
        self._open.clear()
        if files.is_systems(fault):
            try:
                self._write_unsynced_again()
            except OSError as raised:
                files.pass_on(raised)
                _logger.exception("%s: relaxed commits were not written again yet", self._root)

    def _write_unsynced_again(self) -> None:
        for directory, start, end in self._unsynced():
            partition_directory.write_again(directory, start, end)

    def _unsynced(
        self,
    ) -> Iterator[tuple[Path, partition_directory.Place, partition_directory.Place]]:
        for (topic, number), start in self.state.unsynced.items():
            directory = self._root / layout.partition_directory(topic, number)
            state = self.state.topic(topic).partitions[number]
            yield directory, start, (state.active_base, state.active_size)
