"""Which records of a dirty section are obsolete: a bit for each of its offsets.

The first pass meets every record of the dirty section, so it can say there and then which one a
newer record replaces. The second pass need not hash their keys again, nor look for them in a table
that is larger than the caches; and a batch of which every record is obsolete it need not even
decompress.

The bits are a small part of the memory budget, on top of it: a section of more offsets than that
has none, and is asked key by key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.dedup import kernels

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import BatchTable, Integers

__all__ = ["ObsoleteOffsets"]

Flags = npt.NDArray[np.bool_]

SHARE: Final = 16
"""The bits take at most this part of the budget: 8 MiB, 67 million offsets, of 128 MiB."""
SIZE_MIN: Final = 1 << 16
"""Bytes they may take in any case."""


class ObsoleteOffsets:
    """Offsets of [start, end) that are obsolete; none is, to begin with."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.bits: npt.NDArray[np.uint8] = np.zeros((max(end - start, 0) + 7) // 8, dtype=np.uint8)
        """For kernels that set them."""

    @classmethod
    def within(cls, start: int, end: int, budget_bytes: int) -> Self | None:
        """Return a set for the offsets [start, end); None where it would take too much memory."""
        if end - start > 8 * max(budget_bytes // SHARE, SIZE_MIN):
            return None
        return cls(start, end)

    def contains(self, offsets: Integers) -> Flags:
        """Say which offsets (n) are obsolete; those outside the section are not."""
        flags: Flags = np.empty(len(offsets), dtype=np.bool_)
        kernels.test_bits(self.bits, self.start, np.ascontiguousarray(offsets), flags)
        return flags

    def hold_all_of(self, table: BatchTable) -> Flags:
        """Say which batches (b) have records, every one of which is obsolete.

        A batch may have offsets without a record; of how many it has, its header is believed, whose
        checksum was compared.
        """
        flags: Flags = np.empty(len(table), dtype=np.bool_)
        firsts, lasts, counts = map(
            np.ascontiguousarray, (table.base_offsets, table.last_offsets, table.counts)
        )
        kernels.find_covered(self.bits, self.start, firsts, lasts, counts, flags)
        return flags & (table.counts > 0)
