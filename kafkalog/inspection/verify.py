"""`kafkalog verify`: compare all files of a log directory with each other.

It checks the checksums, offsets, indexes, transactions, snapshots and epochs of each partition, and
the journal and checkpoints of the root. With `deep` it also decodes every record. The directory may
be ours, a broker's, or one partition's. Nothing is changed, and no other process has to wait.

A *finding* is damage or a notice. A killed broker leaves half a batch at the end and unsynced
indexes: these are notices, because the broker's next start or `adopt` repairs them.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kafkalog.errors import (
    CorruptLogError,
    InvalidInputError,
    KafkaLogError,
    StorageError,
    UnknownTopicError,
)
from kafkalog.inspection.dump import ROOT_CHECKPOINTS
from kafkalog.inspection.finding import Finding
from kafkalog.inspection.verify_kinds import verify_kinds
from kafkalog.inspection.verify_partition import PartitionFiles, verify_partition
from kafkalog.storage_engine.broker import owner
from kafkalog.storage_engine.broker.checkpointed import Checkpointed
from kafkalog.storage_engine.broker.found_partitions import find_partitions, topics_in_metadata
from kafkalog.storage_engine.broker.loader import remote_notice
from kafkalog.storage_engine.broker.metadata_log import BrokerTopic
from kafkalog.storage_engine.broker.replicas import properties_of
from kafkalog.storage_engine.directory.recorded_records import journal_of
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, files, locks
from kafkalog.storage_engine.metadata import directory_signs
from kafkalog.storage_engine.metadata.checkpoints import OFFSET_FIELDS, checkpoint_entries
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.state import PartitionState, State, TopicState

_ROOT_NAMES: Final = (
    *ROOT_CHECKPOINTS,
    layout.COMMIT,
    layout.ROOT_LOCK,
    layout.META_PROPERTIES,
    layout.CLEAN_SHUTDOWN,
    layout.METADATA_DIRECTORY,
    "bootstrap.checkpoint",
)
_COMPARED: Final = {*ROOT_CHECKPOINTS, layout.COMMIT, layout.METADATA_DIRECTORY, layout.GUARD}
"""Names whose files are read, and of directories."""
_ASIDE: Final = ("-delete", "-stray", "-future")
_DAMAGE_ERRORS: Final = {errno.ENOENT, errno.EIO, errno.ENOTDIR, *files.NOT_OF_A_LOG}
"""Errors that mean lost or damaged data; any other error only prevents the check."""
_UNKNOWN_DIRECTORY: Final = "A" * 22
"""Kafka: DirectoryId.UNASSIGNED."""
_Key = tuple[str, int]
_Checkpoints = Mapping[str, Mapping[_Key, int]]


def _ignore(_: int) -> None:
    pass


def verify(
    root: Path,
    topic: str | None = None,
    *,
    deep: bool = False,
    progress: Callable[[int], None] = _ignore,
    beside: Sequence[Path] = (),
    now_ms: int | None = None,
) -> Iterator[Finding]:
    """Yield what is wrong in a log directory, or in its topic `topic`, as soon as it is found.

    If a broker has several log directories, all of them are `beside`. Bytes of `.log` files read
    since its last call go to `progress`. The present is `now_ms` (epoch ms), by default the
    clock's. Raises InvalidInputError for a path without a log, UnknownTopicError, and at the end
    StorageError if a file could not be checked.
    """
    root = root.absolute()
    for each in (root, *beside):
        directory_signs.check_is_directory(each)
    faults: list[str] = []
    at_ms = clock.now_ms() if now_ms is None else now_ms
    if _is_partition(root):
        yield from _partition(PartitionFiles(root, now_ms=at_ms), deep, progress, faults)
    else:
        yield from _root(root, topic, deep, progress, faults, beside=beside, now_ms=at_ms)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise StorageError(f"{faults[0]}: this could not be checked{more}")


def _root(
    root: Path,
    topic: str | None,
    deep: bool,
    progress: Callable[[int], None],
    faults: list[str],
    *,
    beside: Sequence[Path],
    now_ms: int,
) -> Iterator[Finding]:
    state, journal = None, journal_of(root)
    if journal.path.exists():
        state, found = _read_journal(journal, faults)
        yield from found
    elif not _has_log(root):
        raise InvalidInputError(
            f"{root}: no log here: neither a `{layout.COMMIT}` file nor "
            f"{layout.META_PROPERTIES}, nor a partition's directory with a segment"
            f"{directory_signs.nearby(root)}"
        )
    elif _has_lost_journal(root):
        expected = "the journal, which says what is committed"
        yield Finding(journal.path, 0, expected, "no file: the journal is missing")
    present = _topic_partitions(root, state)
    deleted = {known.name for known in state.deleting.values()} if state else set()
    if topic is not None and topic not in {name for name, _ in present}:
        known = ", ".join(sorted({name for name, _ in present})[:20]) or "none"
        raise UnknownTopicError(f"topic {topic!r} does not exist; the topics here are: {known}")
    checkpoints: dict[str, dict[tuple[str, int], int]] = {}
    for name in ROOT_CHECKPOINTS:
        checkpoints[name] = {}
        yield from _read_checkpoint(root / name, checkpoints[name], faults)
    metadata: Mapping[str, BrokerTopic] = {}
    aside: Mapping[Path, tuple[_Key, str]] = {}
    if state is None:  # as readers decide it
        roots = [root, *(each for each in beside if each != root)]
        metadata, notices = topics_in_metadata(roots)
        if topic is None:
            yield from _of_metadata(root, notices)
        found_here = find_partitions(roots, metadata)
        aside = found_here.set_aside
        for text in found_here.shared_ids if topic is None else ():
            yield Finding(root, 0, "topics with ids of their own", text, is_damage=False)
    about = _Root(root, checkpoints, metadata)
    lost = _assigned_but_gone(about, {root, *beside}) if state is None else set()
    for partition in sorted(key for key in lost if topic in (None, key[0])):
        yield _gone(about, partition)
    for partition in sorted(present):
        if topic in (None, partition[0]):
            path = root / layout.partition_directory(*partition)
            if path in aside:
                expected = "a partition of the log"
                yield Finding(path, 0, expected, f"one set aside: {aside[path][1]}", False)
                continue
            files = _files_of(about, partition, state, journal)
            if files is None:
                left = "what is left of one that was deleted" if partition[0] in deleted else "none"
                yield Finding(path, 0, "a topic of the journal", left, is_damage=False)
            else:
                files = dataclasses.replace(files, now_ms=now_ms)
                yield from _partition(files, deep, progress, faults)
    yield from _compare_checkpoints(about, state, present | lost, topic, deleted)
    if state is None:
        shown = {key for key in present if topic in (None, key[0])}
        yield from _remote(about, shown)
    if topic is None:
        yield from _foreign(root, state, aside)


@dataclass(frozen=True, slots=True)
class _Root:
    path: Path
    checkpoints: _Checkpoints
    topics: Mapping[str, BrokerTopic]
    """Those of a broker's cluster, as far as they are known."""

    def of(self, partition: tuple[str, int]) -> Checkpointed:
        """Return what is known of a broker's partition."""
        # In an adopted directory, internal topics stay the broker's.
        is_ours = (self.path / layout.COMMIT).exists()
        mark = layout.CLEAN_ASIDE if is_ours else layout.CLEAN_SHUTDOWN
        known = self.topics.get(partition[0])
        return Checkpointed.of(
            self.checkpoints,
            partition,
            {} if known is None else known.config,
            root=self.path,
            is_clean=(self.path / mark).exists(),
            is_live=not is_ours and locks.RootLock(self.path).is_held_alone(),
        )


