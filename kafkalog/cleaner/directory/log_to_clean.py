"""The plan of a cleaning in a directory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kafkalog.cleaner.plan import Part, Plan, plan_cleaning, valid_first_dirty_offset
from kafkalog.cleaner.state.delete_horizon import read_delete_horizon
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.locate import header_at
from kafkalog.storage_engine.segment.segment_times import largest_timestamp
from kafkalog.storage_engine.segment.segments import SegmentFiles


def log_to_clean(
    topic: str,
    partition: int,
    *,
    directory: Path,
    config: TopicConfig,
    state: PartitionState,
    segments: Sequence[SegmentFiles],
    now_ms: int,
    pinned: tuple[int, int] = (layout.INT64_MAX, 0),
    is_awaited: bool = False,
    closing_min: Callable[[], int] | None = None,
) -> Plan:
    """Plan the cleaning of a partition in a directory, as `plan_cleaning` does."""
    total = sum(s.size for s in segments if s.base_offset < state.active_base) + state.active_size
    first_dirty = valid_first_dirty_offset(state)
    clean_bytes = sum(
        s.size for s in segments if s.base_offset < min(first_dirty, state.active_base)
    )
    segments = live_segments(segments, state)
    # The horizons of segments that a broker has cleaned are unknown until they are read.
    has_foreign = any(
        s.size and s.base_offset < min(first_dirty, state.listed_from, state.active_base)
        for s in segments
    )
    return plan_cleaning(
        topic,
        partition,
        config=config,
        state=state,
        parts=[
            _part(s, state.active_size if s.base_offset == state.active_base else s.size)
            for s in segments
        ],
        clean_bytes=clean_bytes,
        total_bytes=total,
        now_ms=now_ms,
        pinned=pinned,
        horizon_ms=read_delete_horizon(DirectoryNotes(directory), first_dirty),
        is_horizon_due=has_foreign and not (directory / layout.DELETE_HORIZON).exists(),
        is_awaited=is_awaited,
        closing_min=closing_min,
    )


def _part(segment: SegmentFiles, size: int) -> Part:
    def first_timestamp() -> int:
        with files.closing(files.open_to_read(segment.log)) as fd:
            header = header_at(FileBytes(fd), 0, size)
        time_ms = layout.NO_TIMESTAMP if header is None else header.max_timestamp
        return max(time_ms, layout.NO_TIMESTAMP)  # less would be one that nobody has recorded

    latest = partial(largest_timestamp, segment, size)
    return Part(segment.base_offset, size, latest, first_timestamp)


def live_segments(segments: Sequence[SegmentFiles], state: PartitionState) -> list[SegmentFiles]:
    """Leave out uncommitted segments, and those below the log start: retention deletes them."""
    committed = [s for s in segments if s.base_offset <= state.active_base]
    start = state.log_start_offset
    return committed[max(0, bisect_right([s.base_offset for s in committed], start) - 1) :]
