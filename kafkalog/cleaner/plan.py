"""Decides what is due, and why: pure functions of sizes, times, configs and notes, for any log.

A log has a *clean* section, which holds each key once, then a *dirty* one, then an uncleanable one.
The clean and the dirty section end at segment bases, but the first dirty offset may lie within a
segment after the offset map was full. The active segment is uncleanable. If the topic sets no
`segment.bytes`, the cleaner closes it once the partition is due counted with it (ours: Kafka's
waits until the writer has). The sections are in `Plan`, what becomes of them in `Verdict`, and
their order in `Schedule`. Whoever cleans, reports or warns reads them, and decides nothing.

Kafka: LogToClean, and cleanableOffsets, maxCompactionDelay and grabFilthiestCompactedLog of
LogCleanerManager (rules C24 to C39).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.config import TopicConfig
    from kafkalog.storage_engine.metadata.state import PartitionState, TopicState

OURS, BROKERS, COPY = "ours", "broker's", "copy"
"""Whose a log is."""
_LAST_BACKOFF_MS: Final = 3_600_000
CLOSING_LEAST: Final = 64 << 10
"""The cleaner never closes an active segment of fewer bytes."""
CLOSING_MOST: Final = 1 << 20
"""One of so many bytes is large enough in any log."""
_DECIDE: Final = (
    "min.cleanable.dirty.ratio",
    "min.compaction.lag.ms",
    "segment.bytes",
    "segment.ms",
)
"""Configs that decide when a partition is cleaned, whose defaults a broker may set."""


class Why(Enum):
    """A fact that lets a partition be cleaned, or wait; `explain` has a sentence for each."""

    # What keeps every cleaner away.
    COPY = auto()  # of a broker's partitions
    BROKERS = auto()
    POLICY = auto()
    CLEANING = auto()
    PAUSED = auto()
    UNCLEANABLE = auto()  # until a retry, which may have come
    # What makes it due.
    ABOVE_RATIO = auto()
    MAX_LAG = auto()
    HORIZON = auto()  # of a tombstone has come
    HORIZON_UNKNOWN = auto()  # as a broker has cleaned it
    # What it waits for.
    EMPTY = auto()
    ALL_CLEAN = auto()
    UNKNOWN = auto()  # what decides may be a broker's own default
    READERS = auto()  # of a changelog
    BELOW_RATIO = auto()
    TRANSACTION = auto()
    MIN_LAG = auto()
    PIN = auto()
    ACTIVE_SEGMENT = auto()
    # What else is true.
    CLEANER = auto()
    NO_CLEANER = auto()
    CLEANER_UNKNOWN = auto()  # as no lock tells
    TOMBSTONES = auto()  # wait for their delete horizon


WHAT_FOR: Final = {
    Why.ABOVE_RATIO: "the dirty ratio was above min.cleanable.dirty.ratio",
    Why.MAX_LAG: "max.compaction.lag.ms had passed",
    Why.HORIZON: "a delete horizon had come",
    Why.HORIZON_UNKNOWN: "a delete horizon may have come",
}
"""Why a cleaning was made, in words for a log message."""
OBSTACLES: Final = frozenset(
    {Why.COPY, Why.BROKERS, Why.POLICY, Why.CLEANING, Why.PAUSED, Why.UNCLEANABLE}
    | {Why.TRANSACTION, Why.MIN_LAG, Why.PIN}
)
"""What may keep a forced cleaning away from records."""


@dataclass(frozen=True, slots=True)
class Part:
    """A segment, whether it is a file or a run of objects; its times may take a read."""

    base_offset: int
    size: int
    largest_timestamp: Callable[[], int]
    """The largest timestamp of its records (ms), or else the age of what holds them."""
    first_timestamp: Callable[[], int]
    """The largest timestamp of its first batch (ms); -1 for none, less if not recorded."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A partition's sections, in offsets and bytes."""

    topic: str
    partition: int
    config: TopicConfig
    state: PartitionState
    first_dirty_offset: int
    first_uncleanable_offset: int
    """The limit by the rules and by pins; rounded down to a segment's base it is `end`."""
    end: int
    """The end of the dirty section; never below `first_dirty_offset`."""
    clean_bytes: int
    cleanable_bytes: int
    uncleanable_bytes: int
    compaction_delay_ms: int
    """Time since max.compaction.lag.ms demanded a cleaning; 0 if it does not (C37)."""
    earliest_delete_horizon_ms: int | None
    """When the next tombstone of the clean section may go; None if there is none, or unknown."""
    is_horizon_due: bool
    """Whether that time has come."""
    is_awaited: bool
    """Whether tasks read a changelog; until they end, the cleaner begins nothing."""
    pinned: tuple[int, int]
    """The offset that a reader needs, and when its lease ends (epoch ms; 0: it has ended)."""
    lagging: tuple[int, int] | None
    """The first dirty offset that min.compaction.lag.ms holds back, and the largest timestamp of
    its segment (ms); None if it holds nothing back."""
    has_closed_dirty: bool
    """Whether any dirty record is outside the active segment."""
    closing_bytes: int = 0
    """The bytes of the active segment, if the cleaner closes it first; else 0."""
    free_bytes: int = 0
    """About how many dirty bytes of an active segment that the cleaner may close wait for nothing
    else."""

    @property
    def dirty_bytes(self) -> int:
        """The bytes that a cleaning treats as new."""
        return self.cleanable_bytes + self.closing_bytes

    @property
    def dirty_end(self) -> int:
        """The end of what is dirty, with the active segment if the cleaner closes it."""
        return self.state.high_watermark if self.closing_bytes else self.end

    @property
    def dirty_ratio(self) -> float:
        """The share of dirty bytes among clean and dirty ones; 0 for an empty log (C32)."""
        return _ratio(self.dirty_bytes, self.clean_bytes)

    @property
    def ratio_with_active(self) -> float:
        """What the dirty ratio would be if the cleaner closed the active segment."""
        return _ratio(self.cleanable_bytes + self.free_bytes, self.clean_bytes)

    @property
    def due(self) -> list[Why]:
        """The reasons to clean it (C33; a due horizon is our addition)."""
        found = []
        if self.dirty_ratio > self.config.min_cleanable_dirty_ratio:
            found.append(Why.ABOVE_RATIO)
        if self.cleanable_bytes > 0 and self.compaction_delay_ms > 0:
            found.append(Why.MAX_LAG)
        if self.is_horizon_due:
            is_known = self.earliest_delete_horizon_ms is not None
            found.append(Why.HORIZON if is_known else Why.HORIZON_UNKNOWN)
        return found

    @property
    def is_eligible(self) -> bool:
        """Whether the background cleaner should clean it now.

        Unlike Kafka's it waits for readers, unless max.compaction.lag.ms demands a cleaning.
        """
        due = self.due
        return Why.MAX_LAG in due or (bool(due) and not self.is_awaited)

    @property
    def has_work(self) -> bool:
        """Whether a cleaning could change anything."""
        return self.is_horizon_due or self.dirty_bytes > 0 or self.end > self.first_dirty_offset

    @property
    def is_all_clean(self) -> bool:
        """Whether nothing in it is dirty."""
        return self.first_dirty_offset >= self.state.high_watermark

    def waits(self, known: TopicState) -> list[Why]:
        """Return what the partition waits for; the first one is the answer."""
        if self.state.high_watermark <= self.state.log_start_offset:
            return [Why.EMPTY]
        if self.is_all_clean:
            return [Why.ALL_CLEAN]
        if not known.knows_defaults:
            # Its cleaner is the broker, with configs of its own; it knows no pins.
            found = [why for why in self.barriers() if why is Why.TRANSACTION]
            if unknown_configs(known):
                return [*found, Why.UNKNOWN]
            is_above = Why.ABOVE_RATIO in self.due
            return [*found, Why.ABOVE_RATIO if is_above else Why.BELOW_RATIO]
        waits = [Why.READERS] if self.due else [Why.BELOW_RATIO] if self.cleanable_bytes else []
        return waits + self.barriers(with_active=True)

    def barriers(self, *, with_active: bool = False) -> list[Why]:
        """Return what holds records back, the one at the lowest offset first."""
        found = [*self._barriers()]
        base = max(self.state.active_base, self.first_dirty_offset)
        if with_active and not self.closing_bytes and base < self.state.high_watermark:
            found.append((base, Why.ACTIVE_SEGMENT))
        return [one for _, one in sorted(found, key=lambda barrier: barrier[0])]

    def _barriers(self) -> Iterable[tuple[int, Why]]:
        state = self.state
        if state.last_stable_offset < state.high_watermark:
            yield state.last_stable_offset, Why.TRANSACTION
        if self.lagging is not None:
            yield self.lagging[0], Why.MIN_LAG
        if self.pinned[0] < min(state.active_base, state.last_stable_offset):
            yield max(self.pinned[0], self.first_dirty_offset), Why.PIN

    def section_of(self, base_offset: int, next_offset: int, *, is_refused: bool = False) -> str:
        """Return the section of a run of records in a word.

        It is `clean`, `cleanable` (the next cleaning takes it), `uncleanable` (something holds it
        back, or `is_refused`), `active`, or `closed` if the topic is not compacted.
        """
        if base_offset >= self.state.active_base:
            return "active"
        if not self.config.is_compacted:
            return "closed"
        if next_offset <= self.first_dirty_offset:
            return "clean"
        return "uncleanable" if is_refused or base_offset >= self.end else "cleanable"


