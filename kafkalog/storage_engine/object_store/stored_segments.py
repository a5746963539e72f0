"""The segments of a partition in an object store: runs of extents that a directory has in one file.

Retention, the lags and the dirty ratio go by segments, so both kinds of log answer alike. A commit
decides by the rule of a directory (`segment_end`) whether its records begin a new segment, and each
extent names the base offset of its segment. Objects are smaller than a segment, or hold parts of
many: a segment is no object. The records that one commit adds to a partition are never in two
segments. An extent that an early release wrote is a segment of its own, and closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import segment_end
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.store_state import NO_SEGMENT, covering

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import TopicState
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment: consecutive extents of a partition, none of them below the log start."""

    base_offset: int
    end_offset: int
    size: int
    first_timestamp: int
    """The largest timestamp of its first batch (ms); -1 for none, UNKNOWN if not recorded."""
    largest_timestamp: int
    """The largest timestamp, or without one when its object was added (ms); -1 without a batch."""
    extents: Sequence[PlacedExtent] = ()


class Batches(NamedTuple):
    """Batches that a segment takes, or does not: a run of them, or one."""

    base_offset: int
    end_offset: int
    size: int
    first_timestamp: int
    max_timestamp: int


@dataclass(frozen=True, slots=True)
class ActiveSegment:
    """The segment that the next records of a partition go to, if it has room."""

    base_offset: int
    size: int = 0
    first_timestamp: int = layout.NO_TIMESTAMP

    def after(self, topic: TopicState, partition: int, batches: Batches) -> ActiveSegment:
        """Return the active segment after more batches of a partition: this one, or a new one."""
        config = TopicConfig.parse(topic.config)
        directory = layout.partition_directory(topic.name, partition)
        longest_ms = segment_end.lifetime_ms(config, topic.topic_id, directory, self.base_offset)
        has_room = (
            self.size > 0
            and batches.end_offset - 1 - self.base_offset <= layout.INT32_MAX
            and segment_end.has_bytes(config, self.size, batches.size)
            and segment_end.has_time(self.first_timestamp, batches.max_timestamp, longest_ms)
        )
        if has_room:
            return ActiveSegment(self.base_offset, self.size + batches.size, self.first_timestamp)
        return ActiveSegment(batches.base_offset, batches.size, batches.first_timestamp)


def active_segment(state: StoreState, topic: TopicState, partition: int) -> ActiveSegment:
    """Return the active segment of a partition; an empty one at the end of a log that has none."""
    held = topic.partitions[partition]
    if not held.active_size:  # it was closed, or an early release wrote the log
        return ActiveSegment(held.high_watermark)
    base, extents = held.active_base, state.extents(topic.topic_id, partition)
    first = next(iter(covering(extents, base, held.high_watermark)), None)
    time_ms = layout.NO_TIMESTAMP if first is None else first.extent.first_timestamp
    return ActiveSegment(base, held.active_size, time_ms)


def stored_segments(
    state: StoreState, topic: TopicState, partition: int
) -> Sequence[StoredSegment]:
    """Return the segments of a partition, ascending, the active one last, which may be empty."""
    held = topic.partitions[partition]
    active = active_segment(state, topic, partition)
    found = [*_segments(state, topic, partition)]
    if not found or found[-1].base_offset != active.base_offset:
        end = held.high_watermark
        found.append(StoredSegment(active.base_offset, end, 0, active.first_timestamp, -1))
    return found


def _segments(state: StoreState, topic: TopicState, partition: int) -> Iterator[StoredSegment]:
    start = topic.partitions[partition].log_start_offset
    live = (
        placed
        for placed in state.extents(topic.topic_id, partition)
        if placed.extent.next_offset > start
    )
    for base, group in groupby(live, key=segment_of):
        placed = [*group]
        with_bytes = (each.extent for each in placed if each.extent.size)
        first = next(with_bytes, None)
        yield StoredSegment(
            base,
            placed[-1].extent.next_offset,
            sum(each.extent.size for each in placed),
            layout.NO_TIMESTAMP if first is None else first.first_timestamp,
            max(map(state.time_of, placed)),
            placed,
        )


def segment_of(placed: PlacedExtent) -> int:
    """Return the base offset of an extent's segment."""
    extent = placed.extent
    return extent.base_offset if extent.segment == NO_SEGMENT else extent.segment
