"""What a log shows, read once where many logs have the same partition.

What is read of a partition follows from its files, and from what the journal says of it. Most
states in which a disk may be differ in one partition, or in none.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
from tests.torture.checks import PartitionRows, Snapshot, read_partition, snapshot
from tests.torture.disk import without_zeros

__all__ = ["Shown", "Tree", "tree"]

_LOCKS: Final = frozenset(
    {
        layout.CLEANER_LOCK,
        layout.COMMIT_LOCK,
        layout.ROOT_LOCK,
        layout.SEGMENTS_LOCK,
        layout.SEGMENTS_TURNSTILE,
    }
)
_KEPT: Final = 4_000
_SMALL: Final = 1 << 16

Tree: TypeAlias = Mapping[str, tuple[bytes, tuple[str, ...]]]
"""Of each directory a digest of all that is in it, but locks, and the names of those."""


def tree(root: Path) -> Tree:
    """Tell directories apart by their files, directory by directory; that of the root is ""."""
    found: dict[str, tuple[bytes, tuple[str, ...]]] = {}
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        with os.scandir(f"{root}/{directory}") as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
        parts, names = [], []
        for entry in inside:
            if entry.name in _LOCKS:
                names.append(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(f"{directory}/{entry.name}" if directory else entry.name)
            else:
                data = _content(entry.path)
                kept = without_zeros(data)
                parts += [b"%s\0%d\0%d\0" % (entry.name.encode(), len(data), len(kept)), kept]
        digest = hashlib.blake2b(b"".join(parts), digest_size=16).digest()
        found[directory] = digest, tuple(names)
    return found


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    data = os.read(fd, _SMALL)
    if len(data) == _SMALL:
        data += os.read(fd, os.fstat(fd).st_size)
    os.close(fd)
    return data


class Shown:
    """Reads all that logs show."""

    def __init__(self) -> None:
        self._known: dict[object, PartitionRows] = {}

    def snapshot(self, engine: DirectoryLog, found: Tree | None = None) -> Snapshot:
        """Return what a log shows whose directories are `found`: the same as `checks.snapshot`."""
        directories = tree(engine.root) if found is None else found
        return snapshot(engine, functools.partial(self._partition, directories))

    def _partition(
        self,
        found: Tree,
        engine: DirectoryLog,
        topic: TopicState,
        number: int,
        state: PartitionState,
    ) -> PartitionRows:
        # A directory that is not there has no digest, and an error that is not remembered.
        directory = found.get(layout.partition_directory(topic.name, number))
        key = directory, topic.name, topic.topic_id, tuple(topic.config.items()), number, state
        rows = self._known.get(key)
        if rows is None:
            rows = read_partition(engine, topic, number, state)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = rows
        return rows
