"""Every lock: only this module locks.

- `RootLock` is Kafka's `.lock`, held *shared* by whoever writes or cleans. A broker takes it
  exclusively, so the two exclude each other. On Linux it is an open-file-description lock, which
  conflicts with Java's POSIX lock and, unlike it, survives the closing of other descriptors of the
  file. Elsewhere it is a `flock` lock of the same file, and who takes it asks for Java's lock then.
- `FileLock` and `SegmentsLock` are `flock` locks of ours. Every acquisition opens a descriptor of
  its own, so two threads of one process exclude each other like two processes. A process that dies
  drops its locks; a forked child closes the descriptors that it inherits, and holds none.

The order is: cleaner lock < commit lock < segments locks (ascending). No lock is upgraded from
shared to exclusive, and none is held across a yield or code of the user. A process that waits for
ours for ten seconds says in a warning who holds it (`lock_wait`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kafkalog.errors import LockedByBrokerError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import file_system, files
from kafkalog.storage_engine.fs.lock_wait import PATIENCE_S, reported

_LOCK_TRIES = 10
_LOCK_PAUSE_S = 0.05
_HAS_DESCRIPTION_LOCKS: Final[bool] = sys.platform == "linux"
_SET_LOCK: Final = 37
"""Linux: F_OFD_SETLK. A Python that was built upon an old C library lacks the name."""
_GET_LOCK: Final = 36 if _HAS_DESCRIPTION_LOCKS else fcntl.F_GETLK
_NO_PROCESS: Final = -1
"""The `l_pid` of a lock that belongs to no process, as those of `flock` do."""
# struct flock: l_type, l_whence, l_start, l_len, l_pid; BSD and macOS have l_type after l_pid.
_FLOCK, _TYPE, _PID = (
    (struct.Struct("hhqqi4x"), 0, 4) if _HAS_DESCRIPTION_LOCKS else (struct.Struct("qqihh"), 3, 2)
)

_descriptors: set[int] = set()
_generation = 0
"""Counts forks: a descriptor that another one opened is not ours to close."""
_mutexes: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
# Nobody forks within it. It may be taken twice: a generator that holds a lock may be finalised by
# the garbage collector while its thread is in here.
_guard = threading.RLock()
_asking = threading.Lock()


def _forget_inherited_locks() -> None:
    """In a forked child: close the parent's lock descriptors, or its death would not free them."""
    # Another thread's mutex may be held for ever in the child.
    global _guard, _asking, _generation  # noqa: PLW0603
    _generation += 1
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()
    _mutexes.clear()
    _guard = threading.RLock()
    _asking = threading.Lock()


def _before_fork() -> None:
    _guard.acquire()


def _after_fork() -> None:
    _guard.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_inherited_locks
)


class _Descriptor:
    """An open lock file: a context manager, and closed by `close`.

    If the file is missing and was not, or cannot be, created, it has no number (None).
    """

    __slots__ = ("_generation", "fd")

    def __init__(self, path: str, *, writable: bool, create: bool = True) -> None:
        self.fd: int | None
        with _guard:
            try:
                # To write, even if only asked: where fcntl emulates `flock`, as on NFS, it has to.
                self.fd = files.open_to_write(path, create=create)
            except OSError as fault:
                if not create and isinstance(fault, FileNotFoundError):
                    self.fd = None
                elif writable or fault.errno not in files.NOT_WRITABLE:
                    raise
                try:
                    self.fd = files.open_to_read(path)
                except FileNotFoundError:
                    self.fd = None
            if self.fd is not None:
                _descriptors.add(self.fd)
            self._generation = _generation

    def close(self) -> None:
        """Close the file, and so drop its lock."""
        # In a forked child the descriptor is closed already, and its number may be another lock's.
        with _guard:
            if self.fd is not None and self._generation == _generation:
                _descriptors.discard(self.fd)
                os.close(self.fd)

    def __enter__(self) -> int | None:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self.close()


