"""The hot loop of a segment: which batches get an index entry.

b = batches. The kernel takes plain arrays and returns plain numbers; it allocates nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Int64s


def choose_index_entries(
    positions: Int64s,
    last_offsets: Int64s,
    max_timestamps: Int64s,
    indexed_position: int,
    interval: int,
    top: int,
    top_offset: int,
    rows: Int64s,
    tops: Int64s,
    top_offsets: Int64s,
) -> tuple[int, int, int, int]:
    """Choose the batches that get an index entry; one decision per batch.

    indexed_position: where the batch of the last entry begins; top, top_offset: the largest
    timestamp so far and the last offset of its batch. Out: rows int64 (b), which batches; tops,
    top_offsets int64 (b), the largest timestamp there. Returns (count of entries,
    indexed_position, top, top_offset). Kafka: LogSegment.append.
    """
    count = 0
    for i in range(positions.shape[0]):
        if max_timestamps[i] > top:
            top = max_timestamps[i]
            top_offset = last_offsets[i]
        if positions[i] - indexed_position > interval:
            rows[count] = i
            tops[count] = top
            top_offsets[count] = top_offset
            count += 1
            indexed_position = positions[i]
    return count, indexed_position, top, top_offset
