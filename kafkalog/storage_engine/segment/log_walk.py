"""A walk over all batches of a `.log` file up to the first one that is none: what loading looks at.

A broker that did not shut down cleanly leaves a log whose end nobody vouches for. A `LogWalk` reads
it chunk by chunk, compares the checksums if asked to, and says where the sound batches end, and
why. Records are not looked into. Memory is bounded by the chunk (1 MiB), whatever a damaged length
claims: the checksum of a larger batch is computed piece by piece.

Kafka: LogSegment.recover, FileLogInputStream.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from crc32c import crc32c

from kafkalog.errors import CorruptBatchError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader, read_header
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.records import messages, records
from kafkalog.storage_engine.records.tables import BatchTable

__all__ = ["LogWalk", "WalkedBatches"]

CHUNK_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class WalkedBatches:
    """Some consecutive batches; positions in `table` count from the start of `buffer`.

    The buffer lies at byte `file_position` of the file. Of a batch larger than a chunk, which is
    alone in its table, it holds the first bytes only.
    """

    buffer: bytes
    table: BatchTable
    file_position: int


class LogWalk:
    """Walks over one `.log` file from a batch's position; a context manager.

    `end` is the byte after the last sound batch, `next_offset` the offset after it, and `fault`
    what was expected and found there, None as long as nothing but the end of the file was.
    """

    def __init__(
        self, path: Path, base_offset: int, *, position: int = 0, limit: int | None = None
    ) -> None:
        """Open the file, to be read to `limit` (its size at most, and by default).

        Raises FileNotFoundError, and StorageError when it cannot be opened.
        """
        self.path = path
        try:
            self._fd = files.open_to_read(path)
        except FileNotFoundError:
            raise
        except OSError as fault:
            raise StorageError(f"{path}: cannot be opened: {fault.strerror}") from fault
        size = os.fstat(self._fd).st_size
        self.limit = size if limit is None else min(limit, size)
        self.end = min(position, self.limit)
        self.next_offset = self._before = base_offset
        self.fault: tuple[str, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def batches(self, *, check: bool) -> Iterator[WalkedBatches]:
        """Yield the batches to the end of the file, or to the first one that is none.

        None is what is cut off, has an impossible length or another magic, does not lie above the
        offsets before it, or, with `check`, has a wrong checksum. Raises StorageError where the
        file cannot be read.
        """
        while self.end < self.limit and self.fault is None:
            buffer = self._read(min(CHUNK_SIZE, self.limit - self.end), self.end)
            table = records.scan_batches(buffer, previous=self.next_offset - 1)[0]
            if not len(table):
                found = self._large_batch(buffer, check=check)
                if found is None:
                    return
                buffer, table = found
            else:
                table = self._sound(buffer, table) if check else table
            table = self._rising(table)
            if not len(table):
                return
            start, self._before = self.end, self.next_offset
            self.end = start + int(table.positions[-1] + table.sizes[-1])
            self.next_offset = int(table.last_offsets[-1]) + 1
            yield WalkedBatches(buffer, table, start)

    def refuse(self, found: WalkedBatches, batch: int, expected: str, what: str) -> None:
        """Let the sound batches end before one of those just yielded, for the caller's reason."""
        self.end = found.file_position + int(found.table.positions[batch])
        lasts = found.table.last_offsets
        self.next_offset = int(lasts[batch - 1]) + 1 if batch else self._before
        self.fault = expected, what

    def _read(self, size: int, position: int) -> bytes:
        try:
            return files.read_at(self._fd, size, position)
        except OSError as fault:
            raise StorageError(
                f"{self.path}: cannot be read at byte {position}: {fault.strerror}"
            ) from fault

    def _large_batch(self, buffer: bytes, *, check: bool) -> tuple[bytes, BatchTable] | None:
        """Return the batch that does not end in the buffer it begins; None, with a fault, if none.

        Its checksum is compared in pieces.
        """
        remaining = self.limit - self.end
        is_whole = len(buffer) >= min(layout.BATCH_OVERHEAD, remaining)  # not cut meanwhile
        header = read_header(buffer, 0, remaining) if is_whole else None
        if header is None or header.last_offset < header.base_offset:
            self.fault = "a whole record batch", _description(buffer, remaining)
            return None
        if check:
            found = self._checksum(header)
            if found != header.crc:
                self.fault = f"checksum {header.crc:#010x}", f"checksum {found:#010x}"
                return None
        table = BatchTable.of_headers([(0, header)])
        if table.has_messages:
            messages.bound_wrappers(table, self.next_offset - 1)
        return buffer, table

    def _checksum(self, header: BatchHeader) -> int:
        crc: Callable[[bytes, int], int] = crc32c
        start = layout.ATTRIBUTES_POSITION
        if header.magic != layout.MAGIC:
            crc, start = zlib.crc32, layout.MAGIC_POSITION
        position, end = self.end + start, self.end + header.size
        value = 0
        while position < end:
            piece = self._read(min(CHUNK_SIZE, end - position), position)
            if not piece:
                break  # cut meanwhile: the checksum is wrong
            value = crc(piece, value)
            position += len(piece)
        return value

    def _sound(self, buffer: bytes, table: BatchTable) -> BatchTable:
        """Return the batches before the first one whose checksum is wrong."""
        while True:
            try:
                records.check_crcs(buffer, table, path=self.path, file_position=self.end)
            except CorruptBatchError as error:
                self.fault = str(error.expected), str(error.found)
                # Messages v0 and v1 are looked at first: an earlier batch may be wrong as well.
                table = table.select(table.positions < error.position - self.end)
            else:
                return table

    def _rising(self, table: BatchTable) -> BatchTable:
        """Return the batches before the first one whose offsets do not rise."""
        lasts, bases = table.last_offsets, table.base_offsets
        before = np.concatenate((np.array([self.next_offset - 1]), lasts[:-1]))
        wrong = (bases <= before) | (lasts < bases)
        if not wrong.any():
            return table
        batch = int(wrong.argmax())
        self.fault = (
            f"offsets above {before[batch]}",
            f"a batch of the offsets {bases[batch]} to {lasts[batch]}",
        )
        return table.select(slice(0, batch))


def _description(buffer: bytes, remaining: int) -> str:
    """Say what stands where a batch was expected."""
    if len(buffer) <= layout.MAGIC_POSITION:
        return f"{len(buffer)} bytes"
    if not any(buffer):
        return f"{remaining} bytes that begin with zeros"
    magic = buffer[layout.MAGIC_POSITION]
    if magic > layout.MAGIC:
        return f"magic {magic}"
    length = int.from_bytes(
        buffer[layout.LENGTH_POSITION : layout.LOG_OVERHEAD], "big", signed=True
    )
    if layout.BATCH_OVERHEAD <= length + layout.LOG_OVERHEAD <= remaining:
        return "one whose last offset has more than 64 bits"
    return f"a length of {length} bytes, of which {remaining - layout.LOG_OVERHEAD} follow"