def plan_cleaning(
    topic: str,
    partition: int,
    *,
    config: TopicConfig,
    state: PartitionState,
    parts: Sequence[Part],
    clean_bytes: int,
    total_bytes: int,
    now_ms: int,
    pinned: tuple[int, int] = (layout.INT64_MAX, 0),
    horizon_ms: int | None,
    is_horizon_due: bool = False,
    is_awaited: bool = False,
    closing_min: Callable[[], int] | None = None,
) -> Plan:
    """Plan the cleaning of a partition; it ends below the pinned offset, which a reader needs.

    The segments that reach above the log start are `parts`, ascending, the active one last. If the
    earliest delete horizon of the clean section is known, it is `horizon_ms`. The cleaner closes an
    active segment of `closing_min()` bytes or more; without that function, it closes none.
    """
    first_dirty = valid_first_dirty_offset(state)
    active_base = state.active_base
    if not clean_bytes:
        horizon_ms = None  # retention has taken what waited for it
    closed = [part for part in parts if part.base_offset < active_base]
    ends = [*(part.base_offset for part in parts[1:]), active_base]
    dirty = [part for part, end in zip(closed, ends, strict=False) if end > first_dirty]
    is_active_dirty = max(first_dirty, active_base) < state.high_watermark
    active = [part for part in parts[-1:] if is_active_dirty and part.base_offset == active_base]
    uncleanable = min(active_base, state.last_stable_offset, pinned[0])
    lagging = None
    if config.min_compaction_lag_ms > 0:
        for part in (*dirty, *active):
            latest_ms = part.largest_timestamp()
            if latest_ms > now_ms - config.min_compaction_lag_ms:
                lagging = max(part.base_offset, first_dirty), latest_ms
                uncleanable = min(uncleanable, part.base_offset)
                break
    uncleanable = max(uncleanable, first_dirty)

    bases = [part.base_offset for part in parts]
    end = first_dirty
    if uncleanable >= active_base:
        end = max(end, active_base)
    elif (place := bisect_right(bases, uncleanable) - 1) >= 0:
        end = max(end, bases[place])
    cleanable = [part for part in dirty if part.base_offset < end] if end > first_dirty else []
    cleanable_bytes = sum(part.size for part in cleanable)
    closing_bytes = free = 0
    if closing_min is not None and config.closes_by_itself and uncleanable >= active_base:
        free = _free_bytes(
            parts[-1:],
            config,
            state,
            first_dirty=first_dirty,
            held_from=min(state.last_stable_offset, pinned[0]),
            now_ms=now_ms,
        )
        without, counted = (_ratio(cleanable_bytes + n, clean_bytes) for n in (0, free))
        # Where it is due without, closed segments wait, for a retry perhaps: one more is no help.
        is_due = without <= config.min_cleanable_dirty_ratio < counted
        if is_due and free >= CLOSING_LEAST and (free >= CLOSING_MOST or free >= closing_min()):
            closing_bytes = state.active_size
    return Plan(
        topic=topic,
        partition=partition,
        config=config,
        state=state,
        first_dirty_offset=first_dirty,
        first_uncleanable_offset=uncleanable,
        end=end,
        clean_bytes=clean_bytes,
        cleanable_bytes=cleanable_bytes,
        uncleanable_bytes=max(0, total_bytes - clean_bytes - cleanable_bytes),
        compaction_delay_ms=_compaction_delay_ms(cleanable, config, now_ms),
        earliest_delete_horizon_ms=horizon_ms,
        is_horizon_due=is_horizon_due or (horizon_ms is not None and horizon_ms <= now_ms),
        is_awaited=is_awaited,
        pinned=pinned,
        lagging=lagging,
        has_closed_dirty=any(
            each.size and end.base_offset > first_dirty for each, end in pairwise(parts)
        ),
        closing_bytes=closing_bytes,
        free_bytes=free,
    )


