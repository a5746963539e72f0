"""Find the records that have one of some keys, by all bytes of the key."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kafkalog.storage_engine.records.tables import Integers, RecordTable


class ChosenKeys:
    """The keys of the wanted records; a record without a key never matches."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        """Take keys in any order; duplicates count once."""
        by_size = groupby(sorted(set(keys), key=len), key=len)
        self._by_size = {
            size: np.sort(np.array(list(group), dtype=f"S{size}")) for size, group in by_size
        }

    def rows(self, records: RecordTable, rows: Integers | None = None) -> Integers:
        """Return the records among `rows` (None: all) with a chosen key: int64 (m,), ascending.

        `rows` are ascending too.
        """
        if rows is None:
            rows = np.arange(len(records), dtype=np.int64)
        sizes = records.key_sizes[rows]
        found = [rows[:0]]
        for size, keys in self._by_size.items():
            of_size = rows[sizes == size]
            found.append(_with_keys(records, of_size, size, keys) if size else of_size)
        return np.sort(np.concatenate(found))


def _with_keys(
    records: RecordTable, rows: Integers, size: int, keys: npt.NDArray[np.bytes_]
) -> Integers:
    """Return the records among `rows`, all with keys of that size, that have one of `keys`.

    numpy ignores trailing zero bytes of a text, which makes no difference at a fixed width.
    """
    if not len(rows):
        return rows
    windows = np.lib.stride_tricks.sliding_window_view(records.arena, size)
    found = windows[records.key_positions[rows]].view(keys.dtype).ravel()
    nearest = np.minimum(keys.searchsorted(found), len(keys) - 1)
    is_chosen: npt.NDArray[np.bool_] = keys[nearest] == found
    return rows[is_chosen]
