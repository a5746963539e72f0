"""Every durable act: only this module syncs, renames, removes, truncates.

Tests inject faults here, by replacing these functions: so the rest of the package calls them as
`files.sync_file(...)`, through the module, and never `os.fsync`. Locks are in `locks`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs.descriptor_limit import raise_descriptor_limit

Buffer: TypeAlias = bytes | bytearray | memoryview
_Opened = TypeVar("_Opened")

NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""What the system says to who may only read."""
MORE_FILES: Final = "raise the limit of open files (ulimit -n)"
_MODE = 0o644
_PIECE_SIZE = 1 << 20
_SIDE_BY_SIDE_MIN, _SIDE_BY_SIDE_MAX = 8, 16
"""Fewer syncs are not worth their threads; more at once are no faster."""


@contextlib.contextmanager
def disk_faults(place: Path) -> Iterator[None]:
    """Raise a StorageError for an OSError; it names the file, where that is known."""
    try:
        yield
    except OSError as fault:
        raise _storage_error(fault, place) from fault


@contextlib.contextmanager
def reading_faults(place: Path) -> Iterator[None]:
    """Do the same, but for a missing file: it may only have been replaced."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as fault:
        raise _storage_error(fault, place) from fault


def _storage_error(fault: OSError, place: Path) -> StorageError:
    where = fault.filename or place
    if fault.errno == errno.EMFILE:
        return StorageError(f"{where}: cannot be opened: {fault.strerror}; {MORE_FILES}")
    return StorageError(f"{where}: the disk refused ({fault.strerror})")


@contextlib.contextmanager
def _named(fd: int) -> Iterator[None]:
    """Let an OSError say which file it was about: of a descriptor the system does not."""
    try:
        yield
    except OSError as fault:
        _name(fault, fd)
        raise


def _name(fault: OSError, fd: int) -> None:
    if fault.filename is None:
        with contextlib.suppress(OSError):
            fault.filename = os.readlink(f"/proc/self/fd/{fd}")


# --- bytes ---------------------------------------------------------------------------------------


def open_to_read(path: str | Path) -> int:
    """Open a file; raises OSError."""
    return open_file(path, os.O_RDONLY)


def open_file(path: str | Path, flags: int) -> int:
    """Open a file, for this process and none that it starts; raises OSError."""
    return _with_descriptors(lambda: os.open(path, flags | os.O_CLOEXEC, _MODE))


def scan(directory: Path) -> contextlib.AbstractContextManager[Iterator[os.DirEntry[str]]]:
    """Open a directory, to go through its entries; raises OSError."""
    return _with_descriptors(lambda: os.scandir(directory))


def _with_descriptors(open_: Callable[[], _Opened]) -> _Opened:
    """Open something; where descriptors run out the soft limit is raised first.

    That is the whole process's: but who reads needs the files at once, and has none to close.
    """
    try:
        return open_()
    except OSError as fault:
        if fault.errno != errno.EMFILE or not raise_descriptor_limit():
            raise
        return open_()


def read_at(fd: int, size: int, position: int) -> bytes:
    """Read `size` bytes at `position`; fewer only at the end of the file."""
    try:
        data = os.pread(fd, size, position)
        while 0 < len(data) < size:
            part = os.pread(fd, size - len(data), position + len(data))
            if not part:
                break
            data += part
    except OSError as fault:
        _name(fault, fd)
        raise
    return data


def write_at(fd: int, data: Buffer, position: int) -> None:
    """Write all of `data` at `position`, however the kernel splits it."""
    view = memoryview(data)
    with _named(fd):
        while view:
            count = os.pwrite(fd, view, position)
            view = view[count:]
            position += count


def truncate(fd: int, size: int) -> None:
    """Cut, or extend with zeros, an open file to `size` bytes."""
    with _named(fd):
        os.ftruncate(fd, size)


def preallocate(fd: int, size: int) -> None:
    """Give an open file at least `size` bytes of disk, zeros beyond its end; raises OSError."""
    with _named(fd):
        os.posix_fallocate(fd, 0, size)


def free_space(directory: Path) -> int:
    """Return how many bytes may still be written to the file system of a directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


# --- durability ----------------------------------------------------------------------------------


def sync_file(fd: int) -> None:
    """Make the content and the size of an open file durable."""
    with _named(fd):
        os.fsync(fd)


def sync_data(fd: int) -> None:
    """Make the content of an open file durable; for files that do not grow."""
    with _named(fd):
        os.fdatasync(fd)


def sync_path(path: Path) -> None:
    """Make the content of a closed file durable."""
    fd = open_to_read(path)
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make names that appeared in, or vanished from, a directory durable."""
    fd = open_file(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _named(fd):
            os.fsync(fd)
    finally:
        os.close(fd)


def all_at_once(syncs: Sequence[Callable[[], None]]) -> None:
    """Do many syncs side by side: a disk does several for the price of one.

    All of them have ended when this returns, or raises what the first of them that failed did.
    Each is done once: of one that fails the repetition would succeed, and prove nothing.
    """
    if len(syncs) < _SIDE_BY_SIDE_MIN:
        for sync in syncs:
            sync()
        return
    waiting = deque(enumerate(syncs))
    faults: dict[int, BaseException] = {}

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                number, sync = waiting.popleft()
                try:
                    sync()
                except BaseException as fault:
                    faults[number] = fault

    threads = [
        threading.Thread(target=work, name="kafkalog-sync")
        for _ in range(min(len(syncs), _SIDE_BY_SIDE_MAX) - 1)
    ]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads: then fewer at once
            for thread in threads:
                thread.start()
        work()
    finally:
        waiting.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if faults:
        raise faults[min(faults)]


def rename(source: Path, target: Path) -> None:
    """Rename a file over whatever bears the target's name; durable after `sync_directory`."""
    os.replace(source, target)


def link(source: Path, target: Path) -> bool:
    """Give a file a second name; False if something bears that name. Raises OSError."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_directory(path: Path) -> None:
    """Remove a directory and the files in it; of a symbolic link nothing but the link."""
    if path.is_symlink():
        remove(path)
        return
    for entry in sorted(path.iterdir()):
        remove(entry)
    os.rmdir(path)


def make_directory(path: Path) -> None:
    """Create a directory; its parents must exist."""
    os.mkdir(path)


def create(path: Path, data: Buffer = b"") -> None:
    """Write a new file, content synced; its name is durable after `sync_directory`."""
    fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if data:
            write_at(fd, data, 0)
            sync_file(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: Buffer, *, temporary_name: str = "") -> None:
    """Put a whole file in place: temporary file, sync, rename, sync of the directory."""
    temporary = path.with_name(temporary_name or path.name + layout.TEMPORARY)
    create(temporary, data)
    rename(temporary, path)
    sync_directory(path.parent)


def set_times(path: Path, mtime_ns: int) -> None:
    """Set a file's times of access and modification."""
    os.utime(path, ns=(mtime_ns, mtime_ns))


def checksum(fd: int, size: int, crc: Callable[[bytes, int], int]) -> int:
    """Return the checksum of the first `size` bytes of a file, read in pieces."""
    value = position = 0
    while position < size and (piece := read_at(fd, min(_PIECE_SIZE, size - position), position)):
        value = crc(piece, value)
        position += len(piece)
    return value
