"""The scan of a `.log` file: its batches, chunk by chunk, and a policy for what is wrong with them.

Everybody who goes through the batches of a file does it with a `LogScanner`. A `FaultPolicy` says
what the scan does with a wrong checksum and a wrong order. At every other fault the scan ends. The
policies in use are below, each with its callers.

The scanner holds a chunk of the file, or one batch where that alone is larger. A length that claims
more than `LARGE_SIZE` is believed once the checksum over it, taken in pieces, is right. A caller
that needs no records lets the scanner hold a chunk at most.

Kafka: FileLogInputStream, FileRecords, LogSegment.recover. LevelDB: log::Reader with its Reporter.
"""

from __future__ import annotations

import contextlib
import enum
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kafkalog.errors import CorruptBatchError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import read_header
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.records import messages, records
from kafkalog.storage_engine.records.tables import BatchTable, RecordTable
from kafkalog.storage_engine.segment.byte_source import ByteSource, FileBytes, data_from

CHUNK_SIZE: Final = 1 << 20
LARGE_SIZE: Final = 16 << 20
"""Bytes up to which a length is believed unseen, and a read grows past the batch it is for."""
_RUN_SIZE: Final = 2 << 20


class FaultKind(enum.Enum):
    """The kinds of faults that a scan meets."""

    TORN = "torn"
    """The limit lies within a batch."""
    ZEROS = "zeros"
    """Nothing but zeros follows, as at the end of a preallocated file: see `look_at_tail`."""
    SHORT = "short"
    """The file ends before the limit: somebody has truncated it since it was opened."""
    FRAME = "frame"
    """No batch begins here: the magic is unknown, or the length impossible."""
    CHECKSUM = "checksum"
    """The checksum of a batch is wrong."""
    ORDER = "order"
    """The offsets of a batch do not lie above those before it."""


class FaultAction(enum.Enum):
    """The ways in which a scan treats a fault."""

    IGNORE = "ignore"
    """Do not look for it."""
    STOP = "stop"
    """End before it; `LogScanner.fault` is the reason."""
    SKIP = "skip"
    """Yield the batch as one that is not valid, and go on behind it."""


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """The action for a wrong checksum, and for a wrong order.

    Behind any other fault nobody knows where the next batch begins, so the scan stops there.
    """

    checksum: FaultAction
    order: FaultAction

    def of(self, kind: FaultKind | None) -> FaultAction:
        """Return what becomes of a fault."""
        if kind is FaultKind.CHECKSUM:
            return self.checksum
        return self.order if kind is FaultKind.ORDER else FaultAction.STOP


_IGNORE, _STOP = FaultAction.IGNORE, FaultAction.STOP
RECOVER: Final = FaultPolicy(checksum=_STOP, order=_STOP)
"""To load a broker's log: it ends before the first batch that is wrong."""
REPLAY: Final = FaultPolicy(checksum=_IGNORE, order=_STOP)
"""To replay producers from a log that is known to be sound."""
INSPECT: Final = FaultPolicy(checksum=FaultAction.SKIP, order=_IGNORE)
"""To see all that is there: `verify`, `dump` and erasures. `verify` looks at the order itself."""
METADATA: Final = FaultPolicy(checksum=_STOP, order=_IGNORE)
"""To read KRaft's metadata; the reader raises the fault, except for a torn tail."""
FRAMES: Final = FaultPolicy(checksum=_IGNORE, order=_IGNORE)
"""For callers with checks of their own: a reader checks what it is asked for, a commit the file."""


@dataclass(frozen=True, slots=True)
class ScannedBatches:
    """Some consecutive whole batches of a file, b of them.

    Positions in `table` count from the start of `buffer`, which lies at byte `file_position`.
    `is_valid`, bool (b,): false for the batches with a fault that the policy skips.

    The buffer holds only the first bytes of a batch that is larger than a chunk, where the scan
    needs no records. It is empty for a large batch that is not valid.
    """

    buffer: bytes
    table: BatchTable
    path: Path | str
    file_position: int
    is_valid: npt.NDArray[np.bool_]

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return int(self.table.positions[-1] + self.table.sizes[-1])

    def position_of(self, batch: int) -> int:
        """Return where a batch begins in the file."""
        return self.file_position + int(self.table.positions[batch])

    def first(self, count: int) -> ScannedBatches:
        """Return the first batches of these."""
        rows = slice(0, count)
        return replace(self, table=self.table.select(rows), is_valid=self.is_valid[rows])

    def records(self, selection: npt.NDArray[np.intp]) -> Iterator[RecordTable]:
        """Yield the records of some valid batches, as many as should be in memory at once.

        `selection`: ascending indexes. Raises CorruptBatchError for the first batch that does not
        decode.
        """
        while len(selection):
            found = records.index_records(
                self.buffer,
                self.table,
                path=self.path,
                file_position=self.file_position,
                selection=selection,
                run_size=_RUN_SIZE,
            )
            yield found
            selection = selection[found.batch_count :]


