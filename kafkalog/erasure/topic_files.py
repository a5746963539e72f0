"""List the files in which keys of a topic may occur.

These are all files in its partitions and in the root, in directories of deleted topics of the same
name, and in directories that are not partitions. Files of other topics are left out. A staged file
of the root is left out only if the journal knows that its writer writes to another topic.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.writer import writer_slug

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.metadata.state import State


class FileKind(StrEnum):
    """The content of a file, or object; the first six kinds hold record batches."""

    LOG = "log"
    MIXED = "mixed object"
    """What a task has written and a commit names, in an object store."""
    RETIRED = "retired log"
    """Replaced or deleted, and not removed yet."""
    UNFINISHED = "unfinished log"
    """Written by a cleaning that is running or has died."""
    STAGED = "staged"
    STAGED_FOR_ANY = "staged of this or another topic"
    """In the root, from a writer whose topic is unknown."""
    INDEX = "index"
    KEY_INDEX = "key index"
    SNAPSHOT = "producer snapshot"
    TEMPORARY = "temporary"
    JOURNAL = "journal"
    PIN = "pin"
    MARK = "mark"
    """Small files: checkpoints, locks, state of the cleaner, names and ids."""
    OTHER = "other"
    DIRECTORY = "directory"
    """A directory that cannot be listed."""

    @property
    def has_batches(self) -> bool:
        """Whether the file is read record by record."""
        return self in _WITH_BATCHES

    @property
    def is_text(self) -> bool:
        """Whether it is a text of ours, with names of topics, and numbers in digits."""
        return self in _TEXTS


LIVE: Final = {FileKind.LOG, FileKind.MIXED}
"""The kinds that readers read."""
_WITH_BATCHES: Final = {
    *(*LIVE, FileKind.RETIRED, FileKind.UNFINISHED),
    *(FileKind.STAGED, FileKind.STAGED_FOR_ANY),
}
_TEXTS: Final = {FileKind.JOURNAL, FileKind.PIN, FileKind.MARK}
_SUFFIX_KINDS: Final = (
    (layout.KEYS, FileKind.KEY_INDEX),
    (layout.STAGED_INDEX, FileKind.INDEX),
    (layout.STAGED_TIME_INDEX, FileKind.INDEX),
    (layout.STAGED, FileKind.STAGED),
)
_KINDS: Final = {
    layout.COMMIT: FileKind.JOURNAL,
    layout.COMMIT_TEMPORARY: FileKind.JOURNAL,
    layout.COMMIT_RELEASED: FileKind.JOURNAL,
    layout.SNAPSHOT_TEMPORARY: FileKind.SNAPSHOT,
    layout.GAPS: FileKind.INDEX,
    layout.RAW_GAPS: FileKind.INDEX,
}
_MARKS: Final = {
    layout.PARTITION_METADATA,
    layout.LEADER_EPOCH_CHECKPOINT,
    layout.RECOVERY_POINT_CHECKPOINT,
    layout.LOG_START_CHECKPOINT,
    layout.REPLICATION_CHECKPOINT,
    layout.CLEANER_CHECKPOINT,
    layout.META_PROPERTIES,
    layout.CLEAN_SHUTDOWN,
    layout.ROOT_LOCK,
}
_REMAINS: Final = re.compile(r"-\d+\.[0-9a-f]{32}-(delete|stray|future)$")
"""Suffix of a directory that is no partition any more, or not yet."""


@dataclass(frozen=True, slots=True)
class TopicFile:
    """A file as it was listed, or an object, whose path is its name below the log's address."""

    path: Path
    kind: FileKind
    partition: int | None
    """None in the root and in a deleted topic."""
    inode: int
    size: int
    changed_ns: int
    """When its name or content changed (ctime), by the file system's clock."""
    modified_ms: int
    is_retired: bool = False
    """Whether its name says that it was replaced or deleted."""
    remove_at_ms: int | None = None
    """When its directory, of a deleted topic, may be removed."""
    kept_until_ms: int | None = None
    """Until when an object that no reader needs stays."""
    fault: str = ""
    """Why it cannot be read, if that is already known."""

    @property
    def changed_ms(self) -> int:
        """`changed_ns` in ms."""
        return self.changed_ns // 1_000_000


def partition_directories(log: DirectoryLog, topic: str) -> dict[Path, int]:
    """Return the directories of a topic's partitions, and their numbers; or UnknownTopicError."""
    present = log.state().topic(topic).numbers()
    return {log.partition_directory(topic, number): number for number in present}


def root_directories(log: DirectoryLog, partitions: Iterable[Path]) -> set[Path]:
    """Return the log directories: the log's own, and those that hold the partitions."""
    return {*log.roots, *(directory.parent for directory in partitions)}


