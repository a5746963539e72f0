"""A log in an object store at one time: a state of the commit log, which needs no request."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.objects.regroup_plan import Decision, fresh_of, plan_regroup
from kafkalog.cleaner.plan import (
    Part,
    closing_min,
    may_be_tried,
    plan_cleaning,
    valid_first_dirty_offset,
)
from kafkalog.cleaner.shelf import Moment, Piece
from kafkalog.cleaner.state.delete_horizon import read_delete_horizon
from kafkalog.cleaner.state.notes import StoredNotes
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.object_snapshot import open_snapshot
from kafkalog.storage_engine.object_store.stored_segments import active_segment, stored_segments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kafkalog.cleaner.plan import Plan
    from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState
    from kafkalog.storage_engine.object_store.stored_segments import StoredSegment
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot


class ObjectMoment(Moment):
    """A state of the commit log."""

    verify = "`kafkalog verify {path} {topic} --deep`"  # without it no object is read

    def __init__(self, log: ObjectLog, store: StoreState, now_ms: int) -> None:
        super().__init__(str(log.root), store.log, now_ms)
        self.log: Final = log
        self.store: Final = store

    def notes(self, topic: str, partition: int) -> StoredNotes:
        """Return a copy of what the cleanings of a partition have left."""
        cleaned = self.store.cleaned_of(self.state.topic(topic).topic_id, partition)
        return StoredNotes(self.root, {} if cleaned is None else dict(cleaned.notes))

    def snapshot(self, topic: str, partition: int, start: int) -> PartitionSnapshot:
        """Open a snapshot of a partition, which is read by requests."""
        return open_snapshot(self.log.client, self.store, topic, partition)

    def pieces(self, plan: Plan) -> Sequence[Piece]:
        """Return the runs of batches in objects that hold a partition's records, ascending."""
        return [
            Piece(
                extent.base_offset,
                extent.next_offset,
                extent.size,
                name,
                not layout.is_stored_segment(name),
            )
            for name, extent in live_extents(self.store, plan.topic, plan.partition)
        ]

    @cached_property
    def regroup(self) -> Decision:
        """The plan of the next regroup; due at once if a partition waits to be cleaned."""
        fresh = fresh_of(self.store, self.now_ms)
        is_awaited = fresh.count > 0 and any(
            self._awaits_regroup(known, number)
            for known in self.state.topics.values()
            if TopicConfig.parse(known.config).is_compacted
            for number, _ in known.present()
        )
        return plan_regroup(fresh, now_ms=self.now_ms, is_awaited=is_awaited)

    @cached_property
    def closing_min(self) -> int:
        """The least bytes for which the cleaner closes an active segment."""
        partitions = sum(len(known.numbers()) for known in self.state.topics.values())
        return closing_min(sum(each.size for each in self.store.objects.values()), partitions)

    def _awaits_regroup(self, known: TopicState, partition: int) -> bool:
        """Return whether a partition is due to be cleaned, and has fresh records in what is due."""
        if not may_be_tried(
            read_uncleanable(self.notes(known.name, partition)), known, self.now_ms
        ):
            return False
        plan = self.plan(known.name, partition)
        return plan.is_eligible and any(
            piece.is_fresh and piece.base_offset < plan.dirty_end for piece in self.pieces(plan)
        )

    def _plan(self, topic: str, partition: int) -> Plan:
        known = self.state.topic(topic)
        segments = stored_segments(self.store, known, partition)
        held = recorded(self.store, known, partition)
        first_dirty = valid_first_dirty_offset(held)
        clean_to = min(first_dirty, held.active_base)
        return plan_cleaning(
            topic,
            partition,
            config=TopicConfig.parse(known.config),
            state=held,
            parts=[_part(segment) for segment in segments],
            clean_bytes=sum(each.size for each in segments if each.base_offset < clean_to),
            total_bytes=sum(each.size for each in segments),
            now_ms=self.now_ms,
            horizon_ms=read_delete_horizon(self.notes(topic, partition), first_dirty),
            closing_min=lambda: self.closing_min,
        )


def _part(segment: StoredSegment) -> Part:
    times = (lambda: segment.largest_timestamp), (lambda: segment.first_timestamp)
    return Part(segment.base_offset, segment.size, *times)


def live_extents(state: StoreState, topic: str, partition: int) -> Sequence[PlacedExtent]:
    """Return the extents of a partition that have records above its log start, ascending."""
    known = state.log.topic(topic)
    start = known.partitions[partition].log_start_offset
    placed = state.extents(known.topic_id, partition)
    return [each for each in placed if each.extent.next_offset > start]


def recorded(state: StoreState, known: TopicState, partition: int) -> PartitionState:
    """Return a partition's state, with the active segment also if an early release wrote it."""
    active = active_segment(state, known, partition)
    return dataclasses.replace(
        known.partitions[partition], active_base=active.base_offset, active_size=active.size
    )
