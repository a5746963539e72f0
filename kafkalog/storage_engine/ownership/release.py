"""`release`: turn our log into a broker's directory, as after a clean shutdown.

The steps are in an order that permits the process to die after any of them:

1. Lock `.lock` exclusively: no broker runs, and no process of ours writes or cleans.
2. Put the broker's `meta.properties` aside, if one is given, for a later run.
3. In every partition, finish half a swap, truncate data above the recorded state, add the active
   segment's last time index entry, trim its indexes, and sync everything. Then append a synced
   record to the journal, so that it is the last one whatever happens.
4. Write the files that a broker reads when it loads a partition: producer snapshot at the end,
   topic id, leader epochs. A new id is announced in the directory before the journal has it, so
   that the directory remains known as the topic's. Write the four root checkpoints and, if all
   partitions here had a clean shutdown, the file that says so.
5. Rename `commit`: **from here on the directory is not ours**. Remove the files that begin with
   `kl-`.
6. Restore `meta.properties`, then remove the guard: from here on it is a broker's.

Up to step 5 the log is ours, whole and writable. After it only another run of `release`, or of
`adopt`, uses the directory. No broker starts on it before step 6 is complete.

After a clean shutdown a broker believes indexes and file times. A segment without time index
entries then has its file's time as its largest timestamp. A segment without batches could thus hide
younger segments behind it, so it gets the time of the segment before it.

Kafka: LogManager.shutdown, UnifiedLog.close, CleanShutdownFileHandler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.recorded_records import journal_of
from kafkalog.storage_engine.directory.transaction import Transaction
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.directory_signs import (
    check_is_directory,
    check_journal_is_not_lost,
    nearby,
)
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.new_topic import new_topic_id
from kafkalog.storage_engine.metadata.remote_log_starts import (
    notices_of_remote_logs,
    read_remote_log_starts,
)
from kafkalog.storage_engine.metadata.state import Change, PartitionState, State, TopicState
from kafkalog.storage_engine.ownership.adopted_topics import differences
from kafkalog.storage_engine.segment import partition_directory, segments, swaps
from kafkalog.storage_engine.segment.partition_directory import check_canary
from kafkalog.storage_engine.segment.segment_times import largest_timestamp
from kafkalog.storage_engine.transactions import producer_snapshot
from kafkalog.storage_engine.transactions.producer_replay import recorded_producers

Progress = Callable[[str, int, int], None]
"""Called with a partition's name, the number done, and the total."""
LOCK_WAIT_S = 10.0
"""How long to wait for a running commit or cleaning."""


@dataclass(frozen=True, slots=True)
class ReleaseReport:
    """The result of `release`."""

    root: Path
    released_already: bool
    """It was a broker's before; at most the rest of an earlier run was done."""
    partitions: int
    has_broker: bool
    """Whether `meta.properties` is in place. Without it, the partitions' directories must be moved
    into a directory that `kafka-storage format` has prepared."""
    notices: tuple[str, ...] = ()


def release(
    root: Path,
    *,
    topic_ids: Mapping[str, str] | None = None,
    meta_properties: Path | None = None,
    now_ms: int,
    progress: Progress | None = None,
) -> ReleaseReport:
    """Give a log to a broker.

    `topic_ids` (name to 22 characters) are the topic ids in the broker's cluster. `meta_properties`
    is the file of that name in the log directory to be replaced. It is needed if the log was not
    adopted or goes to another broker. Raises InvalidInputError for a directory without a log, an
    unknown topic, or an invalid id; LockedByBrokerError while a process writes or cleans;
    StorageError, OSError. A repeated call continues a failed run.
    """
    root = Path(root).absolute()
    wanted = _checked_ids(topic_ids or {})
    properties = None
    check_is_directory(root)
    if meta_properties is not None:
        properties = _checked_properties(meta_properties)
    has_broker = (root / layout.META_PROPERTIES).exists()
    if not _is_ours(root) and not _has_leftovers(root):
        was_ours = (root / layout.COMMIT_RELEASED).exists()
        if not has_broker and not was_ours:
            check_journal_is_not_lost(root)
            raise InvalidInputError(
                f"{root}: no log here (it has no `{layout.COMMIT}` file){nearby(root)}"
            )
        _check_is_as_released(root, wanted, properties)
        if has_broker or properties is None:
            files.sync_directory(root)  # the run that released it may have died
            return ReleaseReport(root, True, 0, has_broker, _what_is_left_to_do(root))
    with files.disk_faults(root), locks.RootLock(root).exclusive(wait_s=LOCK_WAIT_S) as check_lock:
        releasing = _Releasing(root, check_lock, now_ms)
        if not _is_ours(root):
            _check_is_as_released(root, wanted, properties)
            releasing.keep_properties(properties)
        else:
            releasing.prepare(wanted, properties, progress)
            files.rename(root / layout.COMMIT, root / layout.COMMIT_RELEASED)
        # Includes the renames of a dead run: remove the canaries only once these are durable.
        files.sync_directory(root)
        return releasing.hand_over()


