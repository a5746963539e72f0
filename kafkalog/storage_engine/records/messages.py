"""Read messages of the formats v0 and v1, from logs that were begun before Kafka 0.11.

An uncompressed *message* is an entry of the log by itself, a batch of one record. A compressed
message, a *wrapper*, has no key, and its value is a compressed set of messages:

- Its offset is that of its last message, so its end is known and its begin is not.
- Inner offsets are absolute in v0. In v1 they count from anywhere, and the last one has the
  wrapper's offset. Some producers always wrote wrappers at offset 0; their inner offsets are taken
  unchanged.
- An inner set must not be empty, nor hold compressed messages. An incomplete last message is left
  out.
- Only v1 has timestamps. Under a wrapper of LogAppendTime all messages have the wrapper's.
- Inner messages of the other format are read in their own format (KAFKA-4298).

The checksum is zlib's CRC-32, over everything but offset and size; inner messages have their own.

Kafka: LegacyRecord, AbstractLegacyRecordBatch, DataLogInputStream. In addition, inner offsets must
rise, and exceed the last offset before the wrapper as far as that is known.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import compression, layout, ops
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.records import codes, columns
from kafkalog.storage_engine.records.kernels import legacy
from kafkalog.storage_engine.records.tables import (
    BatchTable,
    Bytes,
    ChunkFault,
    Integers,
    RecordTable,
)


def bound_wrappers(table: BatchTable, previous: int) -> None:
    """Set the base offset of each wrapper to the last offset before it plus one."""
    is_wrapper = _is_wrapper(table)
    lowest = np.concatenate((np.array([previous], dtype=np.int64), table.last_offsets[:-1])) + 1
    table.base_offsets[is_wrapper] = lowest[is_wrapper]


def find_first_wrapper_end(buffer: Buffer, table: BatchTable, *, path: Path | str) -> None:
    """Set the last offset of a chunk's first batch, if it is a compressed wrapper v1 at offset 0.

    Such a wrapper may hold messages above its own offset. Raises CorruptBatchError.
    """
    if table.magics[0] != 1 or table.last_offsets[0] != 0 or not _is_wrapper(table)[0]:
        return
    first = table.select(slice(0, 1))
    check_crcs(buffer, first, path=path, file_position=0)
    fault = ChunkFault(path, 0, first, np.zeros(1, dtype=np.int64))
    records = index_messages(buffer, first, compression.SIZE_MAX, None, fault)
    table.last_offsets[0] = records.offsets[-1]
    if len(table) > 1 and _is_wrapper(table)[1]:
        table.base_offsets[1] = table.last_offsets[0] + 1


def _is_wrapper(table: BatchTable) -> npt.NDArray[np.bool_]:
    is_compressed: npt.NDArray[np.bool_] = table.attributes & layout.CODEC_MASK != 0
    return table.is_message & is_compressed


def check_crcs(buffer: Buffer, table: BatchTable, *, path: Path | str, file_position: int) -> None:
    """Raise CorruptBatchError for the first message with a wrong checksum.

    Skips batches v2. `file_position` is the chunk's position in the file `path`.
    """
    found = table.select(table.is_message)
    wrong, checksum = legacy.find_wrong_crc32(
        np.frombuffer(buffer, dtype=np.uint8),
        found.positions + layout.MAGIC_POSITION,
        found.positions + found.sizes,
        found.crcs,
    )
    if wrong >= 0:
        raise CorruptBatchError(
            path,
            file_position + int(found.positions[wrong]),
            f"checksum {int(found.crcs[wrong]):#010x}",
            f"checksum {checksum:#010x}",
        )


def index_messages(
    buffer: Buffer, table: BatchTable, limit: int, run_size: int | None, fault: ChunkFault
) -> RecordTable:
    """Find the records of the batches that `fault` selects, all messages v0 or v1.

    Decompresses each wrapper to at most `limit` bytes. With wrappers and a `run_size`, indexes only
    the first batches, up to the one that makes the arena this large. Raises CorruptBatchError.
    """
    rows = table.select(fault.selection)
    arena, bounds = _arena(buffer, rows, limit, run_size, fault)
    batch_count = bounds.shape[1]
    selection, rows = fault.selection[:batch_count], rows.select(slice(batch_count))
    is_wrapper = _is_wrapper(rows)
    counts = np.ones(len(rows), dtype=np.int64)
    inner_lasts = np.zeros(len(rows), dtype=np.int64)
    status, section, position = legacy.count_messages(arena, bounds, counts, inner_lasts)
    if status != codes.OK:
        place = position - int(bounds[0, section])
        if status == codes.BAD_COUNT:
            fault.report(section, "at least one message in a compressed one", "none")
        fault.report_status(section, status, place, 1)
    lasts = rows.last_offsets
    is_relative = is_wrapper & (rows.magics == 1)
    short = np.flatnonzero(is_relative & (lasts != 0) & (lasts < inner_lasts))
    if len(short):
        section = int(short[0])
        expected = f"a wrapper at the offset {inner_lasts[section]} of its last message or above"
        fault.report(section, expected, f"one at {lasts[section]}")
    is_append_time = is_relative & (rows.attributes & layout.TIMESTAMP_TYPE_BIT != 0)
    sections = np.stack(
        (
            bounds[0],
            bounds[1],
            counts,
            rows.base_offsets,
            np.where(is_relative & (lasts == 0), inner_lasts, lasts),
            np.where(is_relative & (lasts != 0), lasts - inner_lasts, 0),
            np.where(is_append_time, rows.max_timestamps, ops.INT64_MIN),
            is_wrapper.astype(np.int64),
        )
    )
    count = int(counts.sum())
    fields = columns.allocate(codes.RECORD_FIELDS * count, np.int64)
    fields = fields.reshape(codes.RECORD_FIELDS, count)
    status, section, position = legacy.index_messages(arena, sections, fields)
    if status != codes.OK:
        place = position - int(bounds[0, section])
        fault.report_status(section, status, place, int(counts[section]))
    batch_index = np.repeat(selection.astype(np.int32), counts)
    return RecordTable(arena, batch_index, fields, batch_count)


def _arena(
    buffer: Buffer, rows: BatchTable, limit: int, run_size: int | None, fault: ChunkFault
) -> tuple[Bytes, Integers]:
    """Return the bytes that hold the messages, and the start and end of each set in them: (2, s).

    An uncompressed message is a set of one. Without wrappers the arena is the chunk. Otherwise it
    is the needed part of the chunk, followed by the contents of the wrappers. That arena has at
    most `run_size` bytes before its last set, so there may be fewer sets than rows.
    """
    is_wrapper = _is_wrapper(rows)
    bounds = np.stack((rows.positions, rows.positions + rows.sizes))
    chunk = np.frombuffer(buffer, dtype=np.uint8)
    if not is_wrapper.any():
        return chunk, bounds
    start = int(rows.positions[is_wrapper.argmin()])
    # The bytes of the chunk that the first sets need: (s,), never falling.
    copied = np.maximum.accumulate(np.where(is_wrapper, 0, bounds[1] - start))
    room = layout.INT64_MAX if run_size is None else run_size
    stop = int(copied.searchsorted(room)) + 1
    unwrapped: dict[int, bytes | memoryview] = {}
    with memoryview(buffer) as view:
        for section in np.flatnonzero(is_wrapper).tolist():
            if section >= stop:
                break
            unwrapped[section] = _unwrap(view, rows, section, limit, fault)
            room -= len(unwrapped[section])
            stop = max(section, int(copied.searchsorted(room))) + 1
    bounds = bounds[:, :stop] - start
    position = int(copied[:stop][-1])
    parts = [chunk[start : start + position]]
    for section, data in unwrapped.items():
        bounds[:, section] = position, position + len(data)
        position += len(data)
        parts.append(np.frombuffer(data, dtype=np.uint8))
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:  # saves a copy of a large set
        return parts[0], bounds
    arena = columns.allocate(position)
    if parts:
        np.concatenate(parts, out=arena)
    return arena, bounds


def _unwrap(
    view: memoryview, rows: BatchTable, section: int, limit: int, fault: ChunkFault
) -> bytes | memoryview:
    start = int(rows.positions[section])
    end = start + int(rows.sizes[section])
    magic = int(rows.magics[section])
    codec = int(rows.attributes[section]) & layout.CODEC_MASK
    size = layout.MESSAGE_FIELD_SIZE
    position = start + (layout.MESSAGE_KEY_POSITION_V1 if magic else layout.MESSAGE_KEY_POSITION_V0)
    (key_size,) = size.unpack_from(view, position)
    position += size.size + max(key_size, 0)
    if position > end - size.size:
        fault.report(section, f"a key that fits {end - start} bytes", f"one of {key_size}")
    (value_size,) = size.unpack_from(view, position)
    position += size.size
    if not 0 <= value_size <= end - position:
        fault.report(section, f"a value of 0 to {end - position} bytes", f"one of {value_size}")
    if codec == layout.CODEC_ZSTD:
        fault.report(section, "a codec from 0 to 3 in a message v0 or v1", "zstd")
    try:
        return compression.decompress(
            codec,
            view[position : position + value_size],
            limit=limit,
            is_lz4_header_checked=magic != 0,  # Kafka computed it wrongly in v0
        )
    except ValueError as error:
        fault.report_undecodable(section, error)


def count_alike(is_message: npt.NDArray[np.bool_]) -> int:
    """Return how many of the first batches (at least one) have the same kind as the first."""
    differs = is_message != is_message[0]
    return int(differs.argmax()) if differs.any() else len(is_message)
