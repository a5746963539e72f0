"""A snapshot of a partition: what readers, the cleaner and tables read a log through.

A snapshot has the partition's state, and its segments. A `DirectorySnapshot` has them in files, an
`ObjectSnapshot` in the objects of a store.

A snapshot returns no batch at or above the state's high watermark. The checksums of all returned
batches were compared, and their offsets rise.

Kafka: UnifiedLog.read, LogSegment.read, FileRecords, without the fetch sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.loss import Loss
from kafkalog.storage_engine.segment.open_segment import Chunk, OpenSegment
from kafkalog.storage_engine.transactions.transaction_index import IndexedTransactions
from kafkalog.storage_engine.transactions.transaction_markers import LogIdentity
from kafkalog.storage_engine.transactions.transaction_outcomes import TransactionOutcomes

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.records.chosen_keys import ChosenKeys

__all__ = ["Chunk", "PartitionSnapshot"]

CHUNK_SIZE = 1 << 20
READ_SIZE = 2 << 20
"""Chunk size in bytes for reading records, like a run (`RUN_SIZE`) elsewhere."""


class PartitionSnapshot(ABC):
    """A snapshot of a partition; see the module. Close it, or use it as a context manager.

    `state` is the partition's. Thread-safe; iterators must end before the snapshot is closed.
    """

    def __init__(self, topic: str, partition: int, state: PartitionState) -> None:
        self.topic = topic
        self.partition = partition
        self.state = state
        self.lost: tuple[Loss, ...] = ()
        """Records that are gone; a read of them fails, unless this is emptied."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of all that is open."""

    def keep_active(self) -> bool:
        """Keep no more open than `grow` needs; return False if that cannot be."""
        return False

    def grow(self, state: PartitionState, start: int) -> bool:
        """Go on to a later state, for reads from `start` on; return False for another snapshot."""
        return False

    @abstractmethod
    def open_segments(self, start: int, end: int) -> Iterator[OpenSegment]:
        """Yield the segments that may hold offsets of [start, end), ascending.

        Raises OffsetOutOfRangeError above the high watermark, StorageError for a missing segment.
        """

    @abstractmethod
    def whole_segments(self) -> Sequence[OpenSegment]:
        """Return all segments, open and ascending, of a snapshot that was opened `whole`."""

    @abstractmethod
    def indexed_transactions(self, *, kept_max: int = 0) -> IndexedTransactions | None:
        """Return what is known of aborted transactions, for consecutive reads that share it.

        None if only the markers tell.
        """

    def losses(self, start: int, end: int) -> list[Loss]:
        """Return the losses that have an offset of [start, end).

        A loss may have taken the marker of a transaction, which then holds back the last stable
        offset. A caller that wants all committed records therefore asks up to the high watermark.
        """
        return [loss for loss in self.lost if loss.start < end and loss.end > start]

    def check_not_lost(self, start: int, end: int) -> None:
        """Raise StorageError if a record of [start, end) is gone."""
        for loss in self.losses(start, end):
            advice = "restore it from a copy or another replica"
            if loss.end < self.state.high_watermark:
                advice += f", or read from offset {loss.end} on"
            elif loss.start > self.state.log_start_offset:
                advice += f", or read up to offset {loss.start} only"
            raise StorageError(f"{loss}; {advice}")

    def largest_timestamp(self, start: int, end: int) -> int:
        """Return a time (ms) that a record of [start, end) has, if one is known unread; or -1."""
        return layout.NO_TIMESTAMP

    def log_identity(self) -> LogIdentity | None:
        """Return the identity that later reads know the log by, or None."""
        return None

    def read(
        self,
        start: int,
        end: int,
        *,
        schema: pa.Schema,
        read_committed: bool = True,
        keys: ChosenKeys | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the data records with start <= offset < end, in order, as columns of `schema`.

        With `read_committed`, omits records of aborted transactions; a read past the last stable
        offset includes those of open ones. With `keys`, yields only records of these keys. Never
        yields control batches. A yielded batch has at most a chunk (2 MiB, decompressed), or 4 MiB
        of a larger record batch, or one record; none is empty. Raises OffsetOutOfRangeError outside
        [log start, high watermark], CorruptBatchError and StorageError.
        """
        for offset in (start, end):
            if not self.state.log_start_offset <= offset <= self.state.high_watermark:
                raise self._out_of_range(offset, self.state)
        if start > end:
            raise InvalidInputError(
                f"{self.topic}-{self.partition}: the range [{start}, {end}) ends before it starts"
            )
        return self._read(start, end, schema, read_committed, keys)

    def _read(
        self, start: int, end: int, schema: pa.Schema, read_committed: bool, keys: ChosenKeys | None
    ) -> Iterator[pa.RecordBatch]:
        from kafkalog.storage_engine.reading.chunk_reader import ChunkReader

        reader = ChunkReader((self.topic, self.partition), schema, keys)
        with self.transaction_outcomes() as outcomes:
            for chunk in self.chunks(start, end, chunk_size=READ_SIZE):
                is_wanted = ~chunk.table.is_control
                if read_committed:
                    is_wanted &= ~outcomes.is_aborted(chunk)
                yield from reader.read(chunk, is_wanted)
                del chunk  # free its memory before the next one is read

    def transaction_outcomes(
        self, index: IndexedTransactions | None = None, *, is_strict: bool = False
    ) -> TransactionOutcomes:
        """Return a finder of the aborted batches in chunks, which must come in ascending order."""
        return TransactionOutcomes(
            self._chunks_ahead,
            index or self.indexed_transactions(),
            self.log_identity,
            is_strict=is_strict,
        )

    def chunks(self, start: int, end: int, *, chunk_size: int = CHUNK_SIZE) -> Iterator[Chunk]:
        """Yield every batch with last_offset >= start and base_offset < end, even control batches.

        `start` may lie below the log start, if segments still have these offsets. A chunk exceeds
        `chunk_size` (bytes) only for a single larger batch. Raises like `read`.
        """
        offset = start
        for segment in self._segments_to_read(start, end):
            for chunk in segment.chunks(offset, end, chunk_size):
                offset = int(chunk.table.last_offsets[-1]) + 1
                yield chunk

    def _chunks_ahead(self, start: int) -> Iterator[Chunk]:
        """Yield the batches from `start` on to a caller that looks for a marker."""
        return self.chunks(start, self.state.high_watermark)

    def _segments_to_read(self, start: int, end: int) -> Iterator[OpenSegment]:
        """Yield what `open_segments` yields to a caller that reads all of it."""
        return self.open_segments(start, end)

    def _out_of_range(self, offset: int, state: PartitionState) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            self.topic, self.partition, offset, state.log_start_offset, state.high_watermark
        )
