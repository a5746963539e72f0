"""The header of a record batch v2: parse, pack, check and seal it.

A *batch* is a header of 61 bytes and its records, one section of bytes that may be compressed. The
checksum does not cover `base_offset` and `partition_leader_epoch`. A finished batch thus gets its
place in the log by a write of twelve bytes (`ActiveSegment.stamp`).

Invariants:

- `last_offset` is `base_offset + last_offset_delta` and survives cleaning. It may exceed the offset
  of the last record still in the batch, and `records_count` may be zero.
- With the delete horizon bit, `base_timestamp` is the horizon; the records' timestamp deltas are
  relative to it too.
- Only the low byte of the attributes has a meaning.

A *message* of the older formats v0 and v1 appears as a batch of one record. A compressed message (a
*wrapper*) appears as a batch with an unknown number of records, whose last offset alone is known
without decompression (`messages.py`). Only v2 is ever written.

Kafka: DefaultRecordBatch, AbstractLegacyRecordBatch, FileLogInputStream; `records.py` has the
records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from crc32c import crc32c

from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import layout

__all__ = [
    "BatchHeader",
    "Buffer",
    "check_batch",
    "iterate_headers",
    "parse_header",
    "read_header",
    "seal_batch",
    "seal_batches",
]

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The thirteen fields of a batch's header, as stored.

    Timestamps are epoch milliseconds, -1 for none. `batch_length` counts the bytes after itself. A
    message v0 or v1 has -1 in the fields that it lacks; a wrapper has `base_offset` 0, the lowest
    possible, and `records_count` -1.
    """

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return self.batch_length + layout.LOG_OVERHEAD

    @property
    def last_offset(self) -> int:
        """The last offset of the batch, even if a cleaner has removed its record."""
        return self.base_offset + self.last_offset_delta

    @property
    def known_first_offset(self) -> int:
        """The first offset; for messages v0 and v1 the last one, since only that is known."""
        return self.base_offset if self.magic == layout.MAGIC else self.last_offset

    @property
    def next_offset(self) -> int:
        """The offset after the batch."""
        return self.last_offset + 1

    @property
    def codec(self) -> int:
        """The compression codec's number; 5 to 7 do not exist."""
        return self.attributes & layout.CODEC_MASK

    @property
    def timestamp_type(self) -> int:
        """`layout.CREATE_TIME` or `layout.LOG_APPEND_TIME`; for v0 `layout.NO_TIMESTAMP_TYPE`."""
        if self.magic == 0:
            return layout.NO_TIMESTAMP_TYPE
        return int(self.attributes & layout.TIMESTAMP_TYPE_BIT != 0)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction."""
        return self.attributes & layout.TRANSACTIONAL_BIT != 0

    @property
    def is_control(self) -> bool:
        """Whether the batch holds a control record instead of data."""
        return self.attributes & layout.CONTROL_BIT != 0

    @property
    def delete_horizon_ms(self) -> int | None:
        """The time from which a cleaning may remove the batch's tombstones, or None."""
        if self.attributes & layout.DELETE_HORIZON_BIT:
            return self.base_timestamp
        return None


