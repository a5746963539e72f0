"""An index in memory of the last segments of a partition, which have no key index of their own.

It has what a key index has: for each record with a key 33 bits of the key's hash, and its batch. A
lookup extends it by what was committed since, by whomever. It is made when lookups have scanned as
many bytes as it takes, so a single one pays nothing for it. The entries lie in sorted runs, the
oldest first. Each run is at least twice as long as the next one, so a commit costs little.

Invariants
----------
- No record with a key is missing, whatever became of its transaction: who reads the batch judges
  that.
- Committed bytes of a log of ours never change. So what is known of a segment stays true while it
  is the same file or object, and the last batch has the checksum that it had. Only a restored
  backup has another one.
- If a cleaning or retention took the first segments, their entries go. If any other segment was
  replaced, all is read again.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kafkalog.cleaner.dedup.offset_map import Int64s, Uint64s
from kafkalog.cleaner.key_index.key_index import hashes_of, key_hashes
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.reading.partition_snapshot import CHUNK_SIZE

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
    from kafkalog.storage_engine.segment.open_segment import Chunk, OpenSegment

OFFSET_BYTES: Final = 24
"""The most that an offset takes: 8 bytes a record, and 16 a batch."""
_BATCH: Final = np.uint64((1 << layout.KEYS_POSITION_BITS) - 1)


class _Indexed(NamedTuple):
    """A segment in the index."""

    base_offset: int
    identity: Hashable
    first: int
    """The number of its first batch."""


class TailIndex:
    """The index of one partition's last segments; `follow` the log before each use."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)
        self._begin = 0
        """Segments below have messages v0 or v1, which cannot be read one by one."""
        self.scanned_bytes = 0
        """Bytes that lookups have scanned."""
        self.clear()

    def is_worth_reading(self, segments: Sequence[OpenSegment]) -> bool:
        """Return whether lookups have scanned as much as it takes to index these segments.

        A single lookup therefore reads no more than it needs.
        """
        return bool(self._segments) or self.scanned_bytes >= sum(each.limit for each in segments)

    def clear(self) -> None:
        """Forget everything."""
        self._segments: list[_Indexed] = []
        self._runs: list[Uint64s] = []
        self._offsets, self._positions = array("q"), array("q")
        self._last_crc = 0
        self._next_offset = 0

    @property
    def size(self) -> int:
        """The bytes in memory."""
        return sum(run.nbytes for run in self._runs) + 16 * len(self._offsets)

    @property
    def base_offset(self) -> int:
        """The base offset of its first segment."""
        return self._segments[0].base_offset if self._segments else layout.INT64_MAX

    def follow(self, segments: Sequence[OpenSegment], span: tuple[int, int]) -> int:
        """Take in the segments that a partition now ends with, up to the end of the span.

        The span has the log's offsets [start, end). Returns the bytes that were read for it. Raises
        CorruptBatchError, StorageError; then it is empty.
        """
        segments = [each for each in segments if each.base_offset >= self._begin]
        if not self._goes_on(segments, span[1]):
            self.clear()
        try:
            return sum(self._extended(segments, span))
        except BaseException:
            self.clear()
            raise

    def hashes(self, keys: ChosenKeys) -> Uint64s:
        """Return the hashes of keys, in their order: uint64 (k)."""
        return hashes_of(keys, self._secret)

    def batches_below(self, offset: int) -> int:
        """Return how many batches begin below an offset."""
        return bisect_left(self._offsets, offset)

    def last_before(self, hashes: Uint64s, batches: Int64s) -> Int64s:
        """Return the last batch that may have each key, before batch `batches[k]`; -1 for none."""
        found: Int64s = np.full(len(hashes), -1, dtype=np.int64)
        wanted = hashes | batches.astype(np.uint64)
        for run in reversed(self._runs):
            places = run.searchsorted(wanted) - 1
            entries = run[places]  # that of -1 is above all that are wanted
            is_here = (found < 0) & (places >= 0) & (entries & ~_BATCH == hashes)
            found[is_here] = (entries[is_here] & _BATCH).astype(np.int64)
            if (found >= 0).all():
                break
        return found

    def places(self, batches: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield (base offset of a segment, rows, positions) of all batches, the last one first.

        The rows say which of the batches they are; positions ascend.
        """
        firsts = [each.first for each in self._segments]
        segment_of = np.searchsorted(firsts, batches, side="right") - 1
        for place in np.unique(segment_of)[::-1].tolist():
            rows = np.flatnonzero(segment_of == place)
            rows = rows[np.argsort(batches[rows], kind="stable")]
            positions = [self._positions[batch] for batch in batches[rows].tolist()]
            yield self._segments[place].base_offset, rows, np.array(positions, dtype=np.int64)

    def _goes_on(self, segments: Sequence[OpenSegment], end: int) -> bool:
        """Return whether the segments are those it has, or the last of them, and maybe more.

        Forgets the first ones that are gone.
        """
        if not segments or not self._segments or end < self._next_offset:
            return False
        bases = [each.base_offset for each in self._segments]
        gone = bisect_left(bases, segments[0].base_offset)
        held = self._segments[gone:]
        now = [(each.base_offset, each.identity) for each in segments[: len(held)]]
        if not held or now != [(each.base_offset, each.identity) for each in held]:
            return False
        if gone:
            self._forget(gone)
        if len(self._positions) == self._segments[-1].first:
            return True
        header = segments[len(held) - 1].header_at(self._positions[-1])
        return header is not None and header.crc == self._last_crc

    def _forget(self, gone: int) -> None:
        """Forget the first segments, so that the next one's first batch has the number 0."""
        first = self._segments[gone].first
        runs = (run[run & _BATCH >= first] - np.uint64(first) for run in self._runs)
        self._runs = [run for run in runs if len(run)]
        del self._offsets[:first], self._positions[:first]
        self._segments = [each._replace(first=each.first - first) for each in self._segments[gone:]]

    def _extended(self, segments: Sequence[OpenSegment], span: tuple[int, int]) -> Iterator[int]:
        """Add what is new of the segments; yield the bytes of each chunk that is read."""
        found: list[Uint64s] = []
        for segment in segments[max(0, len(self._segments) - 1) :]:
            if not self._segments or self._segments[-1].base_offset != segment.base_offset:
                here = segment.base_offset, segment.identity, len(self._offsets)
                self._segments.append(_Indexed(*here))
            start = max(self._next_offset, segment.base_offset, span[0])
            stop = min(span[1], segment.end_offset)
            for chunk in segment.chunks(start, stop, CHUNK_SIZE) if start < stop else ():
                yield int(chunk.table.sizes.sum())
                if chunk.table.has_messages:
                    self.clear()
                    self._begin = segment.end_offset
                    found.clear()
                    break
                found += self._entries(chunk)
            self._next_offset = max(self._next_offset, stop)
        entries = np.concatenate([np.empty(0, dtype=np.uint64), *found])
        if len(entries):
            self._add(entries)

    def _entries(self, chunk: Chunk) -> Iterator[Uint64s]:
        """Take in the batches of a chunk; yield the entries of their records."""
        table, first = chunk.table, len(self._offsets)
        self._offsets.frombytes(table.base_offsets.tobytes())
        self._positions.frombytes((table.positions + chunk.file_position).tobytes())
        self._last_crc = int(table.crcs[-1])
        for run, records in chunk.runs(~table.is_control):
            rows = np.flatnonzero(records.key_sizes >= 0)
            batches = (records.batch_index[rows] + first).astype(np.uint64)
            yield key_hashes(records, rows, self._secret) | batches
            first += len(run.table)

    def _add(self, entries: Uint64s) -> None:
        entries.sort()
        while self._runs and len(self._runs[-1]) < 2 * len(entries):
            entries = np.concatenate((self._runs.pop(), entries))
            entries.sort(kind="stable")  # two sorted runs are merged
        self._runs.append(entries)
