"""The rule that says how much of a partition has expired; the same for segments and for extents.

Kafka: UnifiedLog.deleteOldSegments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState


def count_oldest(
    sizes: Sequence[int],
    ends: Sequence[int],
    state: PartitionState,
    config: TopicConfig,
    *,
    is_older: Callable[[int, int], bool],
    now_ms: int,
) -> int:
    """Return how many of the oldest pieces of a partition to remove (rules P1 to P5).

    Every policy removes pieces below the log start. The policy delete then removes by size, then by
    time. The result includes all pieces only if the last one, which has bytes, is expired too.

    Args:
        sizes: The bytes of each piece, ascending by offset.
        ends: The offset after each piece.
        state: The partition's state.
        config: The topic's config.
        is_older: Returns whether piece n has only records from before a time in epoch ms.
        now_ms: The time.
    """
    last = len(sizes) - 1
    count = 0

    def advance(matches: Callable[[int], bool]) -> None:
        nonlocal count
        while (
            count <= last
            and ends[count] <= state.high_watermark
            and (count < last or sizes[count] > 0)
            and matches(count)
        ):
            count += 1

    # The last piece stays: no successor's base lies at or below the log start.
    advance(lambda n: n < last and ends[n] <= state.log_start_offset)
    if not config.is_deleted:
        return count
    if config.retention_bytes >= 0:
        totals = list(accumulate(sizes))
        removable = sum(sizes) - config.retention_bytes
        advance(lambda n: totals[n] <= removable)
    if config.retention_ms >= 0:
        advance(lambda n: is_older(n, now_ms - config.retention_ms))
    return count
