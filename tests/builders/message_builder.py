"""Build messages v0 and v1 by hand, as bytes: nothing here is kafkalog's code."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence

from tests.builders.batch_builder import LOG_APPEND_TIME, Record, compressed


def field_of(data: bytes | None) -> bytes:
    return struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data


def entry(offset: int, checked: bytes, crc: int | None = None) -> bytes:
    """Return a message of any contents under a right checksum."""
    crc = zlib.crc32(checked) if crc is None else crc
    return struct.pack(">qiI", offset, len(checked) + 4, crc) + checked


def message(
    magic: int,
    offset: int,
    key: bytes | None,
    value: bytes | None,
    *,
    timestamp: int = -1,
    attributes: int = 0,
    crc: int | None = None,
) -> bytes:
    checked = struct.pack(">bb", magic, attributes)
    if magic > 0:
        checked += struct.pack(">q", timestamp)
    return entry(offset, checked + field_of(key) + field_of(value), crc)


def messages(magic: int, records: Iterable[Record], *, shift: int = 0) -> bytes:
    """Return plain messages; their offsets are lower by `shift`."""
    return b"".join(
        message(magic, r.offset - shift, r.key, r.value, timestamp=r.timestamp) for r in records
    )


def wrapper(
    magic: int,
    codec: int,
    records: Sequence[Record],
    *,
    offset: int | None = None,
    inner_magic: int | None = None,
    append_time: int | None = None,
    start: int = 0,
    payload: bytes | None = None,
    raw: bool = False,
) -> bytes:
    """Return a compressed set; inner offsets are relative, from `start`, if the wrapper is v1."""
    if payload is None:
        shift = records[0].offset - start if magic == 1 and records else 0
        payload = messages(magic if inner_magic is None else inner_magic, records, shift=shift)
    latest = max((record.timestamp for record in records), default=-1)
    return message(
        magic,
        records[-1].offset if offset is None else offset,
        None,
        compressed(codec, payload, magic=magic, raw=raw),
        timestamp=latest if append_time is None else append_time,
        attributes=codec | (0 if append_time is None else LOG_APPEND_TIME),
    )
