"""More keys than memory: find the obsolete records exactly, in one reading of the log.

A full offset map is written to disk and emptied. The keys of the clean section are written too.
Then each part of the hash space that fits into memory is resolved alone. The latest offset of a
dirty key is *kept*; a clean record with a later dirty one is *obsolete*. The second pass reads both
lists of offsets from disk. In a short dirty section, one bit per offset replaces the kept list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.dedup import kernels
from kafkalog.cleaner.dedup.offset_map import Int64s, OffsetMap, Uint64s
from kafkalog.cleaner.dedup.spill.key_runs import BUCKETS, KeyRuns
from kafkalog.cleaner.dedup.spill.offset_list import OffsetList

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.obsolete_offsets import ObsoleteOffsets
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk
    from kafkalog.storage_engine.records.records import RecordTable
    from kafkalog.storage_engine.records.tables import BatchTable

__all__ = ["Spill", "Spilled"]

_DRAINED = 1 << 16
_LEVELS = 8
"""After 8 levels of 8 bits a hash word is used up."""


class Spilled:
    """The result of a spill; satisfies `latest_records.LatestRecords`."""

    def __init__(
        self,
        *,
        first_dirty_offset: int,
        latest_offset: int,
        utilization: float,
        kept: OffsetList,
        obsolete: OffsetList,
        uncounted: OffsetList,
        obsolete_offsets: ObsoleteOffsets | None,
        forget: Callable[[], None],
    ) -> None:
        self.latest_offset = latest_offset
        self.utilization = utilization
        self._first_dirty_offset = first_dirty_offset
        self._kept = kept
        self._obsolete = obsolete
        self._uncounted = uncounted
        self._obsolete_offsets = obsolete_offsets
        """Replaces `kept` and `uncounted` for the dirty section."""
        self._forget = forget

    def obsolete(self, run: Chunk, records: RecordTable) -> npt.NDArray[np.bool_]:
        """Return which records (n) with a key have a later record, up to `latest_offset`.

        False in batches that the first pass left out. Fastest in log order. Raises StorageError.
        """
        offsets = records.offsets
        is_dirty = offsets >= self._first_dirty_offset
        is_known = (records.key_sizes >= 0) & (offsets <= self.latest_offset)
        flags: npt.NDArray[np.bool_] = np.zeros(len(offsets), dtype=np.bool_)
        if self._obsolete_offsets is not None:
            flags = self._obsolete_offsets.contains(offsets)
        else:
            dirty = np.flatnonzero(is_dirty & is_known)
            flags[dirty] = ~self._kept.contains(offsets[dirty])
            flags &= ~self._uncounted.contains(run.table.last_offsets)[records.batch_index]
        clean = np.flatnonzero(~is_dirty & is_known)
        flags[clean] = self._obsolete.contains(offsets[clean])
        return flags

    def obsolete_batches(self, table: BatchTable) -> npt.NDArray[np.bool_]:
        """Return which batches (b) are known to be wholly obsolete, without reading keys."""
        if self._obsolete_offsets is None:
            return np.zeros(len(table), dtype=np.bool_)
        return self._obsolete_offsets.hold_all_of(table)

    def close(self) -> None:
        """Remove the temporary files."""
        self._kept.close()
        self._obsolete.close()
        self._uncounted.close()
        self._forget()


class Spill:
    """Collect the keys of a log: the dirty ones through an offset map, then the clean ones.

    Bytes written and read are reported to `on_moved`. Raises StorageError if the disk is full.
    Always `close` it; after `resolve`, the files of the result stay.
    """

    def __init__(
        self,
        directory: Path,
        offset_map: OffsetMap,
        check_abort: Callable[[], None],
        on_moved: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._directory = directory
        self._check_abort = check_abort
        self._on_moved = on_moved
        self._map = offset_map
        self._files: list[KeyRuns | OffsetList] = []
        self._filled = 0
        try:
            self._dirty = self._runs("dirty")
            self._clean = self._runs("clean")
            self._kept = self._offsets("kept")
            self._obsolete = self._offsets("obsolete")
            self._uncounted = self._offsets("uncounted")
        except BaseException:
            self.close()
            raise

    @property
    def key_bytes(self) -> int:
        """Bytes of keys on disk."""
        return self._dirty.size + self._clean.size

    def take_map(self) -> None:
        """Write the keys of the map to disk, and empty the map."""
        slots = self._map.slots
        self._dirty.add(slots[: kernels.compact_slots(slots)])
        self._map.forget()

    def take_uncounted(self, last_offsets: Int64s) -> None:
        """Add the last offsets (b) of dirty batches whose keys do not count."""
        self._uncounted.append(np.ascontiguousarray(last_offsets))

    def take_clean(self, hashes: Uint64s, offsets: Int64s) -> None:
        """Add hashes (n, 2) and offsets of clean keys, in the map's memory, which must be empty."""
        rows = self._map.slots
        first = 0
        while first < len(offsets):
            count = min(len(rows) - self._filled, len(offsets) - first)
            place = rows[self._filled : self._filled + count]
            place[:, :2] = hashes[first : first + count]
            place[:, 2] = offsets[first : first + count] + 1
            self._filled += count
            first += count
            if self._filled == len(rows):
                self._end_clean()

    def resolve(
        self, first_dirty_offset: int, utilization: float, forget: Callable[[], None]
    ) -> Spilled:
        """Find the obsolete records; the map's memory is free afterwards."""
        self._end_clean()
        latest_offset = self._map.latest_offset
        self._resolve(self._dirty, self._clean, 1)
        self._dirty.close()
        self._clean.close()
        memory = self._map.slots.reshape(-1).view(np.int64)
        result = (self._kept, self._obsolete, self._uncounted)
        for offsets in result:
            self._check_abort()
            offsets.sort(memory, memory.nbytes // 4)
        for offsets in result:
            self._files.remove(offsets)
        return Spilled(
            first_dirty_offset=first_dirty_offset,
            latest_offset=latest_offset,
            utilization=utilization,
            kept=self._kept,
            obsolete=self._obsolete,
            uncounted=self._uncounted,
            obsolete_offsets=self._map.obsolete_offsets,
            forget=forget,
        )

    def close(self) -> None:
        """Remove all files except those of a result."""
        for file in self._files:
            file.close()
        self._files.clear()

    # --- a part of the hash space ---

    def _resolve(self, dirty: KeyRuns, clean: KeyRuns, level: int) -> None:
        for first, last in _parts(dirty.counts, self._map.capacity):
            self._check_abort()
            count = int(dirty.counts[first:last].sum())
            if count == 0:
                continue
            if count <= self._map.capacity:
                self._resolve_part(self._map.slots, dirty, clean, (first, last))
            elif level == _LEVELS:
                slots = np.zeros((2 * count, 3), dtype=np.uint64)
                self._resolve_part(slots, dirty, clean, (first, last))
            else:
                self._resolve_split(dirty, clean, (first, last), level)

    def _resolve_part(
        self, slots: Uint64s, dirty: KeyRuns, clean: KeyRuns, buckets: tuple[int, int]
    ) -> None:
        slots.fill(0)
        size = 0
        for rows in dirty.pieces(*buckets):
            _, size = kernels.put_rows(slots, rows, 0, size, len(slots), *self._map.noted)
        for rows in clean.pieces(*buckets):
            found = np.empty(len(rows), dtype=np.int64)
            count = kernels.probe_rows(slots, rows, found)
            self._obsolete.append(found[:count])
        if self._map.obsolete_offsets is not None:
            return
        drained = np.empty(_DRAINED, dtype=np.int64)
        slot = 0
        while slot < len(slots):
            slot, count = kernels.drain_offsets(slots, slot, drained)
            self._kept.append(drained[:count])

    def _resolve_split(
        self, dirty: KeyRuns, clean: KeyRuns, buckets: tuple[int, int], level: int
    ) -> None:
        """Split one bucket by the next bits of the hash, and resolve its parts."""
        slots, capacity, noted = self._map.slots, self._map.capacity, self._map.noted
        below = self._runs(f"dirty-{level}"), self._runs(f"clean-{level}")
        slots.fill(0)
        size = 0
        for rows in dirty.pieces(*buckets):
            self._check_abort()
            place, size = kernels.put_rows(slots, rows, 0, size, capacity, *noted)
            while place < len(rows):
                below[0].add(slots[: kernels.compact_slots(slots)])
                slots.fill(0)
                place, size = kernels.put_rows(slots, rows, place, 0, capacity, *noted)
        below[0].add(slots[: kernels.compact_slots(slots)])
        for rows in clean.pieces(*buckets):
            turned = rows.copy()
            turned[:, 0] = (rows[:, 0] << np.uint64(8)) | (rows[:, 0] >> np.uint64(56))
            below[1].add(turned)
        self._resolve(*below, level + 1)
        for runs in below:
            runs.close()
            self._files.remove(runs)

    def _end_clean(self) -> None:
        if self._filled:
            self._clean.add(self._map.slots[: self._filled])
            self._filled = 0

    def _runs(self, name: str) -> KeyRuns:
        runs = KeyRuns(self._directory, name, self._on_moved)
        self._files.append(runs)
        return runs

    def _offsets(self, name: str) -> OffsetList:
        offsets = OffsetList(self._directory, name, self._on_moved)
        self._files.append(offsets)
        return offsets


def _parts(counts: Int64s, capacity: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of neighbouring buckets with at most `capacity` rows, or of one bucket."""
    first, total = 0, 0
    for bucket, count in enumerate(counts.tolist()):
        if bucket > first and total + count > capacity:
            yield first, bucket
            first, total = bucket, 0
        total += count
    yield first, BUCKETS
