"""Aborted transactions: read from the `.txnindex` files of a partition's segments.

A segment's file is there only if a transaction was aborted in it: the entry stands with the
segment that holds the ABORT marker, while the data may begin in an earlier one. So whoever leaves
out aborted data needs the entries of all segments from its first one on. Only aborts are recorded;
what is below the last stable offset and not aborted is committed.

Kafka: TransactionIndex, AbortedTxn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine import layout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kafkalog.storage_engine.records import BatchTable

__all__ = [
    "AbortedTransaction",
    "IndexedTransactions",
    "aborted_transactions",
    "is_aborted",
    "size_below",
    "transaction_entry",
]

_VERSION = 0


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """The batches of a producer from `first_offset` to its marker at `last_offset` do not count."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int = -1
    """That of the log once this transaction was aborted."""


def aborted_transactions(paths: Iterable[Path]) -> list[AbortedTransaction]:
    """Read `.txnindex` files; a missing one has no entries, and a torn last entry is none.

    Raises CorruptLogError for an entry of another version.
    """
    entry = layout.TRANSACTION_INDEX_ENTRY
    found = []
    for path in paths:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        whole = len(data) - len(data) % entry.size
        for position in range(0, whole, entry.size):
            version, *fields = entry.unpack_from(data, position)
            if version > _VERSION:
                raise CorruptLogError(path, position, f"entry version {_VERSION}", version)
            found.append(AbortedTransaction(*fields))
    return found


class IndexedTransactions:
    """The aborted transactions of one partition, each `.txnindex` file read when it is asked for.

    For a reader that goes forward: files below the range asked for last are forgotten.
    """

    def __init__(
        self,
        list_files: Callable[[], Sequence[tuple[int, Path]]],
        *,
        end_offset: int = layout.INT64_MAX,
        known: Sequence[AbortedTransaction] | None = None,
    ) -> None:
        """Name the files, as (base offset, path) ascending, once they are needed.

        Or the entries themselves, where these are `known`. Those whose marker is at or above
        `end_offset` are of a commit in flight, or of a dead one, and left out.
        """
        self._list_files = list_files
        self._end_offset = end_offset
        self._known = known
        self._files: Sequence[tuple[int, Path]] | None = None
        self._entries: dict[int, list[AbortedTransaction] | CorruptLogError] = {}

    def between(self, start: int, end: int, *, is_strict: bool = True) -> list[AbortedTransaction]:
        """Return the entries of the segments that may hold markers of [start, end).

        Nothing in a file with an entry of another version is believed; that raises CorruptLogError
        if `is_strict`.
        """
        if self._known is not None:
            return [entry for entry in self._known if start <= entry.last_offset < end]
        if self._files is None:
            self._files = self._list_files()
        first = max(0, bisect_right(self._files, start, key=lambda file: file[0]) - 1)
        stop = bisect_left(self._files, end, key=lambda file: file[0])
        wanted = self._files[first:stop]
        self._entries = {base: self._entries[base] for base, _ in wanted if base in self._entries}
        found: list[AbortedTransaction] = []
        for base_offset, path in wanted:
            if base_offset not in self._entries:
                self._entries[base_offset] = self._read(path)
            entries = self._entries[base_offset]
            if isinstance(entries, list):
                found += entries
            elif is_strict:
                raise entries
        return found

    def _read(self, path: Path) -> list[AbortedTransaction] | CorruptLogError:
        try:
            entries = aborted_transactions([path])
        except CorruptLogError as fault:
            return fault
        return [entry for entry in entries if entry.last_offset < self._end_offset]


def transaction_entry(transaction: AbortedTransaction) -> bytes:
    """Return the 34 bytes of an entry."""
    return layout.TRANSACTION_INDEX_ENTRY.pack(
        _VERSION,
        transaction.producer_id,
        transaction.first_offset,
        transaction.last_offset,
        transaction.last_stable_offset,
    )


def size_below(path: Path, offset: int) -> tuple[int, int]:
    """Return (bytes of a `.txnindex` file that stay when the log is cut at `offset`, its size).

    The first entry whose marker is at or above `offset` goes with all that follow. A missing file
    has no bytes. Kafka: TransactionIndex.truncateTo.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0, 0
    entry = layout.TRANSACTION_INDEX_ENTRY
    kept = len(data) - len(data) % entry.size
    for position in range(0, kept, entry.size):
        _, _, _, last_offset, _ = entry.unpack_from(data, position)
        if last_offset >= offset:
            return position, len(data)
    return kept, len(data)


def is_aborted(table: BatchTable, aborted: Iterable[AbortedTransaction]) -> npt.NDArray[np.bool_]:
    """Say which batches (b) belong to an aborted transaction."""
    import numpy as np

    result = np.zeros(len(table), dtype=np.bool_)
    is_transactional = (table.attributes & layout.TRANSACTIONAL_BIT) != 0
    for transaction in aborted:
        result |= (
            is_transactional
            & (table.producer_ids == transaction.producer_id)
            & (table.base_offsets >= transaction.first_offset)
            & (table.last_offsets <= transaction.last_offset)
        )
    return result