def _is_ours(root: Path) -> bool:
    return (root / layout.COMMIT).exists()


def _has_leftovers(root: Path) -> bool:
    """Return whether an earlier run died after renaming `commit`, or an adoption before that."""
    names = {name for name in files.list_names(root) if name.startswith(layout.OURS)}
    if names & {layout.META_ASIDE, layout.GUARD}:
        return True
    return layout.COMMIT_RELEASED in names and any(
        (directory / layout.CANARY).exists() for directory in _partition_directories(root)
    )


def _partition_directories(root: Path) -> list[Path]:
    with files.scan(root) as entries:
        found = [
            Path(entry.path)
            for entry in entries
            if files.is_directory(entry) and layout.parse_partition_directory(entry.name)
        ]
    return sorted(found)


def _what_is_left_to_do(root: Path) -> tuple[str, ...]:
    if (root / layout.META_PROPERTIES).exists():
        return ()
    return (
        f"{root} has no {layout.META_PROPERTIES}: move the directories of its partitions, and the "
        "four checkpoint files, into a log directory that `kafka-storage format` has prepared, or "
        f"call release with that directory's {layout.META_PROPERTIES}",
    )


def _check_is_as_released(root: Path, wanted: Mapping[str, str], properties: bytes | None) -> None:
    """Refuse arguments that an earlier release did not apply."""
    released = root / layout.COMMIT_RELEASED
    topics = Journal(released).published().topics if wanted and released.exists() else {}
    for name, topic_id in wanted.items():
        if name not in topics or topics[name].topic_id != topic_id:
            raise InvalidInputError(
                f"{root}: the log is released already, without the id {topic_id} for topic "
                f"{name!r}: `kafkalog adopt` it, then release it again"
            )
    found = root / layout.META_PROPERTIES
    if properties is not None and found.exists() and files.read_file(found) != properties:
        raise InvalidInputError(
            f"{root}: the log is released already, with another {layout.META_PROPERTIES}; to "
            "replace that one, remove it first"
        )


def _checked_ids(topic_ids: Mapping[str, str]) -> dict[str, str]:
    """Return the ids as Kafka writes them; some clients print `+` and `/` for `-` and `_`."""
    checked = {}
    for topic, topic_id in topic_ids.items():
        checked[topic] = topic_id.replace("+", "-").replace("/", "_").removesuffix("==")
        if not layout.is_topic_id(checked[topic]):
            raise InvalidInputError(
                f"topic {topic!r}: expected a topic id of 22 characters as `kafka-topics "
                f"--describe` prints it, found {topic_id!r}"
            )
    return checked


def _checked_properties(path: Path) -> bytes:
    properties = checkpoints.read_properties(path)
    if not properties.keys() & {"node.id", "broker.id"}:
        raise InvalidInputError(
            f"{path}: expected a broker's {layout.META_PROPERTIES} with a node.id, found "
            f"{', '.join(sorted(properties)) or 'no properties'}; take that of the log directory "
            "this one is to replace"
        )
    return files.read_file(path)


def _check_ids_differ(state: State, topic_ids: Mapping[str, str]) -> None:
    for name in topic_ids:
        state.topic(name)
    owners: dict[str, str] = {}
    for name, topic in state.topics.items():
        topic_id = topic_ids.get(name, topic.topic_id)
        other = owners.setdefault(topic_id, name)
        if other != name:
            raise InvalidInputError(f"topics {other!r} and {name!r} would have one id, {topic_id}")


