"""Records of a partition that are gone, and the segments that have only their indexes left.

An empty `.log` in the middle of a log is as good as none if its indexes have entries. If a
compaction leaves nothing of a segment, Kafka resizes its indexes.

Kafka: LogSegment.changeFileSuffixes, LogLoader.loadSegmentFiles ("orphaned index file"),
LogSegment.onBecomeInactiveSegment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex
from kafkalog.storage_engine.segment.segments import SegmentFiles, orphaned_indexes


@dataclass(frozen=True, slots=True)
class Loss:
    """Records of the offsets [start, end) that are gone, and what shows that they were there.

    A log whose last segment was empty has lost only its end: then `start` is `end`.
    """

    path: Path
    """The file that is missing, or in which the records would be."""
    start: int
    end: int
    expected: str
    found: str
    is_unsynced: bool = False
    """A power cut took them before they were synced; the broker goes on without them."""

    @property
    def what(self) -> str:
        """The loss in words."""
        if self.start == self.end:
            return f"the log's end at offset {self.end} is lost"
        return f"the records of the offsets {self.start} to {self.end - 1} are lost"

    def __str__(self) -> str:
        return f"{self.path}: {self.what} (expected {self.expected}, found {self.found})"


def lost_segments(
    directory: Path, segments: Sequence[SegmentFiles], *, log_start: int, is_live: bool = False
) -> list[Loss]:
    """Return the segments whose indexes have entries, and whose `.log` is gone or empty.

    `segments` are the live ones; those that end at or below `log_start` are nobody's any more. A
    live broker may be deleting a segment while the directory is listed.
    """
    orphans = orphaned_indexes(directory)
    if orphans and is_live:
        orphans = {base: orphans[base] for base in orphans.keys() & orphaned_indexes(directory)}
    bases = [segment.base_offset for segment in segments]
    emptied = {
        before.base_offset for before, _ in pairwise(segments) if not (before.size or before.swaps)
    }
    found = []
    for base in sorted({*orphans, *emptied}):
        entries_end = _entries_end(directory, base)
        end = min((other for other in [*bases, *orphans] if other > base), default=entries_end)
        if entries_end > base and end > log_start:
            path = directory / layout.segment_file(base, layout.LOG)
            expected, what = "the records that its indexes name", "an empty file"
            if base in orphans:
                expected, what = (
                    f"the segment of its {' and '.join(sorted(orphans[base]))}",
                    "no file",
                )
            found.append(Loss(path, max(base, log_start), end, expected, what))
    return found


def lost_adopted(
    directory: Path, state: PartitionState, segments: Sequence[SegmentFiles]
) -> tuple[Loss, ...]:
    """Return the lost segments of our log among the adopted ones, whose gaps nobody has listed."""
    if not state.log_start_offset < state.listed_from < layout.INT64_MAX:
        return ()
    found = lost_segments(directory, segments, log_start=state.log_start_offset)
    return tuple(loss for loss in found if loss.end <= state.listed_from)


def _entries_end(directory: Path, base: int) -> int:
    """Return the offset after the last one in a segment's indexes; its base without entries."""
    ends = [base]
    index = directory / layout.segment_file(base, layout.INDEX)
    times = directory / layout.segment_file(base, layout.TIME_INDEX)
    transactions = directory / layout.segment_file(base, layout.TRANSACTION_INDEX)
    if (entry := OffsetIndex(index, base).last_entry()) is not None:
        ends.append(entry[0] + 1)
    if (entry := TimeIndex(times, base).last_entry()) is not None:
        ends.append(entry[1] + 1)
    if transactions.exists() and transactions.stat().st_size >= layout.TRANSACTION_INDEX_ENTRY.size:
        ends.append(base + 1)
    return max(ends)