def verify_replicas(roots: Sequence[Path], topic: str | None = None) -> Iterator[Finding]:
    """Yield how the replicas of several brokers differ, and the partitions that lack one.

    Committed records that no replica has are damage. Raises StorageError if no replica of a
    partition can be read.
    """
    found = owner.open_broker(roots)
    if found is None or not found.is_cluster:
        return
    for text in found.missing():
        yield Finding(roots[0], 0, "a replica of each partition", text, is_damage=False)
    for known in found.published().topics.values():
        for number in known.numbers() if topic in (None, known.name) else ():
            election = found.election(known.name, number)
            if election is not None and (text := election.notice):
                expected = "replicas that agree"
                path = election.leader.directory
                yield Finding(path, 0, expected, text, is_damage=election.lacks_committed)


def _assigned_but_gone(root: _Root, given: Collection[Path]) -> set[_Key]:
    """Return the partitions that the metadata assigns to this directory, and its broker lacks.

    `given` are all directories to look in. Where the metadata does not say the log directory, a
    checkpoint has to name the partition. Kafka: LogManager, KIP-858.
    """
    ours, _ = properties_of(root.path)
    node, directory = ours.get("node.id", ""), ours.get("directory.id")
    own = [each for each in given if properties_of(each)[0].get("node.id") == node]
    known = root.checkpoints[layout.REPLICATION_CHECKPOINT]
    found = set()
    for topic in root.topics.values():
        for number in range(topic.partitions):
            assigned = topic.assignment(number)
            places = dict(zip(map(str, assigned.replicas), assigned.directories, strict=False))
            is_assigned = node in map(str, assigned.replicas)
            if places.get(node, _UNKNOWN_DIRECTORY) == _UNKNOWN_DIRECTORY:
                is_here = is_assigned and (topic.name, number) in known
            else:
                is_here = places[node] == directory
            name = layout.partition_directory(topic.name, number)
            if is_here and not any((each / name).is_dir() for each in own):
                found.add((topic.name, number))
    return found


