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
headers at most: also by many short reads, since each goes on from what those before it learned
(`transaction_markers`). Above the last stable offset there are transactions without a marker; they
count as not aborted.

Kafka: the consumer believes the broker's aborted transactions (TransactionIndex); here, as when
Kafka rebuilds that index (LogSegment.recover), the log itself is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.format.control_record import read_control_record
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedRanges,
    IndexedTransactions,
)
from kafkalog.storage_engine.transactions.transaction_markers import (
    LogIdentity,
    Markers,
    known_markers,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kafkalog.storage_engine.segment.open_segment import Chunk

__all__ = ["TransactionOutcomes", "control_types"]

_KIND: Final = layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT
_MARKERS: Final = (layout.CONTROL_ABORT, layout.CONTROL_COMMIT)


class TransactionOutcomes:
    """Says of the chunks of one read, in ascending order, which of their batches were aborted.

    As a context manager it leaves what it learned to later reads, unless this one failed.
    """

    def __init__(
        self,
        chunks_from: Callable[[int], Iterator[Chunk]],
        index: IndexedTransactions,
        identity: Callable[[], LogIdentity | None] = lambda: None,
    ) -> None:
        """Prepare a read; nothing is done before it meets a transaction.

        `chunks_from` yields the chunks of the log from an offset on, up to the high watermark;
        `index` is what the `.txnindex` files say; `identity` names the log; None: not known.
        """
        self._chunks_from = chunks_from
        self._index = index
        self._load_identity = identity
        self._identity: LogIdentity | None = None
        self._markers: Markers | None = None
        """From the first batch that needs one on."""
        self._offset = 0
        """Where the last batch that needed a marker begins."""
        self._ahead: Iterator[Chunk] | None = None
        self._ahead_offset = -1
        self._is_at_end = False
        self._is_damaged = False
        self._indexed: AbortedRanges | None = None
        """Entries from the first batch on that no marker ends: read once, not for each chunk."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        markers, self._markers = self._markers, None
        is_sound = kind is None or issubclass(kind, GeneratorExit)
        if is_sound and markers is not None and self._identity is not None:
            known_markers.give(self._identity, markers, self._offset)

    def is_aborted(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Say which batches (b) of a chunk belong to an aborted transaction.

        Raises CorruptBatchError for a marker that is none, CorruptLogError where the index
        contradicts it, or tells of one that is lost.
        """
        import numpy as np

        table = chunk.table
        result = np.zeros(len(table), dtype=np.bool_)
        is_wanted = (table.attributes & _KIND) == layout.TRANSACTIONAL_BIT
        rows = np.flatnonzero(is_wanted)
        if not len(rows):
            return result
        markers = self._markers_from(int(table.base_offsets[rows[0]]))
        if int(table.last_offsets[-1]) >= markers.frontier:
            _note(markers, chunk)
            self._is_at_end = self._is_damaged = False
        ends = np.full(len(table), -1, dtype=np.int64)  # offset of the batch's marker
        for producer_id in np.unique(table.producer_ids[rows]).tolist():
            own = rows[table.producer_ids[rows] == producer_id]
            self._look_ahead(markers, producer_id, int(table.last_offsets[own[-1]]))
            ends[own], result[own] = markers.outcomes(producer_id, table.last_offsets[own])
        is_known = ends >= 0
        if self._is_damaged and not is_known[rows].all():
            # Of the markers that cannot be reached any file may tell.
            entries = self._index.between(0, layout.INT64_MAX)
            result |= is_wanted & ~is_known & entries.cover(table)
        elif self._is_at_end:
            self._check_lost(chunk, is_wanted & ~is_known & (table.counts > 0))
        if is_known.any():
            # A marker that is lost was one before those that were found.
            first, end = int(table.base_offsets[0]), int(ends.max()) + 1
            entries = self._index.between(first, end, is_strict=False)
            _check_agreement(chunk, result, ends, entries)
        return result

    def _check_lost(self, chunk: Chunk, is_open: npt.NDArray[np.bool_]) -> None:
        """Raise CorruptLogError where batches (b) that no marker ends were aborted by the index.

        A cleaner removes markers, and those of aborted transactions after all of their records.
        """
        table = chunk.table
        if not is_open.any():
            return
        first, last = int(table.base_offsets[is_open.argmax()]), int(table.last_offsets[-1])
        if self._indexed is None:
            self._indexed = self._index.between(first, layout.INT64_MAX, is_strict=False)
        is_lost = is_open & self._indexed.overlapping(first, last).cover(table)
        if is_lost.any():
            batch = int(is_lost.argmax())
            raise CorruptLogError(
                chunk.path,
                chunk.file_position + int(table.positions[batch]),
                "a batch whose transaction has a marker, since the .txnindex files beside it say "
                "that it was aborted",
                "none up to the end of the log (if `kafkalog verify` finds nothing else, remove "
                "these files)",
            )

    def _markers_from(self, offset: int) -> Markers:
        """Return the markers that are known, all from `offset` up to their frontier."""
        self._offset = offset
        if self._markers is None or offset > self._markers.frontier:
            if self._identity is None:
                self._identity = self._load_identity()
            found = None if self._identity is None else known_markers.take(self._identity, offset)
            self._markers = Markers(offset) if found is None else found
            self._is_at_end = self._is_damaged = False
        self._markers.pass_by(offset)
        return self._markers

    def _look_ahead(self, markers: Markers, producer_id: int, offset: int) -> None:
        """Read on until a producer's marker above `offset` is known, or no more can be."""
        while not markers.tells(producer_id, offset) and not self._is_at_end:
            if self._ahead is None or self._ahead_offset < markers.frontier:
                self._ahead = self._chunks_from(markers.frontier)
            try:
                chunk = next(self._ahead, None)
            except (CorruptLogError, StorageError):
                chunk = None
                self._is_damaged = True
            if chunk is None:
                self._is_at_end = True
                self._ahead = None
            else:
                _note(markers, chunk)
                self._ahead_offset = markers.frontier


def _note(markers: Markers, chunk: Chunk) -> None:
    """Take in the markers of a chunk that begins at or below their frontier, or at their begin."""
    import numpy as np

    table = chunk.table
    is_new = table.base_offsets >= markers.frontier
    is_marker = ((table.attributes & _KIND) == _KIND) & (table.counts > 0) & is_new
    batches = np.flatnonzero(is_marker)
    found = zip(
        table.producer_ids[batches].tolist(),
        table.base_offsets[batches].tolist(),
        control_types(chunk, batches),
        strict=True,
    )
    known = (
        (producer_id, offset, type_number == layout.CONTROL_ABORT)
        for producer_id, offset, type_number in found
        if type_number in _MARKERS
    )
    markers.note(known, int(table.last_offsets[-1]) + 1)


def _check_agreement(
    chunk: Chunk,
    result: npt.NDArray[np.bool_],
    ends: npt.NDArray[np.int64],
    indexed: AbortedRanges,
) -> None:
    """Raise CorruptLogError where the index says the opposite of a marker.

    `result` says which batches (b) were aborted, `ends` where their markers are (-1: not known).
    """
    import numpy as np

    table = chunk.table
    first, last = int(table.base_offsets[0]), int(table.last_offsets[-1])
    is_indexed = indexed.overlapping(first, last).cover(table)
    is_known = ends >= 0
    is_wrong = is_known & ~result & is_indexed
    missed = np.flatnonzero(is_known & result & ~is_indexed)
    if len(missed):
        # Of one that begins above the chunk the batches here may still be part.
        is_wrong[missed] = indexed.end_at(table.producer_ids[missed], ends[missed])
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


def control_types(chunk: Chunk, batches: npt.NDArray[np.int64]) -> list[int]:
    """Return the types of control batches (their indexes), -1 for one without a record.

    Those in Kafka's usual form are read all at once. Raises CorruptBatchError for one that is none.
    """
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