class LogScanner:
    """Iterate over the batches of an open `.log` file, once.

    The byte after the last batch that was yielded is `position`, and the offset after it
    `next_offset`. If the scan ended before the limit, `fault` says why. Its kind is `kind`, or None
    if the caller has refused a batch.
    """

    def __init__(
        self,
        source: ByteSource,
        path: Path | str,
        policy: FaultPolicy,
        *,
        limit: int,
        position: int = 0,
        next_offset: int = 0,
        chunk_size: int | None = None,
        needs_records: bool = True,
    ) -> None:
        """Begin at a batch.

        Args:
            source: The bytes of the file.
            path: Its name, for errors.
            policy: What becomes of faults.
            limit: The byte at which the log ends.
            position: Where a batch begins.
            next_offset: The lowest offset that this batch may begin at.
            chunk_size: Bytes that are read at once; CHUNK_SIZE by default.
            needs_records: Whether batches are yielded with all of their bytes.
        """
        self.path = path
        self.limit = limit
        self.position = min(position, limit)
        self.next_offset = self._before = next_offset
        self.fault: CorruptBatchError | None = None
        self.kind: FaultKind | None = None
        self._source = source
        self._policy = policy
        size = CHUNK_SIZE if chunk_size is None else chunk_size
        self._chunk_size = max(size, layout.BATCH_OVERHEAD)
        self._needs_records = needs_records

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls,
        path: Path,
        policy: FaultPolicy,
        *,
        next_offset: int,
        limit: int | None = None,
        position: int = 0,
    ) -> Iterator[LogScanner]:
        """Open a file for a scan that needs no records, to `limit` or its end.

        Raises FileNotFoundError, and StorageError when it cannot be opened or read.
        """
        with files.closing(files.open_listed(path)) as fd:
            source = FileBytes(fd)
            size = source.size()
            scan = cls(
                source,
                path,
                policy,
                limit=size if limit is None else min(limit, size),
                position=position,
                next_offset=next_offset,
                needs_records=False,
            )
            try:
                yield scan
            except OSError as fault:
                files.pass_on(fault)
                raise StorageError(
                    f"{path}: cannot be read at byte {scan.position}: {fault.strerror}"
                ) from fault

    @property
    def is_torn(self) -> bool:
        """Whether the log ends within a batch, or in the zeros of a preallocated one."""
        return self.kind in (FaultKind.TORN, FaultKind.ZEROS)

    def __iter__(self) -> Iterator[ScannedBatches]:
        """Yield the batches; raises OSError."""
        wish = self._chunk_size
        while self.position < self.limit and self.fault is None:
            asked = min(wish, self.limit - self.position)
            buffer = self._source.read_at(asked, self.position)
            table, _, reason = records.scan_batches(buffer, previous=self.next_offset - 1)
            found: ScannedBatches | None
            if len(table):
                if table.has_messages and self._needs_records and self.position == 0:
                    with contextlib.suppress(CorruptBatchError):  # whoever decodes it is told
                        messages.find_first_wrapper_end(buffer, table, path=self.path)
                found = self._checked(buffer, table)
                if self._needs_records:
                    # Large batches come in series: read ahead, or each would be read twice.
                    wish = max(self._chunk_size, min(2 * int(table.sizes.max()), LARGE_SIZE))
            elif reason is not None:
                if not any(buffer[: layout.MAGIC_POSITION + 1]):
                    reason = f"{self.limit - self.position} bytes that begin with zeros"
                self._meet(FaultKind.FRAME, reason)
                break
            else:
                size = self._size_at(buffer, asked)
                if size is None:
                    break
                is_believed = size <= LARGE_SIZE or self._policy.checksum is FaultAction.IGNORE
                if self._needs_records and is_believed:
                    wish = size
                    continue
                found = self._large(buffer, size)
                wish = self._chunk_size
            del buffer, table  # a large value's would be held while the next one is read
            if found is None or not len(found.table):
                break
            self._before = self.next_offset
            self.position += found.size
            self.next_offset = int(found.table.last_offsets[-1]) + 1
            yield found
            del found

    def end_fault(self) -> CorruptBatchError:
        """Return why the scan ended before the end of a file, even of one longer than its limit."""
        none = CorruptBatchError(self.path, self.position, "a record batch", "none")
        return self.fault or none

    def refuse(self, found: ScannedBatches, batch: int, fault: CorruptBatchError) -> None:
        """Let the scan end before one of the batches just yielded, for the caller's reason."""
        self.position = found.position_of(batch)
        lasts = found.table.last_offsets
        self.next_offset = int(lasts[batch - 1]) + 1 if batch else self._before
        self.fault, self.kind = fault, None

    def look_at_tail(self) -> None:
        """Read on behind a fault of the frame: if only zeros follow, the fault becomes ZEROS."""
        if self.kind not in (FaultKind.TORN, FaultKind.FRAME):
            return
        position = data_from(self._source, self.position)
        while position < self.limit:
            piece = self._source.read_at(min(CHUNK_SIZE, self.limit - position), position)
            if not piece or piece.count(0) != len(piece):
                return
            position = data_from(self._source, position + len(piece))
        self._meet(FaultKind.ZEROS, f"{self.limit - self.position} zero bytes")

    def _meet(self, kind: FaultKind, found: str) -> None:
        self.kind = kind
        self.fault = CorruptBatchError(self.path, self.position, "a record batch", found)

    def _size_at(self, buffer: bytes, asked: int) -> int | None:
        """Return the size of the batch that `buffer` holds the start of; None, with a fault."""
        remaining = self.limit - self.position
        found = f"{remaining} bytes"
        if len(buffer) < asked:
            self._meet_end()
            return None
        if len(buffer) >= layout.LOG_OVERHEAD:
            length = buffer[layout.LENGTH_POSITION : layout.LOG_OVERHEAD]
            size = layout.LOG_OVERHEAD + int.from_bytes(length, "big", signed=True)
            if len(buffer) < size <= remaining:
                return size
            found = f"{remaining} bytes of a batch of {size}"
        self._meet(FaultKind.TORN, found)
        return None

    def _meet_end(self) -> None:
        size = self._source.size()
        found = f"the end of the file at byte {size}, {self.limit} bytes were expected"
        self._meet(FaultKind.SHORT, found)

    def _checked(self, buffer: bytes, table: BatchTable) -> ScannedBatches:
        """Return the batches, up to the first one whose fault ends the scan."""
        found = ScannedBatches(
            buffer, table, self.path, self.position, np.ones(len(table), dtype=np.bool_)
        )
        if self._policy.checksum is not FaultAction.IGNORE:
            is_whole = found.size <= len(buffer)
            faults = self._checksum_faults(found) if is_whole else self._large_checksum_fault(table)
            found = self._without(found, FaultKind.CHECKSUM, faults)
        return self._in_order(found)

    def _in_order(self, found: ScannedBatches) -> ScannedBatches:
        if self._policy.order is FaultAction.IGNORE or not len(found.table):
            return found
        lasts, bases = found.table.last_offsets, found.table.base_offsets
        before = np.append(self.next_offset - 1, lasts[:-1])
        faults = {
            batch: CorruptBatchError(
                self.path,
                found.position_of(batch),
                f"offsets above {before[batch]}",
                f"a batch of the offsets {bases[batch]} to {lasts[batch]}",
            )
            for batch in np.flatnonzero((bases <= before) | (lasts < bases)).tolist()
        }
        return self._without(found, FaultKind.ORDER, faults)

    def _without(
        self, found: ScannedBatches, kind: FaultKind, faults: dict[int, CorruptBatchError]
    ) -> ScannedBatches:
        """Apply the policy to faults of one kind, each of the batch of that index."""
        if not faults:
            return found
        if self._policy.of(kind) is FaultAction.SKIP:
            found.is_valid[list(faults)] = False
            return found
        batch = min(faults)
        self.kind, self.fault = kind, faults[batch]
        return found.first(batch)

    def _checksum_faults(self, found: ScannedBatches) -> dict[int, CorruptBatchError]:
        faults: dict[int, CorruptBatchError] = {}
        place = found.file_position
        try:
            records.check_crcs(found.buffer, found.table, path=self.path, file_position=place)
        except CorruptBatchError:
            for batch in range(len(found.table)):
                row = found.table.select(slice(batch, batch + 1))
                try:
                    records.check_crcs(found.buffer, row, path=self.path, file_position=place)
                except CorruptBatchError as fault:
                    faults[batch] = fault
                    if self._policy.checksum is not FaultAction.SKIP:
                        break
        return faults

    def _large(self, buffer: bytes, size: int) -> ScannedBatches | None:
        """Return a batch whose start is in `buffer`; hold all of it once it is sound."""
        header = read_header(buffer, 0, size) if len(buffer) >= layout.BATCH_OVERHEAD else None
        if header is None:
            self._meet(FaultKind.FRAME, f"{size} bytes whose last offset has more than 64 bits")
            return None
        if self._source.size() < self.position + size:
            self._meet_end()
            return None
        table = BatchTable.of_headers([(0, header)])
        if table.has_messages:
            messages.bound_wrappers(table, self.next_offset - 1)
        found = self._checked(buffer, table)
        if self._needs_records and len(found.table):
            is_valid = found.is_valid[0]
            whole = self._source.read_at(size, self.position) if is_valid else b""
            found = replace(found, buffer=whole)
        return found

    def _large_checksum_fault(self, table: BatchTable) -> dict[int, CorruptBatchError]:
        """Compare the checksum of a batch that is not held, piece by piece."""
        is_batch = not table.has_messages
        start = layout.ATTRIBUTES_POSITION if is_batch else layout.MAGIC_POSITION
        position, end = self.position + start, self.position + int(table.sizes[0])
        value, wanted = 0, int(table.crcs[0])
        while position < end:
            piece = self._source.read_at(min(CHUNK_SIZE, end - position), position)
            if not piece:
                break  # somebody has truncated the file: the checksum is wrong
            value = crc32c(piece, value) if is_batch else zlib.crc32(piece, value)
            position += len(piece)
        if value == wanted:
            return {}
        expected, found = f"checksum {wanted:#010x}", f"checksum {value:#010x}"
        return {0: CorruptBatchError(self.path, self.position, expected, found)}
