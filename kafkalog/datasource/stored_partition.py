"""The tasks of a read of a log in an object store: ranges with the extents that hold them.

The driver plans them from one state of the log. A task reads what it was given. Objects are
immutable, so a plan is of one moment. A task takes neighbouring partitions and fetches a range of
each object, so a read sends about as many requests as tasks times objects.

A read of committed records may need a transaction's marker, which lies after the range. Therefore a
task also has some segment objects after its range. A task asks for the state only if it must look
beyond them, or if an object is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import InputPartition

from kafkalog.datasource.data_loss import report_data_loss
from kafkalog.datasource.micro_batch import held_partition
from kafkalog.datasource.offset_range import OffsetRange, split_ranges
from kafkalog.datasource.task_ranges import SPLIT_BYTES
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.object_store.store_state import PlacedExtent, covering

if TYPE_CHECKING:
    from kafkalog.datasource.options import SourceOptions
    from kafkalog.storage_engine.object_store.store_state import StoreState

TASK_BYTES: Final = 32 << 20
"""The most bytes of several partitions for one task. They stay in memory until it has read all."""
LATER: Final = 8
"""Segment objects after its range that a task may look into for markers."""


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A range, the state of its partition when it was planned, and its extents, ascending."""

    range: OffsetRange
    state: PartitionState
    extents: Sequence[PlacedExtent]
    later: Sequence[PlacedExtent]
    """Extents after those, ascending, in which the markers of its transactions may lie."""
    is_part: bool
    """Whether the log may have more extents after those."""
    is_view: bool
    """Whether the latest record of each key is read, instead of all records."""

    @property
    def size(self) -> int:
        """The bytes of the extents."""
        return sum(placed.extent.size for placed in self.extents)

    @property
    def object_names(self) -> set[str]:
        """The names of the objects that hold it and its markers."""
        return {placed.object_name for placed in (*self.extents, *self.later)}

    def after(self, offset: int) -> StoredRange:
        """Return what is left of the range once the records up to an offset were read."""
        start = offset + 1
        _, end = self.range.bounds
        rest = OffsetRange(self.range.partition, min(start, end), end)
        return replace(self, range=rest, extents=covering(self.extents, start, end))

    def is_cleaned_in(self, planned_again: StoredRange) -> bool:
        """Return whether a cleaning since may have removed records of the range."""
        before, now = self.state, planned_again.state
        clean_to = max(before.cleaned_to, now.log_start_offset)  # a log start raises it too
        return now.swapped_at != before.swapped_at or now.cleaned_to > clean_to


