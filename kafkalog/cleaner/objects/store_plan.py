"""Plan what a log in an object store needs next: pure functions, with their reasons and figures.

Three plans are made: whether to regroup the fresh objects, which segment objects to merge, and what
to clean. The last one is `plan_cleaning`, as in a directory.

Regrouping weighs reads against writes. Each read of a fresh object costs a GET per task, until the
object is regrouped. A regroup writes a segment object, with one beside it, for each partition that
has fresh records, and costs the same for few records as for many. It is due once the reads, up to
the next object, will have cost what the regroup costs. With steady arrivals and reads no other
interval is cheaper. Costs that grow with the number of objects are the same at any interval, so
they do not count: a GET for each object, and a segment object for each 64 MiB.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.dedup.delete_horizon import delete_horizon_of
from kafkalog.cleaner.dedup.log_to_clean import CleaningPlan, plan_cleaning
from kafkalog.cleaner.state.first_dirty_offset import valid_first_dirty_offset
from kafkalog.cleaner.state.uncleanable import uncleanable_of
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.prices import S3_STANDARD, Prices
from kafkalog.storage_engine.object_store.regroup import fresh_objects
from kafkalog.storage_engine.object_store.store_state import UNKNOWN
from kafkalog.storage_engine.object_store.stored_segments import (
    StoredSegment,
    active_segment,
    stored_segments,
)

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState

PUTS_PER_OUTPUT: Final = 2
"""A segment object, and the one beside it."""
YOUNGEST_MS: Final = 60_000
"""No regroup is due before its oldest object is so old, unless a cleaning waits for it."""
OLDEST_MS: Final = 86_400_000
"""A regroup is due once its oldest object is so old, even if nobody reads."""
FRESH_MAX: Final = 4_096
"""A regroup is due at so many fresh objects, whatever their age."""
MERGED: Final = 8
"""How many segment objects of one size class become one."""
LARGEST: Final = 64 << 20
"""The size of a segment object that needs no merge."""
_HOUR_MS: Final = 3_600_000
_SMALLEST: Final = 64 << 10
"""Below this size all segment objects are of one class."""

REST, REGROUP = "rest", "regroup"


@dataclass(frozen=True, slots=True)
class Decision:
    """The next act, its reason, and the figures that decided."""

    act: str
    """`rest` or `regroup`."""
    code: str
    """A word for programs: the rule that decided."""
    reason: str
    """One sentence."""
    figures: Mapping[str, float] = field(default_factory=dict)
    until_ms: int | None = None
    """When the decision changes without new records (epoch ms), if that is known."""

    @property
    def is_due(self) -> bool:
        """Whether there is something to do."""
        return self.act != REST


@dataclass(frozen=True, slots=True)
class Fresh:
    """The fresh objects of a log."""

    count: int
    size: int
    """Their bytes."""
    partitions: int
    """How many partitions have records in them."""
    alone: int
    """How many of these have records in one of them alone."""
    oldest_ms: int
    """When the oldest one was committed."""
    waited_ms: int
    """How long all of them have waited, added up."""
    gap_ms: int
    """The usual time from one to the next."""


@dataclass(frozen=True, slots=True)
class Reads:
    """How often the whole log is read, and by how many tasks; a stream reads fresh objects anyway.

    A read leaves no trace in a store, so it is an estimate.
    """

    per_hour: float = 60.0
    tasks: int = 4


def plan_regroup(
    fresh: Fresh,
    *,
    now_ms: int,
    reads: Reads | None = None,
    prices: Prices = S3_STANDARD,
    is_awaited: bool = False,
) -> Decision:
    """Plan whether to regroup all fresh objects now.

    `is_awaited` says that a partition is due to be cleaned and has fresh records.
    """
    if not fresh.count:
        return Decision(REST, "none", "There are no fresh objects.")
    expected = reads or Reads()
    age_ms = max(0, now_ms - fresh.oldest_ms)
    per_ms = expected.per_hour * expected.tasks * prices.get / 3_600_000
    # Half the time to the next object, as no one knows when in it this plan is made. A partition
    # that one object alone touches counts half: later objects may never share its PUTs.
    read_cost = (fresh.waited_ms + fresh.count * fresh.gap_ms / 2) * per_ms
    is_shared = fresh.count > 1
    outputs = fresh.partitions - fresh.alone / 2 if is_shared else fresh.partitions
    write_cost = (PUTS_PER_OUTPUT * outputs + 1) * prices.put + prices.get
    figures = {
        "freshObjects": fresh.count,
        "freshBytes": fresh.size,
        "partitions": fresh.partitions,
        "oldestAgeMs": age_ms,
        "gapMs": fresh.gap_ms,
        "readsPerHour": expected.per_hour,
        "tasks": expected.tasks,
        "readCost": read_cost,
        "writeCost": write_cost,
    }
    costs = f"reads of them cost {read_cost:.2g} $ so far, and a regroup {write_cost:.2g} $"
    if fresh.count >= FRESH_MAX:
        text = f"There are {fresh.count} fresh objects, and {FRESH_MAX} is the limit."
        return Decision(REGROUP, "limit", text, figures)
    if is_awaited:
        text = "A partition with fresh records is due to be cleaned."
        return Decision(REGROUP, "awaited", text, figures)
    if age_ms < YOUNGEST_MS:
        text = f"The oldest fresh object is {age_ms // 1000} s old, and 60 s is the least."
        return Decision(REST, "young", text, figures, fresh.oldest_ms + YOUNGEST_MS)
    if age_ms >= OLDEST_MS:
        return Decision(REGROUP, "old", "The oldest fresh object is a day old.", figures)
    if read_cost >= write_cost:
        text = f"The fresh objects have waited long enough: {costs}."
        return Decision(REGROUP, "reads", text, figures)
    until_ms = fresh.oldest_ms + OLDEST_MS
    if per_ms:
        missing_ms = (write_cost - read_cost) / per_ms / fresh.count
        until_ms = min(until_ms, now_ms + int(missing_ms) + 1)
    return Decision(
        REST, "cheap", f"Fresh objects are cheaper to read: {costs}.", figures, until_ms
    )


def mergeable(sizes: Sequence[int | None]) -> tuple[int, int]:
    """Return the first eight neighbours of one size class, as (first, end); (0, 0) for none.

    `sizes` are those of the objects of one segment by offset; None for one that no merge may take.
    Each object at least doubles, so merging ends: what was merged is not merged again for a few
    more bytes.
    """
    start = 0
    for place, size in enumerate(sizes):
        before = sizes[start]
        if size is None or size >= LARGEST:
            start = place + 1
        elif before is None or size_class(size) != size_class(before):
            start = place
        elif place + 1 - start >= MERGED:
            first, end = place + 1 - MERGED, place + 1
            merged = [each for each in sizes[first:end] if each is not None]
            if 2 * max(merged) <= sum(merged):
                return first, end
    return 0, 0


def size_class(size: int) -> int:
    """Return the class of a size: each begins at eight times the size of the one before."""
    return max(0, (size // _SMALLEST).bit_length() + 2) // 3


# --- the figures of a state ----------------------------------------------------------------------


def fresh_of(state: StoreState, now_ms: int) -> Fresh:
    """Return the fresh objects of a state.

    The usual gap between two is that of the last hour: regrouped ones are dead, and still known.
    """
    objects = [state.objects[name] for name in fresh_objects(state)]
    if not objects:
        return Fresh(0, 0, 0, 0, now_ms, 0, 0)
    runs = Counter((run.topic_id, run.partition) for each in objects for run in each.extents)
    oldest_ms = min(each.added_ms for each in objects)
    gone = sum(
        now_ms - dead.time_ms <= _HOUR_MS and not layout.is_stored_segment(name)
        for name, dead in state.dead.items()
    )
    span_ms = max(_HOUR_MS, now_ms - oldest_ms) if gone else now_ms - oldest_ms
    return Fresh(
        len(objects),
        sum(each.size for each in objects),
        len(runs),
        sum(count == 1 for count in runs.values()),
        oldest_ms,
        sum(max(0, now_ms - each.added_ms) for each in objects),
        max(0, span_ms) // (len(objects) + gone),
    )


def live_extents(state: StoreState, topic: str, partition: int) -> Sequence[PlacedExtent]:
    """Return the extents of a partition that have records above its log start, ascending."""
    known = state.log.topic(topic)
    start = known.partitions[partition].log_start_offset
    placed = state.extents(known.topic_id, partition)
    return [each for each in placed if each.extent.next_offset > start]


def merges_of(state: StoreState, topic: str, partition: int) -> Sequence[str]:
    """Return the segment objects of a partition that a merge makes one; [] for none.

    They are of one segment, so a merge changes no time that retention or a lag goes by. The clean
    section is left alone: the cleaner groups its segments, and they have gaps.
    """
    known = state.log.topic(topic)
    is_compacted = TopicConfig.parse(known.config).is_compacted
    first_dirty = valid_first_dirty_offset(known.partitions[partition]) if is_compacted else 0
    for segment in stored_segments(state, known, partition):
        sizes = [
            size if layout.is_stored_segment(name) and extent.next_offset > first_dirty else None
            for name, extent in segment.extents
            for size in [extent.size]
        ]
        first, end = mergeable(sizes)
        if first < end:
            return [name for name, _ in segment.extents[first:end]]
    return []


def note_of(state: StoreState, topic: str, partition: int, name: str) -> str:
    """Return what a cleaning has left in a note; empty if there is none."""
    cleaned = state.cleaned_of(state.log.topic(topic).topic_id, partition)
    return "" if cleaned is None else cleaned.notes.get(name, "")


def recorded(state: StoreState, topic: str, partition: int) -> PartitionState:
    """Return a partition's state, with the active segment also if an early release wrote it."""
    known = state.log.topic(topic)
    active = active_segment(state, known, partition)
    return dataclasses.replace(
        known.partitions[partition], active_base=active.base_offset, active_size=active.size
    )


