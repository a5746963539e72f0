"""The plan of a cleaning: which part of a partition can be cleaned, and how urgently.

A log has a *clean* section, which holds each key once, then a *dirty* one, then an uncleanable one.
The clean and the dirty section end at segment bases, but the first dirty offset may lie within a
segment after the offset map was full. The plan needs only the sizes and times of segments, whether
they are files or runs of objects.

Kafka: LogToClean, and the methods cleanableOffsets and maxCompactionDelay of LogCleanerManager.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Protocol

from kafkalog.cleaner.dedup.delete_horizon import is_told, read_delete_horizon
from kafkalog.cleaner.state.first_dirty_offset import valid_first_dirty_offset
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.locate import header_at
from kafkalog.storage_engine.segment.segment_times import largest_timestamp
from kafkalog.storage_engine.segment.segments import SegmentFiles


class TimedSegment(Protocol):
    """A segment of either kind of log, as far as the plan needs it; times may take a read."""

    @property
    def base_offset(self) -> int:
        """Its first offset."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def largest_timestamp(self) -> int:
        """Return the largest timestamp of its records (ms), or else the age of what holds them."""

    def first_timestamp(self) -> int | None:
        """Return the largest timestamp of its first batch (ms).

        It is -1 if that has none; None if nobody has recorded it.
        """


@dataclass(frozen=True, slots=True)
class CleaningPlan:
    """A partition's sections, in offsets and bytes; the same for both kinds of log."""

    topic: str
    partition: int
    config: TopicConfig
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
    lagging: tuple[int, int] | None
    """The first dirty offset that min.compaction.lag.ms holds back, and the largest timestamp of
    its segment (ms); None if it holds nothing back."""
    has_closed_dirty: bool
    """Whether any dirty record is outside the active segment."""

    @property
    def dirty_ratio(self) -> float:
        """The share of dirty bytes among clean and dirty ones; 0 for an empty log (C32)."""
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0

    @property
    def is_eligible(self) -> bool:
        """Whether the background cleaner should clean it now (C33).

        Unlike Kafka's it waits for readers, unless max.compaction.lag.ms demands a cleaning.
        """
        if self.cleanable_bytes > 0 and self.compaction_delay_ms > 0:
            return True
        return self.is_due and not self.is_awaited

    @property
    def is_due(self) -> bool:
        """Whether there is a reason to clean it (C33; a due horizon is our addition)."""
        return (
            self.is_horizon_due
            or (self.cleanable_bytes > 0 and self.compaction_delay_ms > 0)
            or self.dirty_ratio > self.config.min_cleanable_dirty_ratio
        )

    @property
    def has_work(self) -> bool:
        """Whether a cleaning could change anything."""
        return self.is_horizon_due or self.cleanable_bytes > 0 or self.end > self.first_dirty_offset


def plan_cleaning(
    topic: str,
    partition: int,
    *,
    config: TopicConfig,
    state: PartitionState,
    active_base: int,
    segments: Sequence[TimedSegment],
    clean_bytes: int,
    total_bytes: int,
    now_ms: int,
    pinned_offset: int,
    horizon_ms: int | None,
    is_horizon_due: bool,
    is_awaited: bool = False,
) -> CleaningPlan:
    """Plan the cleaning of a partition; it ends below `pinned_offset`, which a reader needs.

    `segments` are those that reach above the log start, ascending, the active one last.
    `horizon_ms` is the earliest delete horizon of the clean section, if that is known.
    """
    first_dirty = valid_first_dirty_offset(state)
    if not clean_bytes:
        horizon_ms = None  # retention has taken what waited for it
    closed = [s for s in segments if s.base_offset < active_base]
    ends = [*(s.base_offset for s in segments[1:]), active_base]
    dirty = [s for s, end in zip(closed, ends, strict=False) if end > first_dirty]
    uncleanable = min(active_base, state.last_stable_offset, pinned_offset)
    lagging = None
    if config.min_compaction_lag_ms > 0:
        for segment in dirty:
            latest_ms = segment.largest_timestamp()
            if latest_ms > now_ms - config.min_compaction_lag_ms:
                lagging = max(segment.base_offset, first_dirty), latest_ms
                uncleanable = min(uncleanable, segment.base_offset)
                break
    uncleanable = max(uncleanable, first_dirty)

    bases = [s.base_offset for s in segments]
    end = first_dirty
    if uncleanable >= active_base:
        end = max(end, active_base)
    elif (place := bisect_right(bases, uncleanable) - 1) >= 0:
        end = max(end, bases[place])
    cleanable = [s for s in dirty if s.base_offset < end] if end > first_dirty else []
    cleanable_bytes = sum(s.size for s in cleanable)
    return CleaningPlan(
        topic=topic,
        partition=partition,
        config=config,
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
        lagging=lagging,
        has_closed_dirty=any(
            each.size and end.base_offset > first_dirty for each, end in pairwise(segments)
        ),
    )


