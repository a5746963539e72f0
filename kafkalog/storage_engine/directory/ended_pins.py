"""Snapshot pins that have ended: one file keeps their remains, so the root need not be listed.

A task may start after the pin of its action has ended. It must not take the pin for missing and pin
another snapshot. A process that ends pins therefore writes them here first, and removes their files
after that. An entry lasts a day. The youngest entries keep the pin's content, so that a late task
still reads the same snapshot. The others keep only their name, and a late task is refused.

A process that ends pins holds the file's lock exclusively and replaces the file. A process that
makes a pin shares the lock, so no pin ends between its look at this file and its own pin.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files, locks

_TRIES: Final = 5
_PAUSE_S: Final = 0.005
_KEPT_MS: Final = 24 * 60 * 60_000
_CONTENT_MAX: Final = 1 << 20
"""Bytes of content to keep; the first task of every action reads the file."""
_HEADER: Final = b"kl-ended-pins 1 %08x\n"
"""With the checksum of the lines: each has a name, the time (epoch ms), and the content."""
_HEADER_SIZE: Final = len(_HEADER % 0)
_NO_CONTENT: Final = b"-"


@contextlib.contextmanager
def making(root: Path) -> Iterator[None]:
    """Keep all pins from ending while the block runs; raises StorageError and OSError."""
    path = root / layout.ENDED_PINS
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.FileLock(path).shared())
        except PermissionError as fault:
            if path.exists() and os.access(root, os.W_OK):
                raise _unreadable(path, fault) from fault
            raise
        yield


@contextlib.contextmanager
def ending(root: Path) -> Iterator[bool]:
    """Keep other processes from making or ending pins; yield False if the lock stays busy.

    Raises like `making`.
    """
    for _ in range(_TRIES):
        with locks.FileLock(root / layout.ENDED_PINS).exclusive(wait=False) as is_alone:
            if is_alone:
                yield True
                return
        time.sleep(_PAUSE_S)
    yield False


def find(root: Path, name: str) -> bytes | None:
    """Return the content of an ended pin, or None if no such pin has ended.

    Raises StorageError if its content is no longer kept or the file is unreadable, CorruptLogError,
    and OSError.
    """
    path = root / layout.ENDED_PINS
    lines = b"\n" + _lines(path)
    start = lines.find(b"\n%s " % name.encode())
    if start < 0:
        return None
    _, _, content = _parsed(path, lines[start + 1 :].partition(b"\n")[0])
    if content == _NO_CONTENT:
        raise StorageError(
            f"{root / name}: this task started so long after the others of its action that the "
            "snapshot they read is no longer kept; run the action again"
        )
    return content + b"\n"


def add(root: Path, ended: Mapping[str, bytes], now_ms: int) -> None:
    """Record ended pins, and drop those of a day ago; the caller is inside `ending`.

    Raises StorageError, CorruptLogError and OSError.
    """
    path = root / layout.ENDED_PINS
    found: dict[bytes, tuple[int, bytes]] = {}
    for line in _lines(path).split(b"\n")[:-1]:
        name, time_ms, content = _parsed(path, line)
        if abs(now_ms - time_ms) < _KEPT_MS:
            found[name] = time_ms, content
    for key, data in ended.items():
        content = data.removesuffix(b"\n")
        is_line = content and b"\n" not in content
        found.pop(key.encode(), None)  # the youngest are the last
        found[key.encode()] = now_ms, content if is_line else _NO_CONTENT
    lines: list[bytes] = []
    left = _CONTENT_MAX
    for name, (time_ms, content) in reversed(found.items()):
        left -= len(content)
        lines.append(b"%s %d %s\n" % (name, time_ms, content if left >= 0 else _NO_CONTENT))
    whole = b"".join(reversed(lines))
    files.write_atomically(path, _HEADER % crc32c(whole) + whole)


def _lines(path: Path) -> bytes:
    """Return the lines; b"" for a missing file, or one that was just created."""
    try:
        data = files.read_file(path)
    except FileNotFoundError:
        return b""
    except PermissionError as fault:
        raise _unreadable(path, fault) from fault
    lines = data[_HEADER_SIZE:]
    if data and not _is_whole(data[:_HEADER_SIZE], lines):
        raise _corrupt(path, data[:40])
    return lines


def _unreadable(path: Path, fault: PermissionError) -> StorageError:
    return StorageError(
        f"{path}: the list of ended pins cannot be read: {fault.strerror}; "
        "run all executors as one user, or with a umask that lets them read"
    )


def _is_whole(header: bytes, lines: bytes) -> bool:
    return header == _HEADER % crc32c(lines)


def _parsed(path: Path, line: bytes) -> tuple[bytes, int, bytes]:
    try:
        name, time_ms, content = line.split(b" ", 2)
        return name, int(time_ms), content
    except ValueError:
        raise _corrupt(path, line[:40]) from None


def _corrupt(path: Path, found: bytes) -> CorruptLogError:
    return CorruptLogError(
        path,
        0,
        "the list of ended pins, version 1",
        repr(found),
        advice="remove it when no action runs",
    )
