"""Tables of batches and records: the results of scanning a chunk and of indexing its batches.

Rows are in the order of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from kafkalog.errors import CorruptBatchError, OversizedBatchError
from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.format.batch import BatchHeader
from kafkalog.storage_engine.records import codes

Integers: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(slots=True)
class BatchTable:
    """The headers of b batches of a chunk; every array is int64 (b,).

    Positions and sizes are bytes in the chunk, timestamps are ms; `base_timestamps` is the delete
    horizon if its bit is set.

    A message v0 or v1 has a row too, with -1 in missing fields, and only codec and timestamp type
    in its attributes. A compressed message (a *wrapper*) does not tell its first offset and number
    of records. Its base offset here is the lowest possible, the last offset before it plus one, and
    its count is -1.
    """

    positions: Integers
    sizes: Integers
    base_offsets: Integers
    last_offsets: Integers
    leader_epochs: Integers
    attributes: Integers
    base_timestamps: Integers
    max_timestamps: Integers
    producer_ids: Integers
    producer_epochs: Integers
    base_sequences: Integers
    counts: Integers
    crcs: Integers
    magics: Integers

    @classmethod
    def of_headers(cls, found: Sequence[tuple[int, BatchHeader]]) -> BatchTable:
        """Return the table of a few (position, header) pairs, without a kernel."""
        rows = [
            (
                position,
                header.size,
                header.base_offset,
                header.last_offset,
                header.leader_epoch,
                header.attributes,
                header.base_timestamp,
                header.max_timestamp,
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                header.records_count,
                header.crc,
                header.magic,
            )
            for position, header in found
        ]
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), len(fields(cls))).T
        return cls(*np.ascontiguousarray(columns))

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, rows: slice | npt.NDArray[Any]) -> BatchTable:
        """Return the table of some of the batches."""
        return BatchTable(*[column[rows] for column in _columns(self)])

    @property
    def is_message(self) -> npt.NDArray[np.bool_]:
        """Whether each row is a message v0 or v1 (b)."""
        result: npt.NDArray[np.bool_] = self.magics != layout.MAGIC
        return result

    @property
    def is_control(self) -> npt.NDArray[np.bool_]:
        """Whether each row is a control batch (b)."""
        result: npt.NDArray[np.bool_] = (self.attributes & layout.CONTROL_BIT) != 0
        return result

    @property
    def has_messages(self) -> bool:
        """Whether any row is a message v0 or v1."""
        return bool(self.is_message.any())


_columns = attrgetter(*(field.name for field in fields(BatchTable)))


@dataclass(slots=True)
class RecordTable:
    """The places of n records in `arena`; records keep the order of their batches.

    - fields: int64 (9, n), the rows that the properties below name
    - batch_index: int32 (n,), the record's batch in the `BatchTable`
    - batch_count: how many of the selected batches have their records here
    """

    arena: Bytes
    batch_index: npt.NDArray[np.int32]
    fields: npt.NDArray[np.int64]
    batch_count: int

    def __len__(self) -> int:
        return int(self.fields.shape[1])

    def rows_between(self, start: int, end: int) -> Integers | None:
        """Return the records with `start` <= offset < `end`; None for all."""
        offsets = self.offsets
        if not len(offsets) or (offsets.min() >= start and offsets.max() < end):
            return None
        return np.flatnonzero((offsets >= start) & (offsets < end))

    def value(self, row: int) -> bytes | None:
        """Return the value of one record, None for a tombstone."""
        start, size = int(self.value_positions[row]), int(self.value_sizes[row])
        return None if size < 0 else self.arena[start : start + size].tobytes()

    def _row(self, index: int) -> Integers:
        row: Integers = self.fields[index]
        return row

    @property
    def starts(self) -> Integers:
        """Position of the record's length field, or of the offset of a message v0 or v1."""
        return self._row(0)

    @property
    def ends(self) -> Integers:
        """Position after the record."""
        return self._row(1)

    @property
    def offsets(self) -> Integers:
        """Offset in the log."""
        return self._row(2)

    @property
    def timestamps(self) -> Integers:
        """Milliseconds, -1 for none; in a LogAppendTime batch its max timestamp."""
        return self._row(3)

    @property
    def key_positions(self) -> Integers:
        """Position of the key's bytes."""
        return self._row(4)

    @property
    def key_sizes(self) -> Integers:
        """Bytes of the key, -1 for none."""
        return self._row(5)

    @property
    def value_positions(self) -> Integers:
        """Position of the value's bytes."""
        return self._row(6)

    @property
    def value_sizes(self) -> Integers:
        """Bytes of the value, -1 for a tombstone."""
        return self._row(7)

    @property
    def header_positions(self) -> Integers:
        """Position of the header count; -1 in messages v0 and v1, which have no headers."""
        return self._row(8)


@dataclass(frozen=True, slots=True)
class ChunkFault:
    """The place of a chunk, for errors about one of its batches.

    `selection` has the indexes of the examined batches, which kernels call sections.
    """

    path: Path | str
    file_position: int
    table: BatchTable
    selection: npt.NDArray[Any]

    def report(
        self,
        section: int,
        expected: str,
        found: str,
        fault: type[CorruptBatchError] = CorruptBatchError,
    ) -> NoReturn:
        """Raise CorruptBatchError, or its subclass `fault`, for the batch `selection[section]`."""
        position = int(self.table.positions[self.selection[section]])
        raise fault(self.path, self.file_position + position, expected, found)

    def report_undecodable(self, section: int, error: ValueError) -> NoReturn:
        """Raise OversizedBatchError at the limit of `decompress`, CorruptBatchError for others."""
        expected, _, found = str(error).removeprefix("expected ").partition(", found ")
        is_limit = isinstance(error, compression.LimitExceededError)
        self.report(
            section, expected, found, OversizedBatchError if is_limit else CorruptBatchError
        )

    def report_status(self, section: int, status: int, place: int, count: int) -> NoReturn:
        """Raise CorruptBatchError for a kernel's status; see `record_fault`."""
        self.report(section, *record_fault(status, place, count))


def record_fault(status: int, place: int, count: int) -> tuple[str, str]:
    """Return (expected, found) for a status; `place` is a position in the record section."""
    at = f"byte {place} of its records"
    faults = {
        codes.BAD_VARINT: (f"a varint in the record at {at}", "one that is truncated or too long"),
        codes.BAD_LENGTH: (f"a record within its batch at {at}", "a length beyond its end"),
        codes.BAD_FIELD: (f"fields within the record at {at}", "a size beyond its end"),
        codes.BAD_HEADER_COUNT: (f"the header count of the record at {at}", "an impossible one"),
        codes.BAD_END: (f"a record that ends with its fields at {at}", "bytes after them"),
        codes.BAD_OFFSET: (f"offsets that rise within the batch at {at}", "another one"),
        codes.BAD_COUNT: (f"{count} records that fill the batch", f"its end or more at {at}"),
        codes.BAD_RANGE: ("a batch within its chunk", "one beyond it"),
        codes.BAD_CHECKSUM: (f"the checksum of the message at {at}", "another one"),
        codes.BAD_NESTING: (f"no compressed message within another at {at}", "one"),
        codes.BAD_MAGIC: (f"a message v0 or v1 at {at}", "another magic"),
    }
    expected, found = faults[status]
    return expected, found
