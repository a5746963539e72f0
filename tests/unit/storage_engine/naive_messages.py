"""Read messages v0 and v1 a second time, slow and plain, and draw sets of them.

Imports nothing of kafkalog. A fault is a ValueError.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from hypothesis import strategies as st

from tests.builders.batch_builder import Record
from tests.builders.message_builder import message


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


def read_set(data: bytes, *, lowest: int, highest: int, base: int) -> list[Record]:
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
        messages.append(Record(base + offset, timestamp, key, value))
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
