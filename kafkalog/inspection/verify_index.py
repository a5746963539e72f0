"""Compare index files with the batches of their segment, for `verify`.

Entries are read in blocks and compared as columns. In an offset index, a batch must begin at the
entry's position and end with its offset. In a time index, a batch must end with the entry's offset
and have its timestamp. A zero entry ends the file (preallocation).

Kafka: OffsetIndex, TimeIndex.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kafkalog.inspection.finding import Finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

__all__ = ["OffsetIndexCheck", "TimeIndexCheck"]

Integers = npt.NDArray[np.int64]

_BLOCK_ENTRIES: Final = 1 << 15
_REPORTED_MAX: Final = 10
"""Wrong entries of one file that are reported singly; the rest is counted."""


class _IndexCheck(ABC):
    """Entries of one index file, taken in order; a missing file has none, and sets `is_missing`."""

    dtype: ClassVar[np.dtype[np.void]]

    def __init__(self, path: Path, base_offset: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self._wrong = 0
        self._next = 0
        """Entries before the block."""
        self._cursor = 0
        """Entries of the block that are compared already."""
        self._first: Integers = np.empty(0, dtype=np.int64)
        self._second: Integers = np.empty(0, dtype=np.int64)
        self._before = (-1, -1)
        self._ended = False
        self._fd = -1
        try:
            self._fd = files.open_to_read(path)
        except FileNotFoundError:
            self._ended = True
        self.is_missing = self._ended

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def _entry_size(self) -> int:
        return self.dtype.itemsize

    def _position(self, place: int) -> int:
        return (self._next + place) * self._entry_size

    def _load(self) -> Iterator[Finding]:
        """Read the next block once this one is used up; stop at the first entry out of order."""
        if self._ended or self._cursor < len(self._first):
            return
        self._next += len(self._first)
        self._cursor = 0
        size = _BLOCK_ENTRIES * self._entry_size
        data = files.read_at(self._fd, size, self._next * self._entry_size)
        block = np.frombuffer(data[: len(data) - len(data) % self._entry_size], dtype=self.dtype)
        first, second = block["f0"].astype(np.int64), block["f1"].astype(np.int64)
        zeros = np.flatnonzero((first == 0) & (second == 0))
        self._ended = len(data) < size or bool(len(zeros))
        if len(zeros):
            first, second = first[: zeros[0]], second[: zeros[0]]
        self._first, self._second = first, second
        if not len(first):
            return
        fault = self._out_of_order(first, second)
        if fault is not None:
            place, expected, found = fault
            yield Finding(self.path, self._position(place), expected, found)
            self._first, self._second = first[:place], second[:place]
            self._ended = True
        if len(self._first):
            self._before = (int(self._first[-1]), int(self._second[-1]))

    @abstractmethod
    def _out_of_order(self, first: Integers, second: Integers) -> tuple[int, str, str] | None:
        """Return the first entry that breaks its kind's order, with what was expected and found."""

    def _report(self, place: int, expected: str, found: str) -> Iterator[Finding]:
        self._wrong += 1
        if self._wrong <= _REPORTED_MAX:
            yield Finding(self.path, self._position(place), expected, found)

    def _rest(self, expected: str, *, is_active: bool) -> Iterator[Finding]:
        """Report entries beyond the end, and half an entry; a commit in flight may leave these."""
        if not is_active:
            yield from self._load()
            left = len(self._first) - self._cursor
            if left:
                found = f"{left} entries or more beyond it"
                yield from self._report(self._cursor, expected, found)
        size = 0 if self._fd < 0 else os.fstat(self._fd).st_size
        if size % self._entry_size:
            whole = size - size % self._entry_size
            expected = f"entries of {self._entry_size} bytes"
            found = f"{size - whole} bytes at the end"
            yield Finding(self.path, whole, expected, found, is_damage=not is_active)
        if self._wrong > _REPORTED_MAX:
            more = self._wrong - _REPORTED_MAX
            yield Finding(
                self.path, 0, "entries that the log confirms", f"{more} more that it does not"
            )


def _columns(first: str, second: str) -> np.dtype[np.void]:
    return np.dtype([("f0", ">" + first), ("f1", ">" + second)])


def _dtype(format_text: str) -> np.dtype[np.void]:
    return _columns(*format_text.removeprefix(">"))


