"""Read and write the small notes of a partition: files of a directory, texts of a store's commit.

A note that a cleaning leaves for the next one is a JSON object with a version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSION: Final = 1
_Signs = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of the files that a cleaner writes; None for a missing one."""
_unwritten: dict[tuple[str, bytes, str], tuple[str, _Signs]] = {}
"""Notes that the disk has refused, by directory, topic id and name, with the signs at that time."""


def packed(content: Mapping[str, object]) -> str:
    """Return the text of a note."""
    return json.dumps({"version": VERSION, **content})


def unpacked(text: str | bytes | None) -> dict[str, Any]:
    """Return the object that a note has; {} for none."""
    try:
        content = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True, slots=True)
class DirectoryNotes:
    """The notes in a partition's directory, a file each."""

    directory: Path

    @property
    def place(self) -> str:
        """The directory."""
        return str(self.directory)

    def read(self, name: str) -> bytes | str | None:
        """Return a note, or what this process remembers of one; None for none. Raises OSError."""
        if _unwritten and (held := _unwritten.get(key := self._key(name))) is not None:
            text, signs = held
            if signs == self._signs():
                return text
            _unwritten.pop(key, None)  # another process has cleaned or marked the partition
        try:
            return files.read_file(self.directory / name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, text: str, *, or_remember: bool = False) -> None:
        """Replace a note; raises OSError, unless the process may remember what the disk refuses."""
        try:
            files.write_atomically(self.directory / name, text.encode() + b"\n")
            self._forget(name)
        except OSError as raised:
            files.pass_on(raised)
            if not or_remember:
                raise
            _unwritten[self._key(name)] = text, self._signs()

    def remove(self, name: str) -> None:
        """Remove a note, if there is one; raises OSError."""
        self._forget(name)
        path = self.directory / name
        if path.exists():
            files.remove(path)
            files.sync_directory(self.directory)

    def _forget(self, name: str) -> None:
        if _unwritten:
            _unwritten.pop(self._key(name), None)

    def _key(self, name: str) -> tuple[str, bytes, str]:
        """Identify a note also by the topic id: a new topic may reuse path and inode."""
        try:
            topic_id = files.read_file(self.directory / layout.PARTITION_METADATA)
        except OSError as raised:
            files.pass_on(raised)
            topic_id = b""
        return str(self.directory), topic_id, name

    def _signs(self) -> _Signs:
        found: list[tuple[int, int, int] | None] = []
        for name in (layout.UNCLEANABLE, layout.LAST_CLEANING):
            try:
                stat = (self.directory / name).stat()
            except OSError as raised:
                files.pass_on(raised)
                found.append(None)
            else:
                found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class StoredNotes:
    """The notes of a partition in an object store; a commit keeps `texts`."""

    place: str
    """The address of the log."""
    texts: dict[str, str] = field(default_factory=dict)

    def read(self, name: str) -> str | None:
        """Return a note; None for none."""
        return self.texts.get(name)

    def write(self, name: str, text: str, *, or_remember: bool = False) -> None:
        """Replace a note."""
        self.texts[name] = text

    def remove(self, name: str) -> None:
        """Remove a note, if there is one."""
        self.texts.pop(name, None)