def topic_files(log: DirectoryLog, topic: str) -> list[TopicFile]:
    """List the files, by path; raises UnknownTopicError, OSError.

    Special files are left out. Unreadable entries and links to directories are listed with a fault.
    """
    state = log.state()
    partitions = partition_directories(log, topic)
    roots = root_directories(log, partitions)
    deleted = {
        log.root / layout.deleted_directory(gone.name, number, gone.topic_id): gone.remove_at_ms
        for gone in state.deleting.values()
        if gone.name == topic
        for number in range(gone.partitions)
    }
    targets = _targets(state)
    found: list[TopicFile] = []
    for root in roots:
        with files.scan(root) as entries:
            for entry in entries:
                path = root / entry.name
                if not files.is_directory(entry):
                    found += _of_root(path, topic, targets)
                elif path in partitions or path in deleted or not _is_others(entry.name, topic):
                    found += _below(path, partitions.get(path), deleted.get(path))
    return sorted(found, key=lambda file: file.path)


def _is_others(name: str, topic: str) -> bool:
    match = _REMAINS.search(name)
    if match is not None and len(name) == layout.FILE_NAME_MAX:
        return not topic.startswith(name[: match.start()])  # Kafka has shortened the topic
    if match is not None:
        return name[: match.start()] != topic
    parsed = layout.parse_partition_directory(name)
    return parsed is not None and parsed[0] != topic


def _targets(state: State) -> dict[str, str]:
    names = [name.rpartition(" ") for name in state.writers]
    return {writer_slug(writer, target): target for writer, _, target in names}


def _of_root(path: Path, topic: str, targets: Mapping[str, str]) -> Iterator[TopicFile]:
    for file in _file(path):
        if file.kind is not FileKind.STAGED:
            yield file
            continue
        parsed = layout.parse_staged(path.name)
        target = targets.get(parsed[0], "*") if parsed is not None else "*"
        if target == topic:
            yield file
        elif target == "*":
            yield replace(file, kind=FileKind.STAGED_FOR_ANY)


def _below(directory: Path, partition: int | None, remove_at_ms: int | None) -> Iterator[TopicFile]:
    try:
        with files.scan(directory) as entries:
            found = list(entries)
    except FileNotFoundError:
        return
    except OSError as fault:
        files.pass_on(fault)
        said = f"cannot be read: {fault.strerror}"
        yield _unlooked(directory, FileKind.DIRECTORY, partition, said)
        return
    for entry in found:
        path = directory / entry.name
        if not files.is_directory(entry):
            yield from _file(path, partition, remove_at_ms)
        elif entry.is_symlink():
            said = "a link to another directory, which is not scanned"
            yield _unlooked(path, FileKind.DIRECTORY, partition, said)
        else:
            yield from _below(path, partition, remove_at_ms)


def _unlooked(path: Path, kind: FileKind, partition: int | None, fault: str) -> TopicFile:
    return TopicFile(path, kind, partition, 0, 0, 0, 0, fault=fault)


def _file(
    path: Path, partition: int | None = None, remove_at_ms: int | None = None
) -> Iterator[TopicFile]:
    try:
        known = path.stat()
    except FileNotFoundError:
        return
    except OSError as fault:
        files.pass_on(fault)
        yield _unlooked(path, _kind(path.name), partition, f"cannot be read: {fault.strerror}")
        return
    if stat.S_ISREG(known.st_mode):
        yield TopicFile(
            path,
            _kind(path.name),
            partition,
            known.st_ino,
            known.st_size,
            known.st_ctime_ns,
            known.st_mtime_ns // 1_000_000,
            path.name.endswith(layout.DELETED),
            remove_at_ms,
        )


def _kind(name: str) -> FileKind:
    parsed = layout.parse_segment_file(name)
    if parsed is not None:
        _, suffix, stage = parsed
        if suffix == layout.SNAPSHOT:
            return FileKind.SNAPSHOT
        if suffix != layout.LOG:
            return FileKind.INDEX
        return {"": FileKind.LOG, layout.DELETED: FileKind.RETIRED}.get(stage, FileKind.UNFINISHED)
    if name in _KINDS:
        return _KINDS[name]
    if name in _MARKS or name.removesuffix(layout.TEMPORARY) in _MARKS:
        return FileKind.MARK
    if not name.startswith(layout.OURS):
        return FileKind.OTHER
    if name.startswith(layout.PIN):
        return FileKind.PIN
    if name.startswith(layout.SPILL):
        return FileKind.TEMPORARY
    for suffix, kind in _SUFFIX_KINDS:
        if name.endswith(suffix):
            return kind
    return FileKind.MARK
