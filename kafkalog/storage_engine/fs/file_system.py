"""The calls of the operating system that open, list, change, sync and lock files.

Only this module makes them, and only `files` and `locks` call it. A test gives another file system:
a subclass that counts calls, refuses some of them, or records them, put in place by `replaced`.

Linux has all of these calls. If another system lacks one, the method does the same by others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Final

Place = str | os.PathLike[str]
Data = bytes | bytearray | memoryview

_NO_FULL_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})
"""The errors of a file system without F_FULLFSYNC, for example a network's."""
_PATH_SIZE: Final = 1024
"""Apple: MAXPATHLEN, the bytes that F_GETPATH fills."""
_ZEROS_SIZE: Final = 1 << 20


class FileSystem:
    """The operating system's own calls; each method is the call of its name."""

    def open(self, path: Place, flags: int, mode: int = 0o777) -> int:
        """Open a file, or make it."""
        return os.open(path, flags, mode)

    def listdir(self, directory: Place) -> list[str]:
        """List the names in a directory."""
        return os.listdir(directory)

    def scandir(
        self, directory: Place
    ) -> contextlib.AbstractContextManager[Iterator[os.DirEntry[str]]]:
        """Go through the entries of a directory."""
        return os.scandir(directory)

    def pread(self, fd: int, size: int, position: int) -> bytes:
        """Read at a position."""
        return os.pread(fd, size, position)

    def preadv(self, fd: int, target: memoryview, position: int) -> int:
        """Read at a position into memory, as much as the system gives at once."""
        return os.preadv(fd, [target], position)

    def pwrite(self, fd: int, data: Data, position: int) -> int:
        """Write at a position, as much as the system takes at once."""
        return os.pwrite(fd, data, position)

    def data_from(self, fd: int, position: int) -> int:
        """Seek the first byte that lies in no hole; without this call, there is none."""
        if not hasattr(os, "SEEK_DATA"):
            return position
        try:
            return os.lseek(fd, position, os.SEEK_DATA)
        except OSError as fault:
            if fault.errno == errno.ENXIO:  # a hole up to the end
                return max(position, os.fstat(fd).st_size)
            if fault.errno == errno.EINVAL:  # a file system that does not tell
                return position
            raise

    def ftruncate(self, fd: int, size: int) -> None:
        """Change the size of an open file."""
        os.ftruncate(fd, size)

    def posix_fallocate(self, fd: int, position: int, size: int) -> None:
        """Give an open file room; without this call, zeros are written beyond the file's end."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, position, size)
            return
        begin, end = max(position, os.fstat(fd).st_size), position + size
        while begin < end:
            begin += self.pwrite(fd, bytes(min(_ZEROS_SIZE, end - begin)), begin)

    def statvfs(self, path: Place) -> os.statvfs_result:
        """Describe the disk below a path."""
        return os.statvfs(path)

    def fsync(self, fd: int) -> None:
        """Make the content and the size of an open file durable."""
        _sync(fd, os.fsync)

    def fdatasync(self, fd: int) -> None:
        """Make the content of an open file durable."""
        _sync(fd, os.fdatasync if hasattr(os, "fdatasync") else os.fsync)

    def replace(self, source: Place, target: Place) -> None:
        """Rename a file over another."""
        os.replace(source, target)

    def link(self, source: Place, target: Place) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def unlink(self, path: Place) -> None:
        """Remove a name of a file."""
        os.unlink(path)

    def mkdir(self, path: Place) -> None:
        """Make a directory."""
        os.mkdir(path)

    def rmdir(self, path: Place) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def mkdtemp(self) -> str:
        """Make a directory for temporary files."""
        return tempfile.mkdtemp(prefix="kafkalog-")

    def rmtree(self, path: Place) -> None:
        """Remove a directory with all that is in it."""
        shutil.rmtree(path, ignore_errors=True)

    def give_back(self, content: mmap.mmap) -> None:
        """Let the pages of a mapped file leave this process; without the call they stay."""
        if hasattr(mmap, "MADV_DONTNEED"):
            content.madvise(mmap.MADV_DONTNEED)

    def mmap(self, fd: int, size: int) -> mmap.mmap:
        """Map an open file, which is not empty, to read it."""
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)

    def utime(self, path: Place, times_ns: tuple[int, int]) -> None:
        """Set the times of access and modification."""
        os.utime(path, ns=times_ns)

    def flock(self, fd: int, operation: int) -> None:
        """Lock or unlock an open file."""
        fcntl.flock(fd, operation)

    def fcntl(self, fd: int, command: int, argument: bytes) -> bytes:
        """Lock a range of an open file, or ask who holds it."""
        return fcntl.fcntl(fd, command, argument)


def _sync(fd: int, sync: Callable[[int], None]) -> None:
    """Sync an open file; on macOS also what is in the cache of the disk itself."""
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        try:
            fcntl.fcntl(fd, full_sync)
            return
        except OSError as fault:
            if fault.errno not in _NO_FULL_SYNC:
                raise
    sync(fd)


def path_of(fd: int) -> str:
    """Return the path of an open file; raises OSError where the system does not know it."""
    get_path: int | None = getattr(fcntl, "F_GETPATH", None)
    if get_path is not None:
        return os.fsdecode(fcntl.fcntl(fd, get_path, bytes(_PATH_SIZE)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{fd}")


current = FileSystem()
"""The file system of this process."""


@contextlib.contextmanager
def replaced(other: FileSystem) -> Iterator[None]:
    """Give all threads of this process another file system meanwhile, for a test."""
    global current  # noqa: PLW0603
    before, current = current, other
    try:
        yield
    finally:
        current = before
