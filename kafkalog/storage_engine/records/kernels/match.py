"""Find the records of keys among those of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import ops

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Int64s


def _is_equal(first: Bytes, at: int, second: Bytes, place: int, size: int) -> bool:
    """Compare `size` bytes, which lie inside both."""
    for _ in range(size >> 3):
        if ops.little_64(first, at) != ops.little_64(second, place):
            return False
        at += 8
        place += 8
    for i in range(size & 7):
        if first[at + i] != second[place + i]:
            return False
    return True


def last_rows(
    arena: Bytes, key_positions: Int64s, key_sizes: Int64s, offsets: Int64s, keys: Bytes,
    places: Int64s, sizes: Int64s, numbers: Int64s, firsts: Int64s, stops: Int64s, start: int,
    end: int, rows: Int64s,
) -> None:  # fmt: skip
    """Write for each of m searches the last record that has its key, or -1, into `rows` int64 (m).

    key_positions, key_sizes, offsets: int64 (n), the records in `arena`
    keys, places, sizes: the wanted keys, int64 (k) each, inside `keys`
    numbers, firsts, stops: int64 (m), search i looks for key numbers[i] in firsts[i]..stops[i] - 1
    Only records with start <= offset < end count. A key outside the arena equals none.
    """
    limit = arena.shape[0]
    for i in range(numbers.shape[0]):
        size = sizes[numbers[i]]
        place = places[numbers[i]]
        row = stops[i] - 1
        while row >= firsts[i]:
            at = key_positions[row]
            if (
                key_sizes[row] == size
                and offsets[row] >= start
                and offsets[row] < end
                and at >= 0
                and at <= limit - size
                and _is_equal(arena, at, keys, place, size)
            ):
                break
            row -= 1
        rows[i] = row if row >= firsts[i] else -1


ops.plain(globals())