def _of_metadata(root: Path, notices: Sequence[str]) -> Iterator[Finding]:
    """Report what is odd about the metadata in this directory; each has its own."""
    for text in notices:
        if text.startswith(f"{root}: "):
            found = text.removeprefix(f"{root}: ")
            path = root / layout.METADATA_DIRECTORY
            yield Finding(path, 0, "a Kafka cluster's metadata", found, is_damage=False)


def _gone(root: _Root, partition: _Key) -> Finding:
    """Report a partition without its directory: damage if a checkpoint says that it had records."""
    names = (layout.REPLICATION_CHECKPOINT, layout.RECOVERY_POINT_CHECKPOINT)
    end, name = max((root.checkpoints[name].get(partition, 0), name) for name in names)
    found = "none" + (f", although {name} has the offset {end}" if end else "")
    expected = "the directory of a partition that the cluster's metadata has here"
    path = root.path / layout.partition_directory(*partition)
    return Finding(path, 0, expected, found, is_damage=end > 0)


def log_size(root: Path, topic: str | None = None) -> int:
    """Return the bytes of all `.log` files that `verify` will read."""
    total = 0
    if not root.is_dir():
        return total
    directories = [root] if _is_partition(root) else [path for _, path in _partitions(root)]
    for directory in directories:
        parsed = layout.parse_partition_directory(directory.name)
        if topic is not None and parsed is not None and parsed[0] != topic:
            continue
        with files.scan(directory) as entries:
            for entry in entries:
                file = layout.parse_segment_file(entry.name)
                if file is not None and file[1:] == (layout.LOG, ""):
                    total += entry.stat().st_size
    return total


def has_topic(root: Path, topic: str) -> bool:
    """Return whether a directory has a partition of a topic."""
    return root.is_dir() and any(name == topic for (name, _), _ in _partitions(root))


def _has_log(root: Path) -> bool:
    marks = (layout.META_PROPERTIES, layout.META_ASIDE, layout.COMMIT_RELEASED)
    return any((root / name).exists() for name in marks) or any(
        _is_partition(directory) for _, directory in _partitions(root)
    )


def _has_lost_journal(root: Path) -> bool:
    """Return whether a directory without a journal had one, and has not become a broker's."""
    if any((root / name).exists() for name in (layout.META_PROPERTIES, layout.COMMIT_RELEASED)):
        return False
    if (root / layout.COMMIT_LOCK).exists():
        return True
    # An adoption makes the canaries before the journal.
    is_adoption = (root / layout.META_ASIDE).exists()
    return not is_adoption and any(
        (directory / layout.CANARY).exists() for _, directory in _partitions(root)
    )


def _is_partition(directory: Path) -> bool:
    if (directory / layout.COMMIT).exists():
        return False
    names = files.list_names(directory)
    found = (layout.parse_segment_file(name) for name in names)
    return any(parsed is not None and parsed[1] == layout.LOG for parsed in found)


def _partitions(root: Path) -> Iterator[tuple[tuple[str, int], Path]]:
    """Yield ((topic, partition), directory) for each directory with a partition's name."""
    with files.scan(root) as entries:
        for entry in entries:
            parsed = layout.parse_partition_directory(entry.name)
            if parsed is not None and files.is_directory(entry):
                yield parsed, Path(entry.path)


