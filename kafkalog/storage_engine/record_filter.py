"""What a reader wants to see of the records: a filter that saves work and decides nothing.

It keeps every record that is wanted, and may keep others; who asked looks again. So it takes what
is quick to tell: that a whole batch is too old, that a record is, or that the ends of its key
differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kafkalog.storage_engine.tables import BatchTable, Bytes, Integers, RecordTable

__all__ = ["RecordFilter"]

_COMPARED: Final = 32
"""Bytes that are compared at each end of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """The records wanted; plain data. What is None says nothing."""

    min_timestamp: int | None = None
    """Epoch ms, inclusive, as the next."""
    max_timestamp: int | None = None
    keys: frozenset[bytes] | None = None
    has_key: bool | None = None
    has_value: bool | None = None
    """False: tombstones alone."""

    @property
    def is_any(self) -> bool:
        """Whether there is anything that is not wanted."""
        return self != RecordFilter()

    def batches(self, table: BatchTable) -> npt.NDArray[np.bool_]:
        """Return which batches may have wanted records: bool (b,)."""
        may: npt.NDArray[np.bool_] = np.ones(len(table), dtype=np.bool_)
        if self.min_timestamp is not None:
            # Of messages v0 and v1 the wrapper may say another time than what it holds.
            may &= (table.max_timestamps >= self.min_timestamp) | table.is_message
        return may

    def rows(self, records: RecordTable, rows: Integers | None) -> Integers | None:
        """Return the records among `rows` (None: all) that may be wanted, in the same form."""
        if not self.is_any:
            return rows
        if rows is None:
            rows = np.arange(len(records), dtype=np.int64)
        if self.min_timestamp is not None:
            rows = rows[records.timestamps[rows] >= self.min_timestamp]
        if self.max_timestamp is not None:
            rows = rows[records.timestamps[rows] <= self.max_timestamp]
        if self.has_key is not None:
            rows = rows[(records.key_sizes[rows] >= 0) == self.has_key]
        if self.has_value is not None:
            rows = rows[(records.value_sizes[rows] >= 0) == self.has_value]
        if self.keys is not None:
            rows = _with_keys(records, rows, self.keys)
        return rows


def _with_keys(records: RecordTable, rows: Integers, keys: frozenset[bytes]) -> Integers:
    found = [_with_key(records, rows, key) for key in sorted(keys)]
    return np.unique(np.concatenate(found)) if found else rows[:0]


def _with_key(records: RecordTable, rows: Integers, key: bytes) -> Integers:
    rows = rows[records.key_sizes[rows] == len(key)]
    ends = range(max(len(key) - _COMPARED, 0), len(key))
    for index in sorted({*range(min(len(key), _COMPARED)), *ends}):
        if not len(rows):
            break
        arena: Bytes = records.arena
        rows = rows[arena[records.key_positions[rows] + index] == key[index]]
    return rows
