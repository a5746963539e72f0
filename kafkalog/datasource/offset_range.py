"""Ranges of offsets, one per Spark task, and how two options split them by their offsets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kafkalog.datasource.offsets import TopicPartition


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets `start` (included) to `end` (excluded) of a partition (Spark: KafkaOffsetRange).

    Either may be -2 or -1; the task that reads the range resolves them.
    """

    partition: TopicPartition
    start: int
    end: int
    from_earliest: bool = False
    """A piece of a range from the earliest offset: records that retention deletes are no loss."""
    to_latest: bool = False
    """A piece of a range to the latest offset: its task reads at the moment of the action."""
    high_watermark: int = 0
    """The partition's high watermark when the range was planned.

    A task reads a broker's log at least so far: the marker of a transaction may lie above the
    range, and a restarted broker reports less."""

    planned: tuple[int, int] | None = None
    """The start and the end when the range was planned; None where these are `start` and `end`."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The start and the end when the range was planned, -2 and -1 looked up."""
        return (self.start, self.end) if self.planned is None else self.planned

    @property
    def size(self) -> int:
        """The number of offsets in the range, gaps included."""
        first, last = self.bounds
        return last - first

    def split(self, parts: int) -> list[OffsetRange]:
        """Split the range in at most `parts` of nearly equal size; the last ones are larger."""
        parts = min(parts, self.size)
        sizes = [self.size // parts + (n >= parts - self.size % parts) for n in range(parts)]
        return self.split_at(accumulate(sizes, initial=self.bounds[0]))

    def split_at(self, offsets: Iterable[int]) -> list[OffsetRange]:
        """Split the range at offsets in any order; offsets outside are ignored."""
        first, last = self.bounds
        inside = sorted({offset for offset in offsets if first < offset < last})
        return [
            replace(
                self,
                start=self.start if start == first else start,
                end=self.end if end == last else end,
                planned=None if self.planned is None else (start, end),
            )
            for start, end in pairwise([first, *inside, last])
        ]


def split_ranges(
    ranges: Iterable[OffsetRange],
    min_partitions: int | None = None,
    max_records_per_partition: int | None = None,
) -> list[OffsetRange]:
    """Drop empty ranges, and split the others as the two options say; no offset is dropped.

    First each range is split in pieces of at most `max_records_per_partition` offsets. If there are
    fewer pieces than `min_partitions`, the larger ones are split in proportion to their sizes.
    Pieces too small for that are left out of the proportion, and so are other pieces of their
    partition. Spark: KafkaOffsetRangeCalculator.
    """
    filled = [piece for piece in ranges if piece.size > 0]
    if max_records_per_partition is not None:
        most = max_records_per_partition
        filled = [part for piece in filled for part in piece.split(-(-piece.size // most))]
    if min_partitions is None or len(filled) >= min_partitions:
        return filled
    total = sum(piece.size for piece in filled)
    whole = [p for p in filled if _part_count(p.size, total, min_partitions) == 1]
    unsplit = {piece.partition for piece in whole}
    shared_total = total - sum(piece.size for piece in whole)
    shared_count = max(min_partitions - len(whole), 1)
    pieces: list[OffsetRange] = []
    for piece in filled:
        if piece.partition in unsplit:
            pieces.append(piece)
        else:
            pieces += piece.split(_part_count(piece.size, shared_total, shared_count))
    return pieces


def _part_count(size: int, total: int, min_partitions: int) -> int:
    # Java rounds a half up, Python's round() to the even number.
    return max(math.floor(size / total * min_partitions + 0.5), 1)