def _topic_partitions(root: Path, state: State | None) -> set[tuple[str, int]]:
    found = {partition for partition, _ in _partitions(root)}
    if state is not None:
        for topic in state.topics.values():
            found |= {(topic.name, number) for number in topic.numbers()}
    return found


def _files_of(
    root: _Root, partition: tuple[str, int], state: State | None, journal: Journal
) -> PartitionFiles | None:
    """Return what is known of a partition before it is read; None if the journal lacks it."""
    directory = root.path / layout.partition_directory(*partition)
    if state is None or partition[0] in layout.INTERNAL_TOPICS:
        checkpointed = root.of(partition)
        # If only the journal of our log is lost, all of its data was synced.
        is_clean = checkpointed.is_clean or (state is None and journal.path.exists())
        point = None if is_clean else checkpointed.recovery_point or 0
        return PartitionFiles(directory, recovery_point=point, checkpointed=checkpointed)
    topic = state.topics.get(partition[0])
    if topic is None or not topic.is_here(partition[1]):
        return None
    return PartitionFiles(
        directory,
        _loader(journal, topic, partition[1]),
        topic.topic_id,
        load_number=lambda: journal.published().number,
    )


def _loader(journal: Journal, topic: TopicState, partition: int) -> Callable[[], PartitionState]:
    def load() -> PartitionState:
        known = journal.published().topics.get(topic.name)
        if known is None or known.topic_id != topic.topic_id:
            raise UnknownTopicError(f"topic {topic.name!r} was deleted while it was verified")
        return known.partitions[partition]

    return load


def _partition(
    partition: PartitionFiles, deep: bool, progress: Callable[[int], None], faults: list[str]
) -> Iterator[Finding]:
    damaged: set[Path | str] = set()
    try:
        for finding in verify_partition(partition, deep=deep, progress=progress):
            if finding.is_damage:
                damaged.add(finding.path)
            yield finding
    except UnknownTopicError:
        return  # deleted meanwhile
    except FileNotFoundError as fault:
        path = Path(fault.filename or partition.directory)
        yield Finding(path, 0, "a file of the partition", "none: it is missing")
    except OSError as fault:
        files.pass_on(fault)
        path = Path(fault.filename or partition.directory)
        if path not in damaged:
            yield from _unread(path, fault, faults)
    except KafkaLogError as fault:
        cause = fault.__cause__
        if isinstance(cause, files.NotOfALogError) and Path(cause.filename) in damaged:
            return
        if isinstance(cause, OSError) and cause.errno not in _DAMAGE_ERRORS:
            faults.append(str(fault))
            return
        yield Finding(partition.directory, 0, "a partition that can be read", str(fault))


def _unread(path: Path, fault: OSError, faults: list[str]) -> Iterator[Finding]:
    text = str(fault.strerror or fault)
    if isinstance(fault, files.NotOfALogError):
        yield Finding(path, 0, fault.expected, fault.found)
    elif fault.errno in _DAMAGE_ERRORS:
        yield Finding(path, 0, "a file that can be read", text)
    else:
        faults.append(f"{path}: {text}")


def _read_journal(journal: Journal, faults: list[str]) -> tuple[State | None, list[Finding]]:
    path = journal.path
    try:
        state = journal.published()
        for _ in journal.records()[1]:
            pass
        _, lost = journal.unpublished()
    except CorruptLogError as fault:
        return None, [Finding(path, fault.position, str(fault.expected), str(fault.found))]
    except OSError as fault:
        files.pass_on(fault)
        return None, list(_unread(path, fault, faults))
    except (KafkaLogError, ValueError) as fault:
        return None, [Finding(path, 0, "a journal of this release", str(fault))]
    if lost:
        found = f"{lost}; the next writer drops it"
        return state, [Finding(path, 0, "published records alone", found, is_damage=False)]
    return state, []


def _read_checkpoint(
    path: Path, found: dict[tuple[str, int], int], faults: list[str]
) -> Iterator[Finding]:
    try:
        entries = checkpoint_entries(path, files.read_file(path), OFFSET_FIELDS)
        for _, (topic, partition, offset) in entries:
            found[topic, partition] = offset
    except FileNotFoundError:
        return
    except CorruptLogError as fault:
        yield Finding(path, fault.position, str(fault.expected), str(fault.found))
    except OSError as fault:
        files.pass_on(fault)
        yield from _unread(path, fault, faults)