def closing_min(log_bytes: int, partitions: int) -> int:
    """Return the least bytes for which the cleaner closes an active segment of a log.

    They are an eighth of what a partition of the log has on average: less saves no room that
    counts, and costs a cleaning. They are at least CLOSING_LEAST and at most CLOSING_MOST.
    """
    return min(max(log_bytes // (8 * max(partitions, 1)), CLOSING_LEAST), CLOSING_MOST)


def _free_bytes(
    active: Sequence[Part],
    config: TopicConfig,
    state: PartitionState,
    *,
    first_dirty: int,
    held_from: int,
    now_ms: int,
) -> int:
    """Return about how many dirty bytes of the active segment nothing but the writer holds back.

    That is its share of the offsets below `held_from`, and of the time that
    min.compaction.lag.ms leaves.
    """
    base, end = state.active_base, state.high_watermark
    if not active or active[0].base_offset != base or end <= base:
        return 0
    share = (min(held_from, end) - max(first_dirty, base)) / (end - base)
    if share > 0 and config.min_compaction_lag_ms > 0:
        old_ms, latest_ms = now_ms - config.min_compaction_lag_ms, active[0].largest_timestamp()
        if latest_ms > old_ms:
            first_ms = active[0].first_timestamp()
            is_known = 0 <= first_ms < latest_ms
            share = min(share, (old_ms - first_ms) / (latest_ms - first_ms) if is_known else 0)
    return int(max(share, 0.0) * state.active_size)


def _ratio(dirty_bytes: int, clean_bytes: int) -> float:
    total = clean_bytes + dirty_bytes
    return dirty_bytes / total if total else 0.0


def valid_first_dirty_offset(state: PartitionState) -> int:
    """Return a partition's first dirty offset, or the log start if it lies outside the log."""
    first_dirty = state.first_dirty_offset
    if state.log_start_offset <= first_dirty <= state.high_watermark:
        return first_dirty
    return state.log_start_offset


def is_surely_above_ratio(config: TopicConfig, state: PartitionState, end: int) -> bool:
    """Return whether what is below `end` is dirty past the ratio, without a look at segments.

    The share of dirty *offsets* decides. The dirty ratio is no less, since cleaned offsets hold
    fewer records.
    """
    end = min(end, state.last_stable_offset)
    dirty = end - max(state.first_dirty_offset, state.log_start_offset)
    span = end - state.log_start_offset
    return dirty > 0 and dirty / span > config.min_cleanable_dirty_ratio


def unknown_configs(known: TopicState) -> list[str]:
    """Return the configs that decide, and may be a broker's own."""
    return [] if known.knows_defaults else [name for name in _DECIDE if name not in known.config]


def _compaction_delay_ms(cleanable: Sequence[Part], config: TopicConfig, now_ms: int) -> int:
    """Return how long max.compaction.lag.ms has demanded a cleaning.

    A first timestamp that nobody has recorded may be older than the lag, so it counts as a
    millisecond older.
    """
    if config.max_compaction_lag_ms >= layout.INT64_MAX:
        return 0
    latest_ms = now_ms - config.max_compaction_lag_ms
    known = [
        latest_ms - 1 if time < layout.NO_TIMESTAMP else time
        for part in cleanable
        for time in [part.first_timestamp()]
        if time > 0 or time < layout.NO_TIMESTAMP
    ]
    return max(0, latest_ms - min(known)) if known else 0


# --- what becomes of it --------------------------------------------------------------------------

_OWNERS: Final = {COPY: Why.COPY, BROKERS: Why.BROKERS}


@dataclass(frozen=True, slots=True)
class Uncleanable:
    """Why a partition could not be cleaned, and when to try again."""

    reason: str
    failures: int = 1
    """Failures in a row."""
    since_ms: int = 0
    retry_at_ms: int = layout.INT64_MAX
    config: Mapping[str, str] | None = None
    """The topic's configs at the last failure."""
    is_disk_fault: bool = False
    """Whether the disk refused: then retention continues, because it may free space."""

    def is_due(self, config: Mapping[str, str], now_ms: int) -> bool:
        """Return whether to try again; a pause beyond the maximum shows a clock that went back."""
        if self.config is not None and dict(self.config) != dict(config):
            return True
        is_retried = self.retry_at_ms < layout.INT64_MAX
        return is_retried and not 0 < self.retry_at_ms - now_ms <= _LAST_BACKOFF_MS

    @classmethod
    def after(
        cls,
        before: Uncleanable | None,
        reason: str,
        config: Mapping[str, str],
        *,
        now_ms: int,
        is_disk_fault: bool,
    ) -> Uncleanable:
        """Return the mark of another failure; the pause doubles from a minute to an hour."""
        failures = 1 if before is None else before.failures + 1
        return cls(
            reason=reason,
            failures=failures,
            since_ms=now_ms if before is None else before.since_ms,
            retry_at_ms=now_ms + min(60_000 << min(failures - 1, 10), _LAST_BACKOFF_MS),
            config=dict(config),
            is_disk_fault=is_disk_fault,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a background cleaner cleans a partition, and why or why not."""

    plan: Plan
    is_due: bool
    """Whether the next one that looks for work will clean it."""
    refusals: Sequence[Why]
    """What keeps every cleaner away."""
    reasons: Sequence[Why]
    """What brings one, or what the partition waits for."""
    others: Sequence[Why]
    """What else is true."""

    @property
    def state(self) -> str:
        """The state in a word: not compacted, paused, uncleanable, dirty, clean or not due."""
        if not self.plan.config.is_compacted:
            return "not compacted"
        if Why.PAUSED in self.refusals:
            return "paused"
        if Why.UNCLEANABLE in self.refusals:
            return "uncleanable"
        if self.plan.is_eligible:
            return "dirty"
        return "clean" if self.plan.is_all_clean else "not due"


def judge(
    plan: Plan,
    known: TopicState,
    *,
    owner: str,
    mark: Uncleanable | None,
    is_paused: bool,
    is_being_cleaned: bool,
    is_cleaner_running: bool | None,
    now_ms: int,
) -> Verdict:
    """Judge a plan by what the partition's cleaners have left, and by what they do now."""
    if not plan.config.is_compacted:
        return Verdict(plan, False, [_OWNERS.get(owner, Why.POLICY)], [], [])
    if owner in _OWNERS:
        refusals = [_OWNERS[owner]]
    else:
        states = (Why.CLEANING, is_being_cleaned), (Why.PAUSED, is_paused)
        refusals = [why for why, is_so in (*states, (Why.UNCLEANABLE, mark is not None)) if is_so]
    is_tried = {*refusals} <= {Why.UNCLEANABLE} and may_be_tried(mark, known, now_ms)
    is_wanted = plan.is_eligible and known.knows_defaults
    others = []
    if is_tried and (plan.has_work or not plan.is_all_clean):
        if is_cleaner_running is None:
            others.append(Why.CLEANER_UNKNOWN)
        elif not is_cleaner_running:
            others.append(Why.NO_CLEANER)
        elif plan.is_eligible:
            others.append(Why.CLEANER)
    is_ahead = plan.earliest_delete_horizon_ms is not None and not plan.is_horizon_due
    if is_ahead and known.knows_defaults:
        others.append(Why.TOMBSTONES)
    reasons = plan.due + plan.barriers() if is_wanted else plan.waits(known)
    return Verdict(plan, plan.is_eligible and is_tried, refusals, reasons, others)


def may_be_tried(mark: Uncleanable | None, known: TopicState, now_ms: int) -> bool:
    """Return whether a partition is not uncleanable until a later time (C35)."""
    return mark is None or mark.is_due(known.config, now_ms)


def may_be_retained(mark: Uncleanable | None, *, is_paused: bool) -> bool:
    """Return whether retention may delete from a partition of a compacted topic (C125).

    One that is paused or uncleanable is left alone, as in Kafka, except after a disk fault, because
    retention frees space.
    """
    return not is_paused and (mark is None or mark.is_disk_fault)


@dataclass(slots=True)
class Schedule:
    """The next work of background cleaners."""

    partitions: list[tuple[str, int]] = field(default_factory=list)
    """(topic, partition) of those to clean, the filthiest first."""
    max_dirty_ratio: float = 0.0
    """The largest dirty ratio, also if it makes no partition due (C39)."""
    max_compaction_delay_ms: int = 0
    """The largest delay behind max.compaction.lag.ms; 0 for none."""


def schedule(plans: Iterable[tuple[str, int, Plan | None]]) -> Schedule:
    """Order the plans of partitions that may be tried: who is due, the filthiest first.

    A partition without a plan, as it cannot be read, comes last: its cleaning reports the reason.
    """
    found = Schedule()
    order: list[tuple[float, str, int]] = []
    for topic, partition, plan in plans:
        if plan is None:
            order.append((1.0, topic, partition))
        else:
            found.max_dirty_ratio = max(found.max_dirty_ratio, plan.dirty_ratio)
            if plan.is_eligible:
                delay_ms = max(found.max_compaction_delay_ms, plan.compaction_delay_ms)
                found.max_compaction_delay_ms = delay_ms
                order.append((-plan.dirty_ratio, topic, partition))
    found.partitions = [(topic, partition) for _, topic, partition in sorted(order)]
    return found
