"""Plan whether to regroup the fresh objects of a store, and which segment objects to merge.

Regrouping weighs reads against writes. Each read of a fresh object costs a GET per task, until the
object is regrouped. A regroup writes a segment object and a side object for each partition that has
fresh records, and costs the same for few records as for many. It is due once the reads, up to the
next object, will have cost what the regroup costs. With steady arrivals and reads no other interval
is cheaper. Costs that grow with the number of objects are the same at any interval, so they do not
count. Those are a GET for each object, and a segment object for each 64 MiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.plan import valid_first_dirty_offset
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.client import GET, HEAD, LIST, PUT
from kafkalog.storage_engine.object_store.object_log import FRESH_MAX
from kafkalog.storage_engine.object_store.regroup import fresh_objects
from kafkalog.storage_engine.object_store.segment_object import SEGMENT_SIZE_MAX
from kafkalog.storage_engine.object_store.stored_segments import stored_segments

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.store_state import StoreState

PUT_PRICE: Final = 5e-6
"""Of a PUT or a LIST, in dollars: Amazon S3 Standard, us-east-1. Deletes are free."""
GET_PRICE: Final = 4e-7
"""Of a GET or a HEAD."""
_READS_PER_HOUR: Final = 60.0
"""How often the whole log is read: a guess, as a read leaves no trace in a store."""
TASKS: Final = 4
"""By how many tasks; a stream reads fresh objects anyway."""
READ_PRICE: Final = _READS_PER_HOUR * TASKS * GET_PRICE / 3_600_000
"""What the reads of one fresh object cost in a millisecond."""
PUTS_PER_OUTPUT: Final = 2
"""A segment object, and the one next to it."""
YOUNGEST_MS: Final = 60_000
"""No regroup is due before its oldest object is so old, unless a cleaning waits for it."""
OLDEST_MS: Final = 86_400_000
"""A regroup is due once its oldest object is so old, even if nobody reads."""
MERGED: Final = 8
"""How many segment objects of one size class become one."""
_HOUR_MS: Final = 3_600_000
_SMALLEST: Final = 64 << 10
"""Below this size all segment objects are of one class."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to regroup, why, and the figures that decided."""

    is_due: bool
    code: str
    """A word for programs: the rule that decided."""
    reason: str
    """One sentence."""
    figures: Mapping[str, float] = field(default_factory=dict)


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


def price_of(counts: Mapping[str, int]) -> float:
    """Return what requests cost in dollars, counted by kind."""
    prices = {PUT: PUT_PRICE, LIST: PUT_PRICE, GET: GET_PRICE, HEAD: GET_PRICE}
    return sum(prices.get(kind, 0.0) * count for kind, count in counts.items())


def plan_regroup(fresh: Fresh, *, now_ms: int, is_awaited: bool = False) -> Decision:
    """Plan whether to regroup all fresh objects now.

    `is_awaited` says that a partition is due to be cleaned and has fresh records.
    """
    if not fresh.count:
        return Decision(False, "none", "There are no fresh objects.")
    age_ms = max(0, now_ms - fresh.oldest_ms)
    # Half the time to the next object, as no one knows when in it this plan is made. A partition
    # that one object alone touches counts half: later objects may never share its PUTs.
    read_cost = (fresh.waited_ms + fresh.count * fresh.gap_ms / 2) * READ_PRICE
    is_shared = fresh.count > 1
    outputs = fresh.partitions - fresh.alone / 2 if is_shared else fresh.partitions
    write_cost = (PUTS_PER_OUTPUT * outputs + 1) * PUT_PRICE + GET_PRICE
    figures = {
        "freshObjects": fresh.count,
        "freshBytes": fresh.size,
        "partitions": fresh.partitions,
        "oldestAgeMs": age_ms,
        "gapMs": fresh.gap_ms,
        "readsPerHour": _READS_PER_HOUR,
        "tasks": TASKS,
        "readCost": read_cost,
        "writeCost": write_cost,
    }
    costs = f"reads of them cost {read_cost:.2g} $ so far, and a regroup {write_cost:.2g} $"
    if fresh.count >= FRESH_MAX:
        text = f"There are {fresh.count} fresh objects, and {FRESH_MAX} is the limit."
        return Decision(True, "limit", text, figures)
    if is_awaited:
        text = "A partition with fresh records is due to be cleaned."
        return Decision(True, "awaited", text, figures)
    if age_ms < YOUNGEST_MS:
        text = f"The oldest fresh object is {age_ms // 1000} s old, and 60 s is the least."
        return Decision(False, "young", text, figures)
    if age_ms >= OLDEST_MS:
        return Decision(True, "old", "The oldest fresh object is a day old.", figures)
    if read_cost >= write_cost:
        text = f"The fresh objects have waited long enough: {costs}."
        return Decision(True, "reads", text, figures)
    return Decision(False, "cheap", f"Fresh objects are cheaper to read: {costs}.", figures)


def mergeable(sizes: Sequence[int | None]) -> tuple[int, int]:
    """Return the first eight neighbours of one size class, as (first, end); (0, 0) for none.

    `sizes` are those of the objects of one segment by offset; None for one that no merge may take.
    Each object at least doubles, so merging ends: what was merged is not merged again for a few
    more bytes.
    """
    start = 0
    for place, size in enumerate(sizes):
        before = sizes[start]
        if size is None or size >= SEGMENT_SIZE_MAX:
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

    The usual gap between two is that of the last hour: regrouped ones are dropped, and still known.
    """
    objects = [state.objects[name] for name in fresh_objects(state)]
    if not objects:
        return Fresh(0, 0, 0, 0, now_ms, 0, 0)
    runs = Counter((run.topic_id, run.partition) for each in objects for run in each.extents)
    oldest_ms = min(each.added_ms for each in objects)
    gone = sum(
        now_ms - dropped.time_ms <= _HOUR_MS and not layout.is_stored_segment(name)
        for name, dropped in state.dropped.items()
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
