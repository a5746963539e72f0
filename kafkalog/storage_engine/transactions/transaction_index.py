"""Read and write `.txnindex` files, which list the aborted transactions of a segment.

A segment has such a file only if it holds an ABORT marker. The entry is in the segment of the
marker, while the data may begin in an earlier segment. A reader that omits aborted data thus needs
the entries of all segments from its first one on. A transaction that is below the last stable
offset and has no entry is committed.

Kafka: TransactionIndex, AbortedTxn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kafkalog.storage_engine.records.records import BatchTable

_VERSION = 0
_Read = TypeVar("_Read")


class AbortedTransaction(NamedTuple):
    """The batches of a producer from `first_offset` to its ABORT marker at `last_offset`."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int = -1
    """The last stable offset of the log after this abort."""


def aborted_transactions(path: Path) -> list[AbortedTransaction]:
    """Read a `.txnindex` file; a missing one has no entries. Ignores a torn last entry.

    Raises CorruptLogError for an entry of another version.
    """
    try:
        data = files.read_file(path)
    except FileNotFoundError:
        return []
    return parse_transactions(data, path)


def parse_transactions(data: bytes, path: Path | str) -> list[AbortedTransaction]:
    """Return the entries of a `.txnindex`; ignores a torn last one. Raises CorruptLogError."""
    entry = layout.TRANSACTION_INDEX_ENTRY
    found = []
    for position in range(0, len(data) - entry.size + 1, entry.size):
        version, *fields = entry.unpack_from(data, position)
        if version > _VERSION:
            raise CorruptLogError(path, position, f"entry version {_VERSION}", version)
        found.append(AbortedTransaction(*fields))
    return found


