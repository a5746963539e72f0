"""The plan of a cleaning: which part of a partition can be cleaned, and how urgently.

A log has a *clean* section, which holds each key once, then a *dirty* one, then an uncleanable one.
The clean and the dirty section end at segment bases, but the first dirty offset may lie within a
segment after the offset map was full. The plan needs only names, sizes and indexes.

Kafka: LogToClean, and the methods cleanableOffsets and maxCompactionDelay of LogCleanerManager.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kafkalog.cleaner.dedup.delete_horizon import is_told, read_delete_horizon
from kafkalog.cleaner.state.first_dirty_offset import valid_first_dirty_offset
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.segment_times import largest_timestamp
from kafkalog.storage_engine.segment.segments import SegmentFiles, header_at


@dataclass(frozen=True, slots=True)
class LogToClean:
    """A partition's sections, in offsets and bytes."""

    topic: str
    partition: int
    directory: Path
    config: TopicConfig
    segments: tuple[SegmentFiles, ...]
    """The live segments that reach above the log start, ascending, the active one last."""
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
    """Plan the cleaning of a partition; it ends below `pinned_offset`, which a reader needs."""
    total = sum(s.size for s in segments if s.base_offset < state.active_base) + state.active_size
    first_dirty = valid_first_dirty_offset(state)
    clean_bytes = sum(
        s.size for s in segments if s.base_offset < min(first_dirty, state.active_base)
    )
    segments = _wanted(segments, state)
    closed = [s for s in segments if s.base_offset < state.active_base]
    ends = [*(s.base_offset for s in segments[1:]), state.active_base]
    dirty = [s for s, end in zip(closed, ends, strict=False) if end > first_dirty]
    uncleanable = min(state.active_base, state.last_stable_offset, pinned_offset)
    if config.min_compaction_lag_ms > 0:
        for segment in dirty:
            if largest_timestamp(segment, segment.size) > now_ms - config.min_compaction_lag_ms:
                uncleanable = min(uncleanable, segment.base_offset)
                break
    uncleanable = max(uncleanable, first_dirty)

    bases = [s.base_offset for s in segments]
    end = first_dirty
    if uncleanable >= state.active_base:
        end = max(end, state.active_base)
    elif (place := bisect_right(bases, uncleanable) - 1) >= 0:
        end = max(end, bases[place])
    cleanable = [s for s in dirty if s.base_offset < end] if end > first_dirty else []
    cleanable_bytes = sum(s.size for s in cleanable)
    horizon = read_delete_horizon(directory, first_dirty)
    # The horizons of segments that a broker has cleaned are unknown until they are read.
    has_foreign = any(
        s.size and s.base_offset < min(first_dirty, state.listed_from) for s in closed
    )
    is_unknown = has_foreign and not is_told(directory)
    return LogToClean(
        topic=topic,
        partition=partition,
        directory=directory,
        config=config,
        segments=segments,
        first_dirty_offset=first_dirty,
        first_uncleanable_offset=uncleanable,
        end=end,
        clean_bytes=clean_bytes,
        cleanable_bytes=cleanable_bytes,
        uncleanable_bytes=max(0, total - clean_bytes - cleanable_bytes),
        compaction_delay_ms=_compaction_delay_ms(cleanable, config, now_ms),
        earliest_delete_horizon_ms=horizon,
        is_horizon_due=is_unknown or (horizon is not None and horizon <= now_ms),
        is_awaited=is_awaited,
    )


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
) -> list[list[SegmentFiles]]:
    """Group consecutive segments so that a group fits into one segment (rules C45, C46).

    The sums of the `.log` sizes and of both index sizes keep their limits, and a group's offsets
    span at most 2^31-1. A segment ends where the next one begins, the last one at `end`. A segment
    that is too large is a group of its own.
    """
    groups: list[list[SegmentFiles]] = []
    totals = (0, 0, 0)
    limits = (max_size, max_index_size, max_index_size)
    for place, segment in enumerate(segments):
        figures = (segment.size, _size(segment.index), _size(segment.time_index))
        following = segments[place + 1].base_offset if place + 1 < len(segments) else end
        sums = tuple(a + b for a, b in zip(totals, figures, strict=True))
        if (
            groups
            and all(total <= limit for total, limit in zip(sums, limits, strict=True))
            and (segment.size == 0 or following - 1 - groups[-1][0].base_offset <= layout.INT32_MAX)
        ):
            groups[-1].append(segment)
            totals = (sums[0], sums[1], sums[2])
        else:
            groups.append([segment])
            totals = figures
    return groups


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _compaction_delay_ms(
    cleanable: Sequence[SegmentFiles], config: TopicConfig, now_ms: int
) -> int:
    if config.max_compaction_lag_ms >= layout.INT64_MAX:
        return 0
    firsts = [first for s in cleanable if (first := _first_timestamp(s)) > 0]
    return max(0, now_ms - config.max_compaction_lag_ms - min(firsts)) if firsts else 0


def _first_timestamp(segment: SegmentFiles) -> int:
    """Return the largest timestamp of a segment's first batch; -1 if it has none."""
    with files.open_stream(segment.log) as file:
        header = header_at(FileBytes(file.fileno()), 0, segment.size)
    return layout.NO_TIMESTAMP if header is None else header.max_timestamp
