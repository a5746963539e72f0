"""The offset map: for every key the offset of its latest record, in a fixed amount of memory.

A key is identified by 16 bytes of SipHash-2-4 under a random secret. Kafka's MD5 lets an attacker
construct keys that collide, and so drop records that are not obsolete. The probability that two of
10^9 keys collide by chance is 10^-21. A slot takes 24 bytes: two words of hash, and the offset plus
one. Probing is linear.

Kafka: org.apache.kafka.storage.internals.log.SkimpyOffsetMap.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.dedup import kernels
from kafkalog.errors import CorruptBatchError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kafkalog.cleaner.dedup.obsolete_offsets import ObsoleteOffsets
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk
    from kafkalog.storage_engine.records.records import RecordTable
    from kafkalog.storage_engine.records.tables import BatchTable

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

SLOT_SIZE = 24
_END = np.iinfo(np.int64).max
_TAKEN_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class HashPart:
    """A part of the hash space: the keys whose hash ends in the `bits` low bits `prefix`."""

    bits: int = 0
    prefix: int = 0

    @property
    def mask(self) -> int:
        """The bits that are compared."""
        return (1 << self.bits) - 1

    def halves(self) -> tuple[HashPart, HashPart]:
        """Split in two; every key of this part is in exactly one half."""
        bits = self.bits + 1
        return HashPart(bits, self.prefix), HashPart(bits, self.prefix | 1 << self.bits)


WHOLE = HashPart()


def parts_that_fit(put: Callable[[HashPart, int], bool]) -> Iterator[HashPart]:
    """Yield parts that cover the hash space, each after `put` has put all of its keys into a map.

    `put` receives a part, and how many are left; it returns False if they have no room.
    """
    parts = [WHOLE]
    while parts:
        if put(parts[0], len(parts)):
            yield parts.pop(0)
        else:  # parts are of equal weight, so the others would not fit either: split them all
            parts = [half for whole in parts for half in whole.halves()]


class OffsetMap:
    """The latest offset per key, for at most `capacity` = floor(slots * load_factor) keys."""

    def __init__(self, slots: int, load_factor: float = 0.9) -> None:
        self.capacity = int(slots * load_factor)
        if self.capacity < 1:
            raise InvalidInputError(
                f"an offset map of {slots} slots at a load factor of {load_factor} holds no key; "
                "raise the cleaner's dedupe_buffer_size"
            )
        self.size = 0
        self.latest_offset = -1
        """The map knows the latest record of every key up to here."""
        self.on_close: Callable[[], None] | None = None
        """Called by `close`."""
        self.obsolete_offsets: ObsoleteOffsets | None = None
        """Collects the offsets that became obsolete, if not None."""
        self._slots: Uint64s = np.zeros((slots, 3), dtype=np.uint64)
        self._secret: Uint64s = np.frombuffer(secrets.token_bytes(16), dtype=np.uint64)

    @classmethod
    def for_records(cls, count: int, *, budget_bytes: int, load_factor: float = 0.9) -> OffsetMap:
        """Return a map for `count` records with different keys, limited by the budget."""
        wanted = int(max(count, 1) / load_factor) + 2
        return cls(min(budget_bytes // SLOT_SIZE, wanted), load_factor)

    @classmethod
    def for_parts(cls, count: int, *, budget_bytes: int) -> OffsetMap:
        """Return a map as `for_records` does, for keys that are read in parts if they do not fit.

        It has room for two keys at least. A map for one is full as soon as it has a key, so no part
        would fit.
        """
        return cls.for_records(count, budget_bytes=max(budget_bytes, 3 * SLOT_SIZE))

    @property
    def slots(self) -> Uint64s:
        """The table itself, for kernels."""
        return self._slots

    @property
    def is_full(self) -> bool:
        """Whether the next keyed record cannot be put."""
        return self.size >= self.capacity

    @property
    def utilization(self) -> float:
        """Share of the slots that are taken (rule C8)."""
        return self.size / len(self._slots)

    def clear(self, latest_offset: int = -1) -> None:
        """Forget all keys; the secret stays, so a `HashPart` keeps its keys."""
        self._slots.fill(0)
        self.size = 0
        self.latest_offset = latest_offset

    def take_offsets(self) -> Int64s:
        """Return all latest offsets, ascending, in the map's own memory: int64 (size).

        Clear the map before it is used again.
        """
        words = self._slots.reshape(-1)
        size = 0
        for first in range(0, len(self._slots), _TAKEN_AT_ONCE):
            found = self._slots[first : first + _TAKEN_AT_ONCE, 2]
            found = found[found != 0]  # a copy, which may overwrite the slots it comes from
            words[size : size + len(found)] = found
            size += len(found)
        offsets: Int64s = words[:size].view(np.int64)
        offsets -= 1
        offsets.sort()
        self.size = 0
        return offsets

    def close(self) -> None:
        """Release the memory."""
        self._slots = np.zeros((1, 3), dtype=np.uint64)
        self.size = 0
        self.obsolete_offsets = None
        if self.on_close is not None:
            self.on_close()

    def hash(self, records: RecordTable, *, path: Path | str, file_position: int) -> Uint64s:
        """Hash every record's key: uint64 (n, 2), undefined for records without a key.

        Raises CorruptBatchError if a key lies outside its batch.
        """
        hashes: Uint64s = np.empty((len(records.offsets), 2), dtype=np.uint64)
        fault = kernels.hash_keys(
            records.arena, records.key_positions, records.key_sizes, self._secret, hashes
        )
        if fault >= 0:
            raise CorruptBatchError(
                path,
                file_position,
                f"the key of the record at offset {records.offsets[fault]} inside its batch",
                f"{records.key_sizes[fault]} bytes at {records.key_positions[fault]}",
            )
        return hashes

    def put(
        self,
        hashes: Uint64s,
        key_sizes: Int64s,
        offsets: Int64s,
        *,
        first: int = 0,
        start: int = 0,
        end: int = _END,
        part: HashPart = WHOLE,
    ) -> tuple[int, int]:
        """Put the records with start <= offset < end, from index `first` on, in order.

        Returns (index of the record that found the map full, or n; index of the last record put, or
        -1). Like in Kafka, any record with a key ends the build of a full map, even if its key is
        there (C12).
        """
        stop, self.size, last = kernels.put_offsets(
            self._slots, hashes, key_sizes, offsets, first, start, end,
            self.capacity, self.size, part.mask, part.prefix, *self._noted,
        )  # fmt: skip
        if last >= 0:
            self.latest_offset = max(self.latest_offset, int(offsets[last]))
        return int(stop), int(last)

    @property
    def _noted(self) -> tuple[npt.NDArray[np.uint8], int]:
        """The bits of `obsolete_offsets`, and the offset of the first bit."""
        if self.obsolete_offsets is None:
            return np.empty(0, dtype=np.uint8), 0
        return self.obsolete_offsets.bits, self.obsolete_offsets.start

    def get(self, hashes: Uint64s) -> Int64s:
        """Return the latest offset per hash; -1 for a key that is not in the map."""
        found: Int64s = np.empty(len(hashes), dtype=np.int64)
        kernels.get_offsets(self._slots, hashes, found)
        return found

    def obsolete(self, run: Chunk, records: RecordTable) -> npt.NDArray[np.bool_]:
        """Return which records (n) with a key have a later record, up to `latest_offset`.

        Rules C51 and C52. Raises CorruptBatchError.
        """
        known = self.obsolete_offsets
        if known is not None and run.table.base_offsets[0] >= known.start:
            return known.contains(records.offsets)
        hashes = self.hash(records, path=run.path, file_position=run.file_position)
        return self.has_later(hashes, records.key_sizes, records.offsets)

    def has_later(
        self, hashes: Uint64s, key_sizes: Int64s, offsets: Int64s
    ) -> npt.NDArray[np.bool_]:
        """Return for which records (n) with a key the map has a higher offset."""
        flags: npt.NDArray[np.bool_] = np.empty(len(offsets), dtype=np.bool_)
        kernels.mark_obsolete(self._slots, hashes, key_sizes, offsets, self.latest_offset, flags)
        return flags

    def obsolete_batches(self, table: BatchTable) -> npt.NDArray[np.bool_]:
        """Return which batches (b) are known to be wholly obsolete, without reading keys."""
        known = self.obsolete_offsets
        if known is None:
            return np.zeros(len(table), dtype=np.bool_)
        return known.hold_all_of(table)

    def update_latest_offset(self, offset: int) -> None:
        """Extend the known range up to `offset`, though no key was put there."""
        self.latest_offset = max(self.latest_offset, offset)
