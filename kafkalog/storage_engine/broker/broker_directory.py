"""The log directories of a broker, or of several, as one log; the counterpart of `Journal`.

A broker has no journal. The content of its partitions is found as the broker finds it (`loader`).
This module reads the checkpoints in the roots, and tests whether the broker is alive; it holds
`.lock` while it runs. The directories' partitions are decided by `found_partitions`.

- While it runs, a partition ends at its checkpointed high watermark, which the broker moves every
  few seconds. Each move gives a new `State`.
- Once it has stopped, the partition ends at its log's end. The checkpoint lags behind, so the log
  is not truncated there.

With directories of several brokers of a cluster, a partition is read from the replica that Kafka's
rules would make the leader (`replicas`). After a restart the cluster would serve that log to its
end, because the high watermark follows once the others have fetched or left the in-sync replicas.

A partition is loaded on demand, so a `State` of very many costs only their names. Nothing is ever
written, not even a lock file. Directories of deleted (`-delete`), stray or future partitions are
skipped.

Kafka: LogManager.loadLogs, OffsetCheckpointFile.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn, overload

from kafkalog.errors import InvalidInputError, KafkaLogError, LockedByBrokerError, StorageError
from kafkalog.storage_engine.broker.checkpointed import Checkpointed
from kafkalog.storage_engine.broker.found_partitions import (
    FoundPartitions,
    Key,
    find_partitions,
    topics_in_metadata,
)
from kafkalog.storage_engine.broker.loader import LoadedPartition, load_partition
from kafkalog.storage_engine.broker.metadata_log import BrokerTopic
from kafkalog.storage_engine.broker.replicas import Election, brokers_of, elect
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, files, locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.config import usable
from kafkalog.storage_engine.metadata.state import PartitionState, State, TopicState

if TYPE_CHECKING:
    from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot

_logger = logging.getLogger(__name__)

_LOADS = 20
"""Attempts to load a partition while a live broker changes it."""
_NOTED: Final[set[str]] = set()
"""Notices that this process has logged."""


@dataclass(frozen=True)
class _Root:
    path: Path
    stamp: tuple[object, ...]
    """Changes when the broker starts or stops, creates or deletes partitions, or moves a
    checkpoint."""
    is_live: bool
    is_clean: bool
    offsets: Mapping[str, Mapping[Key, int]]
    """By the checkpoint's name."""
    knows_cleaned: bool
    """Whether the cleaner's checkpoint is there: a broker creates the file when it starts."""


