"""The mark of a partition that could not be cleaned: why, since when, and when to try again.

The file `kl-uncleanable` in the partition's directory survives a restart, so that a broken disk is
not tried again and again. A change of the topic's configs, or a forced cleaning, tries at once.
Success removes the mark. If the disk refuses the mark, this process remembers it until another one
cleans or marks the partition. Kafka keeps its marks in memory only (C131, C132).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

_VERSION = 1
_FIRST_BACKOFF_MS = 60_000
_LAST_BACKOFF_MS = 3_600_000
_Signs = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of the files that a cleaner writes; None for a missing one."""
_unwritten: dict[tuple[str, bytes], tuple[Uncleanable, _Signs]] = {}
"""Marks that the disk has refused, by directory and topic id, with the signs at that time."""


@dataclass(frozen=True, slots=True)
class Uncleanable:
    """Why a partition is not cleaned."""

    reason: str
    failures: int = 1
    """Failures in a row."""
    since_ms: int = 0
    retry_at_ms: int = layout.INT64_MAX
    config: Mapping[str, str] | None = None
    """The topic's configs at the last failure."""
    is_disk_fault: bool = False
    """Whether the disk refused: then retention continues, because it may free space."""

    def told(self) -> str:
        """Return the content of the file."""
        return json.dumps({"version": _VERSION, **asdict(self)})

    def is_due(self, config: Mapping[str, str], now_ms: int) -> bool:
        """Return whether to try again; a pause beyond the maximum shows a clock that went back."""
        if self.config is not None and dict(self.config) != dict(config):
            return True
        is_retried = self.retry_at_ms < layout.INT64_MAX
        return is_retried and not 0 < self.retry_at_ms - now_ms <= _LAST_BACKOFF_MS


def read_uncleanable(directory: Path) -> Uncleanable | None:
    """Return a partition's mark; None if it has none. An unreadable mark is a mark too."""
    if _unwritten and (unwritten := _unwritten.get(_key(directory))) is not None:
        mark, signs = unwritten
        if signs == _signs(directory):
            return mark
        _unwritten.pop(_key(directory), None)  # another process has cleaned or marked it
    path = directory / layout.UNCLEANABLE
    try:
        content = files.read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as fault:
        files.pass_on(fault)
        return Uncleanable(f"{path}: {fault.strerror}")
    return uncleanable_of(content, path)


def uncleanable_of(text: str | bytes, path: Path | str = layout.UNCLEANABLE) -> Uncleanable:
    """Return the mark that a file's content says; `path` names the file in its reason."""
    try:
        content = json.loads(text)
        if content.pop("version") != _VERSION:
            return Uncleanable(f"{path}: written by a newer release; use that one")
        mark = Uncleanable(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Uncleanable(f"{path}: expected a mark of the cleaner; remove the file to continue")
    numbers = (mark.failures, mark.since_ms, mark.retry_at_ms)
    is_sound = isinstance(mark.reason, str) and all(isinstance(n, int) for n in numbers)
    if not is_sound or not isinstance(mark.config, dict | None):
        return Uncleanable(f"{path}: expected a mark of the cleaner; remove the file to continue")
    return mark


def _key(directory: Path) -> tuple[str, bytes]:
    """Identify a directory by its path and topic id: a new topic may reuse path and inode."""
    try:
        return str(directory), files.read_file(directory / layout.PARTITION_METADATA)
    except OSError as raised:
        files.pass_on(raised)
        return str(directory), b""


def _signs(directory: Path) -> _Signs:
    found: list[tuple[int, int, int] | None] = []
    for name in (layout.UNCLEANABLE, layout.LAST_CLEANING):
        try:
            stat = (directory / name).stat()
        except OSError as raised:
            files.pass_on(raised)
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def mark_uncleanable(
    directory: Path,
    reason: str,
    config: Mapping[str, str],
    *,
    now_ms: int,
    is_disk_fault: bool = False,
) -> Uncleanable:
    """Mark a partition, or count another failure; the pause doubles from a minute to an hour.

    If the disk refuses the mark, it holds in this process.
    """
    before = read_uncleanable(directory)
    mark = next_mark(before, reason, config, now_ms=now_ms, is_disk_fault=is_disk_fault)
    try:
        files.write_atomically(directory / layout.UNCLEANABLE, mark.told().encode() + b"\n")
        _unwritten.pop(_key(directory), None)
    except OSError as raised:
        files.pass_on(raised)
        _unwritten[_key(directory)] = mark, _signs(directory)
    return mark


def next_mark(
    before: Uncleanable | None,
    reason: str,
    config: Mapping[str, str],
    *,
    now_ms: int,
    is_disk_fault: bool,
) -> Uncleanable:
    """Return the mark after another failure; `before` is that of the earlier ones."""
    failures = 1 if before is None else before.failures + 1
    backoff_ms = min(_FIRST_BACKOFF_MS << min(failures - 1, 10), _LAST_BACKOFF_MS)
    return Uncleanable(
        reason=reason,
        failures=failures,
        since_ms=now_ms if before is None else before.since_ms,
        retry_at_ms=now_ms + backoff_ms,
        config=dict(config),
        is_disk_fault=is_disk_fault,
    )


def clear_uncleanable(directory: Path) -> None:
    """Remove a partition's mark; raises OSError."""
    _unwritten.pop(_key(directory), None)
    path = directory / layout.UNCLEANABLE
    if path.exists():
        files.remove(path)
        files.sync_directory(directory)


def fault_reason(fault: Exception) -> str:
    """Return the message of an error, in one line."""
    if isinstance(fault, OSError) and fault.filename and fault.strerror:
        return f"{fault.filename}: {fault.strerror}"
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    text = " ".join(str(fault).split())
    return text if text else type(fault).__name__
