"""Transactions during a round: which aborted data and which markers may be removed.

Data of an aborted transaction is removed at once. A marker stays as long as the round finds a batch
of its transaction, even an empty one. Then it goes in two stages, like a tombstone
(`retention_rules`). An ABORT marker that stays for its data keeps its transaction index entry.

Only the marker decides, because its batch has a checksum. A wrong byte in `.txnindex`, which lacks
a checksum, could destroy committed data. An index that contradicts a marker is an error.

Kafka: CleanedTransactionMetadata; rules C49, C64 to C74 and C84 to C86.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.transactions.transaction_index import transaction_entry
from kafkalog.storage_engine.transactions.transaction_outcomes import control_types

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
    from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction

_KIND = layout.CONTROL_BIT | layout.TRANSACTIONAL_BIT


@dataclass(frozen=True, slots=True)
class Seen:
    """Facts about the b batches of a chunk."""

    is_control: npt.NDArray[np.bool_]
    """(b)"""
    can_discard: npt.NDArray[np.bool_]
    """(b) aborted data, and control batches that nothing needs any more."""


class CleanedTransactions:
    """Follow the transactions of a log through a round; `see` each chunk once, in log order."""

    def __init__(
        self,
        snapshot: PartitionSnapshot,
        entries_of: Callable[[int], Iterable[AbortedTransaction]],
    ) -> None:
        """`entries_of` returns the transaction index of a segment, by its base offset."""
        self._entries_of = entries_of
        self._outcomes = snapshot.transaction_outcomes(is_strict=True)
        self._committed: set[int] = set()
        """Producers with committed data since their last marker."""
        self._aborted: set[int] = set()
        """The same for aborted data."""
        self._kept = bytearray()
        self._index: dict[int, AbortedTransaction] = {}
        """Entries of one segment, by the offset of their marker."""
        self._index_base = -1

    def see(self, chunk: Chunk) -> Seen:
        """Return which batches of the next chunk may go, as far as transactions decide.

        Raises CorruptBatchError, and CorruptLogError if the index contradicts a marker or is
        unreadable.
        """
        table = chunk.table
        is_control = table.is_control
        rows = np.flatnonzero(table.attributes & _KIND)
        can_discard = self._outcomes.is_aborted(chunk)
        if not len(rows):
            return Seen(is_control, can_discard)
        types = _types(chunk, is_control)
        aborted, committed = self._aborted, self._committed
        for batch, producer_id, type_, is_aborted in zip(
            rows.tolist(),
            table.producer_ids[rows].tolist(),
            types[rows].tolist(),
            can_discard[rows].tolist(),
            strict=True,
        ):
            if type_ == _DATA:
                (aborted if is_aborted else committed).add(producer_id)
            elif type_ == _EMPTY:
                can_discard[batch] = True
            elif type_ == layout.CONTROL_COMMIT:
                can_discard[batch] = producer_id not in committed
                committed.discard(producer_id)
            elif type_ == layout.CONTROL_ABORT:
                can_discard[batch] = producer_id not in aborted
                if producer_id in aborted:
                    aborted.remove(producer_id)
                    self._keep_entry(chunk, producer_id, int(table.last_offsets[batch]))
        return Seen(is_control, can_discard)

    def take_entries(self) -> bytes:
        """Return the packed index entries of the markers kept since the last call."""
        entries = bytes(self._kept)
        self._kept.clear()
        return entries

    def _keep_entry(self, chunk: Chunk, producer_id: int, marker_offset: int) -> None:
        if self._index_base != chunk.segment_base:
            entries = self._entries_of(chunk.segment_base)
            self._index = {entry.last_offset: entry for entry in entries}
            self._index_base = chunk.segment_base
        entry = self._index.get(marker_offset)
        if entry is not None and entry.producer_id == producer_id:
            self._kept += transaction_entry(entry)


def mapped_batches(
    snapshot: PartitionSnapshot, *, is_strict: bool
) -> Callable[[Chunk], npt.NDArray[np.bool_]]:
    """Return a function that selects, chunk by chunk, the batches (b) whose keys count.

    Call it in log order. Keys of control batches and aborted data do not count (C17, C18); keys of
    open transactions do. The function raises what `TransactionOutcomes.is_aborted` raises; a caller
    that destroys records is strict.
    """
    outcomes = snapshot.transaction_outcomes(is_strict=is_strict)

    def is_mapped(chunk: Chunk) -> npt.NDArray[np.bool_]:
        return ~chunk.table.is_control & ~outcomes.is_aborted(chunk)

    return is_mapped


_DATA = -1
_EMPTY = -2


def _types(chunk: Chunk, is_control: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the type of each batch (b): `_DATA`, `_EMPTY`, or a control record's type."""
    types = np.full(len(chunk.table), _DATA, dtype=np.int64)
    types[is_control] = _EMPTY
    batches = np.flatnonzero(is_control & (chunk.table.counts != 0))
    types[batches] = control_types(chunk, batches)
    return types
