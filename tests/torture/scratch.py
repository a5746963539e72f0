"""Where programs put what they break: in memory, where that is a disk, and gone when they end.

A program that is told to end (SIGTERM, SIGHUP, Ctrl-C) ends as by an error: what it has opened is
closed, and its directory removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["ending", "memory_disk", "scratch"]

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_PATIENCE_S: Final = 20.0


def memory_disk() -> Path | None:
    """Return where memory is the disk, if that is known: no power is cut, so it is durable."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Have a directory; it is removed in the end, also when this process is told to end.

    Who is told so while he removes it, for another reason, ends when it is gone.
    """
    with ending():
        parent = memory_disk() or Path(tempfile.gettempdir())
        directory = parent / f"kafkalog-{name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:  # before it exists: the end may be told as soon as it does
            directory.mkdir(0o700)
            yield directory
        finally:
            late: list[int] = []
            for number in _ENDING:  # once is enough
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, lambda number, _: late.append(number))
            _remove(directory)
        if late:
            sys.exit(128 + late[0])


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Let this process end as by an error when it is told to end."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while directory.exists() and time.monotonic() < deadline:  # who was killed may still be writing
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():
            time.sleep(0.01)
