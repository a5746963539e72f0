"""How much memory processes have resident, at most."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

MIB: Final = 1 << 20
_EVERY_S: Final = 0.25
"""A look costs some 10 ms of a processor."""


class Peak:
    """The most that was seen; `mib` is complete once its block has ended."""

    def __init__(self) -> None:
        self.mib = 0.0


@contextmanager
def peak_of_tree(pid: int | None = None, *, without: int | None = None) -> Iterator[Peak]:
    """Watch the resident memory of a process and of all below it, those of `without` left out.

    It is the sum over the processes of what each has resident, so pages that two of them share
    count twice.
    """
    found, is_over = Peak(), threading.Event()

    def watch() -> None:
        while True:
            found.mib = max(found.mib, _tree(pid or os.getpid(), without) / MIB)
            if is_over.wait(_EVERY_S):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        is_over.set()
        watcher.join()


def reset_peak(pid: int | None = None) -> None:
    """Let `peak_mib` count from now on."""
    Path(f"/proc/{pid or os.getpid()}/clear_refs").write_text("5")


def peak_mib(pid: int | None = None) -> float:
    """Return the most that one process had resident, in MiB."""
    lines = Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _tree(pid: int, without: int | None) -> int:
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        left_out = _below(without) if without is not None else set()
        for process in [root, *root.children(recursive=True)]:
            if process.pid not in left_out:
                with suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
    return total


def _below(pid: int) -> set[int]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return {pid, *(process.pid for process in root.children(recursive=True))}
    return {pid}
