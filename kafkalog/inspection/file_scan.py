"""Scan a whole `.log` file, damaged or not, for `dump` and `verify`.

A reader stops at the first damaged batch. This scan reports it, and continues as long as batch
lengths lead to another batch. Memory is bounded by a chunk or one batch. A batch that claims more
than `LARGE_SIZE` is loaded only after its checksum, computed in pieces, was right.

Kafka: FileLogInputStream, FileRecords.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader, read_header
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import BatchTable, RecordTable

__all__ = ["FileScan", "ScannedChunk"]

CHUNK_SIZE: Final = 1 << 20
LARGE_SIZE: Final = 16 << 20
_RUN_SIZE: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class ScannedChunk:
    """Consecutive whole batches of a file; b batches.

    Positions in `table` count from `file_position`. `is_valid`, bool (b,), marks the batches with a
    right checksum. `buffer` is empty for a single large batch that is damaged.
    """

    buffer: bytes
    table: BatchTable
    path: Path
    file_position: int
    is_valid: npt.NDArray[np.bool_]

    def position_of(self, batch: int) -> int:
        """Return where a batch begins in the file."""
        return self.file_position + int(self.table.positions[batch])

    def records(self, selection: npt.NDArray[np.intp]) -> Iterator[RecordTable]:
        """Yield the records of the valid batches `selection` (ascending indexes), some at a time.

        Raises CorruptBatchError for the first batch that does not decode.
        """
        from kafkalog.storage_engine.records.records import index_records

        while len(selection):
            found = index_records(
                self.buffer,
                self.table,
                path=self.path,
                file_position=self.file_position,
                selection=selection,
                run_size=_RUN_SIZE,
            )
            yield found
            selection = selection[found.batch_count :]


class FileScan:
    """Iterate over the chunks of an open `.log` file, once.

    Afterwards `position` is the byte after the last whole batch. `fault` says why no batch begins
    there, None at the end of the file. If `is_torn`, the file ends within a batch or in
    preallocated zeros; `is_preallocated` means the zeros.
    """

    def __init__(self, fd: int, path: Path, *, limit: int, base_offset: int = 0) -> None:
        self.path = path
        self.limit = limit
        self.position = 0
        self.fault: str | None = None
        self.is_torn = False
        self.is_preallocated = False
        self._fd = fd
        self._previous = base_offset - 1

    def __iter__(self) -> Iterator[ScannedChunk]:
        from kafkalog.storage_engine.records.records import scan_batches

        wish = CHUNK_SIZE
        while self.position < self.limit:
            buffer = files.read_at(self._fd, min(wish, self.limit - self.position), self.position)
            if not buffer:
                self.fault = f"the end of the file, {self.limit} bytes were expected"
                return
            table, consumed, fault = scan_batches(buffer, previous=self._previous)
            if len(table):
                chunk = self._checked(buffer, table)
                self.position += consumed
                self._previous = int(table.last_offsets[-1])
                wish = max(CHUNK_SIZE, min(2 * int(table.sizes.max()), LARGE_SIZE))
                yield chunk
            if fault is not None:
                self._explain(fault)
                return
            if not len(table):
                size = self._size_at(buffer)
                if size is None:
                    return
                if size <= LARGE_SIZE:
                    wish = size
                    continue
                large = self._large(size)
                if large is None:
                    return
                yield large
                wish = CHUNK_SIZE

    def _size_at(self, buffer: bytes) -> int | None:
        """Return the size of the first batch in `buffer`; None if the file ends within it."""
        remaining = self.limit - self.position
        if len(buffer) >= layout.LOG_OVERHEAD:
            length = buffer[layout.LENGTH_POSITION : layout.LOG_OVERHEAD]
            size = layout.LOG_OVERHEAD + int.from_bytes(length, "big", signed=True)
            if len(buffer) < size <= remaining:
                return size
            self._explain(f"{remaining} bytes of a batch of {size}")
        else:
            self._explain(f"{remaining} bytes")
        self.is_torn = True
        return None

    def _explain(self, fault: str) -> None:
        """Set `fault`, and detect the zeros at the end of a preallocated file."""
        self.fault = fault
        position = self.position
        while position < self.limit:
            piece = files.read_at(self._fd, min(CHUNK_SIZE, self.limit - position), position)
            if not piece or piece.count(0) != len(piece):
                return
            position += len(piece)
        self.is_torn = self.is_preallocated = True
        self.fault = f"{self.limit - self.position} zero bytes"

    def _checked(self, buffer: bytes, table: BatchTable) -> ScannedChunk:
        from kafkalog.storage_engine.records import messages, records

        valid = np.ones(len(table), dtype=np.bool_)
        try:
            records.check_crcs(buffer, table, path=self.path, file_position=self.position)
        except CorruptBatchError:
            for batch in range(len(table)):
                row = table.select(slice(batch, batch + 1))
                try:
                    records.check_crcs(buffer, row, path=self.path, file_position=self.position)
                except CorruptBatchError:
                    valid[batch] = False
        if table.has_messages and self.position == 0 and valid[0]:
            with contextlib.suppress(CorruptBatchError):  # decoding the records reports it
                messages.find_first_wrapper_end(buffer, table, path=self.path)
        return ScannedChunk(buffer, table, self.path, self.position, valid)

    def _large(self, size: int) -> ScannedChunk | None:
        start, end = self.position, self.position + size
        header = read_header(files.read_at(self._fd, layout.BATCH_OVERHEAD, start), 0, size)
        if header is None:
            self.fault = f"{size} bytes that are no batch"
            return None
        is_valid = self._checksum(header, start, end) == header.crc
        buffer = files.read_at(self._fd, size, start) if is_valid else b""
        self.position = end
        self._previous = header.last_offset
        from kafkalog.storage_engine.records.tables import BatchTable

        table = BatchTable.of_headers([(0, header)])
        return ScannedChunk(buffer, table, self.path, start, np.array([is_valid]))

    def _checksum(self, header: BatchHeader, start: int, end: int) -> int:
        is_batch = header.magic == layout.MAGIC
        position = start + (layout.ATTRIBUTES_POSITION if is_batch else layout.MAGIC_POSITION)
        value = 0
        while position < end:
            piece = files.read_at(self._fd, min(CHUNK_SIZE, end - position), position)
            if not piece:
                break
            value = crc32c(piece, value) if is_batch else zlib.crc32(piece, value)
            position += len(piece)
        return value