@dataclass(frozen=True, slots=True)
class AbortedRanges:
    """Aborted transactions as arrays int64 (n), in any order; ranges of a producer may overlap."""

    producer_ids: npt.NDArray[np.int64]
    first_offsets: npt.NDArray[np.int64]
    last_offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, entries: Sequence[AbortedTransaction]) -> Self:
        """Convert entries to arrays."""
        import numpy as np

        rows = [(e.producer_id, e.first_offset, e.last_offset) for e in entries]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return cls(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())

    @classmethod
    def joined(cls, parts: Sequence[AbortedRanges]) -> Self:
        """Concatenate several."""
        import numpy as np

        none = np.empty(0, dtype=np.int64)
        return cls(
            np.concatenate([none, *(part.producer_ids for part in parts)]),
            np.concatenate([none, *(part.first_offsets for part in parts)]),
            np.concatenate([none, *(part.last_offsets for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.producer_ids)

    def overlapping(self, first: int, last: int) -> AbortedRanges:
        """Return those that overlap the offsets first to last."""
        return self._where((self.first_offsets <= last) & (self.last_offsets >= first))

    def ending_within(self, start: int, end: int) -> AbortedRanges:
        """Return those whose marker is in [start, end)."""
        return self._where((self.last_offsets >= start) & (self.last_offsets < end))

    def _where(self, wanted: npt.NDArray[np.bool_]) -> AbortedRanges:
        return AbortedRanges(
            self.producer_ids[wanted], self.first_offsets[wanted], self.last_offsets[wanted]
        )

    def cover(self, table: BatchTable) -> npt.NDArray[np.bool_]:
        """Return which batches (b) belong to one of these transactions, in O((b + n) log (b + n)).

        A batch belongs if its producer has a transaction that begins at or before the batch and
        reaches to its end. The method sorts both by producer and begin, and carries the largest
        last offset along.
        """
        import numpy as np

        result = np.zeros(len(table), dtype=np.bool_)
        rows = np.flatnonzero(table.attributes & layout.TRANSACTIONAL_BIT)
        count = len(self)
        if not count or not len(rows):
            return result
        _, codes = np.unique(
            np.concatenate([self.producer_ids, table.producer_ids[rows]]), return_inverse=True
        )
        begins = np.concatenate([self.first_offsets, table.base_offsets[rows]])
        is_batch = np.arange(len(codes)) >= count
        order = np.lexsort((is_batch, begins, codes))
        distinct, ranks = np.unique(self.last_offsets, return_inverse=True)
        # All keys of a producer lie above those of the producers before; 0: no transaction.
        keys = codes * (len(distinct) + 1)
        keys[:count] += ranks + 1
        ranks_so_far = np.empty_like(keys)
        ranks_so_far[order] = np.maximum.accumulate(keys[order])
        found = (ranks_so_far - codes * (len(distinct) + 1))[count:]
        result[rows] = (found > 0) & (distinct[found - 1] >= table.last_offsets[rows])
        return result

    def end_at(
        self, producer_ids: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return for pairs (k) whether a transaction of that producer ends at that offset."""
        import numpy as np

        ours = set(zip(self.producer_ids.tolist(), self.last_offsets.tolist(), strict=True))
        pairs = zip(producer_ids.tolist(), offsets.tolist(), strict=True)
        return np.fromiter((pair in ours for pair in pairs), np.bool_, len(offsets))


class IndexedTransactions:
    """The aborted transactions of one partition; each `.txnindex` file is read on demand.

    Made for a reader that moves forward: once it holds more than `kept_max` entries, it drops those
    of files outside the requested range.
    """

    def __init__(
        self,
        list_files: Callable[[], Sequence[tuple[int, Path]]],
        *,
        end_offset: int = layout.INT64_MAX,
        known: Sequence[AbortedTransaction] | None = None,
        kept_max: int = 0,
        check_topic: Callable[[], object] = lambda: None,
    ) -> None:
        """Take a function that lists the files, as (base offset, path) ascending.

        `known` has the entries themselves and replaces the files. Entries whose marker is at or
        above `end_offset` belong to a commit in flight or a dead one, and are omitted. After files
        were read, `check_topic` is called, and raises if they are another topic's.
        """
        self._list_files = list_files
        self._end_offset = end_offset
        self._kept_max = kept_max
        self._check_topic = check_topic
        self._known = None if known is None else AbortedRanges.of(known)
        self._files: Sequence[tuple[int, Path]] | None = None
        self._entries: dict[int, AbortedRanges | CorruptLogError] = {}

    def between(self, start: int, end: int, *, is_strict: bool = True) -> AbortedRanges:
        """Return the entries of the segments that may hold markers of [start, end).

        Skips a file with an entry of another version; with `is_strict` raises CorruptLogError
        instead.
        """
        if self._known is not None:
            return self._known.ending_within(start, end)
        if self._files is None:
            self._files = self._of_the_topic(self._list_files)
        first = max(0, bisect_right(self._files, start, key=lambda file: file[0]) - 1)
        stop = bisect_left(self._files, end, key=lambda file: file[0])
        wanted = self._files[first:stop]
        if self._kept_max < sum(_count(entries) for entries in self._entries.values()):
            kept = [base for base, _ in wanted if base in self._entries]
            self._entries = {base: self._entries[base] for base in kept}
        found: list[AbortedRanges] = []
        for base_offset, path in wanted:
            if base_offset not in self._entries:
                self._entries[base_offset] = self._of_the_topic(partial(self._read, path))
            entries = self._entries[base_offset]
            if isinstance(entries, AbortedRanges):
                found.append(entries)
            elif is_strict:
                raise entries
        return found[0] if len(found) == 1 else AbortedRanges.joined(found)

    def _of_the_topic(self, read: Callable[[], _Read]) -> _Read:
        try:
            return read()
        finally:
            self._check_topic()

    def _read(self, path: Path) -> AbortedRanges | CorruptLogError:
        try:
            entries = aborted_transactions(path)
        except CorruptLogError as fault:
            return fault
        # A marker lies above its data, so this also skips an entry of zeros.
        end = self._end_offset
        return AbortedRanges.of([e for e in entries if e.first_offset < e.last_offset < end])


def _count(entries: AbortedRanges | CorruptLogError) -> int:
    return 1 + (len(entries) if isinstance(entries, AbortedRanges) else 0)


def transaction_entry(transaction: AbortedTransaction) -> bytes:
    """Return the 34 bytes of an entry."""
    return layout.TRANSACTION_INDEX_ENTRY.pack(
        _VERSION,
        transaction.producer_id,
        transaction.first_offset,
        transaction.last_offset,
        transaction.last_stable_offset,
    )


def size_kept(path: Path, is_kept: Callable[[AbortedTransaction], bool]) -> tuple[int, int]:
    """Return (bytes of a `.txnindex` file up to its last entry to keep, its size).

    Truncating there removes the remains of an unfinished write: whole entries, a torn one, or
    zeros. A missing file has no bytes. Kafka: TransactionIndex.truncateTo.
    """
    try:
        data = files.read_file(path)
    except FileNotFoundError:
        return 0, 0
    entry = layout.TRANSACTION_INDEX_ENTRY
    kept = len(data) - len(data) % entry.size
    while kept:
        version, *fields = entry.unpack_from(data, kept - entry.size)
        if version == _VERSION and is_kept(AbortedTransaction(*fields)):
            break
        kept -= entry.size
    return kept, len(data)