class _refused:
    """Raise a StorageError for an OSError of a file system without locks."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, fault: BaseException | None, __: object) -> None:
        if isinstance(fault, OSError) and not isinstance(fault, BlockingIOError):
            files.pass_on(fault)
            what = f"this file system has no locks ({fault.strerror})"
            raise StorageError(f"{self._path}: {what}") from fault


def _flock(fd: int, operation: int, path: Path) -> None:
    with _refused(path):
        file_system.current.flock(fd, operation)


def _needs_writing(fault: StorageError) -> bool:
    """Tell whether a lock was refused since the file is open to be read only, as NFS does."""
    return isinstance(fault.__cause__, OSError) and fault.__cause__.errno == errno.EBADF


def _whole_file(kind: int) -> bytes:
    """Return the `struct flock` of a lock of a kind on a whole file."""
    fields = [0] * 5
    fields[_TYPE] = kind
    return _FLOCK.pack(*fields)


def _conflicting(fd: int, kind: int) -> tuple[int, int]:
    """Return the kind and the process of a lock that conflicts with one on a whole file.

    The kind is F_UNLCK if nobody holds it.
    """
    answer = file_system.current.fcntl(fd, _GET_LOCK, _whole_file(kind))
    fields = _FLOCK.unpack(answer)
    return fields[_TYPE], fields[_PID]


def _is_current(fd: int, path: str) -> bool:
    """Tell whether an open file still is the one of that name."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


