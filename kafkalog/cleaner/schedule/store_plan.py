"""Plan what a log in an object store needs next: pure functions, with their reasons and figures.

Two plans are made: whether to regroup the fresh objects, and what to do with one partition.

Regrouping weighs reads against writes. Each read of a fresh object costs a GET per task, until the
object is regrouped. A regroup writes a segment object, with one beside it, for each partition that
has fresh records, and costs the same for few records as for many. It is due once the reads, up to
the next object, will have cost what the regroup costs. With steady arrivals and reads no other
interval is cheaper. Costs that grow with the number of objects are the same at any interval, so
they do not count: a GET for each object, and a segment object for each 64 MiB.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.dedup.delete_horizon import delete_horizon_of
from kafkalog.cleaner.state.first_dirty_offset import valid_first_dirty_offset
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.prices import S3_STANDARD, Prices
from kafkalog.storage_engine.object_store.regroup import fresh_objects

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState

PUTS_PER_OUTPUT: Final = 2
"""A segment object, and the one beside it."""
YOUNGEST_MS: Final = 60_000
"""No regroup is due before its oldest object is so old."""
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

REST, REGROUP, CLEAN, MERGE = "rest", "regroup", "clean", "merge"


@dataclass(frozen=True, slots=True)
class Decision:
    """The next act, its reason, and the figures that decided."""

    act: str
    """`rest`, `regroup`, `clean` or `merge`."""
    code: str
    """A word for programs: the rule that decided."""
    reason: str
    """One sentence."""
    figures: Mapping[str, float] = field(default_factory=dict)
    until_ms: int | None = None
    """When the decision changes without new records (epoch ms), if that is known."""
    merged: tuple[int, int] = (0, 0)
    """For `merge`: which of the segment objects, as (first, end)."""

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
    if age_ms < YOUNGEST_MS:
        text = f"The oldest fresh object is {age_ms // 1000} s old, and 60 s is the least."
        return Decision(REST, "young", text, figures, fresh.oldest_ms + YOUNGEST_MS)
    if is_awaited:
        text = "A partition with fresh records is due to be cleaned."
        return Decision(REGROUP, "awaited", text, figures)
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


@dataclass(frozen=True, slots=True)
class Part:
    """A partition's run of records in one object."""

    size: int
    time_ms: int
    """The largest timestamp, or without one when the object was added; -1 without a batch."""
    is_dirty: bool
    """Whether it ends above the first dirty offset."""
    is_fresh: bool
    """Whether it is in a mixed object."""
    has_time: bool = True
    """Whether a record has a timestamp."""


def plan_partition(
    config: TopicConfig,
    parts: Sequence[Part],
    *,
    now_ms: int,
    horizon_ms: int | None = None,
) -> Decision:
    """Plan what a partition needs; `parts` are its live runs by offset, fresh ones last.

    Compacted partitions follow Kafka: the dirty ratio, both lags, and the earliest delete horizon,
    `horizon_ms`. Segment objects that are not clean yet are merged by eights of a size class.
    """
    if config.is_compacted:
        decision = _cleaning(config, parts, now_ms, horizon_ms)
        if decision.is_due:
            return decision
    else:
        text = "Its cleanup.policy has no compact, so no record becomes obsolete."
        decision = Decision(REST, "policy", text)
    first, end = _mergeable(parts)
    if first == end:
        return decision
    size = sum(part.size for part in parts[first:end])
    text = f"{end - first} segment objects of one size class, {size} bytes, become one."
    figures = {**decision.figures, "segments": end - first, "mergedBytes": size}
    return Decision(MERGE, "sizes", text, figures, merged=(first, end))


