"""Build batches v2 by hand, as bytes: nothing here is kafkalog's code."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import lz4.frame
import pyarrow as pa
import snappy
from crc32c import crc32c

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
LOG_APPEND_TIME, TRANSACTIONAL, CONTROL, HORIZON = 0x08, 0x10, 0x20, 0x40
ABORT, COMMIT = 0, 1
NO_PRODUCER = (-1, -1, -1)
Headers = list[tuple[bytes, bytes | None]]


@dataclass(frozen=True)
class Record:
    """A record, also of a message v0 or v1, which has no headers."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = field(default_factory=list, hash=False)


@dataclass(frozen=True)
class BuiltBatch:
    """The bytes of a batch, with what a reader must find in them."""

    data: bytes
    records: list[Record]
    base_offset: int
    last_offset: int
    attributes: int
    max_timestamp: int
    producer: tuple[int, int, int]
    """Id, epoch, base sequence."""
    leader_epoch: int

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)


@dataclass(kw_only=True)
class BatchBuilder:
    """Build a batch v2 of the added records; the defaults are what a producer sends."""

    base_offset: int = 0
    last_offset: int | None = None
    """The last record's, unless a cleaner took that record."""
    codec: int = NONE
    attributes: int = 0
    """Bits beside those of the other fields."""
    transactional: bool = False
    control: bool = False
    horizon: int | None = None
    """The delete horizon takes the place of the base timestamp."""
    producer: tuple[int, int, int] = NO_PRODUCER
    leader_epoch: int = -1
    base_timestamp: int | None = None
    max_timestamp: int | None = None
    count: int | None = None
    """A count of records to lie with."""
    payload: bytes | None = None
    """Bytes in the place of the records: compressed already, or wrong."""
    magic: int = 2
    records: list[Record] = field(default_factory=list)

    def add(
        self,
        key: bytes | None,
        value: bytes | None,
        *,
        timestamp: int = 0,
        offset: int | None = None,
        headers: Headers | None = None,
    ) -> Self:
        """Add a record, at the next offset if none is given."""
        if offset is None:
            offset = self.records[-1].offset + 1 if self.records else self.base_offset
        self.records.append(Record(offset, timestamp, key, value, headers or []))
        return self

    def build(self) -> BuiltBatch:
        records = self.records
        base_timestamp = self.base_timestamp if self.horizon is None else self.horizon
        if base_timestamp is None:
            base_timestamp = records[0].timestamp if records else -1
        max_timestamp = self.max_timestamp
        if max_timestamp is None:
            max_timestamp = max((record.timestamp for record in records), default=-1)
        last_offset = self.last_offset
        if last_offset is None:
            last_offset = records[-1].offset if records else self.base_offset
        attributes = self.attributes | self.codec
        attributes |= TRANSACTIONAL * self.transactional | CONTROL * self.control
        attributes |= HORIZON * (self.horizon is not None)
        payload = self.payload
        if payload is None:
            payload = compressed(self.codec, section(records, self.base_offset, base_timestamp))
        checked = struct.pack(
            ">hiqqqhii",
            attributes,
            last_offset - self.base_offset,
            base_timestamp,
            max_timestamp,
            *self.producer,
            len(records) if self.count is None else self.count,
        )
        checked += payload
        before = (self.base_offset, len(checked) + 9, self.leader_epoch, self.magic)
        return BuiltBatch(
            struct.pack(">qiibI", *before, crc32c(checked)) + checked,
            list(records),
            self.base_offset,
            last_offset,
            attributes,
            max_timestamp,
            self.producer,
            self.leader_epoch,
        )


# --- batches that many tests want ----------------------------------------------------------------


def batch_data(records: Iterable[Record], **fields: Any) -> bytes:
    """Return the bytes of a batch that begins with the first of these records."""
    records = list(records)
    fields = {"base_offset": records[0].offset if records else 0} | fields
    return BatchBuilder(records=records, **fields).build().data


def batch(
    first: int,
    count: int,
    *,
    size: int = 10,
    last: int | None = None,
    step: int = 1,
    timestamp: int | None = None,
    of: int = -1,
    **fields: Any,
) -> BuiltBatch:
    """Build `count` records from offset `first`, every `step` offsets; timestamps rise.

    They belong to a transaction of the producer `of`, if it is given.
    """
    fields = {"leader_epoch": 0} | fields
    if of >= 0:
        fields |= {"producer": (of, 0, 0), "transactional": True}
    last = first + max(count, 1) * step - 1 if last is None else last
    builder = BatchBuilder(base_offset=first, last_offset=last, **fields)
    for offset in range(first, first + count * step, step):
        builder.add(
            b"key-%d" % (offset % 7),
            b"%d:" % offset + b"v" * size,
            timestamp=1000 + 10 * offset if timestamp is None else timestamp,
            offset=offset,
        )
    return builder.build()