def parse_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Return the header at `position`, unchecked.

    Raises struct.error if fewer than 61 bytes follow.
    """
    return BatchHeader(*layout.BATCH_HEADER.unpack_from(buffer, position))


def read_header(buffer: Buffer, position: int, remaining: int) -> BatchHeader | None:
    """Return the header of the whole batch or message at `position`, or None.

    Also returns None if the last offset exceeds 64 bits. `remaining` bytes of log begin at
    `position`; the buffer holds them, or at least 61. Does not compare checksums. Kafka:
    FileLogInputStream.nextBatch.
    """
    if remaining <= layout.MAGIC_POSITION:
        return None
    magic = buffer[position + layout.MAGIC_POSITION]
    if magic == layout.MAGIC:
        if remaining < layout.BATCH_OVERHEAD:
            return None
        header = parse_header(buffer, position)
        is_whole = layout.BATCH_OVERHEAD <= header.size <= remaining
        return header if is_whole and abs(header.last_offset) <= layout.INT64_MAX else None
    size_min = layout.MESSAGE_SIZE_MIN_V1 if magic else layout.MESSAGE_SIZE_MIN_V0
    if magic > 1 or remaining < size_min:
        return None
    header = _parse_message(buffer, position, magic)
    return header if size_min <= header.size <= remaining and header.last_offset >= 0 else None


def _parse_message(buffer: Buffer, position: int, magic: int) -> BatchHeader:
    timestamp = layout.NO_TIMESTAMP
    if magic == 0:
        fields = layout.MESSAGE_HEADER_V0.unpack_from(buffer, position)
        offset, size, crc, _, attributes = fields
        attributes &= layout.CODEC_MASK
    else:
        fields = layout.MESSAGE_HEADER_V1.unpack_from(buffer, position)
        offset, size, crc, _, attributes, timestamp = fields
        attributes &= layout.CODEC_MASK | layout.TIMESTAMP_TYPE_BIT
    is_wrapper = attributes & layout.CODEC_MASK != layout.CODEC_NONE
    return BatchHeader(
        base_offset=0 if is_wrapper else offset,
        batch_length=size,
        leader_epoch=-1,
        magic=magic,
        crc=crc,
        attributes=attributes,
        last_offset_delta=offset if is_wrapper else 0,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        records_count=-1 if is_wrapper else 1,
    )


def seal_batch(
    target: bytearray | memoryview,
    position: int,
    size: int,
    *,
    base_offset: int,
    last_offset_delta: int,
    records_count: int,
    base_timestamp: int,
    max_timestamp: int,
    attributes: int = 0,
    leader_epoch: int = -1,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> None:
    """Write the header, with its checksum, of a batch whose records begin at `position + 61`.

    `size` is that of the whole batch. Kafka: DefaultRecordBatch.writeHeader.
    """
    fields = (
        attributes,
        last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        records_count,
    )
    prefix = (base_offset, size - layout.LOG_OVERHEAD, leader_epoch, layout.MAGIC)
    layout.BATCH_HEADER.pack_into(target, position, *prefix, 0, *fields)
    with memoryview(target) as view:
        crc = crc32c(view[position + layout.ATTRIBUTES_POSITION : position + size])
    layout.CHECKSUM.pack_into(target, position + layout.CRC_POSITION, crc)


def seal_batches(
    target: memoryview, batches: Iterable[tuple[int, int, int, int, int, int, int]]
) -> None:
    """Write the headers of new batches without producers, faster than `seal_batch`.

    A batch is (position, size, base offset, number of records, base timestamp, max timestamp,
    attributes).
    """
    pack, pack_crc = layout.BATCH_HEADER.pack_into, layout.CHECKSUM.pack_into
    overhead, magic, covered = layout.LOG_OVERHEAD, layout.MAGIC, layout.ATTRIBUTES_POSITION
    for position, size, base_offset, count, base_timestamp, max_timestamp, attributes in batches:
        before = base_offset, size - overhead, -1, magic, 0, attributes, count - 1
        pack(target, position, *before, base_timestamp, max_timestamp, -1, -1, -1, count)
        crc = crc32c(target[position + covered : position + size])
        pack_crc(target, position + layout.CRC_POSITION, crc)


def check_batch(
    buffer: Buffer, position: int, *, path: Path | str, file_position: int
) -> BatchHeader:
    """Return the header of the batch v2 at `position` after checking size, magic and checksum.

    `path` and `file_position` (of the batch in that file) are for the error's message. Raises
    CorruptBatchError. Kafka: DefaultRecordBatch.ensureValid.
    """
    remaining = len(buffer) - position
    if remaining < layout.BATCH_OVERHEAD:
        raise CorruptBatchError(
            path,
            file_position,
            f"a batch of at least {layout.BATCH_OVERHEAD} bytes",
            f"{remaining} bytes",
        )
    header = parse_header(buffer, position)
    if header.magic != layout.MAGIC:
        raise CorruptBatchError(
            path, file_position, f"magic {layout.MAGIC}", f"magic {header.magic}"
        )
    if not layout.BATCH_OVERHEAD <= header.size <= remaining:
        raise CorruptBatchError(
            path,
            file_position,
            f"a batch of {layout.BATCH_OVERHEAD} to {remaining} bytes",
            f"a batch of {header.size} bytes",
        )
    with memoryview(buffer) as view:
        crc = crc32c(view[position + layout.ATTRIBUTES_POSITION : position + header.size])
    if crc != header.crc:
        raise CorruptBatchError(
            path, file_position, f"checksum {header.crc:#010x}", f"checksum {crc:#010x}"
        )
    return header


def iterate_headers(
    buffer: Buffer, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each whole batch or message in `buffer[start:end]`.

    Stops before the first incomplete one, wrong magic or impossible length. Does not compare
    checksums. Kafka: FileLogInputStream.nextBatch.
    """
    position = start
    limit = len(buffer) if end is None else min(end, len(buffer))
    while (header := read_header(buffer, position, limit - position)) is not None:
        yield position, header
        position += header.size
