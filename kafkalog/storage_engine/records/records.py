"""The records of batches as columns: decode to Arrow, encode from Arrow, rebuild batches.

A *chunk* is a piece of a .log file. Its batches are found by `scan_batches` (a `BatchTable`), and
their checksums compared by `check_crcs`. Then `index_records` finds the records: a `RecordTable`
has the place of each in an *arena*, which is the chunk or its decompressed record sections. Columns
are copied out by `to_arrow`.

Invariants, checked on everything that is read:

- A record lies within its batch, and its fields end exactly at its length.
- Offsets rise strictly within a batch and do not exceed its last offset.
- A batch holds as many records as its header says, and nothing after them.
- Decompressed data stays below a limit, and is never written past it.

No Python code runs per record. The functions that need pyarrow import it. The Arrow side is in
`columns.py`, and the way from Arrow to batches in `encoding.py`. Messages v0 and v1, which have
rows in these tables too, are read in `messages.py`.

Kafka: DefaultRecordBatch, DefaultRecord, MemoryRecordsBuilder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kafkalog.errors import CorruptBatchError, InvalidInputError
from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.records import codes, messages
from kafkalog.storage_engine.records.columns import to_arrow
from kafkalog.storage_engine.records.encoding import Encoded, encode
from kafkalog.storage_engine.records.kernels import encode as encode_kernels
from kafkalog.storage_engine.records.kernels import scan
from kafkalog.storage_engine.records.murmur2 import murmur2_partitions
from kafkalog.storage_engine.records.sections import find_sections, index_sections
from kafkalog.storage_engine.records.tables import BatchTable, ChunkFault, Integers, RecordTable

__all__ = [
    "BatchTable",
    "Encoded",
    "RecordTable",
    "check_crcs",
    "empty_batch",
    "encode",
    "index_records",
    "murmur2_partitions",
    "rebuild_batch",
    "scan_batches",
    "to_arrow",
]


def scan_batches(buffer: Buffer, *, previous: int = -1) -> tuple[BatchTable, int, str | None]:
    """Return the complete batches, the position after the last, and the reason for the scan's end.

    If the buffer ends there or within a batch, the reason is None. Otherwise it says why the scan
    found no further batch. `previous` is the last known offset before the buffer. Does not compare
    checksums.
    """
    data = np.frombuffer(buffer, dtype=np.uint8)
    count, position, ending = scan.count_batches(data)
    headers = np.empty((codes.HEADER_FIELDS, count), dtype=np.int64)
    scan.scan_batches(data, headers)
    headers[3] += headers[2]  # the last offset's delta
    reason = None
    if ending == codes.SCAN_LENGTH:
        start = position + layout.LENGTH_POSITION
        length = int.from_bytes(buffer[start : start + 4], "big", signed=True)
        reason = f"batch length {length}, less than a header"
    elif ending == codes.SCAN_MAGIC:
        reason = f"magic {buffer[position + layout.MAGIC_POSITION]}, above {layout.MAGIC}"
    table = BatchTable(*headers)
    if table.has_messages:
        messages.bound_wrappers(table, previous)
    return table, position, reason


def check_crcs(buffer: Buffer, table: BatchTable, *, path: Path | str, file_position: int) -> None:
    """Raise CorruptBatchError for a batch with a wrong checksum, the first one of its format.

    `file_position` is the chunk's position in the file `path`.
    """
    if table.has_messages:
        messages.check_crcs(buffer, table, path=path, file_position=file_position)
        table = table.select(~table.is_message)
    batches = zip(
        (table.positions + layout.ATTRIBUTES_POSITION).tolist(),
        (table.positions + table.sizes).tolist(),
        table.crcs.tolist(),
        strict=True,
    )
    with memoryview(buffer) as view:
        for start, end, expected in batches:
            found = crc32c(view[start:end])
            if found != expected:
                raise CorruptBatchError(
                    path,
                    file_position + start - layout.ATTRIBUTES_POSITION,
                    f"checksum {expected:#010x}",
                    f"checksum {found:#010x}",
                )


def index_records(
    buffer: Buffer,
    table: BatchTable,
    *,
    path: Path | str,
    file_position: int,
    selection: npt.NDArray[Any] | None = None,
    limit: int = compression.SIZE_MAX,
    run_size: int | None = None,
) -> RecordTable:
    """Find the records of the selected batches (ascending indexes; None for all).

    Indexes only the first batches of one format: messages v0 and v1, or batches v2. With a
    `run_size`, ends with the one that makes the decompressed bytes this many. Decompresses each
    batch to at most `limit` bytes. Raises CorruptBatchError. Kafka: DefaultRecordBatch.iterator,
    AbstractLegacyRecordBatch.iterator.
    """
    if selection is None:
        selection = np.arange(len(table))
    is_message = table.is_message[selection]
    if is_message.any():
        selection = selection[: messages.count_alike(is_message)]
    fault = ChunkFault(path, file_position, table, selection)
    if is_message[:1].any():
        return messages.index_messages(buffer, table, limit, run_size, fault)
    return index_sections(find_sections(buffer, table, limit=limit, run_size=run_size, fault=fault))


def rebuild_batch(
    records: RecordTable, table: BatchTable, batch: int, rows: Integers, *, level: int | None = None
) -> bytes:
    """Return a batch of the records `rows` (at least one) under the header of `batch`.

    The header comes from `table`, with its delete horizon and codec. If the rows come from several
    batches, in offset order, the header must fit them all. The codec's level is `level`, None for
    the default; records above the decompression limit stay uncompressed. Raises InvalidInputError
    for messages v0 and v1.
    """
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    if table.has_messages:
        _refuse_messages(table, batch, records.batch_index[rows])
    attributes = int(table.attributes[batch])
    base_timestamp = int(records.timestamps[rows[0]])
    if attributes & layout.DELETE_HORIZON_BIT:
        base_timestamp = int(table.base_timestamps[batch])
    if attributes & layout.TIMESTAMP_TYPE_BIT:
        max_timestamp = int(table.max_timestamps[batch])
    else:
        max_timestamp = int(records.timestamps[rows].max())
    base_offset = int(table.base_offsets[batch])
    place = (records.arena, records.fields, rows, base_offset, base_timestamp)
    size = encode_kernels.rewrite_records(*place, np.empty(0, dtype=np.uint8))
    target = bytearray(layout.BATCH_OVERHEAD + max(size, 0))
    section = memoryview(target)[layout.BATCH_OVERHEAD :]
    if size < 0 or encode_kernels.rewrite_records(*place, np.frombuffer(section, np.uint8)) != size:
        raise InvalidInputError(f"batch {batch}: its record table does not fit its records")
    codec = attributes & layout.CODEC_MASK
    if size > compression.SIZE_MAX:
        codec, attributes = layout.CODEC_NONE, attributes & ~layout.CODEC_MASK
    if codec != layout.CODEC_NONE:
        compressed = compression.compress(codec, section, level)
        target = bytearray(layout.BATCH_OVERHEAD) + compressed
    return _sealed(
        target,
        table,
        batch,
        attributes=attributes,
        records_count=len(rows),
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
    )


def empty_batch(table: BatchTable, batch: int) -> bytes:
    """Return the batch without records: 61 bytes that keep its offsets and its producer.

    It has no codec and no delete horizon. Kafka: DefaultRecordBatch.writeEmptyHeader.
    """
    _refuse_messages(table, batch)
    kept = layout.TIMESTAMP_TYPE_BIT | layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT
    return _sealed(
        bytearray(layout.BATCH_OVERHEAD),
        table,
        batch,
        attributes=int(table.attributes[batch]) & kept,
        records_count=0,
        base_timestamp=layout.NO_TIMESTAMP,
        max_timestamp=int(table.max_timestamps[batch]),
    )


def _refuse_messages(table: BatchTable, *batches: int | npt.NDArray[Any]) -> None:
    if any(np.any(table.magics[some] != layout.MAGIC) for some in batches):
        raise InvalidInputError("messages v0 and v1 cannot be rewritten as batches v2")


def _sealed(
    target: bytearray,
    table: BatchTable,
    batch: int,
    *,
    attributes: int,
    records_count: int,
    base_timestamp: int,
    max_timestamp: int,
) -> bytes:
    base_offset = int(table.base_offsets[batch])
    layout.BATCH_HEADER.pack_into(
        target,
        0,
        base_offset,
        len(target) - layout.LOG_OVERHEAD,
        int(table.leader_epochs[batch]),
        layout.MAGIC,
        0,
        attributes,
        int(table.last_offsets[batch]) - base_offset,
        base_timestamp,
        max_timestamp,
        int(table.producer_ids[batch]),
        int(table.producer_epochs[batch]),
        int(table.base_sequences[batch]),
        records_count,
    )
    crc = crc32c(memoryview(target)[layout.ATTRIBUTES_POSITION :])
    layout.CHECKSUM.pack_into(target, layout.CRC_POSITION, crc)
    return bytes(target)