class FileLock:
    """A `flock` lock on one file, for processes and for threads.

    A directory that cannot be written is locked `shared` only if its lock file exists: where it
    does not, nobody who could write there has ever been. Raises FileNotFoundError if the directory
    is missing. With `create=False` nothing is created: a file that is not there is nobody's, and
    who takes its lock holds none.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        before: Sequence[Path] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Name the lock.

        A process that waits for it longer than `patience_s` warns who holds it. The warning also
        says who holds the locks of `before`, because the holder may be waiting for those.
        """
        self.path = path
        self._name = str(path)
        self._create = create
        self._names = [self._name, *map(str, before)]
        self._patience_s = patience_s

    @contextlib.contextmanager
    def exclusive(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock alone; with `wait=False` yield False at once when it is taken."""
        with _guard:
            mutex = _mutexes[self._name]
        if not mutex.acquire(blocking=False):
            if not wait:
                yield False
                return
            with reported(self._names, self._patience_s):
                mutex.acquire()
        try:
            operation = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
            held = self._take(operation, writable=True)
            if held is None:
                yield False
                return
            with held:
                yield True
        finally:
            # A forked child has a new mutex; releasing its parent's would be harmless but wrong.
            if mutex.locked():
                mutex.release()

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock together with other sharers."""
        return self._held(fcntl.LOCK_SH)

    def is_held_alone(self) -> bool:
        """Tell whether somebody holds the lock exclusively; never waits.

        Tried for as a sharer: askers do not take each other for the holder, but who tries for it
        exclusively in that instant, without waiting, misses it.
        """
        return self._is_refused(fcntl.LOCK_SH)

    def is_held(self) -> bool:
        """The same for any holder; two processes that ask at once may take each other for one."""
        with _asking:
            return self._is_refused(fcntl.LOCK_EX)

    def _is_refused(self, operation: int) -> bool:
        with _Descriptor(self._name, writable=False, create=self._create) as fd:
            if fd is None:
                return False
            try:
                _flock(fd, operation | fcntl.LOCK_NB, self.path)
            except BlockingIOError:
                return True
            return False

    def passing(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock alone for a moment; like `shared`, also where nothing can be written.

        NFS locks alone only what may be written. There, who may only read holds it with others.
        """
        return self._held(fcntl.LOCK_EX)

    @contextlib.contextmanager
    def _held(self, operation: int) -> Iterator[None]:
        held = self._take(operation, writable=False)
        assert held is not None
        with held:
            yield

    def _wait(self, fd: int, operation: int) -> None:
        """Lock an open file; with LOCK_NB in the operation raise BlockingIOError instead."""
        try:
            _flock(fd, operation | fcntl.LOCK_NB, self.path)
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
            with reported(self._names, self._patience_s):
                _flock(fd, operation, self.path)

    def _take(self, operation: int, *, writable: bool) -> _Descriptor | None:
        """Lock the file that bears the name now, until it is closed; None if it is taken.

        The directory of a deleted topic is renamed with its locks. A process that waited for one of
        them then holds the lock of another directory than the one of that name.
        """
        while True:
            opened = _Descriptor(self._name, writable=writable, create=self._create)
            is_held = False
            try:
                if opened.fd is None:
                    is_held = True
                    return opened
                try:
                    self._wait(opened.fd, operation)
                except StorageError as fault:
                    if writable or not _needs_writing(fault):
                        raise
                    self._wait(opened.fd, fcntl.LOCK_SH)
                if _is_current(opened.fd, self._name):
                    is_held = True
                    return opened
            except BlockingIOError:
                return None
            finally:
                if not is_held:
                    opened.close()


class SegmentsLock:
    """The lock of one partition's set of files: shared to list and open, exclusive to change it.

    Everyone passes the turnstile, one by one, and a writer keeps it while it waits. Later readers
    queue behind it, so a stream of them cannot starve it. (Held together it would never be free.)
    """

    def __init__(self, directory: Path, *, patience_s: float = PATIENCE_S) -> None:
        path = directory / layout.SEGMENTS_LOCK
        self._lock = FileLock(path, patience_s=patience_s)
        self._turnstile = FileLock(
            directory / layout.SEGMENTS_TURNSTILE, before=[path], patience_s=patience_s
        )

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the set of files alone."""
        with self._turnstile.exclusive(), self._lock.exclusive():
            yield

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the set of files together with other readers."""
        with contextlib.ExitStack() as held:
            with self._turnstile.passing():
                held.enter_context(self._lock.shared())
            yield


class RootLock:
    """Kafka's `.lock` in the root: shared by whoever writes or cleans; never unlinked by us.

    Exclusive as long as a directory changes its owner.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / layout.ROOT_LOCK
        self._name = str(self.path)

    def shared(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Keep brokers out; yields a check that the lock still is on the file of that name.

        Raises LockedByBrokerError when a broker holds the directory.
        """
        return self._held(fcntl.F_RDLCK)

    def exclusive(
        self, *, wait_s: float = 0.0
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Keep everybody out, brokers and our own writers and cleaners; yields the same check.

        Waits so many seconds for those that are at work, then raises LockedByBrokerError.
        """
        return self._held(fcntl.F_WRLCK, wait_s)

    def is_held_alone(self) -> bool:
        """Return whether a broker, an adoption or a release holds the directory; or StorageError.

        Takes and creates nothing, so it may be asked for a directory that cannot be written.
        """
        try:
            fd = files.open_listed(self.path)
        except FileNotFoundError:
            return False
        with files.closing(fd), _refused(self.path):
            kind, _ = _conflicting(fd, fcntl.F_RDLCK)
        if kind == fcntl.F_UNLCK and not _HAS_DESCRIPTION_LOCKS:
            return FileLock(self.path, create=False).is_held_alone()
        return kind != fcntl.F_UNLCK

    @contextlib.contextmanager
    def _held(self, kind: int, wait_s: float = 0.0) -> Iterator[Callable[[], None]]:
        deadline = time.monotonic() + wait_s
        for _ in range(_LOCK_TRIES):
            with _Descriptor(self._name, writable=True) as fd:
                assert fd is not None
                while not self._lock(fd, kind):
                    if time.monotonic() >= deadline:
                        raise self._taken(kind)
                    time.sleep(_LOCK_PAUSE_S)
                if not _is_current(fd, self._name):
                    continue  # a broker that shut down deleted the file between open and lock
                yield functools.partial(self._check, fd)
                return
        raise LockedByBrokerError(f"{self.path}: the lock file is replaced again and again")

    def _taken(self, kind: int) -> LockedByBrokerError:
        if kind == fcntl.F_RDLCK:
            return LockedByBrokerError(
                f"{self.path}: a Kafka broker holds this directory, or kafkalog adopts or releases "
                "it; stop the broker, or open the log with read_only=True"
            )
        return LockedByBrokerError(
            f"{self.path}: a Kafka broker holds this directory, or a process of kafkalog writes to "
            "it or cleans it; stop that first"
        )

    def _lock(self, fd: int, kind: int) -> bool:
        with _refused(self.path), contextlib.suppress(BlockingIOError, PermissionError):
            if _HAS_DESCRIPTION_LOCKS:
                file_system.current.fcntl(fd, _SET_LOCK, _whole_file(kind))
                return True
            operation = fcntl.LOCK_SH if kind == fcntl.F_RDLCK else fcntl.LOCK_EX
            file_system.current.flock(fd, operation | fcntl.LOCK_NB)
            found, process = _conflicting(fd, kind)
            if found == fcntl.F_UNLCK or process == _NO_PROCESS:  # none, or our own
                return True
            file_system.current.flock(fd, fcntl.LOCK_UN)
        return False

    def _check(self, fd: int) -> None:
        if not _is_current(fd, self._name):
            raise LockedByBrokerError(
                f"{self.path}: the lock file was replaced while it was held; "
                "a Kafka broker runs, or ran, on this directory"
            )


def lock_fault(directory: Path) -> str | None:
    """Say why the file system of a directory has no locks; None where they work.

    Creates nothing, waits for nobody: the directory is locked, shared, for an instant.
    """
    try:
        fd = files.open_directory(directory)
    except OSError as fault:
        files.pass_on(fault)
        return f"{directory}: cannot be opened: {fault.strerror}"
    try:
        with files.closing(fd), contextlib.suppress(BlockingIOError):  # locked: so it can be done
            _flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, directory)
    except StorageError as fault:
        return str(fault)
    return None