class BrokerDirectories:
    """The log directories of one broker, or of several brokers of a cluster, read together.

    Thread-safe. Raises StorageError, which names the directory, if one cannot be read.
    """

    def __init__(
        self, roots: Sequence[Path], *, copies: Sequence[Path] = (), is_adopted: bool = False
    ) -> None:
        """With `is_adopted` the directories are ours, but for Kafka's own topics, read here."""
        self.roots = tuple(roots)
        self._is_adopted = is_adopted
        self.copies = tuple(copies)
        """Those of the roots that no broker's file is in: rescued partitions."""
        self._brokers = brokers_of(self.roots)
        self.is_cluster = len(set(self._brokers.values())) > 1
        """Whether the directories are those of several brokers."""
        self._guard = threading.RLock()
        self._found: tuple[_Root, ...] = ()
        self._partitions = FoundPartitions({}, {}, {})
        self._metadata: Mapping[str, BrokerTopic] = {}
        self._loaded: dict[Path, LoadedPartition] = {}
        self._elected: dict[Key, Election] = {}
        self._told: set[Path] = set()
        """Partitions whose damage was logged."""
        self._ends: dict[Key, int] = {}
        """High watermarks that readers have already seen."""
        self._state: State | None = None

    def refuse_write(self) -> NoReturn:
        """Raise InvalidInputError, which says how the directory becomes ours."""
        root = self.roots[0]
        if self.is_cluster:
            roots = ",".join(map(str, self.roots))
            raise InvalidInputError(
                f"{roots}: directories of several brokers are only read. To write, copy them to a "
                f"new log: kafkalog copy {shlex.quote(roots)} NEW"
            )
        what, first = "a Kafka broker's log directory", ", stop the broker and run"
        if root in self.copies:
            what, first = "a copy of a broker's partitions", " run"
        raise InvalidInputError(
            f"{root}: {what} is only read; to write to it{first}: "
            f"kafkalog adopt {shlex.quote(str(root))}"
        )

    def published(self) -> State:
        """Return the state, the same object while the broker changes nothing."""
        with self._guard:
            stamps = tuple(_stamp(root) for root in self.roots)
            if self._state is None or stamps != tuple(root.stamp for root in self._found):
                self._refresh(stamps)
                if self.is_cluster:
                    _note(self._missing())
            assert self._state is not None
            return self._state

    def directory(self, topic: str, partition: int) -> Path:
        """Return a partition's directory, that of the chosen replica if there are several.

        Raises StorageError if it is missing.
        """
        with self._guard:
            if self._state is None:
                self.published()
            directory = self._partitions.directories.get((topic, partition))
            if directory is None:
                raise StorageError(self.why_absent(topic, partition))
            chosen = self.election(topic, partition)
            if chosen is not None:
                directory = chosen.leader.directory
                _note(filter(None, [chosen.notice]))
            return directory

    def loaded(self, topic: str, partition: int) -> LoadedPartition:
        """Return a partition as it is now; a live broker's is listed again.

        Raises StorageError, CorruptLogError.
        """
        with self._guard:
            self.published()
            loaded = self._loaded_in(self.directory(topic, partition), (topic, partition))
            self._ends[topic, partition] = loaded.state.high_watermark
            is_told = loaded.directory in self._told
            self._told.add(loaded.directory)
        for damage in () if is_told else (*loaded.damage, *loaded.lost):
            _logger.warning("%s", damage)
        _note(loaded.notices)
        return loaded

    def _loaded_in(self, directory: Path, key: Key) -> LoadedPartition:
        root = self._root_of(directory)
        earlier = self._loaded.get(directory)
        if earlier is None or root.is_live:
            earlier = self._loaded[directory] = self._load(root, directory, key, earlier)
        return earlier

    def election(self, topic: str, partition: int) -> Election | None:
        """Return which of several replicas is read, and why; None with only one.

        Raises StorageError and CorruptLogError if no replica can be read.
        """
        with self._guard:
            self.published()
            key = topic, partition
            paths = self._partitions.replicas.get(key)
            if paths is None:
                return None
            if key not in self._elected:
                self._elected[key] = self._elect(paths, key)
            return self._elected[key]

    def _elect(self, paths: Sequence[Path], key: Key) -> Election:
        loaded, faults = [], []
        for path in paths:
            try:
                loaded.append(self._loaded_in(path, key))
            except KafkaLogError as fault:
                faults.append(fault)
        if not loaded:
            raise faults[0]
        known = self._metadata.get(key[0])
        in_sync = [] if known is None else [*map(str, known.assignment(key[1]).in_sync)]
        if any(broker == str(root) for root, broker in self._brokers.items()):
            in_sync = []  # nothing says whose a copy is
        marks = [root.offsets[layout.REPLICATION_CHECKPOINT].get(key, 0) for root in self._found]
        return elect(
            loaded,
            [*map(str, faults)],
            acknowledged=max(marks),
            brokers=self._brokers,
            in_sync=in_sync,
        )

    def snapshot(
        self,
        topic: str,
        partition: int,
        *,
        whole: bool = False,
        start: int | None = None,
        known_end: int = 0,
    ) -> DirectorySnapshot:
        """Open a snapshot as `ReadableDirectory.snapshot` does; raises StorageError."""
        from kafkalog.storage_engine.reading.directory_snapshot import open_snapshot

        with self._guard:
            key = topic, partition
            self._ends[key] = max(self._ends.get(key, 0), known_end)
        seen: list[LoadedPartition] = []

        def load_state() -> PartitionState:
            seen[:] = [self.loaded(topic, partition)]
            return seen[0].state

        return open_snapshot(
            self.directory(topic, partition),
            topic,
            partition,
            load_state,
            whole=whole,
            start=start,
            locked=False,
            load_aborted=lambda: seen[0].aborted,
            load_lost=lambda _: seen[0].lost,
        )

    def cleaned_to(self, topic: str, partition: int) -> int:
        """Return how far the broker may have cleaned: to the active segment, if nothing says."""
        with self._guard:
            state = self.loaded(topic, partition).state
            root = self._root_of(self.directory(topic, partition))
            policy = self._metadata[topic].config if topic in self._metadata else {}
        is_kept = policy.get("cleanup.policy", "compact") == "delete"
        if root.knows_cleaned or is_kept:
            return state.cleaned_to
        return max(state.cleaned_to, state.active_base)

    def why_absent(self, topic: str, partition: int) -> str:
        """Return why a partition that a topic has cannot be read here."""
        name = layout.partition_directory(topic, partition)
        with self._guard:
            known = self._metadata.get(topic)
            brokers = () if known is None else known.assignment(partition).replicas
            had = f": it was on the brokers {', '.join(map(str, brokers))}" if brokers else ""
            return self._partitions.reason((topic, partition)) or (
                f"partition {partition} of topic {topic!r} is not in "
                f"{', '.join(map(str, self.roots))} (expected the directory {name}): another "
                f"broker has it, or another log directory{had}"
            )

    def _root_of(self, directory: Path) -> _Root:
        return next(root for root in self._found if root.path == directory.parent)

    def _refresh(self, stamps: tuple[tuple[object, ...], ...]) -> None:
        self._check_are_brokers(self.roots)
        self._found = tuple(
            _look_at(path, stamp) for path, stamp in zip(self.roots, stamps, strict=True)
        )
        self._metadata, notices = topics_in_metadata(self.roots)
        try:
            self._partitions = found = find_partitions(self.roots, self._metadata)
        except OSError as fault:
            files.pass_on(fault)
            raise _unreadable(Path(fault.filename or self.roots[0]), fault) from fault
        if self._is_adopted:
            self._partitions = found = found.internal()
        _note([*notices, *found.notices])
        live = {root.path for root in self._found if root.is_live}
        here = {*found.directories.values(), *(p for each in found.replicas.values() for p in each)}
        self._loaded = {
            directory: loaded
            for directory, loaded in self._loaded.items()
            if directory.parent in live and directory in here
        }
        self._told &= self._loaded.keys()
        self._elected = {}
        number = 0 if self._state is None else self._state.number + 1
        numbers: dict[str, set[int]] = {}
        for topic, partition in found.named():
            numbers.setdefault(topic, set()).add(partition)
        topics = {topic: self._topic(topic, numbers[topic]) for topic in sorted(numbers)}
        self._state = State(number=number, time_ms=clock.now_ms(), topics=MappingProxyType(topics))

    def missing(self) -> list[str]:
        """Return a notice for each topic that has partitions without a replica here."""
        with self._guard:
            self.published()
            return [*self._missing()]

    def _missing(self) -> Iterator[str]:
        assert self._state is not None
        topics = self._state.topics
        for name in sorted({*self._metadata, *topics}):
            known = self._metadata.get(name) or BrokerTopic(name, "", 0)
            topic = topics.get(name)
            gone = range(known.partitions) if topic is None else sorted(topic.absent)
            brokers = sorted({b for number in gone for b in known.assignment(number).replicas})
            where = f": they were on the brokers {', '.join(map(str, brokers))}" if brokers else ""
            if gone:
                numbers = ", ".join(map(str, gone))
                yield f"topic {name!r}: partitions without a replica here are {numbers}{where}"

    def _check_are_brokers(self, roots: Iterable[Path]) -> None:
        """Raise LockedByBrokerError once a directory is ours.

        Its logs may then end with uncommitted data, which only the journal tells apart. An adoption
        does not write to Kafka's own topics.
        """
        for root in roots:
            if not self._is_adopted and (root / layout.COMMIT).exists():
                raise LockedByBrokerError(
                    f"{root}: this directory was taken over with `kafkalog adopt` since it was "
                    "opened; open it again to read it"
                )

    def _topic(self, name: str, numbers: Collection[int]) -> TopicState:
        known = self._metadata.get(name)
        topic_id = self._partitions.topic_ids.get(name)
        count = max(numbers) + 1
        config: dict[str, str] = {"cleanup.policy": ""}
        if known is not None:
            topic_id = known.topic_id
            count = max(count, known.partitions)
            config.update(usable(known.config))
        absent = frozenset(
            number for number in range(count) if (name, number) not in self._partitions.directories
        )
        return TopicState(
            name,
            topic_id or derived_id(name),
            MappingProxyType(config),
            _Partitions(self, name, count, absent),
            absent,
            knows_defaults=False,
        )

    def _load(
        self, root: _Root, directory: Path, key: Key, earlier: LoadedPartition | None
    ) -> LoadedPartition:
        end = None
        if root.is_live:
            # A broker that has just started may not have moved its checkpoint yet.
            seen = self._ends.get(key, 0)
            end = max(root.offsets[layout.REPLICATION_CHECKPOINT].get(key, 0), seen)
        known = self._metadata.get(key[0])
        checkpointed = Checkpointed.of(
            root.offsets,
            key,
            {} if known is None else known.config,
            root=root.path,
            is_clean=root.is_clean,
            is_live=root.is_live,
        )
        for attempt in range(_LOADS):
            try:
                loaded = load_partition(
                    directory,
                    *key,
                    log_start=checkpointed.log_start,
                    recovery_point=checkpointed.recovery_point,
                    is_clean=root.is_clean,
                    first_dirty=checkpointed.first_dirty or 0,
                    end=end,
                    now_ms=clock.now_ms(),
                    earlier=earlier,
                    checkpointed=checkpointed,
                )
                self._check_are_brokers([root.path])
                return loaded
            except FileNotFoundError as fault:
                if attempt + 1 == _LOADS or not directory.is_dir():
                    raise StorageError(
                        f"{directory}: {fault.filename} vanished while it was read; "
                        "a broker has removed it"
                    ) from fault
            except OSError as fault:
                files.pass_on(fault)
                where = fault.filename or directory
                raise StorageError(f"{where}: cannot be read: {fault.strerror}") from fault
        raise AssertionError