def _cleaning(
    config: TopicConfig, parts: Sequence[Part], now_ms: int, horizon_ms: int | None
) -> Decision:
    """Plan a cleaning. Kafka: LogCleanerManager, rules C32 to C37."""
    lag_ms = config.min_compaction_lag_ms
    dirty = [part for part in parts if part.is_dirty]
    aged = [*itertools.takewhile(lambda part: part.time_ms <= now_ms - lag_ms, dirty)]
    if not lag_ms:
        aged = dirty
    clean_bytes = sum(part.size for part in parts if not part.is_dirty)
    dirty_bytes = sum(part.size for part in aged)
    total = clean_bytes + dirty_bytes
    firsts = [part.time_ms for part in aged if part.has_time and part.time_ms > 0]
    delay_ms = max(0, now_ms - min(firsts) - config.max_compaction_lag_ms) if firsts else 0
    ratio = dirty_bytes / total if total else 0.0
    figures = {
        "cleanBytes": clean_bytes,
        "dirtyBytes": dirty_bytes,
        "waitingBytes": sum(part.size for part in dirty) - dirty_bytes,
        "freshBytes": sum(part.size for part in parts if part.is_fresh),
        "dirtyRatio": ratio,
        "minDirtyRatio": config.min_cleanable_dirty_ratio,
        "compactionDelayMs": delay_ms,
    }
    if figures["compactionDelayMs"]:
        text = "Its oldest dirty record is older than max.compaction.lag.ms allows."
        return Decision(CLEAN, "lag", text, figures)
    if horizon_ms is not None and horizon_ms <= now_ms:
        text = "The delete horizon of a tombstone has come."
        return Decision(CLEAN, "horizon", text, figures)
    shown = f"{ratio:.2f} of its bytes are dirty, and min.cleanable.dirty.ratio is "
    shown += f"{config.min_cleanable_dirty_ratio:.2f}."
    if ratio > config.min_cleanable_dirty_ratio:
        return Decision(CLEAN, "ratio", shown, figures)
    if len(aged) < len(dirty) and not aged:
        until_ms = dirty[0].time_ms + lag_ms
        text = "Its dirty records are younger than min.compaction.lag.ms."
        return Decision(REST, "young", text, figures, until_ms)
    if not dirty:
        text = "All of it is clean." if parts else "It has no records."
        return Decision(REST, "clean" if parts else "empty", text, figures, horizon_ms)
    return Decision(REST, "ratio", shown, figures, horizon_ms)


def _mergeable(parts: Sequence[Part]) -> tuple[int, int]:
    """Return the first eight neighbours of one size class, as (first, end); (0, 0) for none.

    The clean section is left alone: the cleaner groups its segments, and they have gaps.
    """
    start = 0
    for place, part in enumerate(parts):
        if part.is_fresh or part.size >= LARGEST or not part.is_dirty:
            start = place + 1
        elif _size_class(part.size) != _size_class(parts[start].size):
            start = place
        elif place + 1 - start == MERGED:
            return start, place + 1
    return 0, 0


def _size_class(size: int) -> int:
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


def plan_of(
    state: StoreState, topic: str, partition: int, now_ms: int, *, with_fresh: bool = True
) -> Decision:
    """Plan a partition of a state; fresh records count as dirty ones, or not at all."""
    known = state.log.topic(topic)
    first_dirty = valid_first_dirty_offset(known.partitions[partition])
    parts = [
        Part(
            placed.extent.size,
            state.time_of(placed),
            placed.extent.next_offset > first_dirty,
            not layout.is_stored_segment(placed.object_name),
            has_time=placed.extent.max_timestamp >= 0,
        )
        for placed in live_extents(state, topic, partition)
        if with_fresh or layout.is_stored_segment(placed.object_name)
    ]
    cleaned = state.cleaned_of(known.topic_id, partition)
    notes = {} if cleaned is None else cleaned.notes
    horizon_ms = delete_horizon_of(notes.get(layout.DELETE_HORIZON, ""), first_dirty)
    config = TopicConfig.parse(known.config)
    return plan_partition(config, parts, now_ms=now_ms, horizon_ms=horizon_ms)


def regroup_of(state: StoreState, now_ms: int) -> Decision:
    """Plan the regroup of a state."""
    fresh = fresh_of(state, now_ms)
    is_awaited = fresh.count > 0 and any(
        decision.act == CLEAN and decision.figures["freshBytes"]
        for name, known in state.log.topics.items()
        for number, _ in known.present()
        for decision in [plan_of(state, name, number, now_ms)]
    )
    return plan_regroup(fresh, now_ms=now_ms, is_awaited=is_awaited)
