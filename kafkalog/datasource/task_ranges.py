"""The ranges of a read, divided among Spark's tasks; many tasks may read one partition of a log.

For a split by bytes the sizes of the segments and their offset indexes give the positions. No
record is read and no lock is held. A split may be at any offset, since a task reads exactly the
offsets of its range. A wrong index makes pieces of unequal size. A segment that vanishes makes
fewer pieces.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from kafkalog.datasource.micro_batch import held_partition
from kafkalog.datasource.offset_range import OffsetRange, split_ranges
from kafkalog.errors import StorageError
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.segments import SegmentFiles, list_segments

if TYPE_CHECKING:
    from kafkalog.datasource.options import SourceOptions
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.metadata.state import PartitionState

SPLIT_BYTES: Final = 128 << 20
"""The most bytes of the log for one task, as Spark's `maxPartitionBytes` for files."""


def task_ranges(
    log: ReadableDirectory, options: SourceOptions, ranges: list[OffsetRange]
) -> list[OffsetRange]:
    """Split resolved ranges: by the options, as in Spark, or else by bytes."""
    if options.min_partitions is None and options.max_records_per_partition is None:
        return [piece for range_ in ranges for piece in split_by_bytes(log, range_)]
    return split_ranges(ranges, options.min_partitions, options.max_records_per_partition)


def split_by_bytes(
    log: ReadableDirectory, range_: OffsetRange, max_bytes: int = SPLIT_BYTES
) -> list[OffsetRange]:
    """Split a range into pieces of about equal size, at most `max_bytes` on disk.

    Splits lie between batches where an index has entries; a piece may be larger by the bytes
    between index entries. An empty range gives no piece. For a missing partition the range stays
    whole, and its task reports the fault.
    """
    if range_.size <= 0:
        return []
    topic, number = range_.partition
    state = held_partition(range_.partition, log.state())
    if state is None:
        return [range_]
    if range_.bounds[0] >= state.active_base and state.active_size <= max_bytes:
        return [range_]
    try:
        segments = list_segments(log.partition_directory(topic, number))
    except (FileNotFoundError, StorageError):
        return [range_]  # retired meanwhile; the task reads what is there then
    segments = [segment for segment in segments if segment.base_offset <= state.active_base]
    if not segments:
        return [range_]
    return range_.split_at(_split_offsets(_Places(segments, state), range_, max_bytes))


class _Places:
    """Byte positions of offsets in a whole partition, and offsets of positions."""

    def __init__(self, segments: list[SegmentFiles], state: PartitionState) -> None:
        self.segments = segments
        self.bases = [segment.base_offset for segment in segments]
        self.end_offset = state.high_watermark
        sizes = [segment.size for segment in segments]
        if self.bases[-1] == state.active_base:
            sizes[-1] = min(sizes[-1], state.active_size)
        self.sizes = sizes
        self.starts = list(accumulate(sizes, initial=0))
        """First byte of each segment, and after the last one the count of all bytes."""

    def position(self, offset: int) -> int:
        """Return the approximate byte position of an offset."""
        if offset >= self.end_offset:
            return self.starts[-1]
        place = max(0, bisect_right(self.bases, offset) - 1)
        segment = self.segments[place]
        found = OffsetIndex(segment.index, segment.base_offset).lookup(offset)
        return self.starts[place] + min(found, self.sizes[place])

    def offset(self, position: int) -> int:
        """Return an offset near a position; the start of a batch if an index has it."""
        place = min(bisect_right(self.starts, position) - 1, len(self.segments) - 1)
        segment, inside = self.segments[place], position - self.starts[place]
        index = OffsetIndex(segment.index, segment.base_offset)
        entry = index.entry_at(inside)
        if entry is not None:
            return entry[0] + 1
        if index.last_entry() is not None:
            return segment.base_offset
        # Without an index, assume records of equal size.
        following = [*self.bases, self.end_offset][place + 1]
        span = following - segment.base_offset
        return segment.base_offset + span * inside // max(self.sizes[place], 1)


def _split_offsets(places: _Places, range_: OffsetRange, max_bytes: int) -> list[int]:
    first, last = map(places.position, range_.bounds)
    count = -(-(last - first) // max_bytes)
    return [places.offset(first + (last - first) * n // count) for n in range(1, count)]