@dataclass(frozen=True, slots=True)
class _StoredTimes:
    """The times of a segment, as the commits recorded them."""

    segment: StoredSegment

    @property
    def base_offset(self) -> int:
        return self.segment.base_offset

    @property
    def size(self) -> int:
        return self.segment.size

    def largest_timestamp(self) -> int:
        return self.segment.largest_timestamp

    def first_timestamp(self) -> int | None:
        first_ms = self.segment.first_timestamp
        return None if first_ms == UNKNOWN else first_ms


def plan_of(state: StoreState, topic: str, partition: int, now_ms: int) -> CleaningPlan:
    """Plan the cleaning of a partition of a state, by the rules of every log."""
    known = state.log.topic(topic)
    held = recorded(state, topic, partition)
    first_dirty = valid_first_dirty_offset(held)
    segments = stored_segments(state, known, partition)
    horizon_ms = delete_horizon_of(
        note_of(state, topic, partition, layout.DELETE_HORIZON), first_dirty
    )
    clean_to = min(first_dirty, held.active_base)
    return plan_cleaning(
        topic,
        partition,
        config=TopicConfig.parse(known.config),
        state=held,
        active_base=held.active_base,
        segments=[_StoredTimes(segment) for segment in segments],
        clean_bytes=sum(each.size for each in segments if each.base_offset < clean_to),
        total_bytes=sum(each.size for each in segments),
        now_ms=now_ms,
        pinned_offset=layout.INT64_MAX,
        horizon_ms=horizon_ms,
        is_horizon_due=False,
    )


