"""Scan all files of a topic while other processes write and clean.

The scan blocks no other process. It lists the files in rounds, and reads what has changed. It ends
after a round that began and ended with the same commit, and with the same files of records as the
round before. No record has then moved between files unseen, and the result holds as of that commit.
If writers never pause, the last rounds, with little left to read, hold off commits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.erasure.file_occurrences import FileOccurrences, scan_file
from kafkalog.erasure.key_scan import KeyScan
from kafkalog.erasure.topic_files import FileKind, TopicFile, topic_files
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.metadata.state import State

_MOVED: Final = {FileKind.LOG, FileKind.RETIRED, FileKind.UNFINISHED}
"""Files between which commits and cleanings move records."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The scan of a file, as it was listed."""

    file: TopicFile
    fixed: FileOccurrences
    """The occurrences in its first bytes, which do not change."""
    rest: FileOccurrences


class TopicScan(KeyScan[Path, _Known]):
    """Scan all files."""

    _log: DirectoryLog
    _is_held = False
    _read: set[tuple[Path, int]] | None = None

    def _round(self, *, is_pressed: bool) -> bool:
        return self._look() or (is_pressed and self._held_looks())

    def _held_looks(self) -> bool:
        """Scan once or twice while commits are held off; return whether the result is stable."""
        if self._log.is_brokers:
            return False
        commit_lock = locks.FileLock(self._log.root / layout.COMMIT_LOCK, create=False)
        self._is_held = True  # report no progress, because the callback might commit
        try:
            with commit_lock.shared():
                return self._look() or self._look()
        finally:
            self._is_held = False

    def _look(self) -> bool:
        state = self._log.state()
        listed = topic_files(self._log, self._topic)
        changed = [file for file in listed if not self._is_known(file)]
        self._of += sum(file.size - self._fixed_size(file) for file in changed)
        for file in changed:
            try:
                self._seen[file.path] = self._read_file(file, state)
            except FileNotFoundError as raised:
                files.pass_on(raised)
                # it was removed meanwhile
        moved = [file for file in listed if file.kind in _MOVED]
        read = {(file.path, file.inode) for file in moved}
        is_stable = read == self._read and all(map(self._is_known, moved))
        # A broker has no staged files; its new appends come after that state.
        if not self._log.is_brokers:
            is_stable &= self._log.state().number == state.number
        self._read, self.state = read, state
        if is_stable:
            known = [self._seen[file.path] for file in listed if self._is_known(file)]
            self.files = tuple(one.fixed.add(one.rest) for one in known)
        return is_stable

    def _is_known(self, file: TopicFile) -> bool:
        known = self._seen.get(file.path)
        return known is not None and known.file == file

    def _fixed_size(self, file: TopicFile) -> int:
        known = self._seen.get(file.path)
        is_same = known is not None and known.file.inode == file.inode
        return known.fixed.size if known is not None and is_same else 0

    def _read_file(self, file: TopicFile, state: State) -> _Known:
        """Read a file; if its first bytes are known and do not change, read only the rest."""
        start = self._fixed_size(file)
        fixed = self._seen[file.path].fixed if start else FileOccurrences(file)
        end = self._committed_size(file, state)
        if end > start:
            fixed = fixed.add(self._scan(file, start, end))
            start = fixed.size
        return _Known(file, fixed, self._scan(file, start, None))

    def _committed_size(self, file: TopicFile, state: State) -> int:
        """Return how many bytes of a file no truncation can remove; 0 if unknown, or a broker's."""
        if self._log.is_brokers or file.kind is not FileKind.LOG or file.partition is None:
            return 0
        directory = self._log.partition_directory(self._topic, file.partition)
        partition = dict(state.topic(self._topic).present()).get(file.partition)
        if partition is None:
            return 0
        active = directory / layout.segment_file(partition.active_base, layout.LOG)
        return partition.active_size if file.path == active else 0

    def _scan(self, file: TopicFile, start: int, end: int | None) -> FileOccurrences:
        return scan_file(
            file, self._keys, start=start, end=end, names=self._names, progress=self._advance
        )

    def _advance(self, count: int) -> None:
        if self._is_held:
            self._done += count
        else:
            super()._advance(count)