class _Partitions(Sequence[PartitionState]):
    """A topic's partitions, loaded on demand; an absent one is empty.

    The partitions of one `State` do not change after their first load.
    """

    def __init__(
        self, source: BrokerDirectories, topic: str, count: int, absent: frozenset[int]
    ) -> None:
        self._source = source
        self._topic = topic
        self._count = count
        self._absent = absent
        self._seen: dict[int, PartitionState] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> PartitionState: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[PartitionState]: ...
    def __getitem__(self, place: int | slice) -> PartitionState | Sequence[PartitionState]:
        if isinstance(place, slice):
            return [self[number] for number in range(self._count)[place]]
        number = range(self._count)[place]
        if number not in self._seen:
            state = PartitionState()
            if number not in self._absent:
                state = self._source.loaded(self._topic, number).state
            self._seen[number] = state
        return self._seen[number]

    def __iter__(self) -> Iterator[PartitionState]:
        return (self[number] for number in range(self._count))


_CHECKPOINTS = (
    layout.REPLICATION_CHECKPOINT,
    layout.LOG_START_CHECKPOINT,
    layout.RECOVERY_POINT_CHECKPOINT,
    layout.CLEANER_CHECKPOINT,
)


def _stamp(root: Path) -> tuple[object, ...]:
    """Return a value that changes whenever the root must be read again."""
    stamp: list[object] = [locks.RootLock(root).is_held_alone()]
    for name in (".", *_CHECKPOINTS, layout.CLEAN_SHUTDOWN):
        try:
            found = os.lstat(root / name)  # no link is followed
        except FileNotFoundError:
            stamp.append(None)
        except OSError as fault:
            files.pass_on(fault)
            raise _unreadable(root, fault) from fault
        else:
            stamp.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(stamp)


def _look_at(path: Path, stamp: tuple[object, ...]) -> _Root:
    offsets, notices = checkpoints.known_offsets(path)
    for notice in notices:
        _logger.warning("%s", notice)
    return _Root(
        path,
        stamp,
        is_live=bool(stamp[0]),
        is_clean=checkpoints.is_clean(path),
        offsets=offsets,
        knows_cleaned=(path / layout.CLEANER_CHECKPOINT).is_file()
        and not any(layout.CLEANER_CHECKPOINT in notice for notice in notices),
    )


def _unreadable(path: Path, fault: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be read: {fault.strerror}")


def _note(notices: Iterable[str]) -> None:
    """Log notices, each once per process."""
    for notice in notices:
        if notice not in _NOTED:
            _NOTED.add(notice)
            _logger.warning("%s", notice)


def derived_id(topic: str) -> str:
    """Return an id for a topic without one, the same in every process."""
    digest = hashlib.blake2b(topic.encode(), digest_size=16, person=b"kafkalog").digest()
    return layout.topic_id_text(digest)
