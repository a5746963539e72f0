"""One holder's turn at a log: the recovered state, its changes, and the record that commits them.

The order of events: `ReadableDirectory.transaction` takes the root lock, shared, and the commit
lock, and the journal is recovered. Then come any number of changes. `sync_appended` syncs the logs
that they touched. `record` checks the root lock, writes the journal's record, syncs it, and
publishes it. An exception before `record` leaves nothing: the files are truncated at once, or by
the next holder.

If the previous holder died or failed, its changes are made durable before anything is built on
them (`EarlierWork`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kafkalog.errors import CommitInDoubtError
from kafkalog.storage_engine.directory.appender import Appender
from kafkalog.storage_engine.directory.earlier_work import EarlierWork
from kafkalog.storage_engine.directory.kept_appenders import KeptAppenders, Key
from kafkalog.storage_engine.directory.new_directories import NewDirectories
from kafkalog.storage_engine.directory.open_appenders import OpenAppenders
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.log_change import LogChange
from kafkalog.storage_engine.metadata.new_topic import NewTopic, new_topic_id
from kafkalog.storage_engine.metadata.state import Change, State, TopicState
from kafkalog.storage_engine.segment import gaps

_logger = logging.getLogger(__name__)


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
        kept = kept or KeptAppenders()
        kept.check(state)
        self._root = root
        self._journal = journal
        self.check_lock = check_lock
        """Raises LockedByBrokerError if this holder has lost the root lock."""
        self._kept = kept
        self._appenders = OpenAppenders(self._begun)
        self._earlier = EarlierWork(root, journal, kept)
        self._directories = NewDirectories(root)
        self._touched: set[str] = set()
        self._synced: tuple[dict[str, Any], bool] | None = None
        """The change that `record` is to write, and whether it is to sync it."""
        self._needs_sync = False

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
        others = (self.topic(other) for other in (*self.state.topics, *self._created))
        self._directories.create(name, topic_id, starts, self.state.deleting.values(), others)

    def appender(self, topic: str, number: int, now_ms: int) -> Appender:
        """Return a partition's appender; the first call truncates it to its recorded state."""
        return self._appenders.opened((topic, number), now_ms)

    def appenders(self, keys: Sequence[Key], now_ms: int) -> Iterator[dict[Key, Appender]]:
        """Yield the appenders of partitions: all at once, to be used side by side, if possible.

        A process that may have few files open gets one after the other.
        """
        return self._appenders.side_by_side(keys, now_ms)

    def _begun(self, key: Key, now_ms: int) -> Appender:
        """Return a partition's appender, truncated to the recorded state."""
        topic, number = key
        known = self.topic(topic)
        known.check_is_here(number)
        self._earlier.make_durable(self.state)
        self._earlier.check(key)
        state, config = known.partitions[number], TopicConfig.parse(known.config)
        kept = self._kept.take(key)
        if kept is not None and kept.resume(known.topic_id, state, config, now_ms):
            return kept
        directory = self._root / layout.partition_directory(topic, number)
        gaps.check_moment(directory, self.state.number, state.swapped_at)
        return Appender(directory, known.topic_id, state, config, now_ms)

    def roll(self, topic: str, number: int, now_ms: int) -> None:
        """Finish a partition's active segment and begin a new one at the log end."""
        self.appender(topic, number, now_ms).roll()

    def undo(self, topic: str, number: int, now_ms: int) -> None:
        """Truncate what was appended to a partition; otherwise the next holder would do it."""
        if self._appenders.forget((topic, number)):
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
        appender = self._appenders.known().get((topic, number))
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
        self._earlier.make_durable(self.state)
        for (topic, number), appender in self._appenders.known().items():
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
        self.state = self._journal.append(
            change, sync=is_synced, ends_work=self._earlier.is_certain
        )
        self._kept.keep(self._appenders.let_go(), self.state)
        self._directories.note_recorded()
        self._earlier.is_recorded()
        self._change, self._synced = Change(), None
        self._created.clear()
        self._touched.clear()
        self._needs_sync = False
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
            self._earlier.check(key)  # a sync after a failed one proves nothing
        self._appenders.sync()
        self._earlier.sync_relaxed(self.state)

    def close(self) -> None:
        """Close the partitions' files; the next holder truncates what was not published."""
        self._appenders.close()

    def abandon(self, fault: BaseException) -> None:
        """Undo unpublished changes, unless they are in doubt; only log a second failure.

        Published relaxed commits are not undone. Their bytes are written again at once, while the
        pages are in memory, or else before the next sync.
        """
        self._kept.clear()
        is_systems = files.is_systems(fault)
        self._appenders.abandon(truncate=is_systems and not isinstance(fault, CommitInDoubtError))
        if is_systems:
            try:
                self._earlier.write_again(self.state)
            except OSError as raised:
                files.pass_on(raised)
                _logger.exception("%s: relaxed commits were not written again yet", self._root)
