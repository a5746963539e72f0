"""Find the records that have one of some keys, by all bytes of the key."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kafkalog.storage_engine.records.kernels import match
from kafkalog.storage_engine.records.tables import Bytes, Integers, RecordTable


class ChosenKeys:
    """The keys of the wanted records; a record without a key never matches.

    - keys: the distinct keys, k of them; the number of a key is its place here
    - arena: their bytes, one key after the other
    - positions, sizes: int64 (k), where each lies there
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        """Take keys in any order; duplicates count once."""
        self.keys: list[bytes] = sorted(sorted(set(keys)), key=len)
        self.arena: Bytes = np.frombuffer(b"".join(self.keys), dtype=np.uint8)
        self.sizes: Integers = np.array([len(key) for key in self.keys], dtype=np.int64)
        self.positions: Integers = np.cumsum(self.sizes) - self.sizes
        self._by_size: dict[int, tuple[int, npt.NDArray[np.bytes_]]] = {}
        first = 0
        for size, group in groupby(self.keys, key=len):
            texts = np.array(list(group), dtype=f"S{size}")
            self._by_size[size] = first, texts
            first += len(texts)

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, records: RecordTable, rows: Integers | None = None) -> Integers:
        """Return the records among `rows` (None: all) with a chosen key: int64 (m,), ascending.

        `rows` are ascending too.
        """
        return self.find(records, rows)[0]

    def find(self, records: RecordTable, rows: Integers | None = None) -> tuple[Integers, Integers]:
        """Return the records of `rows` like that, and the number of the key that each has."""
        if rows is None:
            rows = np.arange(len(records), dtype=np.int64)
        sizes = records.key_sizes[rows]
        found, numbers = [rows[:0]], [rows[:0]]
        for size, (first, keys) in self._by_size.items():
            of_size = rows[sizes == size]
            places = np.zeros(len(of_size), dtype=np.int64)
            if size:
                of_size, places = _with_keys(records, of_size, size, keys)
            found.append(of_size)
            numbers.append(places + first)
        every = np.concatenate(found)
        order = np.argsort(every, kind="stable")
        return every[order], np.concatenate(numbers)[order]

    def last_rows(
        self,
        records: RecordTable,
        numbers: Integers,
        firsts: Integers,
        stops: Integers,
        span: tuple[int, int],
    ) -> Integers:
        """Return for each of m key numbers the last record that has the key, or -1: int64 (m).

        Search i looks at the records firsts[i] to stops[i] - 1 with offsets in [start, end).
        """
        rows = np.empty(len(numbers), dtype=np.int64)
        match.last_rows(
            records.arena, records.key_positions, records.key_sizes, records.offsets, self.arena,
            self.positions, self.sizes, numbers, firsts, stops, *span, rows,
        )  # fmt: skip
        return rows


def _with_keys(
    records: RecordTable, rows: Integers, size: int, keys: npt.NDArray[np.bytes_]
) -> tuple[Integers, Integers]:
    """Return the records among `rows`, all with keys of that size, that have one of `keys`.

    The second array has the place of each one's key. numpy ignores trailing zero bytes of a text,
    which makes no difference at a fixed width.
    """
    if not len(rows):
        return rows, rows
    windows = np.lib.stride_tricks.sliding_window_view(records.arena, size)
    found = windows[records.key_positions[rows]].view(keys.dtype).ravel()
    nearest = np.minimum(keys.searchsorted(found), len(keys) - 1)
    is_chosen: npt.NDArray[np.bool_] = keys[nearest] == found
    return rows[is_chosen], nearest[is_chosen]
