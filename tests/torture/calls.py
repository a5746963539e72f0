"""Calls of the operating system below a log's root: counted, and one of them fails.

Also what a power cut may leave of what they did, where a sync is among those that failed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, Final, Self

from tests.torture.acts import Names, Sync
from tests.torture.checks import Snapshot, snapshot
from tests.torture.disk import SECTOR, Disk, State
from tests.torture.memory import elsewhere
from tests.torture.recorder import Recorder
from tests.torture.repeatable import booted

__all__ = ["KINDS", "READS", "Calls", "CutReader", "DiedError", "Disturbed"]

STAYS: Final = "+"
SHORT: Final = "SHORT"
_FULL: Final = ("ENOSPC", "ENOSPC+", "EDQUOT")
_BROKEN: Final = ("EIO", "EIO+")
KINDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "open": ("EIO", "EMFILE", "EINTR"),
        "create": ("EIO", "EMFILE", "EINTR", *_FULL),
        "pread": ("EIO", "EINTR", SHORT),
        "listdir": ("EIO", "EMFILE", "EINTR"),
        "scandir": ("EIO", "EMFILE", "EINTR"),
        "stat": ("EIO",),
        "flock": ("ENOLCK", "EIO"),
        "pwrite": (*_BROKEN, "EINTR", SHORT, *_FULL),
        "ftruncate": ("EIO", "EINTR"),
        "posix_fallocate": ("EIO", "EINTR", *_FULL),
        "fsync": (*_BROKEN, "EINTR", *_FULL),
        "fdatasync": (*_BROKEN, "EINTR", *_FULL),
        "replace": ("EIO", *_FULL),
        "link": ("EIO", *_FULL),
        "mkdir": ("EIO", *_FULL),
        "unlink": ("EIO",),
        "rmdir": ("EIO",),
        "utime": ("EIO",),
    }
)
"""How a call may fail; `create` is an `open` that makes a file.

