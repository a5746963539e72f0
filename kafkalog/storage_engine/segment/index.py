"""The sparse indexes of a segment: offset to position, timestamp to offset.

An entry is a *hint*. Kafka's index files have no checksum, are padded with zeros while their
segment is active, and may be torn, stale or missing. No entry is believed before the batch at its
position confirms it (`locate.locate`). That of a time is not believed where an earlier batch is
younger (`segment_times`). A wrong file costs a longer scan, never a record.

Kafka: OffsetIndex, TimeIndex. Unlike Kafka's, these classes keep no file open: a lookup opens the
file, reads some twenty entries, and closes it. Instead of a file, an object store has a function
that loads the entries.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import ByteSource, FileBytes, HeldBytes


def offset_entry(base_offset: int, offset: int, position: int) -> bytes:
    """Return the 8 bytes of an entry: the batch at byte `position` ends with `offset`.

    Raises struct.error if either does not fit; a segment is rolled long before that.
    """
    return layout.OFFSET_INDEX_ENTRY.pack(offset - base_offset, position)


def time_entry(base_offset: int, timestamp: int, offset: int) -> bytes:
    """Return the 12 bytes of an entry: no record up to `offset` is younger than `timestamp`.

    `timestamp` is in epoch milliseconds, `offset` the last one of the batch with it.
    """
    return layout.TIME_INDEX_ENTRY.pack(timestamp, offset - base_offset)


class _IndexFile(ABC):
    """Entries of one size, each a pair of integers; only the first ones are in use."""

    entry_size: ClassVar[int]
    """Bytes of an entry."""

    def __init__(self, place: Path | Callable[[], bytes], base_offset: int) -> None:
        """Name a file, which need not exist, or give what loads its content."""
        self.place = place
        self.base_offset = base_offset

    def last_entry(self) -> tuple[int, int] | None:
        """Return the last entry in use, or None."""
        for _, entry in self._search(self._is_used):
            return entry
        return None

    @abstractmethod
    def _unpack(self, data: bytes) -> tuple[int, int]: ...

    @abstractmethod
    def _is_used(self, entry: tuple[int, int]) -> bool: ...

    def _search(
        self, wanted: Callable[[tuple[int, int]], bool]
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (place, entry) of wanted entries: the last one, then ever earlier ones.

        In a sound file `wanted` holds for the first entries and for no later one. In a damaged file
        the search still ends, on entries for which it holds. A missing or unreadable file yields
        none, because entries are hints.
        """
        with self._opened() as source:
            low, high = 0, source.size() // self.entry_size
            while low < high:
                middle = (low + high) // 2
                if wanted(self._at(source, middle)):
                    low = middle + 1
                else:
                    high = middle
            place, step = low - 1, 1
            while place >= 0:
                entry = self._at(source, place)
                if wanted(entry):
                    yield place, entry
                place -= step
                step *= 2

    @contextlib.contextmanager
    def _opened(self) -> Iterator[ByteSource]:
        if not isinstance(self.place, Path):
            yield HeldBytes(self.place())
            return
        try:
            fd = files.open_to_read(self.place)
        except (FileNotFoundError, PermissionError):
            yield HeldBytes(b"")
            return
        with files.closing(fd):
            yield FileBytes(fd)

    def _at(self, source: ByteSource, place: int) -> tuple[int, int]:
        data = source.read_at(self.entry_size, place * self.entry_size)
        # If the file is truncated now, pad with zeros, which no search wants.
        return self._unpack(data.ljust(self.entry_size, b"\0"))


class OffsetIndex(_IndexFile):
    """A segment's `.index`: (last offset of a batch, position where that batch starts)."""

    entry_size: ClassVar[int] = layout.OFFSET_INDEX_ENTRY.size

    def lookup(self, offset: int) -> int:
        """Return the unconfirmed position of a batch at or before that of `offset`, or 0."""
        for _, position in self.hints(offset):
            return position
        return 0

    def hints(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield (last offset, position) of batches that end at or below `offset`, best first."""
        for _, entry in self._search(lambda entry: self._is_used(entry) and entry[0] <= offset):
            yield entry

    def entry_at(self, position: int) -> tuple[int, int] | None:
        """Return the unconfirmed last entry at or before a position, or None."""
        for _, entry in self._search(lambda entry: self._is_used(entry) and entry[1] <= position):
            return entry
        return None

    def _unpack(self, data: bytes) -> tuple[int, int]:
        relative_offset, position = layout.OFFSET_INDEX_ENTRY.unpack(data)
        return self.base_offset + relative_offset, position

    def _is_used(self, entry: tuple[int, int]) -> bool:
        # The first batch of a segment never gets an entry, so position 0 is padding.
        return entry[0] >= self.base_offset and entry[1] > 0


class TimeIndex(_IndexFile):
    """A segment's `.timeindex`: (largest timestamp so far, last offset of the batch with it).

    An entry says that no record up to that offset has a larger timestamp (epoch milliseconds).
    """

    entry_size: ClassVar[int] = layout.TIME_INDEX_ENTRY.size

    def hints(self, timestamp: int) -> Iterator[tuple[int, int]]:
        """Yield (timestamp, offset) of entries older than `timestamp`, best first."""
        for _, entry in self._search(lambda entry: self._is_used(entry) and entry[0] < timestamp):
            yield entry

    def last_time(self) -> int | None:
        """Return the timestamp of the last entry in use, or None."""
        entry = self.last_entry()
        return None if entry is None else entry[0]

    def _unpack(self, data: bytes) -> tuple[int, int]:
        timestamp, relative_offset = layout.TIME_INDEX_ENTRY.unpack(data)
        return timestamp, self.base_offset + relative_offset

    def _is_used(self, entry: tuple[int, int]) -> bool:
        # Timestamps below 0 are never written. (0, base) could be one record of 1970, but is
        # nearly always padding; the mistake costs that log one hint.
        return entry[0] >= 0 and entry[1] >= self.base_offset and entry != (0, self.base_offset)
