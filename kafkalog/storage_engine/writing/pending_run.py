"""Finished batches that a task has not written yet, in memory."""

from __future__ import annotations

from dataclasses import dataclass

from kafkalog.storage_engine.format.stamping import stamp


@dataclass(slots=True)
class RunPart:
    """Consecutive finished batches of one log partition, in memory.

    positions, counts: byte position in `data` and number of records of each batch
    """

    data: memoryview
    positions: list[int]
    counts: list[int]


class PendingRun:
    """Unwritten finished batches of one log partition; base offsets count from 0."""

    def __init__(self) -> None:
        self.is_segment = False
        """Whether it goes into a file that becomes a segment."""
        self.clear()

    def clear(self) -> None:
        """Drop the batches after they were written."""
        self.parts: list[RunPart] = []
        self.size = self.rows = 0

    def add(self, part: RunPart, rows: int) -> None:
        """Add batches whose base offsets count from 0, and renumber them after the others."""
        if self.rows:
            next_offset = self.rows
            for position, count in zip(part.positions, part.counts, strict=True):
                stamp(part.data, position, next_offset)
                next_offset += count
        self.parts.append(part)
        self.size += len(part.data)
        self.rows += rows
