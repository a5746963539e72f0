"""The rule that gives batches their index entries, and the entries of one segment as it is written.

A batch gets an entry in the offset index when it begins more than `index.interval.bytes` after the
batch of the entry before. The time index gets one with it, if the largest timestamp has grown since
its own last entry. It gets a last one when the segment ends. The distance counts, and not the
bytes since the file was opened. Many small commits get the index that one large commit would get.

Kafka: LogSegment.append, LogSegment.onBecomeInactiveSegment, LogSegment.recover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment.index import offset_entry, time_entry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class IndexBuilder:
    """Packs the entries of a segment's `.index` and `.timeindex`, batch by batch in their order.

    `offset_entries` and `time_entries` are bytes to be written; the caller clears what it wrote.
    `offset_count` and `time_count` count all entries, the written ones too.
    """

    def __init__(
        self, base_offset: int, interval: int, *, offset_entries_max: int = layout.INT64_MAX
    ) -> None:
        """Begin with empty indexes.

        Args:
            base_offset: The segment's first offset, from which entries count.
            interval: The topic's `index.interval.bytes`.
            offset_entries_max: Up to how many offset entries are packed; others are left out.
        """
        self.base_offset = base_offset
        self.offset_entries = bytearray()
        self.time_entries = bytearray()
        self.offset_count = self.time_count = 0
        self.indexed_position = 0
        """Where the batch of the last offset entry begins; 0 without one."""
        self.indexed_timestamp = layout.NO_TIMESTAMP
        """The timestamp of the last time entry."""
        self._interval = interval
        self._offset_entries_max = offset_entries_max
        self._largest = (layout.NO_TIMESTAMP, base_offset)

    def resume(
        self, offsets: tuple[int, int], times: tuple[int, int], largest: tuple[int, int]
    ) -> None:
        """Continue after entries that are in the files.

        Args:
            offsets: How many offset entries there are, and the position in the last one.
            times: How many time entries there are, and the timestamp in the last one.
            largest: The largest timestamp of the batches so far, and the last offset of its batch.
        """
        self.offset_count, self.indexed_position = offsets
        self.time_count, self.indexed_timestamp = times
        self._largest = largest

    @property
    def largest_timestamp(self) -> int:
        """The largest timestamp of the batches so far."""
        return self._largest[0]

    def take_times(self, other: IndexBuilder) -> None:
        """Continue with the time entries of another builder, which has had the same batches."""
        self.time_entries, self.time_count = other.time_entries, other.time_count
        self.indexed_timestamp, self._largest = other.indexed_timestamp, other._largest

    def add(self, position: int, last_offset: int, max_timestamp: int) -> bool:
        """Take the next batch, which begins at byte `position` of the segment.

        Returns whether the batch is due for an entry.
        """
        if max_timestamp > self._largest[0]:
            self._largest = max_timestamp, last_offset
        if position - self.indexed_position <= self._interval:
            return False
        self.add_time()
        if self.offset_count < self._offset_entries_max:
            self.offset_entries += offset_entry(self.base_offset, last_offset, position)
            self.offset_count += 1
        self.indexed_position = position
        return True

    def add_batches(
        self,
        positions: npt.NDArray[np.int64],
        last_offsets: npt.NDArray[np.int64],
        max_timestamps: npt.NDArray[np.int64],
    ) -> list[int]:
        """Take the next batches, (b) each; return those that are due for an entry."""
        columns = positions.tolist(), last_offsets.tolist(), max_timestamps.tolist()
        return [row for row, batch in enumerate(zip(*columns, strict=True)) if self.add(*batch)]

    def add_time(self) -> None:
        """Add a time entry if the largest timestamp has grown: also when the segment ends."""
        timestamp, offset = self._largest
        if timestamp > self.indexed_timestamp:
            self.time_entries += time_entry(self.base_offset, timestamp, offset)
            self.time_count += 1
            self.indexed_timestamp = timestamp
