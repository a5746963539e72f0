"""Remember which records of a dirty section are obsolete, in one bit per offset.

The first pass sets the bits. The second pass then need not hash keys again, nor decompress a batch
with only obsolete records. A section with too many offsets for the bits' share of the memory budget
is looked up key by key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.dedup import kernels

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import BatchTable, Integers

Flags = npt.NDArray[np.bool_]

SHARE: Final = 16
"""The bits may take 1/16 of the budget: of 128 MiB, 8 MiB for 67 million offsets."""
SIZE_MIN: Final = 1 << 20
"""Bytes they may take whatever the budget is."""


class ObsoleteOffsets:
    """The set of obsolete offsets in [start, end), empty at first."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.bits: npt.NDArray[np.uint8] = np.zeros((max(end - start, 0) + 7) // 8, dtype=np.uint8)
        """The bits, set by kernels."""

    @classmethod
    def within(cls, start: int, end: int, budget_bytes: int) -> Self | None:
        """Return a set for the offsets [start, end); None if it would take too much memory."""
        if end - start > 8 * max(budget_bytes // SHARE, SIZE_MIN):
            return None
        return cls(start, end)

    def contains(self, offsets: Integers) -> Flags:
        """Return which offsets (n) are obsolete; those outside the section are not."""
        flags: Flags = np.empty(len(offsets), dtype=np.bool_)
        kernels.test_bits(self.bits, self.start, np.ascontiguousarray(offsets), flags)
        return flags

    def hold_all_of(self, table: BatchTable) -> Flags:
        """Return which batches (b) have records, all of them obsolete, by their headers' counts."""
        flags: Flags = np.empty(len(table), dtype=np.bool_)
        firsts, lasts, counts = map(
            np.ascontiguousarray, (table.base_offsets, table.last_offsets, table.counts)
        )
        kernels.find_covered(self.bits, self.start, firsts, lasts, counts, flags)
        return flags & (table.counts > 0)
