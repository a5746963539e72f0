"""The log directories of a broker as one log, read-only; the counterpart of `Journal`.

A broker has no journal. The content of its partitions is found as the broker finds it (`loader`).
This module finds the partitions of the directories, reads the checkpoints in their roots, and tests
whether the broker is alive; it holds `.lock` while it runs.

- While it runs, a partition ends at its checkpointed high watermark, which the broker moves every
  few seconds. Each move gives a new `State`.
- Once it has stopped, the partition ends at its log's end. The checkpoint lags behind, so the log
  is not truncated there.

A partition is loaded on demand, so a `State` of very many costs only their names. Nothing is ever
written, not even a lock file. Directories of deleted (`-delete`), stray or future partitions are
skipped.

Kafka: LogManager.loadLogs, OffsetCheckpointFile.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, overload

from kafkalog.errors import (
    CorruptLogError,
    InvalidInputError,
    KafkaLogError,
    LockedByBrokerError,
    StorageError,
)
from kafkalog.storage_engine.broker import metadata_log
from kafkalog.storage_engine.broker.loader import LoadedPartition, load_partition
from kafkalog.storage_engine.broker.metadata_log import BrokerTopic
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
_Key = tuple[str, int]


@dataclass(frozen=True)
class _Root:
    path: Path
    stamp: tuple[object, ...]
    """Changes when the broker starts or stops, creates or deletes partitions, or moves a
    checkpoint."""
    is_live: bool
    is_clean: bool
    recovery_points: Mapping[_Key, int]
    log_starts: Mapping[_Key, int]
    high_watermarks: Mapping[_Key, int]
    first_dirty: Mapping[_Key, int]


class BrokerDirectories:
    """One or several log directories of one broker, read together.

    Thread-safe. Raises StorageError, which names the directory, if one cannot be read or two have
    the same partition.
    """

    def __init__(self, roots: Sequence[Path], *, copies: Sequence[Path] = ()) -> None:
        self.roots = tuple(roots)
        self.copies = tuple(copies)
        """Those of the roots that no broker's file is in: rescued partitions."""
        self._guard = threading.RLock()
        self._found: tuple[_Root, ...] = ()
        self._directories: dict[_Key, tuple[_Root, Path]] = {}
        self._metadata: Mapping[str, BrokerTopic] = {}
        self._loaded: dict[_Key, LoadedPartition] = {}
        self._ends: dict[_Key, int] = {}
        """High watermarks that readers have already seen."""
        self._state: State | None = None

    def refuse_write(self) -> NoReturn:
        """Raise InvalidInputError, which says how the directory becomes ours."""
        root = self.roots[0]
        what, first = "a Kafka broker's log directory", ", stop the broker and run"
        if root in self.copies:
            what, first = "a copy of a broker's partitions", " run"
        raise InvalidInputError(
            f"{root}: {what} is only read; to write to it{first}: kafkalog adopt {root}"
        )

    def published(self) -> State:
        """Return the state, the same object while the broker changes nothing."""
        with self._guard:
            stamps = tuple(_stamp(root) for root in self.roots)
            if self._state is None or stamps != tuple(root.stamp for root in self._found):
                self._refresh(stamps)
            assert self._state is not None
            return self._state

    def directory(self, topic: str, partition: int) -> Path:
        """Return a partition's directory; raises StorageError if it is missing."""
        return self._place(topic, partition)[1]

    def loaded(self, topic: str, partition: int) -> LoadedPartition:
        """Return a partition as it is now; a live broker's is listed again.

        Raises StorageError, CorruptLogError.
        """
        with self._guard:
            self.published()
            root, directory = self._place(topic, partition)
            key = topic, partition
            earlier = self._loaded.get(key)
            if earlier is not None and not root.is_live:
                return earlier
            self._loaded[key] = loaded = self._load(root, directory, key, earlier)
            self._ends[key] = loaded.state.high_watermark
        for damage in loaded.damage if earlier is None else ():
            _logger.warning("%s", damage)
        return loaded

    def snapshot(
        self,
        topic: str,
        partition: int,
        *,
        whole: bool = False,
        start: int | None = None,
        known_end: int = 0,
    ) -> DirectorySnapshot:
        """Open a snapshot of a partition, as `Store.snapshot` does; raises StorageError."""
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
        )

    # --- topics and partitions -------------------------------------------------------------------

    def _place(self, topic: str, partition: int) -> tuple[_Root, Path]:
        with self._guard:
            if self._state is None:
                self.published()
            try:
                return self._directories[topic, partition]
            except KeyError:
                roots = ", ".join(map(str, self.roots))
                raise StorageError(
                    f"{roots}: the directory {layout.partition_directory(topic, partition)} "
                    "is missing: another broker, or another log directory, has the partition"
                ) from None

    def _refresh(self, stamps: tuple[tuple[object, ...], ...]) -> None:
        self._found = tuple(
            _look_at(path, stamp) for path, stamp in zip(self.roots, stamps, strict=True)
        )
        self._directories = _partitions(self._found)
        self._metadata = _metadata(self.roots)
        live = {directory for root, directory in self._directories.values() if root.is_live}
        self._loaded = {
            key: loaded for key, loaded in self._loaded.items() if loaded.directory in live
        }
        number = 0 if self._state is None else self._state.number + 1
        numbers: dict[str, list[int]] = {}
        for topic, partition in sorted(self._directories):
            numbers.setdefault(topic, []).append(partition)
        topics = {topic: self._topic(topic, numbers[topic]) for topic in numbers}
        self._state = State(number=number, time_ms=clock.now_ms(), topics=MappingProxyType(topics))

    def _topic(self, name: str, numbers: list[int]) -> TopicState:
        known = self._metadata.get(name)
        topic_id = self._topic_id(name, numbers)
        count = numbers[-1] + 1
        config: dict[str, str] = {"cleanup.policy": ""}
        if known is not None and topic_id in (None, known.topic_id):
            topic_id = known.topic_id
            count = max(count, known.partitions)
            config.update(usable(known.config))
        absent = frozenset(range(count)) - frozenset(numbers)
        return TopicState(
            name,
            topic_id or _derived_id(name),
            MappingProxyType(config),
            _Partitions(self, name, count, absent),
            absent,
        )

    def _topic_id(self, name: str, numbers: list[int]) -> str | None:
        for number in numbers:
            with files.ignoring(KafkaLogError, ValueError):
                topic_id = checkpoints.read_topic_id(self._directories[name, number][1])
                if topic_id is not None:
                    return topic_id
        return None

    # --- one partition ---------------------------------------------------------------------------

    def _load(
        self, root: _Root, directory: Path, key: _Key, earlier: LoadedPartition | None
    ) -> LoadedPartition:
        end = None
        if root.is_live:
            # A broker that has just started may not have moved its checkpoint yet.
            seen = self._ends.get(key, 0)
            end = max(root.high_watermarks.get(key, 0), seen)
        for attempt in range(_LOADS):
            try:
                loaded = load_partition(
                    directory,
                    *key,
                    log_start=root.log_starts.get(key, 0),
                    recovery_point=root.recovery_points.get(key),
                    is_clean=root.is_clean,
                    first_dirty=root.first_dirty.get(key, 0),
                    end=end,
                    now_ms=clock.now_ms(),
                    earlier=earlier,
                )
                _check_is_brokers(root.path)
                return loaded
            except FileNotFoundError as fault:
                if attempt + 1 == _LOADS or not directory.is_dir():
                    raise StorageError(
                        f"{directory}: {fault.filename} vanished while it was read; "
                        "a broker has removed it"
                    ) from fault
            except OSError as fault:
                files.pass_on(fault)
                raise StorageError(f"{directory}: cannot be read: {fault.strerror}") from fault
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


