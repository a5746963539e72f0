"""Records everything that is done to the files and directories below a root.

In place of the functions of `os` through which anything changes, or becomes durable, stand such
that do the same and note it as an act. Ways to write that it does not know are refused where it
can see them, and found by `check` where it cannot.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tests.torture.acts import Act, Allocate, Names, Resize, Sync, Write

__all__ = ["Hook", "MissedActError", "Recorder", "Scan", "scan"]

_UNKNOWN_WAYS = ("pwritev", "writev", "symlink", "sendfile", "copy_file_range", "splice", "mkfifo")
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


class Recorder:
    """A context manager, for one root and all threads; `acts` grows while it is held."""

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
        self._real: dict[str, Callable[..., Any]] = {}
        self._real_open = builtins.open

    # --- in place of the functions of `os` -------------------------------------------------------

    def __enter__(self) -> Self:
        ways: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "write": self._write,
            "pwrite": self._pwrite,
            "ftruncate": self._truncate,
            "truncate": self._truncate,
            "posix_fallocate": self._allocate,
            "fsync": functools.partial(self._sync, "fsync"),
            "fdatasync": functools.partial(self._sync, "fdatasync"),
            "replace": functools.partial(self._rename, "replace"),
            "rename": functools.partial(self._rename, "rename"),
            "link": self._link,
            "unlink": functools.partial(self._unlink, "unlink"),
            "remove": functools.partial(self._unlink, "remove"),
            "mkdir": self._mkdir,
            "rmdir": functools.partial(self._unlink, "rmdir"),
            "utime": self._utime,
            **{name: functools.partial(self._refuse, name) for name in _UNKNOWN_WAYS},
        }
        self._real = {name: getattr(os, name) for name in ways}
        for name, way in ways.items():
            setattr(os, name, way)
        for module in (builtins, io):
            setattr(module, "open", self._plain_open)  # noqa: B010  (mypy knows better)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        for module in (builtins, io):
            setattr(module, "open", self._real_open)  # noqa: B010

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

    def _refuse(self, name: str, *args: Any, **kwargs: Any) -> Any:
        for given in args:
            if self.is_below(given):
                raise MissedActError(f"os.{name}{args}: is not recorded")
        return self._real[name](*args, **kwargs)

    def _plain_open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(file, (str, os.PathLike))
        if set(mode) & set("wax+") and is_path and self._is_below(file):
            raise MissedActError(f"open({file}, {mode!r}): only `fs.files` writes")
        if self._before is not None and is_path and self._is_below(file):
            self._ask("open", file, os.O_RDONLY)
        return self._real_open(file, mode, *args, **kwargs)

    # --- the calls -------------------------------------------------------------------------------

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        real = self._real["open"]
        if dir_fd is not None:
            return int(real(path, flags, mode, dir_fd=dir_fd))
        if not flags & (os.O_CREAT | os.O_TRUNC):
            if self._before is not None and self._is_below(path):
                self._ask("open", path, flags)
            return int(real(path, flags, mode))
        with self._acting:
            if not self._is_below(path):
                fd = int(real(path, flags, mode))
                found = os.fstat(fd)
                self._numbers.pop((found.st_dev, found.st_ino), None)  # its inode is another's now
                return fd
            self._ask("open", path, flags)
            is_new = not os.path.lexists(path)
            fd = int(real(path, flags, mode))
            if is_new:
                directory, name = self._place(path)
                number = self._new(fd)
                self.acts.append(Names(((directory, name, number),), made=(number, False)))
            elif flags & os.O_TRUNC:
                self.acts.append(Resize(self._number(fd), 0))
            return fd

    def _write(self, fd: int, data: Any) -> int:
        with self._acting:
            number = self._known(fd)
            if number is None:
                return int(self._real["write"](fd, data))
            most = self._ask("write", fd, data)
            piece = memoryview(data).cast("B")[: _PIECE if most is None else most]
            position = os.lseek(fd, 0, os.SEEK_CUR)
            count = int(self._real["write"](fd, piece))
            self.acts.append(Write(number, position, bytes(piece[:count])))
            return count

    def _pwrite(self, fd: int, data: Any, position: int) -> int:
        with self._acting:
            number = self._known(fd)
            if number is None:
                return int(self._real["pwrite"](fd, data, position))
            most = self._ask("pwrite", fd, data, position)
            piece = memoryview(data).cast("B")[: _PIECE if most is None else most]
            count = int(self._real["pwrite"](fd, piece, position))
            self.acts.append(Write(number, position, bytes(piece[:count])))
            return count

    def _truncate(self, target: Any, size: int) -> None:
        with self._acting:
            number = self._known(target)
            if number is not None:
                self._ask("ftruncate", target, size)
            self._real["truncate"](target, size)
            if number is not None:
                self.acts.append(Resize(number, size))

    def _allocate(self, fd: int, offset: int, length: int) -> None:
        with self._acting:
            number = self._known(fd)
            if number is not None:
                self._ask("posix_fallocate", fd, offset, length)
            self._real["posix_fallocate"](fd, offset, length)
            if number is not None:
                self.acts.append(Allocate(number, offset + length))

    def _sync(self, name: str, fd: Any) -> None:
        number = self._known(fd)
        if number is None:
            self._real[name](fd)
            return
        with self._acting:
            try:
                self._ask(name, fd)
                self._real[name](fd)
            except OSError:
                self.acts.append(Sync(number, failed=True))
                raise
            self.acts.append(Sync(number))

    def _rename(self, name: str, source: Any, target: Any, **kwargs: Any) -> None:
        if not (self._is_below(source) or self._is_below(target)):
            self._real[name](source, target, **kwargs)
            return
        with self._acting:
            self._ask(name, source, target)
            gone, put = self._place(source), self._place(target)
            number, replaced = self._known(source), self._known(target)
            self._real[name](source, target, **kwargs)
            if number is None:
                raise MissedActError(f"{source}: was made unseen")
            if number != replaced:  # two names of one file stay
                self.acts.append(Names(((*put, number), (*gone, None))))

    def _link(self, source: Any, target: Any, **kwargs: Any) -> None:
        if not self._is_below(target):
            self._real["link"](source, target, **kwargs)
            return
        with self._acting:
            self._ask("link", source, target)
            self._real["link"](source, target, **kwargs)
            self.acts.append(Names(((*self._place(target), self._number(source)),)))

    def _unlink(self, name: str, path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            if self._known(dir_fd) is not None:
                raise MissedActError(f"os.{name}({path!r}, dir_fd=...): is not recorded")
            self._real[name](path, dir_fd=dir_fd)
            return
        if not self._is_below(path):
            self._real[name](path)
            return
        with self._acting:
            self._ask(name, path)
            self._real[name](path)
            self.acts.append(Names(((*self._place(path), None),)))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or not self._is_below(path):
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            return
        with self._acting:
            self._ask("mkdir", path)
            self._real["mkdir"](path, mode)
            number = self._new(path)
            self.acts.append(Names(((*self._place(path), number),), made=(number, True)))

    def _utime(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Times are hints, and no state of a disk has them: only the hook hears of it."""
        if not isinstance(path, int) and self._is_below(path):
            self._ask("utime", path)
        self._real["utime"](path, *args, **kwargs)
