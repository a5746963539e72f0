"""A temporary file of numbers in the log's directory, for what a cleaning can't hold in memory.

Nothing is synced, because a cleaner that dies starts over. The next holder of the partition's
cleaner lock removes its files, by their names `kl-spill-*`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files


class SpillFile:
    """Words of 8 bytes, appended and read back; `close` removes the file. Raises StorageError."""

    def __init__(
        self, directory: Path, name: str, on_moved: Callable[[int], None] = lambda _: None
    ) -> None:
        self.path = directory / f"{layout.SPILL}{name}"
        self.count = 0
        """Words in the file."""
        self._on_moved = on_moved
        self._fd = -1
        try:
            files.create(self.path)
            self._fd = files.open_to_write(self.path)
        except OSError as fault:
            files.pass_on(fault)
            files.remove(self.path)
            raise self._fault(fault) from fault

    def append(self, words: npt.NDArray[Any]) -> None:
        """Append a contiguous array of words."""
        self.write(words, self.count)
        self.count += words.size

    def write(self, words: npt.NDArray[Any], first: int) -> None:
        """Write a contiguous array at word `first`."""
        if not words.size:
            return
        try:
            files.write_at(self._fd, words.data.cast("B"), 8 * first)
        except OSError as fault:
            files.pass_on(fault)
            raise self._fault(fault) from fault
        self._on_moved(words.nbytes)

    def _fault(self, fault: OSError) -> StorageError:
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
            return StorageError(f"{self.path}: cannot be written: {fault.strerror}")
        return StorageError(
            f"{self.path}: the disk is full after {8 * self.count:,} bytes of keys that do not fit "
            "the cleaner's memory; the log is unchanged: free space, or raise "
            "log.cleaner.dedupe.buffer.size"
        )

    def read(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Return `count` words from word `first` on; raises StorageError if the file is short."""
        words: npt.NDArray[np.uint64] = np.frombuffer(
            files.read_at(self._fd, 8 * count, 8 * first), dtype=np.uint64
        )
        if len(words) != count:
            raise StorageError(
                f"{self.path}: expected {8 * self.count:,} bytes, found fewer; was it changed?"
            )
        self._on_moved(words.nbytes)
        return words

    def close(self) -> None:
        """Close and remove the file; does nothing a second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            files.remove(self.path)


def sweep_spill_files(directory: Path) -> int:
    """Remove dead cleaners' files, under the partition's cleaner lock; return how many."""
    count = 0
    for name in files.list_names(directory):
        if name.startswith(layout.SPILL):
            files.remove(directory / name)
            count += 1
    return count