# --- the roots -----------------------------------------------------------------------------------

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
            found = os.stat(root / name)
        except FileNotFoundError:
            stamp.append(None)
        except OSError as fault:
            files.pass_on(fault)
            raise _unreadable(root, fault) from fault
        else:
            stamp.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(stamp)


def _look_at(path: Path, stamp: tuple[object, ...]) -> _Root:
    _check_is_brokers(path)
    return _Root(
        path,
        stamp,
        is_live=bool(stamp[0]),
        is_clean=checkpoints.is_clean(path),
        recovery_points=_offsets(path, layout.RECOVERY_POINT_CHECKPOINT),
        log_starts=_offsets(path, layout.LOG_START_CHECKPOINT),
        high_watermarks=_offsets(path, layout.REPLICATION_CHECKPOINT),
        first_dirty=_offsets(path, layout.CLEANER_CHECKPOINT),
    )


def _check_is_brokers(root: Path) -> None:
    """Raise LockedByBrokerError once the directory is ours.

    Its logs may then end with uncommitted data, which only the journal tells apart.
    """
    if (root / layout.COMMIT).exists():
        raise LockedByBrokerError(
            f"{root}: this directory was taken over with `kafkalog adopt` since it was opened; "
            "open it again to read it"
        )


def _offsets(root: Path, name: str) -> dict[_Key, int]:
    """Read a checkpoint; a malformed one counts as empty, as in Kafka, with a warning.

    Without recovery points everything is checked; without a log start a log begins with its first
    segment.
    """
    try:
        return checkpoints.read_offset_checkpoint(root / name)
    except CorruptLogError as fault:
        _logger.warning("%s; it is taken for empty", fault.damage)
        return {}
    except OSError as fault:
        files.pass_on(fault)
        raise _unreadable(root / name, fault) from fault


def _unreadable(path: Path, fault: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be read: {fault.strerror}")


def _partitions(roots: Sequence[_Root]) -> dict[_Key, tuple[_Root, Path]]:
    found: dict[_Key, tuple[_Root, Path]] = {}
    for root in roots:
        try:
            with files.scan(root.path) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        except OSError as fault:
            files.pass_on(fault)
            raise _unreadable(root.path, fault) from fault
        for name in names:
            key = layout.parse_partition_directory(name)
            if key is None or name == layout.METADATA_DIRECTORY:
                continue
            if key[1] >= layout.PARTITIONS_MAX:
                _logger.warning("%s: passed over, it is hardly a partition", root.path / name)
                continue
            if key in found:
                raise StorageError(
                    f"{root.path / name}: partition {name} is also in {found[key][1]}; remove the "
                    "older one of both, which a broker left whose disk failed"
                )
            found[key] = root, root.path / name
    return found


def _metadata(roots: Sequence[Path]) -> Mapping[str, BrokerTopic]:
    """Return the topics in the first metadata log of the roots; warn of a damaged one."""
    for root in roots:
        try:
            topics = metadata_log.read_topics(root)
        except (KafkaLogError, OSError) as fault:
            files.pass_on(fault)
            _logger.warning("%s: topics' ids and configs are not known: %s", root, fault)
            continue
        if topics:
            return topics
    return {}


def _derived_id(topic: str) -> str:
    """Return an id for a topic without one, the same in every process."""
    digest = hashlib.blake2b(topic.encode(), digest_size=16, person=b"kafkalog").digest()
    return layout.topic_id_text(digest)
