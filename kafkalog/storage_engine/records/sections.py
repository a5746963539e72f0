"""The record sections of batches: decompress them, check their counts, and index them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kafkalog.storage_engine.format import compression, layout, ops
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.records import codes, columns
from kafkalog.storage_engine.records.kernels import decode
from kafkalog.storage_engine.records.tables import (
    BatchTable,
    Bytes,
    ChunkFault,
    Integers,
    RecordTable,
)

_RATIO: Final = 4
"""The arena has room for so many times the compressed bytes at first."""
_BEHIND: Final = 1 << 18
"""Room for the section that ends a run, unless it is larger."""


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
    data, starts, ends = _arena(buffer, table, limit=limit, run_size=run_size, fault=fault)
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
            np.where(append_time, table.max_timestamps[selection], ops.INT64_MIN),
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


def _arena(
    buffer: Buffer, table: BatchTable, *, limit: int, run_size: int | None, fault: ChunkFault
) -> tuple[Bytes, Integers, Integers]:
    """Return an *arena*, and the start and end of the record section of each batch of `fault`.

    The arena is the chunk itself if nothing is compressed, else its decompressed record sections,
    one after the other. No section has more than `limit` bytes. With a `run_size`, it stops after
    the batch that makes the decompressed sections this large. Raises CorruptBatchError.
    """
    selection = fault.selection
    starts = table.positions[selection] + layout.BATCH_OVERHEAD
    ends = table.positions[selection] + table.sizes[selection]
    codecs = table.attributes[selection] & layout.CODEC_MASK
    if not codecs.any():
        return np.frombuffer(buffer, dtype=np.uint8), starts, ends
    room = _RATIO * int(table.sizes[selection].sum())
    arena = columns.allocate(room if run_size is None else min(room, run_size + _BEHIND))
    target = arena.data
    section_ends: list[int] = []
    end = 0
    decompressors = {
        codec: compression.decompressor(codec, limit=limit) for codec in set(codecs.tolist())
    }
    places = zip(starts.tolist(), ends.tolist(), table.counts[selection].tolist(), strict=True)
    with memoryview(buffer) as view:
        for (first, last, count), codec in zip(places, codecs.tolist(), strict=True):
            if count == 0:  # no caller reads an empty batch
                section_ends.append(end)
                continue
            try:
                section = decompressors[codec](view[first:last])
            except ValueError as error:
                fault.report_undecodable(len(section_ends), error)
            start, end = end, end + len(section)
            if len(codecs) == 1:  # a large batch is not copied once more
                arena = np.frombuffer(section, dtype=np.uint8)
            else:
                if end > len(target):
                    larger = columns.allocate(max(2 * len(arena), end))
                    larger[:start] = arena[:start]
                    arena, target = larger, larger.data
                target[start:end] = section
            section_ends.append(end)
            if run_size is not None and end >= run_size:
                break
    ends = np.array(section_ends, dtype=np.int64)
    return arena[:end], np.append(0, ends[:-1]), ends
