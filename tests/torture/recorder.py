"""Records everything that is done to the files and directories below a root.

A recorder is a file system. It does what the real one does, and notes it as an act. What was
changed past it is found by `check_recorded`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.file_system import Data, FileSystem, Place
from tests.torture.acts import Act, Allocate, Names, Resize, Sync, Write

__all__ = ["Hook", "MissedActError", "Recorder", "Scan", "scan"]

_PIECE = 1 << 30


class MissedActError(AssertionError):
    """Something below the root was changed in a way that the recorder does not see."""


class Hook(Protocol):
    """Asked before each call below the root.

    It may raise OSError, which the caller gets instead; or return how many bytes at most a write
    may take, None for all.
    """

    def __call__(self, call: str, arguments: tuple[Any, ...], /) -> int | None: ...


class Scan:
    """Files and directories by number, as they are: where a recording begins."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.directories: dict[int, dict[str, int]] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        """The number of each (device, inode)."""
        self.count = 0
        """Numbers from here on are free."""

    def number(self, found: os.stat_result, known: int | None = None) -> int:
        """Return the number of a file or directory; that `known` is, or the next one."""
        inode = found.st_dev, found.st_ino
        if inode not in self.numbers:
            self.numbers[inode] = self.count if known is None else known
            self.count = max(self.count, self.numbers[inode] + 1)
        return self.numbers[inode]


def scan(root: Path, known: Mapping[str, int] | None = None, count: int = 0) -> Scan:
    """Read a directory tree; its root is number 0.

    Where the numbers of its paths are `known`, others begin at `count`.
    """
    made = Scan()
    made.number(os.stat(root))
    made.count = max(made.count, count)
    _scan(made, str(root), "", known or {})
    return made


def _scan(made: Scan, root: str, path: str, known: Mapping[str, int]) -> None:
    names = made.directories[made.number(os.stat(root + path))] = {}
    with os.scandir(root + path) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        below = f"{path}/{entry.name}"
        number = made.number(entry.stat(follow_symlinks=False), known.get(below[1:]))
        names[entry.name] = number
        if entry.is_dir(follow_symlinks=False):
            _scan(made, root, below, known)
        elif number not in made.files:
            made.files[number] = Path(entry.path).read_bytes()


class Recorder(FileSystem):
    """A file system for all threads while it is held; `acts` grows by what is done in one root."""

    def __init__(
        self, root: Path, *, begin: Scan | None = None, before: Hook | None = None
    ) -> None:
        self.root = str(root)
        self.begin = scan(root) if begin is None else begin
        self.acts: list[Act] = []
        self._before = before
        self._numbers = dict(self.begin.numbers)
        self._count = self.begin.count
        self._acting = threading.RLock()
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._held.enter_context(file_system.replaced(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._held.close()

    # --- what is below the root ------------------------------------------------------------------

    def is_below(self, target: Any) -> bool:
        """Tell whether a path, or what a descriptor has open, is below the root."""
        if isinstance(target, int):
            return self._known(target) is not None
        return isinstance(target, (str, os.PathLike)) and self._is_below(target)

    def _is_below(self, path: Any) -> bool:
        text = os.path.abspath(os.fspath(path))
        return text.startswith(self.root) and text[len(self.root) : len(self.root) + 1] in ("", "/")

    def _known(self, target: Any) -> int | None:
        """Return the number of a file or directory by its descriptor, or its path."""
        try:
            found = os.stat(target)
        except OSError:
            return None
        return self._numbers.get((found.st_dev, found.st_ino))

    def _number(self, target: Any) -> int:
        number = self._known(target)
        if number is None:
            raise MissedActError(f"{target}: was made unseen")
        return number

    def _new(self, path: Any) -> int:
        found = os.stat(path)
        self._numbers[found.st_dev, found.st_ino] = self._count
        self._count += 1
        return self._count - 1

    def _place(self, path: Any) -> tuple[int, str]:
        head, tail = os.path.split(os.path.abspath(os.fspath(path)))
        return self._number(head), tail

    def _ask(self, call: str, *arguments: Any) -> int | None:
        return None if self._before is None else self._before(call, arguments)

    def _ask_below(self, call: str, target: Place | int, *arguments: Any) -> int | None:
        if self._before is None or not self.is_below(target):
            return None
        return self._before(call, (target, *arguments))

    # --- the calls -------------------------------------------------------------------------------

    def open(self, path: Place, flags: int, mode: int = 0o777) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC):
            self._ask_below("open", path, flags)
            return super().open(path, flags, mode)
        with self._acting:
            if not self._is_below(path):
                fd = super().open(path, flags, mode)
                found = os.fstat(fd)
                self._numbers.pop((found.st_dev, found.st_ino), None)  # its inode is another's now
                return fd
            self._ask("open", path, flags)
            is_new = not os.path.lexists(path)
            fd = super().open(path, flags, mode)
            if is_new:
                directory, name = self._place(path)
                number = self._new(fd)
                self.acts.append(Names(((directory, name, number),), made=(number, False)))
            elif flags & os.O_TRUNC:
                self.acts.append(Resize(self._number(fd), 0))
            return fd

    def listdir(self, directory: Place) -> list[str]:
        self._ask_below("listdir", directory)
        return super().listdir(directory)

    def scandir(
        self, directory: Place
    ) -> contextlib.AbstractContextManager[Iterator[os.DirEntry[str]]]:
        self._ask_below("scandir", directory)
        return super().scandir(directory)

    def flock(self, fd: int, operation: int) -> None:
        self._ask_below("flock", fd, operation)
        super().flock(fd, operation)

    def pread(self, fd: int, size: int, position: int) -> bytes:
        most = self._ask_below("pread", fd, size, position)
        return super().pread(fd, size if most is None else most, position)

    def preadv(self, fd: int, target: memoryview, position: int) -> int:
        most = self._ask_below("pread", fd, len(target), position)
        return super().preadv(fd, target[:most], position)

    def pwrite(self, fd: int, data: Data, position: int) -> int:
        with self._acting:
            number = self._known(fd)
            if number is None:
                return super().pwrite(fd, data, position)
            most = self._ask("pwrite", fd, data, position)
            piece = memoryview(data).cast("B")[: _PIECE if most is None else most]
            count = super().pwrite(fd, piece, position)
            self.acts.append(Write(number, position, bytes(piece[:count])))
            return count

    def ftruncate(self, fd: int, size: int) -> None:
        with self._acting:
            number = self._known(fd)
            if number is not None:
                self._ask("ftruncate", fd, size)
            super().ftruncate(fd, size)
            if number is not None:
                self.acts.append(Resize(number, size))

    def posix_fallocate(self, fd: int, position: int, size: int) -> None:
        with self._acting:
            number = self._known(fd)
            if number is not None:
                self._ask("posix_fallocate", fd, position, size)
            super().posix_fallocate(fd, position, size)
            if number is not None:
                self.acts.append(Allocate(number, position + size))

    def fsync(self, fd: int) -> None:
        self._sync("fsync", super().fsync, fd)

    def fdatasync(self, fd: int) -> None:
        self._sync("fdatasync", super().fdatasync, fd)

    def _sync(self, name: str, sync: Callable[[int], None], fd: int) -> None:
        number = self._known(fd)
        if number is None:
            sync(fd)
            return
        with self._acting:
            try:
                self._ask(name, fd)
                sync(fd)
            except OSError:
                self.acts.append(Sync(number, failed=True))
                raise
            self.acts.append(Sync(number))

    def replace(self, source: Place, target: Place) -> None:
        if not (self._is_below(source) or self._is_below(target)):
            super().replace(source, target)
            return
        with self._acting:
            self._ask("replace", source, target)
            gone, put = self._place(source), self._place(target)
            number, replaced = self._known(source), self._known(target)
            super().replace(source, target)
            if number is None:
                raise MissedActError(f"{source}: was made unseen")
            if number != replaced:  # two names of one file stay
                self.acts.append(Names(((*put, number), (*gone, None))))

    def link(self, source: Place, target: Place) -> None:
        if not self._is_below(target):
            super().link(source, target)
            return
        with self._acting:
            self._ask("link", source, target)
            super().link(source, target)
            self.acts.append(Names(((*self._place(target), self._number(source)),)))

    def unlink(self, path: Place) -> None:
        self._remove("unlink", super().unlink, path)

    def rmdir(self, path: Place) -> None:
        self._remove("rmdir", super().rmdir, path)

    def _remove(self, name: str, remove: Callable[[Place], None], path: Place) -> None:
        if not self._is_below(path):
            remove(path)
            return
        with self._acting:
            self._ask(name, path)
            remove(path)
            self.acts.append(Names(((*self._place(path), None),)))

    def mkdir(self, path: Place) -> None:
        if not self._is_below(path):
            super().mkdir(path)
            return
        with self._acting:
            self._ask("mkdir", path)
            super().mkdir(path)
            number = self._new(path)
            self.acts.append(Names(((*self._place(path), number),), made=(number, True)))

    def utime(self, path: Place, times_ns: tuple[int, int]) -> None:
        """Set the times of a file. They are hints, so no act: only the hook hears of it."""
        self._ask_below("utime", path)
        super().utime(path, times_ns)
