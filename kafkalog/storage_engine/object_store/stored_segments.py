"""The segments of a partition in an object store: runs of extents that a directory has in one file.

Retention, the lags and the dirty ratio go by segments, so both kinds of log answer alike. A commit
decides by the rule of a directory (`segment_end`) whether its records begin a new segment, and each
extent names the base offset of its segment. Objects are smaller than a segment, or hold parts of
many, so an object isn't a segment. An extent that an early release wrote is a segment of its own,
and closed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
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
    """The largest timestamp, or without one when its object was added (ms); -1 for no object."""
    extents: Sequence[PlacedExtent] = ()


@dataclass(frozen=True, slots=True)
class StoredActiveSegment:
    """The segment that the next records of a partition go to, if it has room."""

    base_offset: int
    size: int = 0
    first_timestamp: int = layout.NO_TIMESTAMP


class Filled(NamedTuple):
    """Consecutive batches that go to one segment."""

    batches: int
    base_offset: int
    end_offset: int
    size: int
    first_timestamp: int
    max_timestamp: int
    active: StoredActiveSegment
    """Their segment, with them."""


class OfferedBatch(NamedTuple):
    """A batch that a segment takes, or does not."""

    base_offset: int
    end_offset: int
    size: int
    max_timestamp: int


def filled(
    active: StoredActiveSegment, topic: TopicState, partition: int, batches: Iterable[OfferedBatch]
) -> Iterator[Filled]:
    """Yield consecutive batches of a partition by the segments that a directory has them in.

    The first ones continue the active segment, if they have room there.
    """
    config = TopicConfig.parse(topic.config)
    directory = layout.partition_directory(topic.name, partition)
    place, longest_ms = -1, 0
    held: Filled | None = None
    for base, end, size, time_ms in batches:
        if active.base_offset != place:
            place = active.base_offset
            longest_ms = segment_end.lifetime_ms(config, topic.topic_id, directory, place)
        is_near = end - 1 - place <= layout.INT32_MAX
        has_room = is_near and (
            not active.size
            or (
                segment_end.has_bytes(config, active.size, size)
                and segment_end.has_time(active.first_timestamp, time_ms, longest_ms)
            )
        )
        if has_room:
            first_ms = active.first_timestamp if active.size else time_ms
            active = StoredActiveSegment(place, active.size + size, first_ms)
        else:
            if held is not None:
                yield held
            active, held = StoredActiveSegment(base, size, time_ms), None
        if held is None:
            held = Filled(1, base, end, size, time_ms, time_ms, active)
        else:
            latest = max(held.max_timestamp, time_ms)
            held = Filled(
                held.batches + 1,
                held.base_offset,
                end,
                held.size + size,
                held.first_timestamp,
                latest,
                active,
            )
    if held is not None:
        yield held


def active_segment(state: StoreState, topic: TopicState, partition: int) -> StoredActiveSegment:
    """Return the active segment of a partition; without one, an empty one at the log's end."""
    held = topic.partitions[partition]
    if not held.active_size:  # it was closed, or an early release wrote the log
        return StoredActiveSegment(held.high_watermark)
    base, extents = held.active_base, state.extents(topic.topic_id, partition)
    first = next(iter(covering(extents, base, held.high_watermark)), None)
    time_ms = layout.NO_TIMESTAMP if first is None else first.extent.first_timestamp
    return StoredActiveSegment(base, held.active_size, time_ms)


def stored_segments(
    state: StoreState, topic: TopicState, partition: int
) -> Sequence[StoredSegment]:
    """Return the segments of a partition, ascending, the active one last, which may be empty.

    The active one has all of its bytes, as in a directory, also those below the log start.
    """
    held = topic.partitions[partition]
    active = active_segment(state, topic, partition)
    found = [*_segments(state, topic, partition)]
    if found and found[-1].base_offset == active.base_offset:
        found[-1] = dataclasses.replace(found[-1], size=active.size)
    else:
        end, first_ms = held.high_watermark, active.first_timestamp
        found.append(StoredSegment(active.base_offset, end, active.size, first_ms, -1))
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
        with_bytes = [each for each in placed if each.extent.size]
        yield StoredSegment(
            base,
            placed[-1].extent.next_offset,
            sum(each.extent.size for each in placed),
            with_bytes[0].extent.first_timestamp if with_bytes else layout.NO_TIMESTAMP,
            max(map(state.time_of, with_bytes or placed)),
            placed,
        )


def segment_of(placed: PlacedExtent) -> int:
    """Return the base offset of an extent's segment."""
    extent = placed.extent
    return extent.base_offset if extent.segment == NO_SEGMENT else extent.segment
