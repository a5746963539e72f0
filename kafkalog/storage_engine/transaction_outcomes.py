"""How the transactions of a log ended, told by their markers in the log itself.

A batch of a transaction is followed by a marker of its producer: the next one, ABORT or COMMIT,
says what became of it. A `.txnindex` says the same in advance, but no checksum covers it, and a
changed byte there would show aborted records or hide committed ones. So readers believe the
markers, whose batches are checked, and look ahead in the log as far as the markers of what they
hold: mostly in the chunk that they have just read. An index without an entry is passed over; one
that contradicts a marker is an error, since a log that was cut at the end of a batch has lost a
marker without a trace. Where the log is damaged before the marker, what lies below the damage is
still wanted: then the index decides.

A log without transactions costs nothing here, one that is read in order a second look at its
headers at most. Above the last stable offset there are transactions without a marker; they count as
not aborted.

Kafka: the consumer believes the broker's aborted transactions (TransactionIndex); here, as when
Kafka rebuilds that index (LogSegment.recover), the log itself is asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine import layout
from kafkalog.storage_engine.batch import parse_header
from kafkalog.storage_engine.control_record import read_control_record
from kafkalog.storage_engine.transaction_index import AbortedTransaction, is_aborted

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kafkalog.storage_engine.open_segment import Chunk

__all__ = ["TransactionOutcomes"]

_KIND: Final = layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT
_MARKERS: Final = (layout.CONTROL_ABORT, layout.CONTROL_COMMIT)
_PRODUCERS_MAX: Final = 1000
"""Producers from which on those are forgotten whose markers are all passed."""


class TransactionOutcomes:
    """Says of the chunks of one read, in ascending order, which of their batches were aborted.

    `chunks_from` yields the chunks of the log from an offset on, up to the high watermark; `index`
    reads the entries of the `.txnindex` files, and is only called where the log is damaged.
    """

    def __init__(
        self,
        chunks_from: Callable[[int], Iterator[Chunk]],
        index: Callable[[], list[AbortedTransaction]],
    ) -> None:
        self._chunks_from = chunks_from
        self._index = index
        self._ahead: Iterator[Chunk] | None = None
        self._frontier = -1
        """The markers below this offset are known, from the first batch that needs one on."""
        self._is_at_end = False
        self._is_damaged = False
        self._entries: list[AbortedTransaction] | None = None
        self._markers: dict[int, tuple[list[int], list[bool]]] = {}
        """Per producer id the offsets of its markers, ascending, and whether they are ABORTs."""

    def is_aborted(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Say which batches (b) of a chunk belong to an aborted transaction.

        Raises CorruptBatchError for a marker that is none, CorruptLogError where the index
        contradicts it.
        """
        import numpy as np

        table = chunk.table
        result = np.zeros(len(table), dtype=np.bool_)
        is_wanted = (table.attributes & _KIND) == layout.TRANSACTIONAL_BIT
        rows = np.flatnonzero(is_wanted)
        if not len(rows):
            return result
        self._forget(int(table.base_offsets[rows[0]]))
        if int(table.last_offsets[-1]) >= self._frontier:
            self._note(chunk)
        ends = np.full(len(table), -1, dtype=np.int64)  # offset of the batch's marker
        for producer_id in np.unique(table.producer_ids[rows]).tolist():
            own = rows[table.producer_ids[rows] == producer_id]
            last = int(table.last_offsets[own[-1]])
            offsets, aborts = self._markers_of(producer_id, int(table.base_offsets[own[0]]), last)
            known = np.asarray(offsets, dtype=np.int64)
            places = np.searchsorted(known, table.last_offsets[own])
            is_known = places < len(known)
            places = places[is_known]
            result[own[is_known]] = np.asarray(aborts, dtype=np.bool_)[places]
            ends[own[is_known]] = known[places]
        is_known = ends >= 0
        if self._is_damaged and not is_known[rows].all():
            result |= is_wanted & ~is_known & is_aborted(table, self._index())
        self._compare(chunk, result, ends)
        return result

    def _forget(self, offset: int) -> None:
        """Forget markers below `offset`; if that is all, looking ahead begins anew."""
        if offset >= self._frontier:
            self._markers.clear()
            self._ahead = None
            self._is_at_end = self._is_damaged = False
        elif len(self._markers) > _PRODUCERS_MAX:
            kept = {key: found for key, found in self._markers.items() if found[0][-1] >= offset}
            self._markers = kept

    def _markers_of(self, producer_id: int, first: int, last: int) -> tuple[list[int], list[bool]]:
        """Return a producer's markers from offset `first` on, with one above `last` if any is."""
        while True:
            offsets, aborts = self._markers.get(producer_id, ([], []))
            if (offsets and offsets[-1] > last) or self._is_at_end:
                passed = bisect_left(offsets, first)
                if passed == len(offsets):
                    self._markers.pop(producer_id, None)
                    return [], []
                del offsets[:passed], aborts[:passed]
                return offsets, aborts
            self._look_ahead()

    def _look_ahead(self) -> None:
        if self._ahead is None:
            self._ahead = self._chunks_from(self._frontier)
        try:
            chunk = next(self._ahead, None)
        except (CorruptLogError, StorageError):
            chunk = None
            self._is_damaged = True
        if chunk is None:
            self._is_at_end = True
        else:
            self._note(chunk)

    def _note(self, chunk: Chunk) -> None:
        """Take in the markers of a chunk that begins at or below the frontier, or is the first."""
        import numpy as np

        table = chunk.table
        is_new = table.base_offsets >= self._frontier
        is_marker = ((table.attributes & _KIND) == _KIND) & (table.counts > 0) & is_new
        batches = np.flatnonzero(is_marker)
        found = zip(
            table.producer_ids[batches].tolist(),
            table.base_offsets[batches].tolist(),
            _types(chunk, batches),
            strict=True,
        )
        for producer_id, offset, type_number in found:
            if type_number in _MARKERS:
                offsets, aborts = self._markers.setdefault(producer_id, ([], []))
                offsets.append(offset)
                aborts.append(type_number == layout.CONTROL_ABORT)
        self._frontier = max(self._frontier, int(table.last_offsets[-1]) + 1)

    def _compare(
        self, chunk: Chunk, result: npt.NDArray[np.bool_], ends: npt.NDArray[np.int64]
    ) -> None:
        """Raise CorruptLogError where the index says the opposite of a marker."""
        import numpy as np

        if self._entries is None:
            try:
                self._entries = self._index()
            except CorruptLogError:  # nothing in such a file is believed
                self._entries = []
        table = chunk.table
        is_known = ends >= 0
        first, last = int(table.base_offsets[0]), int(table.last_offsets[-1])
        entries = [e for e in self._entries if e.first_offset <= last and e.last_offset >= first]
        is_indexed = is_aborted(table, entries)
        is_wrong = is_known & ~result & is_indexed
        missed = is_known & result & ~is_indexed
        if missed.any():
            # Of one that begins above the chunk the batches here may still be part.
            markers = {(entry.producer_id, entry.last_offset) for entry in self._entries}
            for batch in np.flatnonzero(missed).tolist():
                is_wrong[batch] = (int(table.producer_ids[batch]), int(ends[batch])) in markers
        if is_wrong.any():
            batch = int(is_wrong.argmax())
            words = ("aborted", "committed") if result[batch] else ("committed", "aborted")
            raise CorruptLogError(
                chunk.path,
                chunk.file_position + int(table.positions[batch]),
                f"a batch that is {words[0]}, as the marker at offset {ends[batch]} says",
                f"one that is {words[1]} in the .txnindex files beside it (if `kafkalog verify` "
                "finds nothing else, remove these)",
            )