def may_be_cleaned(state: StoreState, topic: str, partition: int, now_ms: int) -> bool:
    """Return whether a partition is not uncleanable until a later time."""
    text = note_of(state, topic, partition, layout.UNCLEANABLE)
    return not text or uncleanable_of(text).is_due(state.log.topic(topic).config, now_ms)


def is_awaited(state: StoreState, topic: str, partition: int, now_ms: int) -> bool:
    """Return whether a partition is due to be cleaned, and has fresh records in what is due."""
    if not TopicConfig.parse(state.log.topic(topic).config).is_compacted:
        return False
    if not may_be_cleaned(state, topic, partition, now_ms):
        return False
    plan = plan_of(state, topic, partition, now_ms)
    return plan.is_eligible and any(
        not layout.is_stored_segment(name) and extent.base_offset < plan.end
        for name, extent in live_extents(state, topic, partition)
    )


def regroup_of(state: StoreState, now_ms: int) -> Decision:
    """Plan the regroup of a state."""
    fresh = fresh_of(state, now_ms)
    has_awaited = fresh.count > 0 and any(
        is_awaited(state, name, number, now_ms)
        for name, known in state.log.topics.items()
        for number, _ in known.present()
    )
    return plan_regroup(fresh, now_ms=now_ms, is_awaited=has_awaited)