class _Releasing:
    """One run; the caller holds the root lock exclusively."""

    def __init__(self, root: Path, check_lock: Callable[[], None], now_ms: int) -> None:
        self.root = root
        self._check_lock = check_lock
        self._now_ms = now_ms
        self._notices: list[str] = []

    def prepare(
        self, topic_ids: Mapping[str, str], properties: bytes | None, progress: Progress | None
    ) -> None:
        journal = journal_of(self.root)
        state = journal.recover()
        _check_ids_differ(state, topic_ids)  # before anything is changed
        if (self.root / layout.META_ASIDE).exists() and properties is None:
            self._notices += differences(self.root, state, topic_ids)
        self.keep_properties(properties)
        self._note_unreadable_epochs(state, topic_ids)
        self._move_deleted(state)
        self._remove_leftovers(state)
        state = self._close_partitions(journal, state, progress)
        change = Change()
        for name, topic_id in topic_ids.items():
            topic = state.topics[name]
            if topic.topic_id != topic_id:
                count = len(topic.partitions)
                change.topic(name, topic_id, count, topic.config, topic.absent)
                for number, _ in topic.present():
                    directory = self.root / layout.partition_directory(name, number)
                    partition_directory.announce_topic_id(directory, topic_id)
        if change:
            state = journal.append(change.record(self._now_ms))
        for topic in state.topics.values():
            for number, partition in topic.present():
                directory = self.root / layout.partition_directory(topic.name, number)
                _describe(directory, topic, partition, self._now_ms)
        checkpoints.write_root_checkpoints(self.root, state)
        self._notices += notices_of_remote_logs(self.root, state)
        self._mark_clean(state)
        self._check_lock()

    def keep_properties(self, properties: bytes | None) -> None:
        if properties is not None:
            files.write_atomically(self.root / layout.META_ASIDE, properties)

    def _note_unreadable_epochs(self, state: State, topic_ids: Mapping[str, str]) -> None:
        for name, topic_id in topic_ids.items():
            topic = state.topics[name]
            epoch = max((p.leader_epoch for _, p in topic.present()), default=0)
            if topic.topic_id != topic_id and epoch > 0:
                self._notices.append(
                    f"topic {name!r}: its batches carry leader epochs up to {epoch}, a newly "
                    "created topic begins at 0: a consumer that goes on with a position of another "
                    "cluster may be reset"
                )

    def _move_deleted(self, state: State) -> None:
        """Rename the remains of deleted topics so that a broker removes them."""
        moved = False
        for deleted in state.deleting.values():
            for number in range(deleted.partitions):
                name = layout.partition_directory(deleted.name, number)
                directory = self.root / name
                if checkpoints.read_topic_id(directory) == deleted.topic_id:
                    target = layout.deleted_directory(deleted.name, number, deleted.topic_id)
                    files.rename(directory, self.root / target)
                    moved = True
        if moved:
            files.sync_directory(self.root)

    def _remove_leftovers(self, state: State) -> None:
        """Remove partitions whose creation a dead process has begun: a broker would load them."""
        moved: list[Path] = []
        # By a rename first: a process that dies in a removal would leave what a broker loads.
        for directory in _partition_directories(self.root):
            parsed = layout.parse_partition_directory(directory.name)
            assert parsed is not None
            topic, number = parsed
            known = state.topics.get(topic)
            is_recorded = known is not None and known.is_here(number)
            if not is_recorded and partition_directory.is_leftover(directory):
                target = self.root / layout.deleted_directory(topic, number, new_topic_id())
                files.rename(directory, target)
                moved.append(target)
        if moved:
            files.sync_directory(self.root)
        for target in moved:
            files.remove_directory(target)

    def _close_partitions(self, journal: Journal, state: State, progress: Progress | None) -> State:
        partitions = [
            (topic.name, number) for topic in state.topics.values() for number, _ in topic.present()
        ]
        transaction = Transaction(self.root, journal, state, self._check_lock)
        for done, (topic, number) in enumerate(partitions):
            name = layout.partition_directory(topic, number)
            if progress is not None:
                progress(name, done, len(partitions))
            directory = self.root / name
            check_canary(directory)
            with locks.SegmentsLock(directory).exclusive():
                swaps.finish_swaps(directory)
            appender = transaction.appender(topic, number, self._now_ms)
            appender.finish()
        # This syncs the bytes of relaxed commits and the record itself.
        transaction.sync_on_publish()
        state = transaction.publish(self._now_ms)
        if progress is not None:
            progress("", len(partitions), len(partitions))
        return state

    def _mark_clean(self, state: State) -> None:
        """Write `.kafka_cleanshutdown`, unless other partitions here had no clean shutdown."""
        aside = self.root / layout.CLEAN_ASIDE
        content = checkpoints.CLEAN_SHUTDOWN_CONTENT
        if aside.exists():
            content = files.read_file(aside) or content
        elif others := self._foreign_partitions(state):
            files.remove(self.root / layout.CLEAN_SHUTDOWN)
            files.sync_directory(self.root)
            self._notices.append(
                f"{others[0]} and {len(others) - 1} other partitions here were left by a broker "
                "that was not shut down in good order: the broker will check the log's tails"
            )
            return
        files.write_atomically(self.root / layout.CLEAN_SHUTDOWN, content)

    def _foreign_partitions(self, state: State) -> list[str]:
        return [
            directory.name
            for directory in _partition_directories(self.root)
            if directory.name != layout.METADATA_DIRECTORY
            and directory.name.rpartition("-")[0] not in state.topics
        ]

    def hand_over(self) -> ReleaseReport:
        """Remove our files except the old journal, and let a broker start."""
        count = 0
        for directory in _partition_directories(self.root):
            count += _remove_ours(directory)
        self._restore_remote_epochs()
        self._remove_ours_in_root()
        aside, meta = self.root / layout.META_ASIDE, self.root / layout.META_PROPERTIES
        if aside.exists():
            files.rename(aside, meta)
            files.sync_directory(self.root)
        guard = self.root / layout.GUARD
        if guard.exists():
            files.remove_directory(guard)
            files.sync_directory(self.root)
        notices = (*self._notices, *_what_is_left_to_do(self.root))
        return ReleaseReport(self.root, False, count, meta.exists(), notices)

    def _restore_remote_epochs(self) -> None:
        """Bring the epochs back, so that a broker finds what it has in remote storage."""
        starts = checkpoints.known_offsets(self.root)[0][layout.LOG_START_CHECKPOINT]
        for key, remote in read_remote_log_starts(self.root).items():
            directory = self.root / layout.partition_directory(*key)
            if starts.get(key, layout.INT64_MAX) < remote.local_start and directory.is_dir():
                epochs, _ = checkpoints.known_leader_epochs(directory)
                checkpoints.write_leader_epochs(directory, remote.whole(epochs))
                files.sync_directory(directory)

    def _remove_ours_in_root(self) -> None:
        kept = {layout.COMMIT_RELEASED, layout.META_ASIDE, layout.GUARD}
        for name in sorted(files.list_names(self.root)):
            if name.startswith(layout.OURS) and name not in kept:
                path = self.root / name
                if not path.is_dir():
                    files.remove(path)
        files.sync_directory(self.root)