With a `+` so do all later ones that may fail like it: `ENOSPC+` is a full disk, `EIO+` one that
takes no data any more.
"""
READS: Final = ("open", "pread", "listdir", "scandir", "stat", "flock")
"""Calls that change nothing."""
_AROUND: Final = frozenset({"genericpath", "posixpath", "pathlib", "glob", "os"})
"""Modules through which the library makes calls; others, as of the tests, make their own."""


class DiedError(BaseException):
    """The process is dead: no call of it is done any more."""


class Calls:
    """A hook that counts the calls below the root, and lets the n-th fail; 0 for none.

    The process dies before the call number `death`; 0 for none.
    """

    def __init__(self, n: int = 0, kind: str = "", death: int = 0) -> None:
        self.names: list[str] = []
        self.is_armed = False
        self.has_died = False
        self.failed: list[str] = []
        """The calls that failed, with what they were about."""
        self._n = n
        self._kind = kind.removesuffix(STAYS)
        self._stays = kind.endswith(STAYS)
        self._death = death

    @contextlib.contextmanager
    def dying(self, death: int) -> Iterator[None]:
        """Let a process do what it does in this block, and die before that call."""
        mine = vars(self).copy()
        vars(self).update(vars(Calls(death=death)))
        self.is_armed = True
        try:
            yield
        except (Exception, DiedError):
            if not self.has_died:
                raise
        finally:
            vars(self).update(mine)

    def __call__(self, call: str, arguments: tuple[Any, ...]) -> int | None:
        """Count a call; raises OSError where it is to fail, returns how much it may write."""
        if not self.is_armed:
            return None
        if call == "open" and arguments[1] & os.O_CREAT and not os.path.exists(arguments[0]):
            call = "create"
        self.names.append(call)
        if self._death and len(self.names) >= self._death:
            self.has_died = True
            raise DiedError
        is_chosen = len(self.names) == self._n
        goes_on = self._stays and len(self.names) > self._n and self._kind + STAYS in KINDS[call]
        if not (is_chosen or goes_on):
            return None
        if self._kind == SHORT:
            size = arguments[1] if call == "pread" else len(memoryview(arguments[1]).cast("B"))
            most = max(1, size // 2)
            if call == "pwrite" and self._death == self._n + 1:
                # Nobody writes the rest. A kernel and a disk stop where a sector ends.
                most -= (arguments[2] + most) % SECTOR
                if most <= 0:
                    return None
            self.failed.append(f"{call} {_about(arguments)}")
            return most
        self.failed.append(f"{call} {_about(arguments)}")
        code = getattr(errno, self._kind)
        name = arguments[0] if isinstance(arguments[0], (str, os.PathLike)) else None
        raise OSError(code, os.strerror(code), *(() if name is None else (os.fspath(name),)))


def _is_the_librarys(frame: FrameType | None) -> bool:
    """Tell whether it is the library that makes a call."""
    while frame is not None and frame.f_globals["__name__"] in _AROUND:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals["__name__"]).startswith("kafkalog")


def _about(arguments: tuple[Any, ...]) -> str:
    target = arguments[0]
    if isinstance(target, int):
        try:
            target = os.readlink(f"/proc/self/fd/{target}")
        except OSError:
            return f"descriptor {target}"
    return "/".join(Path(target).parts[-2:])


class Disturbed:
    """A recording of a log's directory in which a call fails; reads are calls, too."""

    def __init__(self, root: Path, calls: Calls) -> None:
        self.recorder = Recorder(root, before=calls)
        self._calls = calls
        self._stat = os.stat
        begin = self.recorder.begin
        self._disk, self._trusting = Disk(begin), Disk(begin)
        self._directories = set(begin.directories)
        self._has_failed = False
        self._followed = 0

    def __enter__(self) -> Self:
        self.recorder.__enter__()
        setattr(os, "stat", self._stat_below)  # noqa: B010  (mypy knows better)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.stat = self._stat
        self.recorder.__exit__(kind, fault, at)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Do something else meanwhile, in another directory, that is no part of the recording."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _stat_below(self, target: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        """Do what `os.stat` does: the library asks the system itself whether a file is there."""
        if _is_the_librarys(sys._getframe(1)) and self.recorder.is_below(target):
            self._calls("stat", (target, *args))
        return self._stat(target, *args, **kwargs)

    def cuts(self) -> Iterator[State]:
        """Yield what a power cut may leave: without anything that no sync has made durable.

        And, after a failed sync, with all but its pages, which later syncs do not write. So it is
        with files. A directory is metadata: file systems keep what they could not write of it, or
        refuse everything from then on; a sync of it that succeeds later holds.
        """
        self._follow()
        yield self._disk.state("none", {})
        if self._has_failed:
            kept = {number for number, _ in self._trusting.unsynced()}
            numbers = (number for number, _ in self._disk.unsynced())
            yield self._disk.state("limbo", {number: None for number in numbers if number in kept})

    def may_lose(self, name: str) -> bool:
        """Tell whether a power cut may take away a name that was given."""
        self._follow()
        return self._disk.may_lose(name)

    def _follow(self) -> None:
        """Do to the disks what was done since they were looked at."""
        new, self._followed = self.recorder.acts[self._followed :], len(self.recorder.acts)
        for act in new:
            if isinstance(act, Names) and act.made is not None and act.made[1]:
                self._directories.add(act.made[0])
            if isinstance(act, Sync) and act.failed:
                if act.of in self._directories:
                    continue
                self._has_failed = True
            self._disk.apply(act)
            self._trusting.apply(Sync(act.of) if isinstance(act, Sync) else act)

    def digest(self) -> bytes:
        """Tell directories apart by what is there, and what a power cut may leave of it."""
        states = [*self.cuts(), self._disk.everything()]
        return b"".join(state.digest() for state in states)


class CutReader:
    """Reads what a log shows after a power cut; equal trees are read once."""

    def __init__(self, scratch: Path) -> None:
        self._root = scratch / "cut"
        self._known: dict[bytes, Snapshot] = {}

    def read(self, state: State) -> Snapshot:
        """Return what the tree shows in another boot of this host; raises KafkaLogError."""
        digest = state.digest()
        found = self._known.get(digest)
        if found is None:
            state.write(self._root)
            try:
                with elsewhere(), booted("after the cut"):
                    found = self._known[digest] = snapshot(self._root)
            finally:
                shutil.rmtree(self._root)
        return found
