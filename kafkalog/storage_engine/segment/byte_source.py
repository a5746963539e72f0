"""The bytes of a `.log`, wherever they are: the seam below segment readers and scans.

A log directory has them in a file. A log in an object store has them in extents of objects.
"""

from __future__ import annotations

import os
from typing import Protocol

from kafkalog.storage_engine.fs import files


class ByteSource(Protocol):
    """Bytes that are read at positions."""

    def size(self) -> int:
        """Return how many bytes there are now."""

    def read_at(self, size: int, position: int) -> bytes:
        """Return `size` bytes at `position`; fewer only at the end."""

    def scattered(self, reads: int) -> ByteSource:
        """Return what answers so many reads, at ascending positions, that may be far apart."""


def data_from(source: ByteSource, position: int) -> int:
    """Return where the first byte at or after `position` is that lies in no hole of a file.

    A hole takes no disk and reads as zeros, so a file of kilobytes may have terabytes of it. Raises
    OSError.
    """
    return files.data_from(source.fd, position) if isinstance(source, FileBytes) else position


class HeldBytes:
    """Bytes in memory."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        """Return how many bytes there are."""
        return len(self._data)

    def read_at(self, size: int, position: int) -> bytes:
        """Return `size` bytes at `position`; fewer only at the end."""
        return self._data[position : position + size]

    def scattered(self, reads: int) -> ByteSource:
        """Return this: any read is as good as another."""
        return self


class FileBytes:
    """The bytes of an open file."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def size(self) -> int:
        """Return the size of the file now."""
        return os.fstat(self.fd).st_size

    def read_at(self, size: int, position: int) -> bytes:
        """Return `size` bytes at `position`; fewer only at the end of the file."""
        return files.read_at(self.fd, size, position)

    def scattered(self, reads: int) -> ByteSource:
        """Return this: any read is as good as another."""
        return self

    def close(self) -> None:
        """Close the file; whoever still reads meets a closed descriptor, not another file's."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
