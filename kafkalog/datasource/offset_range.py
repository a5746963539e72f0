"""Ranges of offsets, one per Spark task, and how `minPartitions` splits them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kafkalog.datasource.offsets import TopicPartition

__all__ = ["OffsetRange", "split_ranges"]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets `start` (included) to `end` (excluded) of a partition (Spark: KafkaOffsetRange).

    Either may be -2 or -1, and is then looked up by the task that reads the range.
    """

    partition: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """The count of offsets in the range; gaps are counted as well."""
        return self.end - self.start

    def split(self, parts: int) -> list[OffsetRange]:
        """Cut the range in `parts` of nearly equal size; the last ones take the remainder."""
        pieces: list[OffsetRange] = []
        start = self.start
        for index in range(parts):
            end = start + (self.end - start) // (parts - index)
            pieces.append(OffsetRange(self.partition, start, end))
            start = end
        return [piece for piece in pieces if piece.size > 0]


def split_ranges(
    ranges: Iterable[OffsetRange], min_partitions: int | None = None
) -> list[OffsetRange]:
    """Drop empty ranges, and split the others into about `min_partitions` pieces.

    Ranges too small to be split are left out of the proportion by which the larger ones share the
    remaining pieces (Spark: KafkaOffsetRangeCalculator). No offset is ever dropped.
    """
    filled = [piece for piece in ranges if piece.size > 0]
    if min_partitions is None or len(filled) >= min_partitions:
        return filled
    total = sum(piece.size for piece in filled)
    whole = [p for p in filled if _part_count(p.size, total, min_partitions) == 1]
    shared_total = total - sum(piece.size for piece in whole)
    shared_count = max(min_partitions - len(whole), 1)
    pieces: list[OffsetRange] = []
    for piece in filled:
        if _part_count(piece.size, total, min_partitions) == 1:
            pieces.append(piece)
        else:
            pieces += piece.split(_part_count(piece.size, shared_total, shared_count))
    return pieces


def _part_count(size: int, total: int, min_partitions: int) -> int:
    # Java rounds a half up, Python's round() to the even neighbour.
    return max(math.floor(size / total * min_partitions + 0.5), 1)
