"""A set of offsets on disk: appended in any order, sorted in a fixed memory, then searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.dedup.offset_map import Int64s
from kafkalog.cleaner.dedup.spill.spill_file import SpillFile

_WINDOW_MIN = 512
_WINDOW_MAX = 1 << 16
_NONE: Int64s = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _Run:
    """A sorted run of the file, and its window in memory."""

    first: int
    last: int
    next: int
    """The first word that is not in the window or before it."""
    window: Int64s = field(default_factory=lambda: _NONE)
    place: int = 0
    """The place of the next offset in the window."""


class OffsetList:
    """Append, then `sort`, then `contains`; `close` removes the file. Raises StorageError."""

    def __init__(
        self, directory: Path, name: str, on_moved: Callable[[int], None] = lambda _: None
    ) -> None:
        self._file = SpillFile(directory, name, on_moved)
        self._runs: list[_Run] = []
        self._window = _WINDOW_MIN
        self._asked = -1

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return 8 * self._file.count

    def append(self, offsets: Int64s) -> None:
        """Append offsets int64 (n), each only once."""
        self._file.append(offsets)

    def sort(self, memory: Int64s, window_bytes: int) -> None:
        """Sort the offsets in `memory`; later, windows take about `window_bytes`."""
        block = len(memory)
        for first in range(0, self._file.count, block):
            last = min(first + block, self._file.count)
            for piece in range(first, last, _WINDOW_MAX):
                words = self._file.read(piece, min(_WINDOW_MAX, last - piece))
                memory[piece - first : piece - first + len(words)] = words.view(np.int64)
            part = memory[: last - first]
            part.sort()
            self._file.write(part, first)
            self._runs.append(_Run(first, last, first))
        share = window_bytes // 8 // max(1, len(self._runs))
        self._window = min(max(share, _WINDOW_MIN), _WINDOW_MAX)

    def contains(self, offsets: Int64s) -> npt.NDArray[np.bool_]:
        """Return which of the offsets (n) are in the list; fastest if they ascend."""
        flags = np.zeros(len(offsets), dtype=np.bool_)
        if not len(offsets):
            return flags
        if (offsets[1:] <= offsets[:-1]).any():  # a log has no such order
            distinct, places = np.unique(offsets, return_inverse=True)
            found: npt.NDArray[np.bool_] = self.contains(distinct)[places]
            return found
        if offsets[0] <= self._asked:
            for run in self._runs:
                run.next, run.window, run.place = run.first, _NONE, 0
        self._asked = int(offsets[-1])
        for run in self._runs:
            self._mark(run, offsets, flags)
        return flags

    def _mark(self, run: _Run, offsets: Int64s, flags: npt.NDArray[np.bool_]) -> None:
        """Set the flags of the ascending offsets that are in a run, from its place on."""
        while True:
            stop = int(run.window.searchsorted(offsets[-1], side="right"))
            wanted = run.window[run.place : stop]
            places = offsets.searchsorted(wanted)
            flags[places[offsets[places] == wanted]] = True
            run.place = max(run.place, stop)
            if run.place < len(run.window) or run.next == run.last:
                return
            count = min(self._window, run.last - run.next)
            run.window = self._file.read(run.next, count).view(np.int64)
            run.place = 0
            run.next += count

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
        self._runs = []