def _compare_checkpoints(
    root: _Root,
    state: State | None,
    present: set[tuple[str, int]],
    topic: str | None,
    deleted: set[str],
) -> Iterator[Finding]:
    """Compare the root's checkpoints with the logs' ends, except for topics that were `deleted`.

    A broker's log that ends below its recovery point or high watermark was reported as a loss.
    """
    from kafkalog.storage_engine.segment.segments import list_segments, next_offset

    ends: dict[tuple[str, int], int] = {}
    for name, entries in root.checkpoints.items():
        for partition, offset in sorted(entries.items()):
            if topic not in (None, partition[0]) or partition[0] in deleted:
                continue
            path = root.path / name
            text = layout.partition_directory(*partition)
            if partition not in present:
                # As it stops, a broker writes the ends of the logs that it has, and no others.
                is_lost = name == layout.RECOVERY_POINT_CHECKPOINT and offset > 0
                is_lost = is_lost and state is None and root.of(partition).is_clean
                found = f"{text} up to offset {offset}, which is not"
                yield Finding(path, 0, "partitions that are here", found, is_damage=is_lost)
                continue
            if partition not in ends:
                try:
                    segments = list_segments(root.path / text)
                    ends[partition] = next_offset(segments[-1]) if segments else 0
                    if state is None and not segments:  # a broker begins such a log at its start
                        starts = root.checkpoints[layout.LOG_START_CHECKPOINT]
                        ends[partition] = max(0, starts.get(partition, 0))
                except OSError as raised:
                    files.pass_on(raised)
                    ends[partition] = layout.INT64_MAX  # the partition's own check reported it
            if 0 <= offset <= ends[partition]:
                continue
            is_brokers = state is None or partition[0] in layout.INTERNAL_TOPICS
            is_damage = True
            if offset >= 0 and is_brokers:
                if name in (layout.RECOVERY_POINT_CHECKPOINT, layout.REPLICATION_CHECKPOINT):
                    continue
                # A broker resets a cleaner's offset that is too high (LogCleanerManager), and
                # empties a log that ends below its start (LogLoader).
                is_damage = name == layout.LOG_START_CHECKPOINT and root.of(partition).is_clean
            expected = f"{text} at an offset from 0 to its end, {ends[partition]}"
            yield Finding(path, 0, expected, str(offset), is_damage)


def _remote(root: _Root, shown: Collection[_Key]) -> Iterator[Finding]:
    """Report tiered logs that begin above their log start: their first records are elsewhere."""
    for key, start in sorted(root.checkpoints[layout.LOG_START_CHECKPOINT].items()):
        directory = root.path / layout.partition_directory(*key)
        if key not in shown or not directory.is_dir() or not root.of(key).is_tiered:
            continue
        bases = layout.base_offsets(files.list_names(directory), layout.LOG)
        if bases and start < bases[0]:
            expected = f"the segment of the checkpointed log start, {start}"
            found = remote_notice(start, bases[0])
            yield Finding(directory, 0, expected, found, is_damage=False)


def _deleted_directories(state: State) -> Iterator[str]:
    for deleted in state.deleting.values():
        for number in range(deleted.partitions):
            yield layout.deleted_directory(deleted.name, number, deleted.topic_id)


def _foreign(
    root: Path, state: State | None, aside: Mapping[Path, tuple[_Key, str]]
) -> Iterator[Finding]:
    """Report what is neither Kafka's nor ours, and directories that were set aside for good."""
    removed = set() if state is None else set(_deleted_directories(state))
    with files.scan(root) as entries:
        names = sorted((entry.name, files.is_directory(entry)) for entry in entries)
    for name, is_directory in names:
        plain = name.removesuffix(layout.TEMPORARY)
        if plain in _ROOT_NAMES or name.startswith(layout.OURS):
            if plain not in _COMPARED:
                yield from verify_kinds(root, [name])
            continue
        if is_directory and layout.parse_partition_directory(name) is not None:
            continue
        if is_directory and name.endswith(_ASIDE):
            if name not in removed and (state is not None or not name.endswith("-delete")):
                expected = "partitions in use"
                found = "one that a broker has set aside"
                if root / name in aside:
                    found += f": {aside[root / name][1]}"
                yield Finding(root / name, 0, expected, found, is_damage=False)
            continue
        owner = "a log's files alone" if state is not None else "a broker's files alone"
        found = "a foreign directory" if is_directory else "a foreign file"
        yield Finding(root / name, 0, owner, found, is_damage=False)
