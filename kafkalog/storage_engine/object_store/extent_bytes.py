"""The bytes of one extent, as a segment of the log: a `ByteSource` with stamped batches.

The batches of an extent count their offsets from 0. Its base offset and leader epoch are stamped
here, in the copy that is returned. No checksum covers these two fields. A read begins at a batch,
as all reads of segments do. A segment object has its own offsets and epochs, and needs no stamp.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.fetched_ranges import AHEAD, FetchedRanges, ObjectRange

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent


class ExtentBytes:
    """The bytes of an extent, fetched on demand."""

    def __init__(
        self,
        ranges: FetchedRanges,
        placed: PlacedExtent,
        following: Sequence[PlacedExtent] = (),
    ) -> None:
        """Take the ranges that have the extent, and the extents that are read after it."""
        self._ranges = ranges
        self._extent = placed.extent
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
        if not self._is_stamped:
            stamp(data, self._extent.base_offset, self._extent.leader_epoch)
        return bytes(data)

    def _ahead(self, place: int) -> Sequence[ObjectRange]:
        later = (each for placed in self._following for each in self._ranges.ranges_of(placed))
        return tuple(itertools.islice(itertools.chain(self._own[place:], later), AHEAD))


def stamp(data: bytearray, base_offset: int, leader_epoch: int) -> None:
    """Stamp the headers of the batches v2 in `data`, whose offsets count from 0.

    Stops before bytes that are no batch, or whose offsets no log has: their reader finds the fault.
    """
    unpack, pack = layout.BATCH_PLACE.unpack_from, layout.STAMP.pack_into
    position = 0
    while len(data) - position >= layout.BATCH_OVERHEAD:
        offset, length, magic, delta, _ = unpack(data, position)
        size = length + layout.LOG_OVERHEAD
        last = base_offset + offset + delta
        if magic != layout.MAGIC or size < layout.BATCH_OVERHEAD:
            return
        if offset < 0 or not 0 <= last <= layout.INT64_MAX:
            return
        pack(data, position, base_offset + offset, length, leader_epoch)
        position += size
