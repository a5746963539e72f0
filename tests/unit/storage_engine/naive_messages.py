"""Messages v0 and v1 a second time, slow and plain: an encoder, and what a reader makes of them.

Imports nothing of kafkalog. A fault is a ValueError.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import lz4.frame
import snappy
from hypothesis import strategies as st

NONE, GZIP, SNAPPY, LZ4 = range(4)
LOG_APPEND_TIME = 8


@dataclass(frozen=True)
class Message:
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None


def field(data: bytes | None) -> bytes:
    return struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data


def entry(offset: int, checked: bytes, crc: int | None = None) -> bytes:
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
    return entry(offset, checked + field(key) + field(value), crc)


def compress(codec: int, data: bytes, *, magic: int, raw: bool = False) -> bytes:
    if codec == GZIP:
        return gzip.compress(data, mtime=0)
    if codec == SNAPPY and raw:
        return bytes(snappy.compress(data))
    if codec == SNAPPY:
        blocks = [bytes(snappy.compress(data[i : i + 50])) for i in range(0, len(data), 50)]
        head = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
        return head + b"".join(struct.pack(">i", len(block)) + block for block in blocks)
    frame = lz4.frame.compress(data, block_linked=False, store_size=False)
    assert frame[4:6] == b"\x60\x40"
    assert frame[6] == 0x82
    # Kafka took the magic of the frame into the checksum then.
    return bytes(frame[:6] + b"\x1a" + frame[7:]) if magic == 0 else bytes(frame)


def wrapper(
    magic: int,
    codec: int,
    messages: list[Message],
    *,
    offset: int | None = None,
    inner_magic: int | None = None,
    append_time: int | None = None,
    start: int = 0,
    payload: bytes | None = None,
    raw: bool = False,
) -> bytes:
    """A compressed set; inner offsets are relative, from `start`, if the wrapper is v1."""
    shift = messages[0].offset - start if magic == 1 and messages else 0
    if payload is None:
        payload = b"".join(
            message(
                magic if inner_magic is None else inner_magic,
                m.offset - shift,
                m.key,
                m.value,
                timestamp=m.timestamp,
            )
            for m in messages
        )
    times = [m.timestamp for m in messages]
    return message(
        magic,
        messages[-1].offset if offset is None else offset,
        None,
        compress(codec, payload, magic=magic, raw=raw),
        timestamp=max(times, default=-1) if append_time is None else append_time,
        attributes=codec | (0 if append_time is None else LOG_APPEND_TIME),
    )


def read_field(data: bytes, position: int) -> tuple[bytes | None, int]:
    if position + 4 > len(data):
        raise ValueError("field")
    (size,) = struct.unpack_from(">i", data, position)
    position += 4
    if size < 0:
        return None, position
    if position + size > len(data):
        raise ValueError("size")
    return data[position : position + size], position + size


def read_set(data: bytes, *, lowest: int, highest: int, base: int) -> list[Message]:
    """Return the messages of a decompressed set, or raise ValueError."""
    found = []
    last = -1
    while len(data) >= 12:
        offset, size = struct.unpack_from(">qi", data)
        if size < 14:
            raise ValueError("size")
        if size > len(data) - 12:
            break
        content, data = data[12 : 12 + size], data[12 + size :]
        found.append((offset, content))
    if not found:
        raise ValueError("empty")
    messages = []
    for offset, content in found:
        crc, magic, attributes = struct.unpack_from(">IBB", content)
        if magic > 1 or attributes & 7 or crc != zlib.crc32(content[4:]):
            raise ValueError("magic, nesting or checksum")
        if magic == 1 and len(content) < 22:
            raise ValueError("size")
        timestamp = struct.unpack_from(">q", content, 6)[0] if magic else -1
        key, position = read_field(content, 14 if magic else 6)
        value, _ = read_field(content, position)
        if offset <= last or not lowest <= base + offset <= highest:
            raise ValueError("offset")
        last = offset
        messages.append(Message(base + offset, timestamp, key, value))
    return messages


@st.composite
def sets(draw: Any) -> bytes:
    """Sets of messages, most of them sound, some with a wrong byte under a right checksum."""
    some = st.one_of(st.none(), st.binary(max_size=6))
    offsets = draw(st.lists(st.integers(0, 12), max_size=4))
    if draw(st.booleans()):
        offsets = sorted(set(offsets))
    data = b""
    for offset in offsets:
        encoded = bytearray(
            message(
                draw(st.integers(0, 1)),
                offset,
                draw(some),
                draw(some),
                timestamp=draw(st.integers(-(2**63), 2**63 - 1)),
            )
        )
        if draw(st.integers(0, 9)) == 0:
            place = draw(st.integers(0, len(encoded) - 1))
            encoded[place] = draw(st.sampled_from([0, 1, 2, 127, 128, 255]))
            if place >= 16:
                encoded[12:16] = struct.pack(">I", zlib.crc32(encoded[16:]))
        data += encoded
    return data[: len(data) - draw(st.sampled_from([0, 0, 0, 1, 20, 30]))]
