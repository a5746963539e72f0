"""Keys on disk: rows of (hash, hash, offset + 1) in runs, each sorted into 256 buckets of the hash.

The rows of a bucket are adjacent in a run, so each bucket can be read and resolved alone. The
bucket is the top byte of the second word: the first one gives a key its place in an offset map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kafkalog.cleaner.dedup.offset_map import Int64s, Uint64s
from kafkalog.cleaner.dedup.spill.spill_file import SpillFile

BUCKETS = 256
_WIDTH = 3
_RUN = 1 << 15
"""Rows of a run, which are copied to be sorted: 768 KiB."""
_PIECE = 8192
"""Rows read at once."""


class KeyRuns:
    """Rows of spilled keys; `close` removes them. Raises StorageError if the disk is full."""

    def __init__(
        self, directory: Path, name: str, on_moved: Callable[[int], None] = lambda _: None
    ) -> None:
        self.counts: Int64s = np.zeros(BUCKETS, dtype=np.int64)
        """(256) rows of each bucket."""
        self._file = SpillFile(directory, name, on_moved)
        self._runs: list[tuple[int, Uint64s]] = []

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return 8 * self._file.count

    def add(self, slots: Uint64s) -> None:
        """Write the rows uint64 (n, 3) of those slots that are taken."""
        for first in range(0, len(slots), _RUN):
            rows = slots[first : first + _RUN]
            rows = rows[rows[:, 2] != 0]
            buckets = (rows[:, 1] >> np.uint64(56)).astype(np.uint8)
            counts = np.bincount(buckets, minlength=BUCKETS)
            ends = np.cumsum(counts, dtype=np.uint32)
            self._runs.append((self._file.count // _WIDTH, np.append(np.uint32(0), ends)))
            self.counts += counts
            self._file.append(rows[np.argsort(buckets, kind="stable")])

    def pieces(self, first: int, last: int) -> Iterator[Uint64s]:
        """Yield the rows (n, 3) of the buckets first <= b < last, from all runs, in pieces.

        The rows of a run come before those of later runs.
        """
        gathered: list[Uint64s] = []
        room = _PIECE
        for base, starts in self._runs:
            row, end = base + int(starts[first]), base + int(starts[last])
            while row < end:
                count = min(room, end - row)
                gathered.append(self._file.read(_WIDTH * row, _WIDTH * count))
                row += count
                room -= count
                if not room:
                    yield np.concatenate(gathered).reshape(-1, _WIDTH)
                    gathered, room = [], _PIECE
        if gathered:
            yield np.concatenate(gathered).reshape(-1, _WIDTH)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