def _compaction_delay_ms(
    cleanable: Sequence[TimedSegment], config: TopicConfig, now_ms: int
) -> int:
    """Return how long max.compaction.lag.ms has demanded a cleaning.

    A first timestamp that nobody has recorded may be older than the lag, so it counts as a
    millisecond older.
    """
    if config.max_compaction_lag_ms >= layout.INT64_MAX:
        return 0
    latest_ms = now_ms - config.max_compaction_lag_ms
    times = [s.first_timestamp() for s in cleanable]
    firsts = [latest_ms - 1 if first is None else first for first in times]
    known = [first for first, time in zip(firsts, times, strict=True) if time is None or first > 0]
    return max(0, latest_ms - min(known)) if known else 0


# --- in a directory ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogToClean(CleaningPlan):
    """The plan of a partition in a directory, with its files."""

    directory: Path
    segments: tuple[SegmentFiles, ...]
    """The live segments that reach above the log start, ascending, the active one last."""


@dataclass(frozen=True, slots=True)
class _FileTimes:
    """The times of a segment in a file."""

    files: SegmentFiles

    @property
    def base_offset(self) -> int:
        return self.files.base_offset

    @property
    def size(self) -> int:
        return self.files.size

    def largest_timestamp(self) -> int:
        return largest_timestamp(self.files, self.files.size)

    def first_timestamp(self) -> int:
        return _first_timestamp(self.files)


def log_to_clean(
    topic: str,
    partition: int,
    *,
    directory: Path,
    config: TopicConfig,
    state: PartitionState,
    segments: Sequence[SegmentFiles],
    now_ms: int,
    pinned_offset: int = layout.INT64_MAX,
    is_awaited: bool = False,
) -> LogToClean:
    """Plan the cleaning of a partition in a directory, as `plan_cleaning` does."""
    total = sum(s.size for s in segments if s.base_offset < state.active_base) + state.active_size
    first_dirty = valid_first_dirty_offset(state)
    clean_bytes = sum(
        s.size for s in segments if s.base_offset < min(first_dirty, state.active_base)
    )
    segments = _wanted(segments, state)
    # The horizons of segments that a broker has cleaned are unknown until they are read.
    has_foreign = any(
        s.size and s.base_offset < min(first_dirty, state.listed_from, state.active_base)
        for s in segments
    )
    plan = plan_cleaning(
        topic,
        partition,
        config=config,
        state=state,
        active_base=state.active_base,
        segments=[_FileTimes(segment) for segment in segments],
        clean_bytes=clean_bytes,
        total_bytes=total,
        now_ms=now_ms,
        pinned_offset=pinned_offset,
        horizon_ms=read_delete_horizon(directory, first_dirty),
        is_horizon_due=has_foreign and not is_told(directory),
        is_awaited=is_awaited,
    )
    fields = {name: getattr(plan, name) for name in CleaningPlan.__slots__}
    return LogToClean(**fields, directory=directory, segments=segments)


def _wanted(segments: Sequence[SegmentFiles], state: PartitionState) -> tuple[SegmentFiles, ...]:
    """Leave out uncommitted segments, and those below the log start: retention deletes them."""
    committed = [s for s in segments if s.base_offset <= state.active_base]
    start = state.log_start_offset
    first = max(0, bisect_right([s.base_offset for s in committed], start) - 1)
    return tuple(committed[first:])


def group_segments_by_size(
    segments: Sequence[SegmentFiles],
    *,
    max_size: int,
    max_index_size: int,
    end: int,
    segment_of: Callable[[int], int] = lambda base_offset: base_offset,
) -> list[list[SegmentFiles]]:
    """Group consecutive segments so that a group fits into one segment (rules C45, C46).

    The sums of the `.log` sizes and of both index sizes keep their limits, and a group's offsets
    span at most 2^31-1. A segment ends where the next one begins, the last one at `end`. A segment
    that is too large is a group of its own. Files of which `segment_of` returns one base offset are
    one segment.
    """
    groups: list[list[SegmentFiles]] = []
    totals = (0, 0, 0)
    limits = (max_size, max_index_size, max_index_size)
    by_segment = groupby(segments, key=lambda each: segment_of(each.base_offset))
    wholes = [[*files_of_one] for _, files_of_one in by_segment]
    for place, whole in enumerate(wholes):
        figures = (
            sum(segment.size for segment in whole),
            sum(_size(segment.index) for segment in whole),
            sum(_size(segment.time_index) for segment in whole),
        )
        following = wholes[place + 1][0].base_offset if place + 1 < len(wholes) else end
        sums = tuple(a + b for a, b in zip(totals, figures, strict=True))
        if (
            groups
            and all(total <= limit for total, limit in zip(sums, limits, strict=True))
            and (figures[0] == 0 or following - 1 - groups[-1][0].base_offset <= layout.INT32_MAX)
        ):
            groups[-1] += whole
            totals = (sums[0], sums[1], sums[2])
        else:
            groups.append(whole)
            totals = figures
    return groups


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _first_timestamp(segment: SegmentFiles) -> int:
    """Return the largest timestamp of a segment's first batch; -1 if it has none."""
    with files.open_stream(segment.log) as file:
        header = header_at(FileBytes(file.fileno()), 0, segment.size)
    return layout.NO_TIMESTAMP if header is None else header.max_timestamp
