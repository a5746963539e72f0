"""The change of one commit of a log in an object store: that of every log, and its objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.log_change import LogChange
from kafkalog.storage_engine.metadata.state import PartitionState, State, TopicState, check_log_end
from kafkalog.storage_engine.object_store.store_state import (
    Cleaned,
    Extent,
    StoreChange,
    StoreState,
    covering,
)
from kafkalog.storage_engine.object_store.stored_segments import (
    OfferedBatch,
    StoredActiveSegment,
    active_segment,
    filled,
)
from kafkalog.storage_engine.writing.staged_message import BatchFigures, Run, StagedMessage

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.segment_object import SegmentObject


class StoreDraft(LogChange):
    """Changes of a log in an object store; `store` is the state before them."""

    def __init__(self, store: StoreState) -> None:
        self._changes = StoreChange()
        super().__init__(store.log, self._changes)
        self.store = store
        self._ends: dict[tuple[str, int], int] = {}
        self._active: dict[tuple[str, int], StoredActiveSegment] = {}
        self._has_ended_records = False

    def append(
        self, messages: Iterable[StagedMessage]
    ) -> Mapping[tuple[str, int], tuple[int, int]]:
        """Append the objects of messages; return (first, next) offset per (topic, partition).

        Raises StorageError at the largest offset.
        """
        for message in messages:
            self._append(message)
        return {
            (topic, number): (self.topic(topic).partitions[number].high_watermark, end)
            for (topic, number), end in self._ends.items()
        }

    def _append(self, message: StagedMessage) -> None:
        extents: list[list[Extent]] = [[] for _ in message.files]
        for run in message.runs:
            place = run.topic, run.partition
            known = self.topic(run.topic)
            state = known.partitions[run.partition]
            start = self._ends.get(place, state.high_watermark)
            end = self._ends[place] = start + run.rows
            check_log_end(layout.partition_directory(*place), end)
            active = self._active.get(place)
            if active is None:
                active = active_segment(self.store, known, run.partition)
            position = run.position
            for part in filled(active, known, run.partition, _offered(run, start)):
                self._active[place] = part.active
                extents[run.file].append(
                    Extent(
                        known.topic_id,
                        run.partition,
                        position,
                        part.size,
                        part.base_offset,
                        part.end_offset,
                        state.leader_epoch,
                        part.max_timestamp,
                        first_timestamp=part.first_timestamp,
                        segment=part.active.base_offset,
                        skipped=part.base_offset - start,
                    )
                )
                position += part.size
        for file, of_file in zip(message.files, extents, strict=True):
            self._changes.add(file.name, file.size, of_file)

    def is_left(self, topic_id: str) -> bool:
        """Return whether an object has records of a deleted topic."""
        extents = (extent for each in self.store.objects.values() for extent in each.extents)
        return super().is_left(topic_id) and any(e.topic_id == topic_id for e in extents)

    def copy_topic(self, topic: TopicState, starts: Mapping[int, int]) -> None:
        """Add a topic of another log under its id, which may be that of a deleted one."""
        super().copy_topic(topic, starts)
        if topic.topic_id in self.state.deleting:
            self.forget_deleted(topic.topic_id)

    def delete_topic(self, name: str, now_ms: int) -> None:
        """Delete a topic, and drop the objects that have records of no other."""
        super().delete_topic(name, now_ms)
        self._has_ended_records = True

    def raise_log_start(self, topic: str, number: int, offset: int) -> None:
        """Raise a partition's log start, and drop the objects whose records are all below."""
        super().raise_log_start(topic, number, offset)
        self._has_ended_records = True

    def fields_of_start(self, state: PartitionState, offset: int) -> dict[str, int]:
        """Return them; if all records of its producers are gone, these are forgotten.

        Only a copy brings producers, and maybe an open transaction. Their state is kept with its
        last object, which goes with the records.
        """
        fields = super().fields_of_start(state, offset)
        if 0 <= state.producer_snapshot <= offset:
            fields |= {"producer_snapshot": -1, "last_stable_offset": state.high_watermark}
        return fields

    def end_partition(self, topic: str, number: int, log_start: int, **fields: int) -> None:
        """Set fields of a partition whose log start may rise, and drop the objects below it."""
        before = self.topic(topic).partitions[number]
        start = max(log_start, before.log_start_offset)
        fields |= self.fields_of_start(dataclasses.replace(before, **fields), start)
        self.change_partition(topic, number, **fields)
        self._has_ended_records |= start > before.log_start_offset

    def swap(self, sources: Sequence[str], outputs: Iterable[SegmentObject]) -> bool:
        """Replace objects by segment objects; return False if one of them is gone.

        An output is left out if none of its records can be read any more.
        """
        if any(name not in self.store.objects for name in sources):
            return False
        topics = {topic.topic_id: topic for topic in self.state.topics.values()}
        for name in sources:
            self._changes.drop(name)
        for each in outputs:
            if is_live(each.extent, topics):
                extent = each.extent
                self._changes.add(
                    each.name,
                    extent.size,
                    [extent],
                    side_size=each.side_size,
                    added_ms=self._added_ms(extent, sources),
                )
        self._has_ended_records |= bool(self.state.deleting)
        return True

    def _added_ms(self, extent: Extent, sources: Sequence[str]) -> int:
        """Return when the records of an output were added: as its sources, the last of them."""
        extents = self.store.extents(extent.topic_id, extent.partition)
        placed = covering(extents, extent.base_offset, extent.next_offset)
        names = {each.object_name for each in placed} & {*sources}
        return max((self.store.objects[name].added_ms for name in names), default=0)

    def roll(self, topic: str, number: int) -> None:
        """Close the active segment: the next append begins another one."""
        end = self.topic(topic).partitions[number].high_watermark
        self.change_partition(topic, number, active_base=end, active_size=0)

    def set_cleaned(self, topic_id: str, partition: int, cleaned: Cleaned) -> None:
        """Set what the last cleaning of a partition has left."""
        self._changes.clean(topic_id, partition, cleaned)

    def forget_dropped(self, name: str) -> None:
        """Forget an object that was dropped: it is deleted."""
        self._changes.forget_dropped(name)

    def sweep(self, seen: int) -> None:
        """Drop the objects that no commit names and whose writers had seen no later commit."""
        self._changes.swept = seen

    def record(self, now_ms: int) -> dict[str, Any]:
        """Return the content of the commit."""
        for (topic, number), end in self._ends.items():
            held = self.topic(topic).partitions[number]
            is_stable = held.last_stable_offset >= held.high_watermark
            stable = end if is_stable else held.last_stable_offset  # a transaction is open
            active = self._active[topic, number]
            self.change_partition(
                topic,
                number,
                high_watermark=end,
                last_stable_offset=stable,
                active_base=active.base_offset,
                active_size=active.size,
            )
        if self._has_ended_records:
            self._drop_ended(self.state.apply(self.state.number + 1, self._changes.record(now_ms)))
        return self._changes.record(now_ms)

    def _drop_ended(self, after: State) -> None:
        """Drop the objects without records; forget deleted topics that are in none."""
        live = {topic.topic_id: topic for topic in after.topics.values()}
        gone = {*self.state.deleting}
        dropped = {*self._changes.dropped}
        for name, each in self.store.objects.items():
            if name in dropped:
                continue
            if any(is_live(extent, live) for extent in each.extents):
                gone -= {extent.topic_id for extent in each.extents}
            else:
                self._changes.drop(name)
        for topic_id in gone:
            self.forget_deleted(topic_id)


def _offered(run: Run, offset: int) -> Iterator[OfferedBatch]:
    """Yield the batches of a run that is appended at an offset."""
    for rows, size, time_ms in run.batches or [BatchFigures(run.rows, run.size, run.max_timestamp)]:
        yield OfferedBatch(offset, offset + rows, size, time_ms)
        offset += rows


def is_live(extent: Extent, topics: Mapping[str, TopicState]) -> bool:
    """Return whether a record of an extent can be read; `topics` are those that exist, by id."""
    topic = topics.get(extent.topic_id)
    return (
        topic is not None
        and extent.next_offset > topic.partitions[extent.partition].log_start_offset
    )
