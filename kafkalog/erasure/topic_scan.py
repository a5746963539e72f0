"""A look through all files of a topic, while others write and clean.

Nothing is held up by it: files come, grow and go while they are read. So they are listed again and
again, and what has changed is read anew, until a round began and ended with the same commit, and
with the same files of records as the round before it. Between its two ends no record moved: not
from a staged file into a segment that was read before, nor from one segment into another. What is
known then holds as of that commit.

A writer that never pauses is stopped for a moment: after some rounds commits are held off for the
last one, which has little left to read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.erasure.file_occurrences import FileOccurrences, scan_file
from kafkalog.erasure.topic_files import FileKind, TopicFile, topic_files
from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.storage_engine.engine import Engine
    from kafkalog.storage_engine.metadata.state import State

__all__ = ["TopicScan"]

_ROUNDS: Final = 100
_FREE_ROUNDS: Final = 8
_MOVED: Final = {FileKind.LOG, FileKind.RETIRED, FileKind.UNFINISHED}
"""The files among which commits and cleanings move records."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a file, as it was when it was listed."""

    file: TopicFile
    settled: FileOccurrences
    """Of its first bytes, which stay as they are as long as it is there."""
    rest: FileOccurrences
    """Of all that follows."""


class TopicScan:
    """Looks through all files; `names` are no traces, `progress` is told bytes: done, and of all.

    Once it has ended, `state` is the one that it holds of, and `files` what was found, by path.
    """

    def __init__(
        self,
        engine: Engine,
        topic: str,
        keys: ErasedKeys,
        names: Sequence[bytes],
        progress: Callable[[int, int], None],
    ) -> None:
        self.state: State = engine.state()
        self.files: tuple[FileOccurrences, ...] = ()
        self._engine, self._topic, self._keys, self._names = engine, topic, keys, names
        self._progress = progress
        self._is_held = False
        self._done = self._of = 0
        self._seen: dict[Path, _Known] = {}
        self._read: set[tuple[Path, int]] | None = None

    def run(self) -> None:
        """Look until it is settled what there is.

        Raises UnknownTopicError, OSError, and StorageError where files are replaced faster than
        they are read.
        """
        for number in range(_ROUNDS):
            if self._round():
                return
            if number >= _FREE_ROUNDS and self._held_rounds():
                return
        raise StorageError(
            f"{self._engine.root}: files were replaced during each of {_ROUNDS} looks at them; "
            "stop the cleaner, and look again"
        )

    def _held_rounds(self) -> bool:
        """Read what is new since the last round, and see that it was all, with commits held off."""
        if self._engine.is_brokers:
            return False
        commit_lock = locks.FileLock(self._engine.root / layout.COMMIT_LOCK, create=False)
        self._is_held = True  # whoever is told of progress might commit
        try:
            with commit_lock.shared():
                return self._round() or self._round()
        finally:
            self._is_held = False

    def _round(self) -> bool:
        """List the files, and read what has changed; tell whether that settles it."""
        state = self._engine.state()
        listed = topic_files(self._engine, self._topic)
        changed = [file for file in listed if not self._is_known(file)]
        self._of += sum(file.size - self._settled_size(file) for file in changed)
        for file in changed:
            with contextlib.suppress(FileNotFoundError):  # the next listing has it no more
                self._seen[file.path] = self._look_at(file, state)
        moved = [file for file in listed if file.kind in _MOVED]
        read = {(file.path, file.inode) for file in moved}
        is_settled = read == self._read and all(map(self._is_known, moved))
        # A broker stages nothing: what it appends meanwhile came after that state.
        if not self._engine.is_brokers:
            is_settled &= self._engine.state().number == state.number
        self._read, self.state = read, state
        if is_settled:
            known = [self._seen[file.path] for file in listed if self._is_known(file)]
            self.files = tuple(one.settled.add(one.rest) for one in known)
        return is_settled

    def _is_known(self, file: TopicFile) -> bool:
        known = self._seen.get(file.path)
        return known is not None and known.file == file

    def _settled_size(self, file: TopicFile) -> int:
        known = self._seen.get(file.path)
        is_same = known is not None and known.file.inode == file.inode
        return known.settled.size if known is not None and is_same else 0

    def _look_at(self, file: TopicFile, state: State) -> _Known:
        """Read a file; of one that was read already what follows its settled bytes."""
        start = self._settled_size(file)
        settled = self._seen[file.path].settled if start else FileOccurrences(file)
        end = self._committed_size(file, state)
        if end > start:
            settled = settled.add(self._scan(file, start, end))
            start = settled.size
        return _Known(file, settled, self._scan(file, start, None))

    def _committed_size(self, file: TopicFile, state: State) -> int:
        """Return how many bytes of a file are committed and stay, as far as that is told; else 0.

        The bytes after them may be cut off again. So may any of a broker's.
        """
        if self._engine.is_brokers or file.kind is not FileKind.LOG or file.partition is None:
            return 0
        directory = self._engine.partition_directory(self._topic, file.partition)
        partition = dict(state.topic(self._topic).present()).get(file.partition)
        if partition is None:
            return 0
        active = directory / layout.segment_file(partition.active_base, layout.LOG)
        return partition.active_size if file.path == active else 0

    def _scan(self, file: TopicFile, start: int, end: int | None) -> FileOccurrences:
        def advance(count: int) -> None:
            self._done += count
            if not self._is_held:
                self._progress(self._done, self._of)

        return scan_file(
            file, self._keys, start=start, end=end, names=self._names, progress=advance
        )
