"""Split segments of old brokers whose offsets span more than an index can express.

An index stores offsets relative to the segment's base in 32 bits. Brokers before 1.1.1 ignored that
in compaction and replication. The split works like a swap of a cleaning: the parts are first
written as `.cleaned`, become `.swap`, and only then replace their source.

Kafka: LocalLog.splitOverflowedSegment (KAFKA-6264).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment import segments, swaps
from kafkalog.storage_engine.segment.log_scanner import REPLAY, LogScanner
from kafkalog.storage_engine.segment.segments import SegmentFiles

_COPY_SIZE = 1 << 20


def is_overflowed(segment: SegmentFiles) -> bool:
    """Return whether a segment has an offset too far above its base."""
    return segments.next_offset(segment) - 1 - segment.base_offset > layout.INT32_MAX


def split_segment(directory: Path, segment: SegmentFiles) -> list[int]:
    """Replace a segment by several that do not overflow; return their base offsets.

    The new segments have no indexes. The caller holds the root exclusively and has finished every
    swap. The process may die at any step: the segment is then whole, or replaced.
    """
    parts = _parts(segment)
    for base_offset, start, end in parts:
        _copy(segment.log, start, end, _path(directory, base_offset, layout.CLEANED))
    files.sync_directory(directory)
    # From the last to the first: until all are renamed, none of them counts.
    for base_offset, _, _ in reversed(parts):
        files.rename(
            _path(directory, base_offset, layout.CLEANED),
            _path(directory, base_offset, layout.SWAP),
        )
    files.sync_directory(directory)
    swaps.finish_swaps(directory)
    return [base_offset for base_offset, _, _ in parts]


def _parts(segment: SegmentFiles) -> list[tuple[int, int, int]]:
    """Return (base offset, start, end) of the parts, the first one at the segment's own base.

    A part ends before the first batch that would overflow it, so the first one may be empty.
    """
    parts: list[tuple[int, int, int]] = []
    base_offset, start = segment.base_offset, 0
    with LogScanner.opened(segment.log, REPLAY, next_offset=segment.base_offset) as scan:
        for found in scan:
            table = found.table
            batch = 0
            while batch < len(table):
                too_far = table.last_offsets[batch:] - base_offset > layout.INT32_MAX
                if not too_far.any():
                    break
                batch += int(np.argmax(too_far))
                position = found.position_of(batch)
                parts.append((base_offset, start, position))
                # The base of a wrapper (compressed messages v0 or v1) is only a lower bound.
                last_offset = int(table.last_offsets[batch])
                base_offset = max(int(table.base_offsets[batch]), last_offset - layout.INT32_MAX)
                start = position
    parts.append((base_offset, start, scan.position))
    return parts


def _copy(source: Path, start: int, end: int, target: Path) -> None:
    files.create(target)
    with (
        files.closing(files.open_to_read(source)) as source_fd,
        files.closing(files.open_to_write(target)) as fd,
    ):
        for position in range(start, end, _COPY_SIZE):
            data = files.read_at(source_fd, min(_COPY_SIZE, end - position), position)
            files.write_at(fd, data, position - start)
        files.sync_file(fd)


def _path(directory: Path, base_offset: int, stage: str) -> Path:
    return directory / layout.segment_file(base_offset, layout.LOG, stage)
