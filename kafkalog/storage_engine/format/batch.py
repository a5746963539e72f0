"""The header of a record batch v2: parse and seal it.

A *batch* is a header of 61 bytes and its records, one section of bytes that may be compressed. The
checksum does not cover `base_offset` and `partition_leader_epoch`. A finished batch thus gets its
place in the log by a write of twelve bytes (`stamping`).

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
from typing import NamedTuple, TypeAlias

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.checksum import crc32c

Buffer: TypeAlias = bytes | bytearray | memoryview


class BatchHeader(NamedTuple):
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
    def is_wrapper(self) -> bool:
        """Whether it is a compressed message v0 or v1: its own timestamp is not that of records."""
        return self.magic != layout.MAGIC and self.codec != layout.CODEC_NONE

    @property
    def is_transactional(self) -> bool:
        """Whether the batch belongs to a transaction."""
        return self.attributes & layout.TRANSACTIONAL_BIT != 0

    @property
    def is_control(self) -> bool:
        """Whether the batch holds a control record instead of data."""
        return self.attributes & layout.CONTROL_BIT != 0


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


def seal_batches(
    target: memoryview, batches: Iterable[tuple[int, int, int, int, int, int, int]]
) -> None:
    """Write the headers, with their checksums, of new batches without producers.

    A batch is (position, size, base offset, number of records, base timestamp, max timestamp,
    attributes). Kafka: DefaultRecordBatch.writeHeader.
    """
    pack, pack_crc = layout.BATCH_HEADER.pack_into, layout.CHECKSUM.pack_into
    overhead, magic, covered = layout.LOG_OVERHEAD, layout.MAGIC, layout.ATTRIBUTES_POSITION
    for position, size, base_offset, count, base_timestamp, max_timestamp, attributes in batches:
        before = base_offset, size - overhead, -1, magic, 0, attributes, count - 1
        pack(target, position, *before, base_timestamp, max_timestamp, -1, -1, -1, count)
        crc = crc32c(target[position + covered : position + size])
        pack_crc(target, position + layout.CRC_POSITION, crc)


def iterate_headers(buffer: Buffer) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of each whole batch or message in `buffer`.

    Stops before the first incomplete one, wrong magic or impossible length. Does not compare
    checksums. Kafka: FileLogInputStream.nextBatch.
    """
    position = 0
    while (header := read_header(buffer, position, len(buffer) - position)) is not None:
        yield position, header
        position += header.size
