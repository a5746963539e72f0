"""A snapshot of a partition in an object store: its state after one commit, and its extents.

Objects are immutable, so a snapshot holds nothing open and needs no lock. Each extent is read as a
segment. The commit log lists the extents. Within one of a mixed object the batches have no gap. A
segment object may have gaps. Then a read fetches their list, and a batch that does not follow the
one before it is damaged. Its indexes are fetched by a lookup that needs them, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.extent_bytes import ExtentBytes
from kafkalog.storage_engine.object_store.failure import UnplannedExtentError
from kafkalog.storage_engine.object_store.fetched_ranges import AHEAD, FetchedRanges
from kafkalog.storage_engine.object_store.side_object import SideObject
from kafkalog.storage_engine.object_store.store_state import covering
from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
from kafkalog.storage_engine.segment.gaps import GapRows
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex
from kafkalog.storage_engine.segment.offset_chain import OffsetChain
from kafkalog.storage_engine.segment.open_segment import Chunk, OpenSegment

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
    from kafkalog.storage_engine.object_store.client import ObjectReader
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState
    from kafkalog.storage_engine.segment.byte_source import ByteSource


class ObjectSnapshot(PartitionSnapshot):
    """A snapshot of a partition in an object store; see the module."""

    def __init__(
        self,
        ranges: FetchedRanges,
        topic: str,
        partition: int,
        state: PartitionState,
        extents: Sequence[PlacedExtent],
        *,
        is_part: bool = False,
    ) -> None:
        """Take the extents, ascending, that reads of this snapshot may need; send no request.

        `ranges` may be those of several snapshots, which one task reads. If the extents are only a
        part, a read that looks for a marker beyond them raises UnplannedExtentError.
        """
        super().__init__(topic, partition, state)
        self._ranges = ranges
        self._extents = extents
        self._is_part = is_part
        self._sides: dict[str, SideObject] = {}

    @property
    def sides(self) -> Mapping[str, SideObject]:
        """The indexes that were asked for, by the names of the segment objects."""
        return dict(self._sides)

    def keep(self, sides: Mapping[str, SideObject]) -> None:
        """Take over from an earlier snapshot what is known of the same objects."""
        names = {name for name, _ in self._extents}
        self._sides = {name: side for name, side in sides.items() if name in names}

    def close(self) -> None:
        """Forget all bytes."""
        self._ranges.close()
        self._sides.clear()

    def is_of(self, state: StoreState) -> bool:
        """Return whether a state has the same objects for the partition; a swap replaces them."""
        topic = state.log.topics.get(self.topic)
        if topic is None:
            return False
        return state.extents(topic.topic_id, self.partition) is self._extents

    def side(self, segment: OpenSegment) -> SideObject | None:
        """Return the indexes of a segment object; None for an extent of a mixed one."""
        wanted = covering(self._extents, segment.base_offset, segment.base_offset + 1)
        return self._side(wanted[0].object_name) if wanted else None

    def _side(self, name: str, *, keeps: bool = True) -> SideObject | None:
        if not layout.is_stored_segment(name):
            return None
        side = self._sides.get(name)
        if side is None:
            side = SideObject(self._ranges.client, layout.stored_side(name))
            if keeps:
                self._sides[name] = side
        return side

    def open_segments(self, start: int, end: int) -> Iterator[OpenSegment]:
        """Yield the extents that may hold offsets of [start, end), ascending."""
        yield from map(self._opened, self._wanted(start, end))

    def _segments_to_read(self, start: int, end: int) -> Iterator[OpenSegment]:
        wanted = self._wanted(start, end)
        for place, placed in enumerate(wanted):
            yield self._opened(placed, wanted[place + 1 : place + 1 + AHEAD], keeps=False)

    def whole_segments(self) -> Sequence[OpenSegment]:
        """Return all extents, ascending."""
        wanted = self._wanted(self.state.log_start_offset, self.state.high_watermark)
        return [*map(self._opened, wanted)]

    def indexed_transactions(self, *, kept_max: int = 0) -> None:
        """Return None: the markers in the log decide."""

    def _chunks_ahead(self, start: int) -> Iterator[Chunk]:
        end = self.state.high_watermark
        if self._is_part and self._extents:
            end = min(end, self._extents[-1].extent.next_offset)
        yield from self.chunks(start, end)
        if end < self.state.high_watermark:
            raise UnplannedExtentError(
                f"{self._ranges.client.address}: a transaction of {self.topic}-{self.partition} "
                f"ends above offset {end - 1}, and this read knows no extent from there on."
            )

    def largest_timestamp(self, start: int, end: int) -> int:
        """Return the largest time of the extents that lie wholly in [start, end)."""
        inside = (
            extent.max_timestamp
            for _, extent in covering(self._extents, start, end)
            if start <= extent.base_offset and extent.next_offset <= end
        )
        return max(inside, default=layout.NO_TIMESTAMP)

    def _opened(
        self, placed: PlacedExtent, following: Sequence[PlacedExtent] = (), *, keeps: bool = True
    ) -> OpenSegment:
        extent = placed.extent
        base_offset = extent.base_offset
        side = self._side(placed.object_name, keeps=keeps)
        indexes = None
        if side is not None:
            indexes = (
                OffsetIndex(partial(side.section, layout.INDEX), base_offset),
                TimeIndex(partial(side.section, layout.TIME_INDEX), base_offset),
            )
        return OpenSegment(
            self._bytes_of(placed, following),
            f"{self._ranges.client.address}/{placed.object_name}, extent of byte {extent.position}",
            base_offset,
            end_offset=extent.next_offset,
            begin_chain=partial(_chain, side if extent.gaps else None),
            indexes=indexes,
            largest_timestamp=extent.max_timestamp,
        )

    def _bytes_of(self, placed: PlacedExtent, following: Sequence[PlacedExtent]) -> ByteSource:
        """Return the bytes of an extent; those of `following` are read next."""
        return ExtentBytes(self._ranges, placed, following)

    def _wanted(self, start: int, end: int) -> Sequence[PlacedExtent]:
        """Return the extents that hold [start, end); raises StorageError if one is missing."""
        if end > self.state.high_watermark:
            raise self._out_of_range(end, self.state)
        wanted = covering(self._extents, start, end)
        first = max(start, self.state.log_start_offset)
        for _, extent in wanted:
            if extent.base_offset > first:
                break
            first = max(first, extent.next_offset)
        if first < end:
            raise StorageError(
                f"{self._ranges.client.address}: the extent of offset {first} of "
                f"{self.topic}-{self.partition} is missing. Restore the log."
            )
        return [placed for placed in wanted if placed.extent.size]  # a cleaned one may be empty


def open_snapshot(
    client: ObjectReader,
    state: StoreState,
    topic: str,
    partition: int,
    *,
    check: Callable[[TopicState], None] = lambda topic: None,
) -> ObjectSnapshot:
    """Open a partition as it is in a state; sends no request.

    `check` may refuse the state. Raises UnknownTopicError, and InvalidInputError for a partition
    that the topic does not have.
    """
    known = state.log.topic(topic)
    known.check_has(partition)
    check(known)
    extents = state.extents(known.topic_id, partition)
    held = known.partitions[partition]
    return ObjectSnapshot(FetchedRanges(client, extents), topic, partition, held, extents)


def _chain(
    side: SideObject | None, base_offset: int, size: int | None, next_offset: int | None
) -> OffsetChain:
    """Begin a chain of batches whose gaps a side object lists; None for no gaps."""
    return OffsetChain([] if side is None else [GapRows(side.gaps())], next_offset, 0)
