"""Makes the n-th durable act of a piece of work fail, or the process die there.

Or lets a sync fail as Linux does. The seam is `fs.files`: everything that changes a
disk goes through its functions.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.fs import files

ACTS = (
    "write_at",
    "truncate",
    "preallocate",
    "sync_file",
    "sync_data",
    "sync_path",
    "sync_directory",
    "rename",
    "link",
    "remove",
    "remove_directory",
    "make_directory",
    "create",
    "write_atomically",
    "set_times",
)


class Died(BaseException):
    """The process was killed here: no handler of ours may repair anything."""


class Acts:
    """Counts durable acts, and raises `fault` instead of (or, with `after`, behind) the n-th.

    A process that dies before an act leaves what it leaves when it dies behind the one before: so
    tests of deaths take one of the two.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, n: int, fault: BaseException, *, after: bool = False
    ) -> None:
        self.count = 0
        self.fired = False
        self._n, self._fault, self._after = n, fault, after
        self._counting = threading.Lock()  # syncs may run side by side
        for name in ACTS:
            patch.setattr(files, name, self._wrapped(getattr(files, name)))

    def _wrapped(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.fired and isinstance(self._fault, Died):
                raise self._fault
            with self._counting:
                self.count += 1
                is_chosen = self.count == self._n
            if is_chosen and not self._after:
                self.fired = True
                raise self._fault
            result = act(*args, **kwargs)
            if is_chosen:
                self.fired = True
                raise self._fault
            return result

        return wrapper


def each_act(
    work: Callable[[], None], n: int, fault: BaseException, *, after: bool = False
) -> bool:
    """Run `work` with its n-th act failing; False when it has fewer acts."""
    with pytest.MonkeyPatch.context() as patch:
        acts = Acts(patch, n, fault, after=after)
        try:
            work()
        except (Exception, Died):
            if not acts.fired:
                raise
        return acts.fired


class LyingPages:
    """What a power cut would leave of each file, on a disk where a sync fails once.

    After that its pages are taken for clean: the next sync of the file does not write them, and
    succeeds.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        code: int,
        is_refused: Callable[[str], bool],
        *,
        kills: bool = False,
    ) -> None:
        """`is_refused` is asked with the name of each file that is synced, until it says yes.

        `kills`: who waits for that sync is killed then, and nobody gets to know of the failure.
        """
        self.failures: list[str] = []
        self._kills = kills
        self._unwritten: dict[int, list[tuple[int, bytes]]] = {}
        self._disk: dict[int, bytearray] = {}
        self._code, self._is_refused = code, is_refused
        self._write_at, self._truncate, self._create = files.write_at, files.truncate, files.create
        self._remove = files.remove
        for name in ("write_at", "truncate", "create", "remove"):
            patch.setattr(files, name, getattr(self, name))
        for name in ("sync_file", "sync_data"):
            patch.setattr(files, name, self._sync)

    def kept(self, path: Path) -> bytes:
        """Return what the disk has of a file."""
        return bytes(self._disk.get(path.stat().st_ino, b""))

    def write_at(self, fd: int, data: files.Buffer, position: int) -> None:
        self._write_at(fd, data, position)
        self._unwritten.setdefault(os.fstat(fd).st_ino, []).append((position, bytes(data)))

    def truncate(self, fd: int, size: int) -> None:
        self._truncate(fd, size)
        inode = os.fstat(fd).st_ino
        unwritten = self._unwritten.pop(inode, [])
        self._unwritten[inode] = [
            (position, data[: size - position]) for position, data in unwritten if position < size
        ]
        del self._disk.setdefault(inode, bytearray())[size:]

    def create(self, path: Path, data: files.Buffer = b"") -> None:
        self._create(path)
        inode = path.stat().st_ino  # it may have been that of a removed file
        self._unwritten.pop(inode, None)
        self._disk.pop(inode, None)
        if data:
            self._create(path, data)

    def remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            inode = path.stat().st_ino  # the next file may get it
            self._unwritten.pop(inode, None)
            self._disk.pop(inode, None)
        self._remove(path)

    def _sync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        inode = os.fstat(fd).st_ino
        unwritten = self._unwritten.pop(inode, [])
        if not self.failures and self._is_refused(path.name):
            self.failures.append(path.name)
            if self._kills:
                raise Died
            raise OSError(self._code, os.strerror(self._code), str(path))  # as `files` names it
        disk = self._disk.setdefault(inode, bytearray())
        for position, data in unwritten:
            disk.extend(bytes(max(0, position - len(disk))))
            disk[position : position + len(data)] = data