class OffsetIndexCheck(_IndexCheck):
    """A segment's `.index`."""

    dtype: ClassVar[np.dtype[np.void]] = _dtype(layout.OFFSET_INDEX_ENTRY.format)

    def compare(self, positions: Integers, last_offsets: Integers, end: int) -> Iterator[Finding]:
        """Compare entries with a chunk's batches: their positions and last offsets.

        `end` is the byte after the chunk.
        """
        while True:
            yield from self._load()
            stop = int(np.searchsorted(self._second, end))
            if stop <= self._cursor:
                return
            pointed = self._second[self._cursor : stop]
            offsets = self._first[self._cursor : stop] + self.base_offset
            batches = np.searchsorted(positions, pointed)
            batches = np.minimum(batches, len(positions) - 1)
            starts = positions[batches] == pointed
            wrong = np.flatnonzero(~(starts & (last_offsets[batches] == offsets)))
            for number in wrong.tolist():
                expected = "the position where a batch begins"
                found = f"{pointed[number]}"
                if starts[number]:
                    expected = f"offset {last_offsets[batches[number]]}, the last of that batch"
                    found = f"{offsets[number]}"
                yield from self._report(self._cursor + number, expected, found)
            self._cursor = stop

    def finish(self, end: int, *, is_active: bool) -> Iterator[Finding]:
        """Report what is left after the log was read up to byte `end`."""
        yield from self._rest(f"positions below the log's end, {end}", is_active=is_active)

    def _out_of_order(self, first: Integers, second: Integers) -> tuple[int, str, str] | None:
        before_first = np.append(self._before[0], first[:-1])
        before_second = np.append(self._before[1], second[:-1])
        wrong = (first <= before_first) | (second <= before_second) | (first < 0) | (second < 0)
        if not wrong.any():
            return None
        place = int(wrong.argmax())
        base = self.base_offset
        low = max(int(before_first[place]), -1)
        expected = f"an entry above offset {base + low} and position {before_second[place]}"
        return place, expected, f"offset {base + first[place]} and position {second[place]}"


class TimeIndexCheck(_IndexCheck):
    """A segment's `.timeindex`."""

    dtype: ClassVar[np.dtype[np.void]] = _dtype(layout.TIME_INDEX_ENTRY.format)

    def __init__(self, path: Path, base_offset: int) -> None:
        super().__init__(path, base_offset)
        self._largest = layout.NO_TIMESTAMP

    def compare(self, last_offsets: Integers, timestamps: Integers) -> Iterator[Finding]:
        """Compare entries with a chunk's batches: their last offsets and largest timestamps."""
        largest = np.maximum(np.maximum.accumulate(timestamps), self._largest)
        self._largest = int(largest[-1])
        while True:
            yield from self._load()
            end = int(last_offsets[-1]) - self.base_offset
            stop = int(np.searchsorted(self._second, end, side="right"))
            if stop <= self._cursor:
                return
            times = self._first[self._cursor : stop]
            offsets = self._second[self._cursor : stop] + self.base_offset
            batches = np.searchsorted(last_offsets, offsets)
            ends = last_offsets[batches] == offsets
            is_true = ends & (timestamps[batches] == times)
            for number in np.flatnonzero(~is_true).tolist():
                expected, found = "the last offset of a batch", f"{offsets[number]}"
                if ends[number]:
                    largest_of = timestamps[batches[number]]
                    expected = f"timestamp {largest_of} of the batch that ends at {found}"
                    found = f"{times[number]}"
                yield from self._report(self._cursor + number, expected, found)
            late = np.flatnonzero(is_true & (largest[batches] > times))
            if len(late):
                number = int(late[0])
                yield Finding(
                    self.path,
                    self._position(self._cursor + number),
                    f"the largest timestamp up to there, {largest[batches[number]]}",
                    f"{times[number]}: a search by time may begin too late",
                    is_damage=False,
                )
            self._cursor = stop

    def finish(self, end_offset: int, *, is_active: bool) -> Iterator[Finding]:
        """Report what is left after the log was read up to `end_offset`."""
        yield from self._rest(f"offsets below the log's end, {end_offset}", is_active=is_active)

    def _out_of_order(self, first: Integers, second: Integers) -> tuple[int, str, str] | None:
        before_first = np.append(self._before[0], first[:-1])
        before_second = np.append(self._before[1], second[:-1])
        wrong = (first <= before_first) | (second < before_second) | (second < 0)
        if not wrong.any():
            return None
        place = int(wrong.argmax())
        base = self.base_offset
        low = max(int(before_second[place]), 0)
        expected = f"a timestamp above {before_first[place]} at an offset of {base + low} or more"
        return place, expected, f"timestamp {first[place]} at offset {base + second[place]}"