class StoredPartition(InputPartition):
    """The ranges of one task, as Spark carries them to the executor."""

    def __init__(self, ranges: Sequence[StoredRange]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


def stored_partitions(
    state: StoreState,
    options: SourceOptions,
    changes: Iterable[OffsetRange],
    views: Iterable[OffsetRange] = (),
) -> list[StoredPartition]:
    """Divide the ranges of a read among tasks; empty ranges are left out.

    Views of the latest records are read whole, each in one task. Other ranges are split by the
    options, as in Spark, or else between extents. Neighbours then share a task, unless the options
    split them. Raises DataLossError, or warns, for a partition that is gone.
    """
    later_max = LATER if options.read_committed else 0
    placed = [*_placed(state, options, views, is_view=True, later_max=later_max)]
    if options.min_partitions is None and options.max_records_per_partition is None:
        whole = _placed(state, options, changes, later_max=later_max)
        placed += [piece for each in whole for piece in _split(each, later_max)]
        return [StoredPartition(group) for group in _grouped(placed, state)]
    pieces = split_ranges(
        [range_ for range_ in changes if range_.size > 0],
        options.min_partitions,
        options.max_records_per_partition,
    )
    placed += _placed(state, options, pieces, later_max=later_max)
    return [StoredPartition((each,)) for each in placed]


def planned_again(
    state: StoreState, options: SourceOptions, ranges: Iterable[StoredRange]
) -> list[StoredRange]:
    """Return ranges with the extents that hold them in a later state, and with all later ones.

    Raises DataLossError, or warns, for a partition that is gone.
    """
    found: list[StoredRange] = []
    later_max = None if options.read_committed else 0
    for one in ranges:
        # As it was planned: the earliest and the latest offset are others by now.
        place, bounds = one.range.partition, one.range.bounds
        range_ = OffsetRange(place, *bounds, high_watermark=one.range.high_watermark)
        topic = state.log.topics.get(range_.partition.topic)
        ids = {placed.extent.topic_id for placed in one.extents}
        if topic is not None and ids - {topic.topic_id}:
            report_data_loss(
                "PARTITIONS_DELETED",
                f"topic {range_.partition.topic!r} was deleted and created again",
                fail=options.fail_on_data_loss,
            )
            continue
        found += _placed(state, options, [range_], later_max=later_max)
    return found


def _placed(
    state: StoreState,
    options: SourceOptions,
    ranges: Iterable[OffsetRange],
    *,
    is_view: bool = False,
    later_max: int | None,
) -> Iterator[StoredRange]:
    """Yield the ranges with their extents, and the later ones that `_later` chooses."""
    for range_ in ranges:
        held = held_partition(range_.partition, state.log)
        if held is None:
            report_data_loss(
                "PARTITIONS_DELETED",
                f"partition {range_.partition} is gone",
                fail=options.fail_on_data_loss,
            )
        elif range_.size > 0:
            topic, number = range_.partition
            first, last = range_.bounds
            if is_view:  # a lookup of keys goes through all of the partition
                first, last = held.log_start_offset, held.high_watermark
                if options.completes is not None:
                    first = options.completes.start(number, first)
            extents = state.extents(state.log.topic(topic).topic_id, number)
            own = covering(extents, first, last)
            later = _later(extents, own, later_max)
            yield StoredRange(range_, held, own, later, later_max is not None, is_view)


def _later(
    extents: Sequence[PlacedExtent], own: Sequence[PlacedExtent], count: int | None
) -> Sequence[PlacedExtent]:
    """Return the extents after `own`: at most `count` segment objects, or all of them for None.

    Other objects have no transactions: only a copy of another log has them.
    """
    end = own[-1].extent.next_offset if own else layout.INT64_MAX
    later = covering(extents, end, layout.INT64_MAX)
    if count is None:
        return later
    return tuple(takewhile(lambda placed: layout.is_stored_segment(placed[0]), later[:count]))


def _split(whole: StoredRange, later_max: int) -> Iterator[StoredRange]:
    """Split a range between extents, into pieces of at most SPLIT_BYTES if extents allow it."""
    cuts, size = [], 0
    for _, extent in whole.extents:
        if size and size + extent.size > SPLIT_BYTES:
            cuts.append(extent.base_offset)
            size = 0
        size += extent.size
    if not cuts:
        yield whole
        return
    known = (*whole.extents, *whole.later)
    for piece in whole.range.split_at(cuts):
        own = covering(whole.extents, *piece.bounds)
        yield StoredRange(piece, whole.state, own, _later(known, own, later_max), True, False)


def _grouped(placed: Iterable[StoredRange], state: StoreState) -> Iterator[Sequence[StoredRange]]:
    """Yield neighbours that have at most TASK_BYTES together; one range may have more.

    Neighbours are near each other in the objects, which are sorted by topic id and partition.
    """

    def place(each: StoredRange) -> tuple[str, int, int]:
        topic, number = each.range.partition
        return state.log.topic(topic).topic_id, number, each.range.bounds[0]

    group: list[StoredRange] = []
    size = 0
    for each in sorted(placed, key=place):
        if group and size + each.size > TASK_BYTES:
            yield tuple(group)
            group, size = [], 0
        group.append(each)
        size += each.size
    if group:
        yield tuple(group)
