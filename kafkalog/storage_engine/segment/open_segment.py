"""One segment that is open for reading: its batches in chunks, its headers, its times.

Its bytes come from a `ByteSource`. The reader checks here what it reads. It compares a chunk's
checksums. Offsets must rise from batch to batch, and stay below the next segment's base: the
checksum does not cover where a batch's offsets begin. In a log of ours every gap between them must
be listed (`offset_chain`).

Kafka: LogSegment.read, FileRecords, FileLogInputStream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import CorruptBatchError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader
from kafkalog.storage_engine.segment.byte_source import ByteSource
from kafkalog.storage_engine.segment.locate import header_at, headers, locate, locate_time

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kafkalog.storage_engine.records.tables import BatchTable, RecordTable
    from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex
    from kafkalog.storage_engine.segment.offset_chain import OffsetChain
    from kafkalog.storage_engine.segment.segment_times import SegmentTimes

RUN_SIZE = 2 << 20
"""Decompressed bytes held at once; the batch that makes it so many ends a run of batches."""
_CHECKED_AT_ONCE = 1 << 20
"""Bytes passed over after which their checksums are compared."""
_LIKELY_BATCH = 1 << 15
"""Bytes to read of a batch whose size is not known yet."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive whole batches of one segment, their checksums compared.

    Positions in `table` count from the start of `buffer`, which lies at byte `file_position` of
    the log `path`. Batches may begin below `start` or end at or above `end`: only records in
    [start, end) belong to the chunk. The first offset of a wrapper (a compressed message v0 or v1)
    is unknown, so the last batch may even have none of them.
    """

    buffer: bytes
    table: BatchTable
    path: Path | str
    file_position: int
    segment_base: int
    start: int
    end: int

    def runs(self, is_wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[Chunk, RecordTable]]:
        """Yield the chunk in runs, each with as many records as should be in memory at once.

        The size of decompressed batches is known only afterwards. A run ends with the batch that
        makes it `RUN_SIZE` bytes, or where messages v0 and v1 and batches v2 meet. Every batch is
        in one run; `is_wanted`, bool (b,), says which are looked into for records. Raises
        CorruptBatchError.
        """
        from kafkalog.storage_engine.records import records

        table = self.table
        # A negative count is none that may be passed over: indexing reports it.
        is_wanted = is_wanted & (table.counts != 0)
        while len(table):
            selection = is_wanted.nonzero()[0]
            found = records.index_records(
                self.buffer,
                table,
                path=self.path,
                file_position=self.file_position,
                selection=selection,
                run_size=RUN_SIZE,
            )
            is_last = found.batch_count == len(selection)
            stop = len(table) if is_last else int(selection[found.batch_count])
            yield dataclasses.replace(self, table=_slice(table, 0, stop)), found
            table, is_wanted = _slice(table, stop, len(table)), is_wanted[stop:]


class OpenSegment:
    """A segment whose log is open; `close` it.

    `limit` is the byte its log ends at, `end_offset` the base offset of the next segment.
    """

    def __init__(
        self,
        source: ByteSource,
        log: Path | str,
        base_offset: int,
        *,
        end_offset: int,
        committed: int | None = None,
        high_watermark: int = layout.INT64_MAX,
        begin_chain: Callable[[int, int | None, int | None], OffsetChain] | None = None,
        indexes: tuple[OffsetIndex, TimeIndex] | None = None,
        load_times: Callable[[], SegmentTimes] | None = None,
        largest_timestamp: int = layout.INT64_MAX,
    ) -> None:
        """Read a source to its end, or to `committed` bytes; fewer are read as far as they go.

        No batch in these bytes begins at or above `high_watermark`.

        Args:
            source: The bytes.
            log: The name of the log, for errors.
            base_offset: The lowest offset that its first batch may have.
            end_offset: The base offset of the next segment.
            committed: The bytes that are committed, if the log may have more.
            high_watermark: Where the log ends.
            begin_chain: Begins a chain of batches whose gaps are listed: takes the base offset, the
                size unless the segment is the active one, and the next offset if it is known.
            indexes: Hints for lookups; without them a lookup begins at the first batch.
            load_times: Returns what the batches say of time. Without it the time index is known to
                be true, as one with a checksum is.
            largest_timestamp: No record is younger, in ms.
        """
        self.log = log
        self.base_offset = base_offset
        self.end_offset = end_offset
        self.largest_timestamp = largest_timestamp
        self._committed = committed
        self._high_watermark = layout.INT64_MAX if committed is None else high_watermark
        self._following = min(end_offset, high_watermark)
        """Where the next segment begins, or the log ends."""
        self._begin_chain = begin_chain
        self._indexes = indexes
        self._load_times = load_times
        self._source = source
        size = source.size()
        self.limit = size if committed is None else min(size, committed)

    def grow(self, committed: int, high_watermark: int) -> None:
        """Read on to `committed` bytes of the last segment, after which the log ends."""
        self._committed, self._high_watermark = committed, high_watermark
        self._following = min(self.end_offset, high_watermark)
        self.limit = min(self._source.size(), committed)

    def close(self) -> None:
        """Let go of the bytes."""

    @property
    def identity(self) -> Hashable:
        """A mark that no other segment of this base offset has."""
        return self.log, self.limit

    def has_whole_time_index(self) -> bool:
        """Return whether the time index is whole, as one with a checksum is."""
        return True

    def chunks(self, start: int, end: int, size: int) -> Iterator[Chunk]:
        """Yield the batches that reach into [start, end), `size` bytes at a time.

        A batch that a chunk cuts off is read again from its start; one that is larger alone makes
        a larger chunk. Raises CorruptBatchError, StorageError.
        """
        from kafkalog.storage_engine.records import messages, records
        from kafkalog.storage_engine.segment.log_scanner import FRAMES, FaultKind, LogScanner

        path, base = self.log, self.base_offset
        position = self._locate(start) if start > base else 0
        previous = base - 1
        chain = self._chain(position)
        scan = LogScanner(
            self._source,
            path,
            FRAMES,
            limit=self.limit,
            position=position,
            next_offset=base,
            chunk_size=size,
        )
        for found in scan:
            buffer, table, position = found.buffer, found.table, found.file_position
            count = len(table)
            if table.has_messages and position == 0:
                messages.find_first_wrapper_end(buffer, table, path=path)
            table = self._in_order(table, previous, position, end, chain)
            previous = int(table.last_offsets[-1]) if len(table) else previous
            first = int(table.last_offsets.searchsorted(start))
            stop = int(table.base_offsets.searchsorted(end))
            # The one before may end below `start` only because its last offset is damaged.
            checked = _slice(table, max(first - 1, 0), max(first, stop))
            records.check_crcs(buffer, checked, path=path, file_position=position)
            if first < stop:
                yield Chunk(buffer, _slice(table, first, stop), path, position, base, start, end)
            if stop < count or previous + 1 >= end:
                return
            del found, buffer  # a large value's would be held while the next one is read
        if scan.kind is FaultKind.SHORT:
            raise self._short()
        if scan.fault is not None:
            self._check_whole()
            raise scan.fault
        if previous + 1 < end:
            self._check_whole()
            self._check_end(chain)

    def header_at(self, position: int) -> BatchHeader | None:
        """Return the header of the whole batch at a position, unchecked; None if none is there."""
        return header_at(self._source, position, self.limit)

    def batch_at(self, position: int) -> Chunk | None:
        """Return the batch v2 at a position, its checksum compared; None if none is there.

        Its offsets lie within the segment; that they follow those of the batch before is not
        looked at. Raises CorruptBatchError, StorageError.
        """
        return next(self.batches_at([position], 1))

    def batches_at(self, positions: Sequence[int], size: int) -> Iterator[Chunk | None]:
        """Yield the batches v2 at ascending positions, like `batch_at`, in chunks of `size` bytes.

        A chunk exceeds `size` by its last batch. The batches of a chunk need not follow each other
        in the log, so a position in it says nothing of the log; `file_position` is the first
        one's. Yields None and ends at a position without a batch.
        """
        parts: list[memoryview] = []
        first = held = 0
        likely = _LIKELY_BATCH
        source = self._source.scattered(len(positions))
        for place, position in enumerate(positions):
            part = self._batch_bytes(source, position, likely)
            if part is None:
                yield None
                return
            parts.append(part)
            held += len(part)
            likely = max(likely, len(part))
            if held >= size or place + 1 == len(positions):
                yield self._gathered(positions[first : place + 1], parts)
                parts, first, held = [], place + 1, 0

    def _batch_bytes(self, source: ByteSource, position: int, likely: int) -> memoryview | None:
        """Return the bytes of the batch v2 at a position, which has `likely` bytes or fewer."""
        limit = self.limit - position
        if position < 0 or limit < layout.BATCH_OVERHEAD:
            return None
        data = self._read(min(likely, limit), position, source)
        length = data[layout.LENGTH_POSITION : layout.LOG_OVERHEAD]
        size = int.from_bytes(length, "big") + layout.LOG_OVERHEAD
        is_batch = layout.BATCH_OVERHEAD <= size <= limit
        if not is_batch or data[layout.MAGIC_POSITION] != layout.MAGIC:
            return None
        if size > len(data):
            data = self._read(size, position, source)
        return memoryview(data)[:size]

    def _gathered(self, positions: Sequence[int], parts: Sequence[memoryview]) -> Chunk:
        """Return batches as one chunk; raises CorruptBatchError for the first that is wrong."""
        from kafkalog.storage_engine.records import records

        path, base, position = self.log, self.base_offset, positions[0]
        buffer = b"".join(parts)
        table, _, _ = records.scan_batches(buffer)
        firsts, lasts = table.base_offsets, table.last_offsets
        try:
            records.check_crcs(buffer, table, path=path, file_position=position)
            is_wrong = (firsts < base) | (lasts < firsts) | (lasts >= self._following)
            if is_wrong.any():
                expected = f"offsets of [{base}, {self._following})"
                raise CorruptBatchError(path, position, expected, f"{firsts[0]} to {lasts[0]}")
        except CorruptBatchError:
            for place, part in zip(positions, parts, strict=True) if len(parts) > 1 else ():
                self._gathered([place], [part])
            raise
        start, end = int(firsts.min()), int(lasts.max()) + 1
        return Chunk(buffer, table, path, position, base, start, end)

    def batches_from(self, offset: int) -> Iterator[tuple[int, BatchHeader]]:
        """Yield (position, header) of each batch that ends at or above `offset`, unchecked."""
        for position, header in self._headers(self._locate(offset)):
            if header.last_offset >= offset:
                yield position, header

    def batches_since(self, timestamp: int) -> Iterator[tuple[int, BatchHeader]]:
        """Yield (position, header) of each batch that may have a record as young as `timestamp`.

        In ms. Every compressed message v0 or v1 is one: its own timestamp is what its producer
        wrote, whatever those of the records in it are. The checksums of what is passed over are
        compared, lest a damaged time hide records. Raises CorruptBatchError, StorageError.
        """
        if self.largest_timestamp < timestamp:
            return
        start = passed = self._locate_time(timestamp)
        for position, header in self._headers(start):
            end = position + header.size
            if header.max_timestamp >= timestamp or header.is_wrapper:
                if passed < position:
                    self._check(passed, position)
                passed = end
                yield position, header
            elif end - passed >= _CHECKED_AT_ONCE:
                self._check(passed, end)
                passed = end
        if passed < self.limit:
            self._check(passed, self.limit)

    def batches_since_largest(self) -> tuple[int, Iterator[tuple[int, BatchHeader]]]:
        """Return a bound, and (position, header) of batches, one with the largest time among them.

        No earlier batch, which is not yielded, has a larger timestamp (ms) than the bound.
        """
        position = self._locate_time(layout.INT64_MAX)
        if self._load_times is not None and position > 0:
            times = self._load_times()
            position = min(position, times.largest_position)
            bound = times.largest
        else:
            header = self.header_at(position) if position > 0 else None
            bound = layout.NO_TIMESTAMP if header is None else header.max_timestamp
        return bound if position else layout.NO_TIMESTAMP, self._headers(position)

    def first_since(
        self, position: int, header: BatchHeader, timestamp: int, *, start: int, end: int
    ) -> tuple[int, int] | None:
        """Return (offset, ms) of the batch's first record at or after `timestamp`.

        Only records with offsets in [start, end) count.
        """
        found = self._records(position, header)
        offsets = found.offsets
        young = (found.timestamps >= timestamp) & (offsets >= start) & (offsets < end)
        if not young.any():
            return None
        row = int(young.argmax())
        return int(offsets[row]), int(found.timestamps[row])

    def latest(
        self, position: int, header: BatchHeader, *, start: int, end: int
    ) -> tuple[int, int] | None:
        """Return the first record with the largest timestamp of one batch, like `first_since`."""
        found = self._records(position, header)
        rows = ((found.offsets >= start) & (found.offsets < end)).nonzero()[0]
        if not len(rows):
            return None
        row = int(rows[found.timestamps[rows].argmax()])
        return int(found.offsets[row]), int(found.timestamps[row])

    def base_offset_of(self, position: int, header: BatchHeader) -> int:
        """Return where a batch begins; a compressed message v0 or v1 is read for it."""
        if not header.is_wrapper:
            return header.base_offset
        return int(self._records(position, header).offsets[0])

    def _records(self, position: int, header: BatchHeader) -> RecordTable:
        """Read one batch, its checksum compared."""
        from kafkalog.storage_engine.records import records

        buffer, table = self._check(position, position + header.size)
        return records.index_records(buffer, table, path=self.log, file_position=position)

    def _check(self, position: int, end: int) -> tuple[bytes, BatchTable]:
        """Read the whole batches of some bytes, their checksums compared."""
        from kafkalog.storage_engine.records import records

        buffer = self._read(end - position, position)
        table, _, _ = records.scan_batches(buffer)
        records.check_crcs(buffer, table, path=self.log, file_position=position)
        return buffer, table

    def _locate(self, offset: int) -> int:
        if self._indexes is None:
            return 0
        return locate(self._source, self.limit, self._indexes[0], offset)

    def _locate_time(self, timestamp: int) -> int:
        if self._indexes is None:
            return 0
        position = locate_time(self._source, self.limit, *self._indexes, timestamp)
        if position > 0 and self._load_times is not None:
            position = min(position, self._load_times().position_since(self._source, timestamp))
        return position

    def _headers(self, position: int) -> Iterator[tuple[int, BatchHeader]]:
        chain = self._chain(position)
        for place, header in headers(self._source, position, self.limit):
            if chain is not None and header.magic != layout.MAGIC:
                chain.next_offset = header.last_offset + 1  # a broker's: nothing lists its gaps
            elif chain is not None and not chain.follows(header.base_offset, header.last_offset):
                assert chain.next_offset is not None
                expected = f"a batch from offset {chain.expected_after(chain.next_offset)} on"
                found = f"a batch of the offsets {header.base_offset} to {header.last_offset}"
                raise CorruptBatchError(self.log, place, expected, found)
            yield place, header
            position = place + header.size
        self._check_whole()
        if position < self.limit:
            expected, found = "a whole record batch", f"{self.limit - position} other bytes"
            raise CorruptBatchError(self.log, position, expected, found)
        self._check_end(chain)

    def _check_whole(self) -> None:
        """Raise StorageError if the file ends before what is committed of it."""
        if self._committed is not None and self.limit < self._committed:
            raise StorageError(
                f"{self.log}: {self._committed} bytes are committed, but the file has "
                f"{self.limit}; committed records are lost"
            )

    def _read(self, size: int, position: int, source: ByteSource | None = None) -> bytes:
        buffer = (source or self._source).read_at(size, position)
        if len(buffer) < size:
            raise self._short()
        return buffer

    def _short(self) -> StorageError:
        """Return the error of a file that somebody has truncated since it was opened."""
        size = self._source.size()
        return StorageError(
            f"{self.log}: ends at byte {size} while it is read, "
            f"but {self.limit} bytes are committed"
        )

    def _chain(self, position: int) -> OffsetChain | None:
        """Begin a chain of the batches from a position on; None where gaps are not listed."""
        if self._begin_chain is None:
            return None
        return self._begin_chain(
            self.base_offset,
            self.limit if self._committed is None else None,
            None if position else self.base_offset,
        )

    def _check_end(self, chain: OffsetChain | None) -> None:
        """Raise CorruptBatchError if batches are missing at the segment's end, or the next one."""
        if chain is None or chain.next_offset is None or chain.ends_at(self._following):
            return
        found = f"the segment's end, and what follows begins at offset {self._following}"
        if chain.sizes:
            sizes = " or ".join(str(size) for size in sorted(set(chain.sizes)))
            found = f"the end of a file that had {sizes} bytes, as {layout.GAPS} says"
        offset = chain.expected_after(chain.next_offset)
        raise CorruptBatchError(self.log, self.limit, f"a batch from offset {offset} on", found)

    def _in_order(
        self,
        table: BatchTable,
        previous: int,
        file_position: int,
        end: int,
        chain: OffsetChain | None,
    ) -> BatchTable:
        """Return the batches whose offsets rise from `previous` and stay in the segment.

        With a chain they must also follow each other. After the first that does not, no batch is
        believed. If the batch before it may be the wrong one, that is not believed either. This
        is a CorruptBatchError unless the batches before reach up to `end`.
        """
        bases, lasts = table.base_offsets, table.last_offsets
        is_wrong = (lasts < bases) | (lasts >= self.end_offset) | (bases >= self._high_watermark)
        is_wrong[0] |= bases[0] <= previous
        is_wrong[1:] |= bases[1:] <= lasts[:-1]
        batch = int(is_wrong.argmax()) if is_wrong.any() else len(table)
        broken = chain.first_break(bases[:batch], lasts[:batch]) if chain and batch else None
        if broken is None and batch == len(table):
            return table
        believed = batch = batch if broken is None else broken
        before = int(lasts[batch - 1]) if batch else previous
        expected = f"offsets above {before} and below {self.end_offset}"
        if chain is not None and broken is not None:
            expected = f"a batch from offset {chain.expected_after(before + 1)} on"
        elif batch and (chain is None or bases[batch - 1] < chain.listed_from):
            believed -= _may_be_wrong(table, batch, previous)
        if believed and end <= lasts[believed - 1] + 1:
            return _slice(table, 0, believed)
        raise CorruptBatchError(
            self.log,
            file_position + int(table.positions[batch]),
            expected,
            f"a batch of the offsets {bases[batch]} to {lasts[batch]}",
        )


def _may_be_wrong(table: BatchTable, batch: int, previous: int) -> bool:
    """Tell whether a batch is out of order since the one before it begins at a wrong offset."""
    bases, lasts = table.base_offsets, table.last_offsets
    before = int(lasts[batch - 1])
    # The base offset of a wrapper is only a bound, drawn from the batch before.
    lowest = min(int(bases[batch]), int(lasts[batch]))
    # Would there be room for the batch before if it began elsewhere?
    floor = int(lasts[batch - 2]) if batch > 1 else previous
    span = 0 if table.is_message[batch - 1] else before - int(bases[batch - 1])
    return lowest <= before and floor + 1 + span < lowest


def _slice(table: BatchTable, first: int, stop: int) -> BatchTable:
    if first == 0 and stop == len(table):
        return table
    return table.select(slice(first, stop))
