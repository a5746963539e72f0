"""The files in which keys of a topic may be: all below its partitions, and all in the root.

And what remains of the partitions of an earlier topic of its name, until it is removed, and what
lies in directories that are no partitions. Those of other topics are not among them: their keys are
theirs. A staged file of the root does not name its topics; where the journal knows its writer as
one of another topic alone, it is left out, too.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.writing.writer import writer_slug

if TYPE_CHECKING:
    from kafkalog.storage_engine.engine import Engine
    from kafkalog.storage_engine.metadata.state import State

__all__ = ["FileKind", "TopicFile", "topic_files"]


class FileKind(StrEnum):
    """What a file holds; the first five hold record batches."""

    LOG = "log"
    RETIRED = "retired log"
    """Replaced or deleted, and not yet removed."""
    UNFINISHED = "unfinished log"
    """What a cleaning is writing, or a dead one has written."""
    STAGED = "staged"
    STAGED_FOR_ANY = "staged of this or another topic"
    """In the root, and nobody knows what its writer writes to."""
    INDEX = "index"
    KEY_INDEX = "key index"
    SNAPSHOT = "producer snapshot"
    TEMPORARY = "temporary"
    JOURNAL = "journal"
    PIN = "pin"
    MARK = "mark"
    """Small files: checkpoints, locks, what the cleaner remembers, names and ids."""
    OTHER = "other"
    DIRECTORY = "directory"
    """One that cannot be looked into."""

    @property
    def has_batches(self) -> bool:
        """Whether such a file is read record by record."""
        return self in _WITH_BATCHES

    @property
    def is_text(self) -> bool:
        """Whether it is a text of ours, with names of topics and numbers in digits."""
        return self in _TEXTS


_WITH_BATCHES: Final = {
    *(FileKind.LOG, FileKind.RETIRED, FileKind.UNFINISHED),
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
"""How the name of a directory ends that is no partition any more, or not yet."""


@dataclass(frozen=True, slots=True)
class TopicFile:
    """A file, as it was listed."""

    path: Path
    kind: FileKind
    partition: int | None
    """None for one in the root, and of a deleted topic."""
    inode: int
    size: int
    changed_ns: int
    """When it got its name or its content (its ctime), by the file system's clock."""
    modified_ms: int
    is_retired: bool = False
    """Whether its name says that it was replaced or deleted."""
    remove_at_ms: int | None = None
    """When the directory of a deleted topic may be removed that it is in."""
    fault: str = ""
    """Why it cannot be looked at, if that is known already."""

    @property
    def changed_ms(self) -> int:
        """The same as `changed_ns`, in ms."""
        return self.changed_ns // 1_000_000


def topic_files(engine: Engine, topic: str) -> list[TopicFile]:
    """List the files, by path; raises UnknownTopicError, OSError.

    Files that vanish meanwhile are left out, and so are those that are no files to read (sockets).
    What cannot be listed, or is a link to a directory elsewhere, is there with its fault.
    """
    state = engine.state()
    partitions = {
        engine.partition_directory(topic, number): number
        for number, _ in state.topic(topic).present()
    }
    roots = {engine.root, *(directory.parent for directory in partitions)}
    deleted = {
        engine.root / layout.deleted_directory(gone.name, number, gone.topic_id): gone.remove_at_ms
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
                if not entry.is_dir():
                    found += _of_root(path, topic, targets)
                elif path in partitions or path in deleted or not _is_others(entry.name, topic):
                    found += _below(path, partitions.get(path), deleted.get(path))
    return sorted(found, key=lambda file: file.path)


def _is_others(name: str, topic: str) -> bool:
    """Tell whether a directory is a partition of another topic, or what remains of one."""
    match = _REMAINS.search(name)
    if match is not None:
        return name[: match.start()] != topic
    parsed = layout.parse_partition_directory(name)
    return parsed is not None and parsed[0] != topic


def _targets(state: State) -> dict[str, str]:
    """Return what the writers of the journal write to, by what stands for them in file names."""
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
        said = f"cannot be read: {fault.strerror}"
        yield _unlooked(directory, FileKind.DIRECTORY, partition, said)
        return
    for entry in found:
        path = directory / entry.name
        if not entry.is_dir():
            yield from _file(path, partition, remove_at_ms)
        elif entry.is_symlink():
            said = "a link to another directory, which is not looked into"
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
