"""A partition at one moment: what readers, the cleaner and tables read a log through.

A view has its `.log` files open, and so keeps the moment at which it was opened, whatever is
rolled, swapped or retired afterwards. It holds no lock: the segments lock is shared only while
files are listed and opened.

Invariants:

- nothing at or above the state's high watermark is returned, and of the active segment no byte
  after `active_size` is looked at: what lies there belongs to nobody, or to a commit in flight;
- the checksums of all batches that are returned were compared, and their offsets rise; in a log of
  ours they have no gap that is not listed (`gaps`), within segments and between them;
- indexes only choose where a scan begins (`segments.locate`); they are opened by name when needed,
  so one of another moment, or none, may meet the open log: then a longer scan is all it costs.

Gaps are normal: the cleaner removes records, whole batches, and all batches of a segment. It lists
those between batches, and a view opens the list with its segments.

Descriptors are bounded: of a partition with very many segments a view opens a *window*, and lists
again when it is used up. The later segments are then those of a later moment, which yield the same
records as far as they are still wanted: a changelog reader cannot tell. Who must see exactly one
moment (which record is the latest of its key?) opens the view `whole`. The cleaner, which alone
replaces segments, opens them one by one (`held`).

That holds for a reader that is done with a window within `delete.retention.ms` (a day by default)
of opening it, which is Kafka's contract too: the cleaner takes away aborted data at once, and its
marker only that much later. A slower one still has the data in the files it has open, and may find
the marker gone from the later window where it looks for it; then it takes the data for what the
producer's next marker says, or for not aborted where there is none. As with tombstones, whoever
must be slower raises `delete.retention.ms`.

Kafka: UnifiedLog.read, LogSegment.read, FileRecords, without the fetch sizes.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.listing import Listing
from kafkalog.storage_engine.segment.offset_chain import GapLists
from kafkalog.storage_engine.segment.open_segment import Chunk, OpenSegment
from kafkalog.storage_engine.segment.segments import SegmentFiles, bases_below
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    IndexedTransactions,
)
from kafkalog.storage_engine.transactions.transaction_markers import log_identity
from kafkalog.storage_engine.transactions.transaction_outcomes import TransactionOutcomes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
    from kafkalog.storage_engine.records.tables import BatchTable, RecordTable

__all__ = ["Chunk", "PartitionSnapshot", "open_snapshot"]

CHUNK_SIZE = 1 << 20
READ_SIZE = 2 << 20
"""Bytes of a chunk of which records are read: what a run holds of others (`RUN_SIZE`)."""
WINDOW = 128
"""Segments a view opens at once, unless it is opened whole."""


class _Window:
    """Consecutive segments with their `.log` files open, and what is listed of gaps in them."""

    def __init__(
        self,
        directory: Path,
        state: PartitionState,
        segments: list[SegmentFiles],
        offset: int,
        size: int | None,
    ) -> None:
        """Open `size` segments (None: all there are), from the one that may hold `offset`."""
        bases = [segment.base_offset for segment in segments]
        first = 0 if size is None else max(0, bisect_right(bases, offset) - 1)
        last = len(bases) if size is None else min(first + size, len(bases))
        self.is_first = first == 0
        self.following = bases[last] if last < len(bases) else None
        """Base offset of the segment after the window; None when there is none."""
        self.bases = bases[first:last]
        self.segments: list[OpenSegment] = []
        self.gaps = None if state.listed_from == layout.INT64_MAX else GapLists(directory)
        try:
            for place in range(first, last):
                self.segments.append(_opened(state, segments, place, self.gaps))
        except BaseException:
            self.close()
            raise

    def covers(self, offset: int) -> bool:
        """Whether the segment that may hold `offset` is in the window, if there is one at all."""
        if self.following is not None and offset >= self.following:
            return False
        return self.is_first or offset >= self.bases[0]

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        if self.gaps is not None:
            self.gaps.close()


def _opened(
    state: PartitionState, segments: Sequence[SegmentFiles], place: int, gaps: GapLists | None
) -> OpenSegment:
    segment = segments[place]
    is_last = place + 1 == len(segments)
    is_active = segment.base_offset == state.active_base
    return OpenSegment(
        segment,
        end_offset=layout.INT64_MAX if is_last else segments[place + 1].base_offset,
        committed=state.active_size if is_active else None,
        high_watermark=state.high_watermark,
        gaps=gaps,
        listed_from=state.listed_from,
    )


def _committed(segments: Sequence[SegmentFiles], state: PartitionState) -> list[SegmentFiles]:
    """Leave out segments that a commit in flight, or a dead one, created."""
    return [segment for segment in segments if segment.base_offset <= state.active_base]


def _check_present(
    directory: Path, segments: Sequence[SegmentFiles], state: PartitionState, start: int, end: int
) -> None:
    """Raise StorageError if the first or the active segment is gone and [start, end) needs it."""
    first = segments[0].base_offset if segments else state.high_watermark
    last = segments[-1].base_offset if segments else -1
    if max(start, state.log_start_offset) < min(end, first):
        raise _missing(directory, max(start, state.log_start_offset))
    if state.active_size and last != state.active_base and end > state.active_base:
        raise _missing(directory, state.active_base)


def _missing(directory: Path, offset: int) -> StorageError:
    return StorageError(
        f"{directory}: the segment of offset {offset} is missing; committed records are lost"
    )


class PartitionSnapshot:
    """A partition at one moment; see the module. Close it, or use it as a context manager.

    `state` is the partition's, `segments` are all segments it had, open or not. Any number of
    threads may read; iterators end before the view is closed.
    """

    def __init__(
        self,
        directory: Path,
        topic: str,
        partition: int,
        state: PartitionState,
        segments: list[SegmentFiles],
        *,
        load_state: Callable[[], PartitionState] | None = None,
        start: int | None = None,
        held: bool = False,
        listing: Listing,
        aborted: Sequence[AbortedTransaction] | None = None,
    ) -> None:
        """Open the segments; the caller holds the segments lock, shared or exclusive.

        `aborted` are the partition's aborted transactions, where its `.txnindex` files cannot be
        believed. With `load_state` open a window of them that begins at offset `start` (the log
        start); it gives the state of later moments, under the lock. With both that and `held` open
        none yet, see `open_view`. Raises StorageError, and FileNotFoundError when a file is gone
        since it was listed.
        """
        self.directory = directory
        self.topic = topic
        self.partition = partition
        self.state = state
        self.segments = _committed(segments, state)
        self._load_state = load_state
        self._held = held
        self._listing = listing
        self._known_aborted = aborted
        self._window = _Window(
            directory,
            state,
            [] if held else self.segments,
            state.log_start_offset if start is None else start,
            WINDOW if load_state else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_window"):
            self.close()

    def close(self) -> None:
        """Close all files."""
        self._window.close()

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

        With `read_committed` records of aborted transactions are left out; whoever reads past the
        last stable offset gets those of open ones. With `keys`, records of these alone are read.
        A batch holds a chunk at most (2 MiB, decompressed where it is compressed), or 4 MiB of a
        record batch where that is larger, or one record; none is empty.
        Control batches never surface. Raises OffsetOutOfRangeError outside [log start, high
        watermark], CorruptBatchError and StorageError.
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
        self,
        start: int,
        end: int,
        schema: pa.Schema,
        read_committed: bool,
        keys: ChosenKeys | None,
    ) -> Iterator[pa.RecordBatch]:
        from kafkalog.storage_engine.reading.chunk_reader import ChunkReader

        reader = ChunkReader((self.topic, self.partition), schema, keys)
        with self.transaction_outcomes() as outcomes:
            for chunk in self.chunks(start, end, chunk_size=READ_SIZE):
                is_wanted = (chunk.table.attributes & layout.CONTROL_BIT) == 0
                if read_committed:
                    is_wanted &= ~outcomes.is_aborted(chunk)
                yield from reader.read(chunk, is_wanted)
                del chunk  # and what it holds, before the next one is read

    def transaction_outcomes(self, index: IndexedTransactions | None = None) -> TransactionOutcomes:
        """Return what tells of chunks, in ascending order, which of their batches were aborted."""
        return TransactionOutcomes(
            lambda offset: self.chunks(offset, self.state.high_watermark),
            index or self.indexed_transactions(),
            lambda: log_identity(self.directory, self.state, self.segments),
        )

    def indexed_transactions(self, *, kept_max: int = 0) -> IndexedTransactions:
        """Return what the `.txnindex` files say, for reads that share it one after the other."""
        end, known = self.state.high_watermark, self._known_aborted
        listed = self._transaction_indexes
        return IndexedTransactions(listed, end_offset=end, known=known, kept_max=kept_max)

    def _transaction_indexes(self) -> list[tuple[int, Path]]:
        """Return (base offset, path) of the transaction indexes, also where the `.log` is gone."""
        paths = {segment.base_offset: segment.transaction_index for segment in self.segments}
        for base_offset in bases_below(self.directory, layout.INT64_MAX):
            path = self.directory / layout.segment_file(base_offset, layout.TRANSACTION_INDEX)
            paths.setdefault(base_offset, path)
        return sorted(paths.items())

    def chunks(self, start: int, end: int, *, chunk_size: int = CHUNK_SIZE) -> Iterator[Chunk]:
        """Yield every batch with last_offset >= start and base_offset < end, control batches too.

        `start` may lie below the log start: what the segments still hold is returned. A chunk is
        larger than `chunk_size` (bytes) only where single batches are. Raises as `read` does.
        """
        offset = start
        for segment in self.open_segments(start, end):
            for chunk in segment.chunks(offset, end, chunk_size):
                offset = int(chunk.table.last_offsets[-1]) + 1
                yield chunk

    def runs(
        self,
        start: int,
        end: int,
        is_wanted: Callable[[BatchTable], npt.NDArray[np.bool_]],
        *,
        chunk_size: int = CHUNK_SIZE,
    ) -> Iterator[tuple[Chunk, RecordTable]]:
        """Yield what `chunks` does in runs, with the records of wanted batches; see `Chunk.runs`.

        Records below `start`, or at or above `end`, are among them.
        """
        for chunk in self.chunks(start, end, chunk_size=chunk_size):
            yield from chunk.runs(is_wanted(chunk.table))

    def position_of(self, offset: int) -> tuple[SegmentFiles, int] | None:
        """Return where the first batch with last_offset >= `offset` is: its segment and position.

        None when there is none below the high watermark. Checksums are not compared, but for that
        of a compressed message v0 or v1.
        """
        end = self.state.high_watermark
        for segment in self.open_segments(offset, end):
            for position, header in segment.batches_from(offset):
                if segment.base_offset_of(position, header) >= end:
                    return None
                return segment.files, position
        return None

    def open_segments(self, start: int, end: int) -> Iterator[OpenSegment]:
        """Yield the segments that may hold offsets of [start, end), window after window."""
        if end > self.state.high_watermark:
            raise self._out_of_range(end, self.state)
        _check_present(self.directory, self.segments, self.state, start, end)
        if self._held:
            yield from self._held_segments(start, end)
            return
        offset: int | None = start
        while offset is not None and offset < end:
            with self._window_at(offset) as window:
                for segment in window.segments[max(0, bisect_right(window.bases, offset) - 1) :]:
                    if segment.files.base_offset >= end:
                        return
                    yield segment
                offset = window.following

    def _held_segments(self, start: int, end: int) -> Iterator[OpenSegment]:
        """Yield the segments that may hold offsets of [start, end), one open at a time."""
        assert self._load_state is not None
        first = bisect_right(self.segments, start, key=lambda segment: segment.base_offset) - 1
        for place in range(max(0, first), len(self.segments)):
            base_offset = self.segments[place].base_offset
            if base_offset >= end:
                return
            try:
                segment = _opened(self.state, self.segments, place, self._window.gaps)
            except FileNotFoundError:
                following = [after.base_offset for after in self.segments[place + 1 : place + 2]]
                if following and self._load_state().log_start_offset >= following[0]:
                    continue  # deleted since it was listed, and nobody misses its records
                raise _missing(self.directory, base_offset) from None
            with contextlib.closing(segment):
                yield segment

    def whole_segments(self) -> Sequence[OpenSegment]:
        """Return all segments, open, ascending, of a view that was opened `whole`."""
        _check_present(
            self.directory,
            self.segments,
            self.state,
            self.state.log_start_offset,
            self.state.high_watermark,
        )
        return self._window.segments

    @contextlib.contextmanager
    def _window_at(self, offset: int) -> Iterator[_Window]:
        """Open the window of an offset, unless it is the one that is open."""
        load_state = self._load_state
        if load_state is None or self._window.covers(offset):
            yield self._window
            return

        def reopen(state: PartitionState, listed: list[SegmentFiles]) -> _Window:
            if offset < state.log_start_offset and (
                not listed or listed[0].base_offset > max(offset, self.state.log_start_offset)
            ):
                # Deleted since the view was opened: saying so beats a silent gap.
                raise self._out_of_range(offset, state)
            committed = _committed(listed, state)
            _check_present(self.directory, committed, state, offset, state.high_watermark)
            return _Window(self.directory, state, committed, offset, WINDOW)

        window = self._listing.open_listed(load_state, reopen)
        try:
            yield window
        finally:
            window.close()

    def _out_of_range(self, offset: int, state: PartitionState) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            self.topic, self.partition, offset, state.log_start_offset, state.high_watermark
        )


# --- opening -------------------------------------------------------------------------------------


def open_snapshot(
    directory: Path,
    topic: str,
    partition: int,
    load_state: Callable[[], PartitionState],
    *,
    whole: bool = False,
    held: bool = False,
    start: int | None = None,
    locked: bool = True,
    load_aborted: Callable[[], Sequence[AbortedTransaction] | None] | None = None,
) -> PartitionSnapshot:
    """Open a partition as it is now: state, listing and files of one moment.

    `load_state` is called under the shared segments lock, and again when a view of more than
    `WINDOW` segments gets past the ones it has open. `whole` opens all of them: for whoever needs
    the one moment. `held` opens each by its name when reading comes to it: for the holder of the
    cleaner lock, who alone replaces segments, and no longer reads those that it has replaced.
    `start` is the offset where reading will begin, if it is known. A broker's directory is not
    `locked`, since that would leave lock files there; `load_aborted` gives the aborted transactions
    that belong to the state loaded last (None: read the `.txnindex` files).
    """

    def opened(state: PartitionState, listed: list[SegmentFiles]) -> PartitionSnapshot:
        later = load_state if held or (len(listed) > WINDOW and not whole) else None
        return PartitionSnapshot(
            directory,
            topic,
            partition,
            state,
            listed,
            load_state=later,
            start=start,
            held=held,
            listing=listing,
            aborted=None if load_aborted is None else load_aborted(),
        )

    listing = Listing(directory, locked=locked)
    return listing.open_listed(load_state, opened)