def at_times(
    first: int,
    times: Sequence[int] = (0,),
    producer_id: int = -1,
    epoch: int = 0,
    sequence: int = 0,
    transactional: bool = False,
    *,
    value_size: int = 1,
    keyless: bool = False,
    **fields: Any,
) -> BuiltBatch:
    """Build a record for each timestamp, from offset `first`."""
    builder = BatchBuilder(
        base_offset=first,
        transactional=transactional,
        producer=NO_PRODUCER if producer_id < 0 else (producer_id, epoch, sequence),
        **{"leader_epoch": 0} | fields,
    )
    for i, time in enumerate(times):
        builder.add(None if keyless else b"%d" % (i % 3), b"v" * value_size, timestamp=time)
    return builder.build()


def empty(first: int, last: int, **fields: Any) -> BuiltBatch:
    """Build what the cleaner leaves of a batch of which no record stays."""
    fields = {"max_timestamp": 1000 + 10 * last, "leader_epoch": 0} | fields
    return BatchBuilder(base_offset=first, last_offset=last, **fields).build()


def end_marker(kind: int, coordinator_epoch: int = 0) -> tuple[bytes, bytes]:
    """Return key and value of the record that ends a transaction: ABORT or COMMIT."""
    return struct.pack(">hh", 0, kind), struct.pack(">hi", 0, coordinator_epoch)


def marker(
    offset: int,
    kind: int = COMMIT,
    producer_id: int = -1,
    *,
    timestamp: int = 0,
    epoch: int = 0,
    coordinator_epoch: int = 0,
    leader_epoch: int = 0,
) -> BuiltBatch:
    """Build the control batch that ends a transaction."""
    builder = BatchBuilder(
        base_offset=offset,
        transactional=True,
        control=True,
        producer=NO_PRODUCER if producer_id < 0 else (producer_id, epoch, -1),
        leader_epoch=leader_epoch,
    )
    return builder.add(*end_marker(kind, coordinator_epoch), timestamp=timestamp).build()


def joined(batches: Iterable[BuiltBatch]) -> bytes:
    return b"".join(batch.data for batch in batches)


def data_records(batches: Iterable[BuiltBatch]) -> list[Record]:
    """Return the records that a reader gets, without those of markers."""
    return [record for batch in batches if not batch.is_control for record in batch.records]


# --- what a batch consists of --------------------------------------------------------------------


def varint(number: int) -> bytes:
    rest = 2 * number if number >= 0 else -2 * number - 1
    out = bytearray()
    while rest >= 0x80:
        out.append(rest % 0x80 + 0x80)
        rest //= 0x80
    return bytes([*out, rest])


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def record(
    offset_delta: int,
    timestamp_delta: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers,
) -> bytes:
    body = b"\0" + varint(timestamp_delta) + varint(offset_delta) + sized(key) + sized(value)
    body += varint(len(headers))
    for name, content in headers:
        body += sized(name) + sized(content)
    return varint(len(body)) + body


def section(records: Iterable[Record], base_offset: int, base_timestamp: int) -> bytes:
    """Return the records of a batch, before they are compressed."""
    return b"".join(
        record(r.offset - base_offset, r.timestamp - base_timestamp, r.key, r.value, r.headers)
        for r in records
    )


def compressed(codec: int, data: bytes, *, magic: int = 2, raw: bool = False) -> bytes:
    """Compress as a client of that magic does; `raw` is snappy without xerial's frames."""
    if codec == GZIP:
        return gzip.compress(data, mtime=0)
    if codec == SNAPPY and raw:
        return bytes(snappy.compress(data))
    if codec == SNAPPY:
        blocks = [bytes(snappy.compress(data[i : i + 50])) for i in range(0, len(data), 50)]
        head = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
        return head + b"".join(struct.pack(">i", len(block)) + block for block in blocks)
    if codec == LZ4:
        frame = bytes(lz4.frame.compress(data, block_linked=False, store_size=False))
        assert (frame[4:6], frame[6]) == (b"\x60\x40", 0x82)
        # Kafka took the magic of the frame into the checksum then.
        return frame[:6] + b"\x1a" + frame[7:] if magic == 0 else frame
    if codec == ZSTD:
        return bytes(pa.Codec("zstd").compress(data, asbytes=True))
    return data
