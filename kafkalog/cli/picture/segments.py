"""The segments of a partition in a picture: their sizes, and their states for the cleaner."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.census import SegmentCensus
    from kafkalog.cleaner.dedup.log_to_clean import LogToClean
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.segment.segments import SegmentFiles


def segment_rows(
    log: LogToClean, state: PartitionState, counts: dict[int, SegmentCensus], *, is_refused: bool
) -> list[dict[str, Any]]:
    """Return a row for each segment, with its counts if there are any.

    A segment is `clean`, `cleanable` (the next cleaning takes it), `uncleanable` (a lag, a reader
    or a transaction holds it back, or `is_refused`: a fault or a pause stops cleaners), `active`,
    or `closed` if the topic is not compacted.
    """
    ends = [*(segment.base_offset for segment in log.segments[1:]), state.high_watermark]
    rows = []
    for segment, end in zip(log.segments, ends, strict=False):  # there may be no segment
        is_active = segment.base_offset == state.active_base
        count = counts.get(segment.base_offset)
        rows.append(
            {
                "baseOffset": segment.base_offset,
                "nextOffset": end,
                # Bytes after the committed ones are garbage, or belong to a running commit.
                "bytes": state.active_size if is_active else segment.size,
                "state": "active" if is_active else _word(log, segment, end, is_refused),
                "records": None if count is None else count.records,
                "tombstones": None if count is None else count.tombstones,
                "deadRecords": None if count is None else count.dead_records,
                "deadBytes": None if count is None else count.dead_bytes,
            }
        )
    return rows


def _word(log: LogToClean, segment: SegmentFiles, end: int, is_refused: bool) -> str:
    if not log.config.is_compacted:
        return "closed"
    if end <= log.first_dirty_offset:
        return "clean"
    return "uncleanable" if is_refused or segment.base_offset >= log.end else "cleanable"


def leftovers(directory: Path) -> tuple[int, int]:
    """Return the bytes of files that a cleaning has written so far, and of those it replaced.

    The former are `.cleaned` and `.swap`. The latter are `.deleted`; readers may still use them.
    """
    cleaned = retired = 0
    with contextlib.suppress(OSError):
        for name in files.list_names(directory):
            parsed = layout.parse_segment_file(name)
            if parsed is None or not parsed[2]:
                continue
            size = 0
            with contextlib.suppress(OSError):
                size = (directory / name).stat().st_size
            if parsed[2] == layout.DELETED:
                retired += size
            else:
                cleaned += size
    return cleaned, retired
