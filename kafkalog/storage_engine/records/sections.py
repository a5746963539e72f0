"""The record sections of batches: decompress them, check their counts, and index them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.records import arena, codes, columns
from kafkalog.storage_engine.records.kernels import decode
from kafkalog.storage_engine.records.tables import (
    BatchTable,
    Bytes,
    ChunkFault,
    Integers,
    RecordTable,
)

__all__ = ["Sections", "find_sections", "index_sections"]

NO_APPEND_TIME: Final = -(2**63)


@dataclass(frozen=True, slots=True)
class Sections:
    """The decompressed record sections of some batches v2.

    arena: the bytes in which they lie
    places: int64 (7, s), a section each, as `decode.index_records` wants them
    fault: reports what is wrong with one of them
    """

    arena: Bytes
    places: Integers
    fault: ChunkFault

    def __len__(self) -> int:
        return int(self.places.shape[1])

    @property
    def record_count(self) -> int:
        """The number of their records, by their batches."""
        return int(self.places[2].sum())

    @property
    def size(self) -> int:
        """Bytes of the sections."""
        return int((self.places[1] - self.places[0]).sum())

    def check(self, status: int, section: int, position: int) -> None:
        """Raise CorruptBatchError for a kernel's status."""
        if status != codes.OK:
            place = position - int(self.places[0, section])
            self.fault.report_status(section, status, place, int(self.places[2, section]))


def find_sections(
    buffer: Buffer,
    table: BatchTable,
    *,
    limit: int = compression.SIZE_MAX,
    run_size: int | None,
    fault: ChunkFault,
) -> Sections:
    """Decompress the batches v2 that `fault` selects, or the first of them; see `index_records`."""
    data, starts, ends = arena.sections(buffer, table, limit=limit, run_size=run_size, fault=fault)
    selection = fault.selection[: len(starts)]
    counts = table.counts[selection]
    # Check each count against its bytes, because it determines the next allocation.
    wild = np.flatnonzero(
        (counts < 0) | ((counts > 0) & (counts > (ends - starts) // codes.RECORD_SIZE_MIN))
    )
    if len(wild):
        section = int(wild[0])
        room = int(ends[section] - starts[section])
        fault.report(section, f"records that fit {room} bytes", f"a count of {counts[section]}")
    append_time = table.attributes[selection] & layout.TIMESTAMP_TYPE_BIT != 0
    base_offsets = table.base_offsets[selection]
    places = np.stack(
        (
            starts,
            ends,
            counts,
            base_offsets,
            table.last_offsets[selection] - base_offsets,
            table.base_timestamps[selection],
            np.where(append_time, table.max_timestamps[selection], NO_APPEND_TIME),
        )
    )
    return Sections(data, places, fault)


def index_sections(sections: Sections) -> RecordTable:
    """Find the records of sections; raises CorruptBatchError."""
    count = sections.record_count
    fields = columns.allocate(codes.RECORD_FIELDS * count, np.int64)
    fields = fields.reshape(codes.RECORD_FIELDS, count)
    status, section, position = decode.index_records(sections.arena, sections.places, fields)
    sections.check(status, section, position)
    selection = sections.fault.selection[: len(sections)]
    batch_index = np.repeat(selection.astype(np.int32), sections.places[2])
    return RecordTable(sections.arena, batch_index, fields, len(selection))
