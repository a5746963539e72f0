"""Copy chosen values of an arena into an Arrow binary column."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import ops

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Int32s, Int64s


def measure_column(
    arena_size: int, positions: Int64s, sizes: Int64s, rows: Int64s
) -> tuple[int, int]:
    """Return (bytes, nulls) of the values of `rows`; (-1, row) when one lies outside the arena."""
    total = 0
    nulls = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if row < 0 or row >= positions.shape[0] or row >= sizes.shape[0]:
            return -1, row
        size = sizes[row]
        if size < 0:
            nulls += 1
        else:
            position = positions[row]
            if position < 0 or position > arena_size or size > arena_size - position:
                return -1, row
            total += size
    return total, nulls


def gather_column(
    arena: Bytes, positions: Int64s, sizes: Int64s, rows: Int64s, offsets: Int32s,
    validity: Bytes, data: Bytes,
) -> None:  # fmt: skip
    """Copy the values of `rows` into an Arrow binary column that `measure_column` has measured.

    offsets: int32 (m + 1,); data: exactly the bytes measured, at most 2^31 - 1
    validity: zeroed bitmap, one bit for each of the m rows; empty when there are no nulls
    """
    total = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        size = sizes[row]
        offsets[i] = total
        if size >= 0:
            if validity.shape[0] > 0:
                validity[i >> 3] |= 1 << (i & 7)
            if size == 8:  # inlined by the compiler, unlike a copy of unknown size
                ops.copy_bytes(data, total, arena, positions[row], 8)
            else:
                ops.copy_bytes(data, total, arena, positions[row], size)
            total += size
    offsets[rows.shape[0]] = total


ops.plain(globals())