def _types(chunk: Chunk, batches: npt.NDArray[np.int64]) -> list[int]:
    """Return the types of control batches, of those in Kafka's usual form all at once."""
    import numpy as np

    table = chunk.table
    positions = table.positions[batches]
    data = np.frombuffer(chunk.buffer, dtype=np.uint8)
    start = np.frombuffer(layout.MARKER_START, dtype=np.uint8)
    end = layout.BATCH_OVERHEAD + len(start) + layout.CONTROL_KEY.size
    is_plain = (table.sizes[batches] == layout.MARKER_SIZE) & (table.counts[batches] == 1)
    is_plain &= (table.attributes[batches] & layout.CODEC_MASK) == layout.CODEC_NONE
    first = np.where(is_plain, positions, 0)[:, None]
    heads = data[np.minimum(first + np.arange(layout.BATCH_OVERHEAD, end), len(data) - 1)]
    is_plain &= (heads[:, : len(start)] == start).all(axis=1)
    is_plain &= (heads[:, len(start) : -1] == 0).all(axis=1)  # version 0, a type below 256
    types: list[int] = heads[:, -1].tolist()
    for place in np.flatnonzero(~is_plain).tolist():
        position = int(positions[place])
        record = read_control_record(
            chunk.buffer,
            position,
            parse_header(chunk.buffer, position),
            path=chunk.path,
            file_position=chunk.file_position + position,
        )
        types[place] = -1 if record is None else record.type
    return types
