"""Compare index files with the batches of their segment, for `verify`.

Entries are compared as columns. In an offset index, a batch must begin at the entry's position and
end with its offset. In a time index, a batch must end with the entry's offset and have its
timestamp. A zero entry ends the file (preallocation).

A broker's entries are those that some release of Kafka writes, so they may be less exact:

- An offset index names the first offset of what was appended (up to 0.11), or the last one (1.0 to
  4.0). A follower appends all batches of a fetch together, so these may be offsets of two batches.
- A time index names the record with the largest timestamp (up to 3.7), or its batch's last offset.
  The record has lost its timestamp if it was converted to a message v0.
- The last entry of a time index may be there twice.

Kafka: OffsetIndex, TimeIndex, LogSegment.append (KAFKA-806, KAFKA-16310).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kafkalog.inspection.finding import Finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

Integers = npt.NDArray[np.int64]

_REPORTED_MAX: Final = 10
"""Wrong entries of one file that are reported singly; the rest is counted."""


class _IndexCheck(ABC):
    """Entries of one index file, in order; empty, with `is_missing` set, for a missing file."""

    dtype: ClassVar[np.dtype[np.void]]

    def __init__(
        self, path: Path, base_offset: int, data: bytes | None = None, *, is_exact: bool = True
    ) -> None:
        """Read a file, unless its content is given; `is_exact` is False for a broker's."""
        self.path = path
        self.base_offset = base_offset
        self.is_missing = False
        self.is_exact = is_exact
        self._wrong = 0
        self._next = 0
        """The first entry that is not compared yet."""
        if data is None:
            data = b""
            try:
                data = files.read_file(path)
            except FileNotFoundError:
                self.is_missing = True
        self._size = len(data)
        entries = np.frombuffer(data, dtype=self.dtype, count=len(data) // self.dtype.itemsize)
        first, second = entries["f0"].astype(np.int64), entries["f1"].astype(np.int64)
        zeros = np.flatnonzero((first == 0) & (second == 0))
        count = int(zeros[0]) if len(zeros) else len(first)
        self._first, self._second = first[:count], second[:count]

    def _position(self, place: int) -> int:
        return place * self.dtype.itemsize

    def in_order(self) -> Iterator[Finding]:
        """Report the first entry out of order, and forget the entries from there on."""
        before_first, before_second = (
            np.append(-1, column)[:-1] for column in (self._first, self._second)
        )
        fault = self._out_of_order(self._first, self._second, before_first, before_second)
        if fault is not None:
            place, expected, found = fault
            yield Finding(self.path, self._position(place), expected, found)
            self._first, self._second = self._first[:place], self._second[:place]

    @abstractmethod
    def _out_of_order(
        self, first: Integers, second: Integers, before_first: Integers, before_second: Integers
    ) -> tuple[int, str, str] | None:
        """Return the first entry that breaks its kind's order, with what was expected and found."""

    def _report(self, place: int, expected: str, found: str) -> Iterator[Finding]:
        self._wrong += 1
        if self._wrong <= _REPORTED_MAX:
            yield Finding(self.path, self._position(place), expected, found)

    def _rest(self, expected: str, *, is_active: bool) -> Iterator[Finding]:
        """Report entries beyond the end, and half an entry; a commit in flight may leave these."""
        left = len(self._first) - self._next
        if left and not is_active:
            yield from self._report(self._next, expected, f"{left} entries beyond it")
        half = self._size % self.dtype.itemsize
        if half:
            expected = f"entries of {self.dtype.itemsize} bytes"
            found = f"{half} bytes at the end"
            yield Finding(self.path, self._size - half, expected, found, is_damage=not is_active)
        if self._wrong > _REPORTED_MAX:
            more = self._wrong - _REPORTED_MAX
            yield Finding(
                self.path, 0, "entries that the log confirms", f"{more} more that it does not"
            )


def _dtype(format_text: str) -> np.dtype[np.void]:
    columns = format_text.removeprefix(">")
    return np.dtype([("f0", ">" + columns[0]), ("f1", ">" + columns[1])])


class OffsetIndexCheck(_IndexCheck):
    """A segment's `.index`."""

    dtype: ClassVar[np.dtype[np.void]] = _dtype(layout.OFFSET_INDEX_ENTRY.format)

    _next_offset = 0
    """The first entry whose offset is not compared yet; `_next` is that for the positions."""
    _misplaced: frozenset[int] = frozenset()
    """Entries that were reported because of their positions."""

    def compare(
        self, positions: Integers, base_offsets: Integers, last_offsets: Integers, end: int
    ) -> Iterator[Finding]:
        """Compare entries with a chunk's batches: their positions and offsets.

        `end` is the byte after the chunk. All earlier chunks were compared.
        """
        first, stop = self._next, int(np.searchsorted(self._second, end))
        pointed = self._second[first:stop]
        batches = np.minimum(np.searchsorted(positions, pointed), len(positions) - 1)
        misplaced = np.flatnonzero(positions[batches] != pointed) + first
        for number in misplaced.tolist():
            found = f"{self._second[number]}"
            yield from self._report(number, "the position where a batch begins", found)
        self._misplaced |= set(misplaced.tolist())
        self._next = stop
        yield from self._compare_offsets(positions, base_offsets, last_offsets)

    def _compare_offsets(
        self, positions: Integers, base_offsets: Integers, last_offsets: Integers
    ) -> Iterator[Finding]:
        """Look for each offset in the batch at the entry's position, or in those appended with it.

        The next entry's batch was appended later.
        """
        first = self._next_offset
        end = int(last_offsets[-1]) - self.base_offset
        stop = int(np.searchsorted(self._first, end, side="right"))
        offsets = self._first[first:stop] + self.base_offset
        batches = np.searchsorted(last_offsets, offsets)
        is_last = last_offsets[batches] == offsets
        pointed = self._second[first:stop]
        is_own = positions[batches] == pointed
        if self.is_exact:
            is_right = is_own & is_last
        else:
            following = np.append(self._second, layout.INT64_MAX)[first + 1 : stop + 1]
            is_with = (positions[batches] > pointed) & (positions[batches] < following)
            is_right = (is_own & (base_offsets[batches] <= offsets)) | (is_last & is_with)
        for number in (np.flatnonzero(~is_right) + first).tolist():
            if number not in self._misplaced:
                yield from self._report_offset(number)
        self._next_offset = stop

    def _report_offset(self, number: int) -> Iterator[Finding]:
        what = "the last offset" if self.is_exact else "an offset"
        expected = f"{what} of the batch at position {self._second[number]}"
        yield from self._report(number, expected, f"{self._first[number] + self.base_offset}")

    def last_offset(self) -> int:
        """Return the offset of the last entry; -1 without one."""
        return int(self._first[-1]) + self.base_offset if len(self._first) else -1

    def finish(self, end: int, *, is_active: bool) -> Iterator[Finding]:
        """Report what is left after the log was read up to byte `end`."""
        for number in range(self._next_offset, self._next):
            if number not in self._misplaced:
                yield from self._report_offset(number)
        yield from self._rest(f"positions below the log's end, {end}", is_active=is_active)

    def _out_of_order(
        self, first: Integers, second: Integers, before_first: Integers, before_second: Integers
    ) -> tuple[int, str, str] | None:
        wrong = (first <= before_first) | (second <= before_second)
        if not wrong.any():
            return None
        place, base = int(wrong.argmax()), self.base_offset
        expected = (
            f"an entry above offset {base + before_first[place]} and position "
            f"{before_second[place]}"
        )
        return place, expected, f"offset {base + first[place]} and position {second[place]}"


class TimeIndexCheck(_IndexCheck):
    """A segment's `.timeindex`."""

    dtype: ClassVar[np.dtype[np.void]] = _dtype(layout.TIME_INDEX_ENTRY.format)
    _largest = layout.NO_TIMESTAMP
    _counted = layout.NO_TIMESTAMP
    """The largest timestamp of the batches that the last entry has to count."""
    counted_to = layout.INT64_MAX
    """Their last offset: an active segment's entry comes with its next offset entry."""

    def compare(
        self, base_offsets: Integers, last_offsets: Integers, timestamps: Integers
    ) -> Iterator[Finding]:
        """Compare entries with a chunk's batches: their offsets and largest timestamps."""
        largest = np.maximum(np.maximum.accumulate(timestamps), self._largest)
        self._largest = int(largest[-1])
        is_counted = last_offsets <= self.counted_to
        self._counted = int(timestamps[is_counted].max(initial=self._counted))
        end = int(last_offsets[-1]) - self.base_offset
        first, stop = self._next, int(np.searchsorted(self._second, end, side="right"))
        times = self._first[first:stop]
        offsets = self._second[first:stop] + self.base_offset
        batches = np.searchsorted(last_offsets, offsets)
        ends = last_offsets[batches] == offsets
        if not self.is_exact:
            ends |= base_offsets[batches] <= offsets
        is_true = ends & (timestamps[batches] == times)
        if not self.is_exact:
            is_true |= ends & (timestamps[batches] == layout.NO_TIMESTAMP)
        for number in np.flatnonzero(~is_true).tolist():
            what = "the last offset" if self.is_exact else "an offset"
            expected, found = f"{what} of a batch", f"{offsets[number]}"
            if ends[number]:
                largest_of = timestamps[batches[number]]
                at = "that ends at" if self.is_exact else "with offset"
                expected = f"timestamp {largest_of} of the batch {at} {found}"
                found = f"{times[number]}"
            yield from self._report(first + number, expected, found)
        late = np.flatnonzero(is_true & (largest[batches] > times))
        if len(late):
            number = int(late[0])
            yield Finding(
                self.path,
                self._position(first + number),
                f"the largest timestamp up to there, {largest[batches[number]]}",
                f"{times[number]}: a search by time may begin too late",
                is_damage=False,
            )
        self._next = stop

    def finish(self, end_offset: int, *, is_active: bool) -> Iterator[Finding]:
        """Report what is left after the log was read up to `end_offset`."""
        yield from self._rest(f"offsets below the log's end, {end_offset}", is_active=is_active)
        last = int(self._first[-1]) if len(self._first) else 0  # a time of 0 may look like padding
        is_half = self._size % self.dtype.itemsize > 0
        if self._counted > last and not (self.is_missing or is_half or self._wrong):
            expected = f"an entry for the largest timestamp, {self._counted}"
            mender = "an append" if is_active else "a cleaning of a compacted topic"
            found = (
                f"none above {last}: a broker would find and delete by that one; kafkalog asks "
                f"the batches, and {mender} adds the entry"
            )
            position = len(self._first) * self.dtype.itemsize
            yield Finding(self.path, position, expected, found, is_damage=False)

    def _out_of_order(
        self, first: Integers, second: Integers, before_first: Integers, before_second: Integers
    ) -> tuple[int, str, str] | None:
        wrong = (first <= before_first) | (second < np.maximum(before_second, 0))
        if not self.is_exact:
            wrong &= (first != before_first) | (second != before_second)
        if not wrong.any():
            return None
        place, base = int(wrong.argmax()), self.base_offset
        low = max(int(before_second[place]), 0)
        expected = f"a timestamp above {before_first[place]} at an offset of {base + low} or more"
        return place, expected, f"timestamp {first[place]} at offset {base + second[place]}"
