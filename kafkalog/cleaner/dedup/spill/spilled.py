"""More keys than memory: find the obsolete records exactly, in one reading of the log.

A full offset map is written to disk and emptied. The keys of the clean section are written too.
Then each part of the hash space that fits into the map is put there again, and resolved alone. The
latest offset of a dirty key is *kept*; a clean record with a later dirty one is *obsolete*. The
second pass reads both lists of offsets from disk. In a short dirty section, one bit per offset
replaces the kept list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.dedup.offset_map import WHOLE, HashPart, Int64s, OffsetMap, Uint64s
from kafkalog.cleaner.dedup.spill.key_runs import BUCKETS, KeyRuns
from kafkalog.cleaner.dedup.spill.offset_list import OffsetList

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.obsolete_offsets import ObsoleteOffsets
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk
    from kafkalog.storage_engine.records.records import RecordTable
    from kafkalog.storage_engine.records.tables import BatchTable

_File = TypeVar("_File", KeyRuns, OffsetList)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """The result of a spill; it answers like an `OffsetMap`."""

    first_dirty_offset: int
    latest_offset: int
    """The latest record of every key is known up to here."""
    utilization: float
    """Share of the offset map's slots that were taken (rule C8)."""
    kept: OffsetList
    obsolete_clean: OffsetList
    obsolete_offsets: ObsoleteOffsets | None
    """Replaces `kept` for the dirty section."""
    files: contextlib.ExitStack

    def obsolete(self, run: Chunk, records: RecordTable) -> npt.NDArray[np.bool_]:
        """Return which records (n) with a key have a later record, up to `latest_offset`.

        Not for batches that the first pass left out. Fastest in log order. Raises StorageError.
        """
        offsets = records.offsets
        is_dirty = offsets >= self.first_dirty_offset
        is_known = (records.key_sizes >= 0) & (offsets <= self.latest_offset)
        flags: npt.NDArray[np.bool_] = np.zeros(len(offsets), dtype=np.bool_)
        if self.obsolete_offsets is not None:
            flags = self.obsolete_offsets.contains(offsets)
        else:
            dirty = np.flatnonzero(is_dirty & is_known)
            flags[dirty] = ~self.kept.contains(offsets[dirty])
        clean = np.flatnonzero(~is_dirty & is_known)
        flags[clean] = self.obsolete_clean.contains(offsets[clean])
        return flags

    def obsolete_batches(self, table: BatchTable) -> npt.NDArray[np.bool_]:
        """Return which batches (b) are known to be wholly obsolete, without reading keys."""
        if self.obsolete_offsets is None:
            return np.zeros(len(table), dtype=np.bool_)
        return self.obsolete_offsets.hold_all_of(table)

    def close(self) -> None:
        """Remove the temporary files."""
        self.files.close()


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
        self._check_abort = check_abort
        self._map = offset_map
        # A key has a row of each filling, and a full map takes no second row of its only key.
        offset_map.capacity = max(2, offset_map.capacity)
        self._filled = 0
        with contextlib.ExitStack() as files:

            def opened(kind: type[_File], name: str) -> _File:
                file = kind(directory, name, on_moved)
                files.callback(file.close)
                return file

            self._dirty = opened(KeyRuns, "dirty")
            self._clean = opened(KeyRuns, "clean")
            self._kept = opened(OffsetList, "kept")
            self._obsolete = opened(OffsetList, "obsolete")
            self._files = files.pop_all()

    @property
    def key_bytes(self) -> int:
        """Bytes of keys on disk."""
        return self._dirty.size + self._clean.size

    def take_map(self) -> None:
        """Write the keys of the map to disk, and empty the map."""
        self._dirty.add(self._map.slots)
        self._map.clear(self._map.latest_offset)

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

    def _end_clean(self) -> None:
        self._clean.add(self._map.slots[: self._filled])
        self._filled = 0

    def resolve(
        self, first_dirty_offset: int, utilization: float, forget: Callable[[], None]
    ) -> Spilled:
        """Find the obsolete records; the map's memory is free afterwards.

        Closing the result calls `forget`.
        """
        self._end_clean()
        for buckets in _ranges(self._dirty.counts, self._map.capacity):
            self._resolve(buckets)
        self._dirty.close()
        self._clean.close()
        memory = self._map.slots.reshape(-1).view(np.int64)
        for offsets in (self._kept, self._obsolete):
            self._check_abort()
            offsets.sort(memory, memory.nbytes // 4)
        self._files.callback(forget)
        return Spilled(
            first_dirty_offset=first_dirty_offset,
            latest_offset=self._map.latest_offset,
            utilization=utilization,
            kept=self._kept,
            obsolete_clean=self._obsolete,
            obsolete_offsets=self._map.obsolete_offsets,
            files=self._files.pop_all(),
        )

    def close(self) -> None:
        """Remove all files except those of a result."""
        self._files.close()

    def _resolve(self, buckets: tuple[int, int], part: HashPart = WHOLE) -> None:
        """Find the obsolete records among the keys of some buckets that are in a part."""
        if not self._put(buckets, part):
            for half in part.halves():
                self._resolve(buckets, half)
            return
        for rows in self._clean.pieces(*buckets):
            hashes, sizes, offsets = _columns(rows)
            self._obsolete.append(offsets[self._map.has_later(hashes, sizes, offsets)])
        if self._map.obsolete_offsets is None:
            self._kept.append(self._map.take_offsets())

    def _put(self, buckets: tuple[int, int], part: HashPart) -> bool:
        """Put the dirty keys into the map again; return whether there was room for all."""
        self._check_abort()
        self._map.clear(self._map.latest_offset)
        for rows in self._dirty.pieces(*buckets):  # in log order, so the latest row wins
            stop, _ = self._map.put(*_columns(rows), part=part)
            if stop < len(rows):
                return False
        return True


def _columns(rows: Uint64s) -> tuple[Uint64s, Int64s, Int64s]:
    """Return the hashes (n, 2) of rows, sizes (n) of keys that are there, and the offsets (n)."""
    offsets = rows[:, 2].astype(np.int64) - 1
    return np.ascontiguousarray(rows[:, :2]), np.zeros(len(rows), dtype=np.int64), offsets


def _ranges(counts: Int64s, capacity: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of neighbouring buckets with at most `capacity` rows, or of one bucket."""
    first, total = 0, 0
    for bucket, count in enumerate(counts.tolist()):
        if total and total + count > capacity:
            yield first, bucket
            first, total = bucket, 0
        total += count
    if total:
        yield first, BUCKETS