def _describe(directory: Path, topic: TopicState, state: PartitionState, now_ms: int) -> None:
    """Write the files that a broker reads with the segments of a partition, if they differ."""
    _write_snapshot(directory, state, now_ms)
    if checkpoints.read_topic_id(directory) != topic.topic_id:
        content = checkpoints.partition_metadata(topic.topic_id)
        files.write_atomically(directory / layout.PARTITION_METADATA, content)
    if not (directory / layout.LEADER_EPOCH_CHECKPOINT).exists():
        checkpoints.write_leader_epochs(directory, [])
    files.sync_directory(directory)  # includes the files of a dead run
    _set_times(directory)


def _write_snapshot(directory: Path, state: PartitionState, now_ms: int) -> None:
    """Write the producers at the log's end, which our own appends have not changed."""
    named, end = state.producer_snapshot, state.high_watermark
    producers, is_rebuilt = recorded_producers(directory, state, now_ms=now_ms)
    is_empty = named < 0 and end == state.log_start_offset
    if is_empty or (named == end and not is_rebuilt):
        return
    producer_snapshot.write_snapshot(directory, producers)
    if is_rebuilt and named != end:
        swaps.retire(directory, [named], suffixes=(layout.SNAPSHOT,))


def _set_times(directory: Path) -> None:
    """Keep segments without batches from hiding later ones in a search by time."""
    found = segments.list_segments(directory)
    if all(segment.size for segment in found):
        return
    largest_ms = 0
    for segment in found:
        if segment.size:
            largest_ms = max(largest_ms, largest_timestamp(segment, segment.size))
            continue
        if segment.log.stat().st_mtime_ns // 1_000_000 != largest_ms:
            files.set_times(segment.log, largest_ms * 1_000_000)
        files.sync_path(segment.log)  # includes the time that a dead run has set


def _remove_ours(directory: Path) -> bool:
    names = [name for name in sorted(files.list_names(directory)) if name.startswith(layout.OURS)]
    for name in names:
        files.remove(directory / name)
    files.sync_directory(directory)
    return bool(names)
