"""Read the record format a second time, slow and plain: what the kernels are compared with.

Imports nothing of kafkalog. A fault is a ValueError.
"""

from __future__ import annotations

import struct

from tests.builders.batch_builder import Headers, Record, section

HEADER = struct.Struct(">qiibIhiqqqhii")
INT64 = 1 << 64


def signed(number: int, bits: int) -> int:
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def read_varint(data: bytes, position: int, end: int, bits: int) -> tuple[int, int]:
    """Return (value, next position) of a varint (32 bits) or varlong (64)."""
    value = 0
    for i, byte in enumerate(data[position : min(end, position + (5 if bits == 32 else 10))]):
        value += byte % 128 * 128**i
        if byte < 128:
            value %= 1 << bits
            return (value // 2 if value % 2 == 0 else -(value // 2) - 1), position + i + 1
    raise ValueError("varint")


def crc32c(data: bytes) -> int:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def read_section(
    data: bytes,
    *,
    count: int,
    base_offset: int,
    last_offset_delta: int,
    base_timestamp: int,
    append_timestamp: int | None = None,
) -> list[Record]:
    """Return the records of a decompressed section, or raise ValueError."""
    if count < 0:
        raise ValueError("count")
    records = []
    position = 0
    last_delta = -1
    for _ in range(count):
        length, position = read_varint(data, position, len(data), 32)
        end = position + length
        if length < 1 or end > len(data):
            raise ValueError("length")
        time_delta, position = read_varint(data, position + 1, end, 64)
        delta, position = read_varint(data, position, end, 32)
        if not last_delta < delta <= last_offset_delta:
            raise ValueError("offset")
        last_delta = delta
        parts: list[bytes | None] = []
        for _ in range(2):
            part, position = read_sized(data, position, end)
            parts.append(part)
        header_count, position = read_varint(data, position, end, 32)
        if not 0 <= header_count <= end - position:
            raise ValueError("header count")
        headers: Headers = []
        for _ in range(header_count):
            name, position = read_sized(data, position, end)
            content, position = read_sized(data, position, end)
            if name is None:
                raise ValueError("header key")
            headers.append((name, content))
        if position != end:
            raise ValueError("end")
        time = base_timestamp + time_delta if append_timestamp is None else append_timestamp
        records.append(Record(base_offset + delta, signed(time, 64), *parts, headers))
    if count and position != len(data):
        raise ValueError("count")
    return records


def read_sized(data: bytes, position: int, end: int) -> tuple[bytes | None, int]:
    size, position = read_varint(data, position, end, 32)
    if size < 0:
        return None, position
    if size > end - position:
        raise ValueError("size")
    return data[position : position + size], position + size


def murmur2(data: bytes) -> int:
    """Return the signed hash, as Java prints it."""
    mask = 0xFFFF_FFFF
    multiplier = 0x5BD1_E995
    value = 0x9747_B28C ^ len(data)
    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        part = word * multiplier & mask
        part = (part ^ part >> 24) * multiplier & mask
        value = value * multiplier & mask ^ part
    if rest := data[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * multiplier & mask
    value = (value ^ value >> 13) * multiplier & mask
    return signed(value ^ value >> 15, 32)


def partition(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFF_FFFF) % partitions


def batches(records: list[Record], batch_size: int) -> list[list[Record]]:
    """Group records as an encoder must: a batch is full before it would pass `batch_size` bytes."""
    groups: list[list[Record]] = []
    for item in records:
        if groups:
            first = groups[-1][0]
            grown = [*groups[-1], item]
            if 61 + len(section(grown, first.offset, first.timestamp)) <= batch_size:
                groups[-1] = grown
                continue
        groups.append([item])
    return groups
