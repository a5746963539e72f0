"""Find out from the markers of a log which transactions were aborted.

The next marker of a producer after a transaction's batch, ABORT or COMMIT, decides about it. A
`.txnindex` has the same fact in advance, but without a checksum: a changed byte would show aborted
records or hide committed ones. Readers therefore believe the markers, whose batches are checked.
They look ahead in the log as far as the markers of their batches, mostly within the chunk in
memory.

An index that lacks an entry is accepted. An index that contradicts a marker is an error, because a
log that lost its end exactly between two batches has lost a marker without a trace. If the log is
damaged before a marker, batches below the damage remain readable, and the index decides. A log in
an object store has no such index for its readers, so there the damage is raised. A cleaner destroys
what it takes for superseded, so it raises the damage too.

A log without transactions costs nothing here. A log that is read in order costs at most a second
look at its headers, even in many short reads. Each continues from the markers of the reads before
it (`transaction_markers`). Transactions above the last stable offset have no marker and
count as not aborted.

Kafka: a consumer believes the broker's aborted transactions (TransactionIndex). We ask the log
itself, as Kafka does when it rebuilds that index (LogSegment.recover).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Self

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.transactions.control_record import read_control_record
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedRanges,
    IndexedTransactions,
)
from kafkalog.storage_engine.transactions.transaction_markers import (
    LogIdentity,
    Markers,
    Place,
    known_markers,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kafkalog.storage_engine.segment.open_segment import Chunk

_KIND: Final = layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT
_MARKERS: Final = (layout.CONTROL_ABORT, layout.CONTROL_COMMIT)


class TransactionOutcomes:
    """Find the aborted batches in the chunks of one read, in ascending order.

    On exit it keeps its markers for later reads, unless this one failed.
    """

    def __init__(
        self,
        chunks_from: Callable[[int], Iterator[Chunk]],
        index: IndexedTransactions | None,
        identity: Callable[[], LogIdentity | None] = lambda: None,
        *,
        is_strict: bool = False,
    ) -> None:
        """Prepare a read; no file is opened before its first transaction.

        The log from an offset up to the high watermark comes in chunks from `chunks_from`. The
        entries of the `.txnindex` files are `index`; None if no file exists. A call of `identity`
        returns the log's identity, or None if unknown. With `is_strict`, or without an index,
        damage before a marker is raised.
        """
        self._chunks_from = chunks_from
        self._index = index
        self._load_identity = identity
        self._is_strict = is_strict or index is None
        self._identity: LogIdentity | None = None
        self._markers: Markers | None = None
        self._offset = 0
        """The base offset of the last batch that needed a marker."""
        self._ahead: Iterator[Chunk] | None = None
        self._ahead_offset = -1
        self._is_at_end = False
        self._is_damaged = False
        self._indexed: AbortedRanges | None = None
        """Entries from the first batch without a marker on; read once, not for each chunk."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        markers, self._markers = self._markers, None
        is_sound = kind is None or issubclass(kind, GeneratorExit)
        if is_sound and markers is not None and self._identity is not None:
            known_markers.give(self._identity, markers, self._offset)

    def is_aborted(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Return which batches (b) of a chunk belong to an aborted transaction.

        The batches follow each other in the log. Raises CorruptBatchError for a malformed marker,
        CorruptLogError if the index contradicts a marker or names a marker that is lost. If it is
        strict, it raises what reading up to a marker raises.
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
        if self._index is None:
            return result
        if self._is_damaged and not is_known[rows].all():
            # The damage hides these markers, so any index file may have their entries.
            entries = self._index.between(0, layout.INT64_MAX)
            result |= is_wanted & ~is_known & entries.cover(table)
        elif self._is_at_end:
            self._check_lost(chunk, is_wanted & ~is_known & (table.counts > 0), self._index)
        if is_known.any():
            # A lost marker lay before the found ones.
            first, end = int(table.base_offsets[0]), int(ends.max()) + 1
            entries = self._index.between(first, end, is_strict=False)
            _check_agreement(chunk, result, ends, entries)
        return result

    def is_aborted_apart(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Return the same for batches (b), ascending, that need not follow each other in the log.

        Markers may lie between them, so each batch is a chunk of its own.
        """
        import numpy as np

        table = chunk.table
        result = np.zeros(len(table), dtype=np.bool_)
        for row in np.flatnonzero((table.attributes & _KIND) == layout.TRANSACTIONAL_BIT).tolist():
            alone = dataclasses.replace(chunk, table=table.select(slice(row, row + 1)))
            result[row] = self.is_aborted(alone)[0]
        return result

    def _check_lost(
        self, chunk: Chunk, is_open: npt.NDArray[np.bool_], index: IndexedTransactions
    ) -> None:
        """Raise CorruptLogError if the index lists an abort for batches (b) without a marker.

        A cleaner removes the marker of an aborted transaction only after all of its records.
        """
        table = chunk.table
        if not is_open.any():
            return
        first, last = int(table.base_offsets[is_open.argmax()]), int(table.last_offsets[-1])
        if self._indexed is None:
            self._indexed = index.between(first, layout.INT64_MAX, is_strict=False)
        is_lost = is_open & self._indexed.overlapping(first, last).cover(table)
        if is_lost.any():
            batch = int(is_lost.argmax())
            raise CorruptLogError(
                chunk.path,
                chunk.file_position + int(table.positions[batch]),
                "a marker for the transaction of this batch, which the .txnindex files next to it "
                "call aborted",
                "none up to the end of the log (if `kafkalog verify` finds nothing else, remove "
                "these files)",
            )

    def _markers_from(self, offset: int) -> Markers:
        """Return the known markers, complete from `offset` up to their frontier."""
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
        """Read ahead until a producer's marker above `offset` is known, or the log ends."""
        while not markers.tells(producer_id, offset) and not self._is_at_end:
            if self._ahead is None or self._ahead_offset < markers.frontier:
                self._ahead = self._chunks_from(markers.frontier)
            try:
                chunk = next(self._ahead, None)
            except (CorruptLogError, StorageError):
                if self._is_strict:
                    raise
                chunk = None
                self._is_damaged = True
            if chunk is None:
                self._is_at_end = True
                self._ahead = None
            else:
                _note(markers, chunk)
                self._ahead_offset = markers.frontier


def _note(markers: Markers, chunk: Chunk) -> None:
    """Add the markers of a chunk that begins at or below their frontier, or at their begin."""
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
    position = chunk.file_position + int(table.positions[-1])
    last = Place(chunk.segment_base, position, int(table.crcs[-1]))
    markers.note(known, int(table.last_offsets[-1]) + 1, last)


def _check_agreement(
    chunk: Chunk, result: npt.NDArray[np.bool_], ends: npt.NDArray[np.int64], indexed: AbortedRanges
) -> None:
    """Raise CorruptLogError if the index contradicts a marker.

    `result` tells which batches (b) were aborted, `ends` has the offsets of their markers (-1:
    none).
    """
    import numpy as np

    table = chunk.table
    first, last = int(table.base_offsets[0]), int(table.last_offsets[-1])
    is_indexed = indexed.overlapping(first, last).cover(table)
    is_known = ends >= 0
    is_wrong = is_known & ~result & is_indexed
    missed = np.flatnonzero(is_known & result & ~is_indexed)
    if len(missed):
        # A transaction whose entry begins above the chunk may still include batches here.
        is_wrong[missed] = indexed.end_at(table.producer_ids[missed], ends[missed])
    if is_wrong.any():
        batch = int(is_wrong.argmax())
        words = ("aborted", "committed") if result[batch] else ("committed", "aborted")
        raise CorruptLogError(
            chunk.path,
            chunk.file_position + int(table.positions[batch]),
            f"a batch that is {words[0]} by the marker at offset {ends[batch]}",
            f"one that is {words[1]} in the .txnindex files next to it (if `kafkalog verify` "
            "finds nothing else, remove these files)",
        )


def control_types(chunk: Chunk, batches: npt.NDArray[np.int64]) -> list[int]:
    """Return the types of control batches (their rows), or -1 for a batch without a record.

    Control batches in Kafka's usual form are read all at once. Raises CorruptBatchError for a
    malformed control record.
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
