"""The bytes of one extent, as a segment of the log: a `ByteSource` with stamped batches.

The batches of a run count their offsets from 0. Base offset and leader epoch are stamped here, in
the copy that is returned. No checksum covers these two fields. A read begins at a batch, as all
reads of segments do. A segment object has its own offsets and epochs, and needs no stamp.

Whole ranges are fetched, with those ahead, because most reads continue. A lookup of a key wants one
batch of a large segment. `scattered` fetches no more than that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.stamping import stamp_run
from kafkalog.storage_engine.object_store.fetched_ranges import AHEAD, FetchedRanges, ObjectRange

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent
    from kafkalog.storage_engine.segment.byte_source import ByteSource

_SCATTERED_SIZE: Final = 128 << 10


class ExtentBytes:
    """The bytes of an extent, fetched on demand."""

    def __init__(
        self, ranges: FetchedRanges, placed: PlacedExtent, following: Sequence[PlacedExtent] = ()
    ) -> None:
        """Take the ranges that have the extent, and the extents that are read after it."""
        self._ranges = ranges
        self._extent = placed.extent
        self._name = placed.object_name
        self._own = ranges.ranges_of(placed)
        self._following = following
        self._is_stamped = layout.is_stored_segment(placed.object_name)

    def size(self) -> int:
        """Return the size of the extent."""
        return self._extent.size

    def read_at(self, size: int, position: int) -> bytes:
        """Return `size` bytes at `position`, where a batch begins; fewer only at the end.

        Raises StorageError.
        """
        start = self._extent.position + position
        end = min(start + size, self._extent.position + self._extent.size)
        data = bytearray()
        for place, own in enumerate(self._own):
            if own.position < end and start < own.position + own.size:
                found = self._ranges.fetch(own, self._ahead(place + 1))
                data += found[max(0, start - own.position) : end - own.position]
        self._stamp(data)
        return bytes(data)

    def scattered(self, reads: int) -> ByteSource:
        """Return what fetches fewer bytes for so many reads; this, if whole ranges are as good."""
        return _ScatteredBytes(self) if reads < len(self._own) else self

    def read_alone(self, size: int, position: int) -> bytes:
        """Return what `read_at` does, by one request for these bytes alone."""
        start = self._extent.position + position
        end = min(start + size, self._extent.position + self._extent.size)
        data = bytearray(self._ranges.client.fetch(self._name, start, end - start))
        self._stamp(data)
        return bytes(data)

    def _stamp(self, data: bytearray) -> None:
        if not self._is_stamped:
            stamp_run(data, self._extent.run_offset, self._extent.leader_epoch)

    def _ahead(self, place: int) -> Sequence[ObjectRange]:
        later = (each for placed in self._following for each in self._ranges.ranges_of(placed))
        return tuple(itertools.islice(itertools.chain(self._own[place:], later), AHEAD))


class _ScatteredBytes:
    """An extent for reading a few batches; a batch of 128 KiB takes one request."""

    def __init__(self, extent: ExtentBytes) -> None:
        self._extent = extent
        self._start = 0
        self._data = b""

    def size(self) -> int:
        return self._extent.size()

    def read_at(self, size: int, position: int) -> bytes:
        start = position - self._start
        if not (start >= 0 and start + size <= len(self._data)):
            self._data = self._extent.read_alone(max(size, _SCATTERED_SIZE), position)
            self._start, start = position, 0
        return self._data[start : start + size]

    def scattered(self, reads: int) -> ByteSource:
        return self
