"""Read messages v0 and v1, and check their CRC-32."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from kafkalog.storage_engine.format import layout, ops
from kafkalog.storage_engine.records import codes

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Int64s, Table


def crc32_tables() -> Any:
    """Return the tables of CRC-32 (zlib's), eight bytes at a time: int64 (8, 256)."""
    tables = array("q", range(256))
    for i in range(256):
        for _ in range(8):
            tables[i] = (tables[i] >> 1) ^ (0xEDB8_8320 if tables[i] & 1 else 0)
    for i in range(256, 8 * 256):
        tables.append((tables[i - 256] >> 8) ^ tables[tables[i - 256] & 0xFF])
    return memoryview(tables).cast("B").cast("q", shape=[8, 256])


_TABLES: Table = crc32_tables()


def crc32(buffer: Bytes, start: int, end: int) -> int:
    """Return the CRC-32 (zlib's) of `buffer[start:end]`; the caller has proven the range."""
    crc = ops.LOW_32
    position = start
    while end - position >= 8:
        mixed = 0
        for i in range(4):
            byte = buffer[position + i] ^ ((crc >> (8 * i)) & 0xFF)
            mixed ^= _TABLES[7 - i, byte]
        for i in range(4, 8):
            mixed ^= _TABLES[7 - i, buffer[position + i]]
        crc = mixed
        position += 8
    while position < end:
        byte = buffer[position] ^ (crc & 0xFF)
        crc = (crc >> 8) ^ _TABLES[0, byte]
        position += 1
    return crc ^ ops.LOW_32


def find_wrong_crc32(buffer: Bytes, starts: Int64s, ends: Int64s, crcs: Int64s) -> tuple[int, int]:
    """Return (index, CRC-32 found) of the first range that has another one than it should.

    Returns (-1, 0) when all are right. A range outside the buffer is wrong.
    """
    for i in range(starts.shape[0]):
        if starts[i] < 0 or ends[i] < starts[i] or ends[i] > buffer.shape[0]:
            return i, 0
        found = crc32(buffer, starts[i], ends[i])
        if found != crcs[i]:
            return i, found
    return -1, 0


def count_messages(
    arena: Bytes, sections: Table, counts: Int64s, last_offsets: Int64s
) -> tuple[int, int, int]:
    """Count the whole messages of each section and return (status, section, position).

    sections: int64 (2, s), start and end of a set of messages; a truncated last one does not count
    counts, last_offsets: int64 (s,), written: messages, and the offset that the last one has
    """
    for section in range(sections.shape[1]):
        position = sections[0, section]
        end = sections[1, section]
        if position < 0 or end < position or end > arena.shape[0]:
            return codes.BAD_RANGE, section, position
        count = 0
        last_offset = -1
        while end - position >= layout.LOG_OVERHEAD:
            size = layout.LOG_OVERHEAD + ops.big_32(arena, position + layout.LENGTH_POSITION)
            if size < layout.MESSAGE_SIZE_MIN_V0:
                return codes.BAD_LENGTH, section, position
            if size > end - position:
                break
            last_offset = ops.big_64(arena, position)
            count += 1
            position += size
        if count == 0:
            return codes.BAD_COUNT, section, position
        counts[section] = count
        last_offsets[section] = last_offset
    return codes.OK, 0, 0


def read_message(
    arena: Bytes, position: int, end: int, is_wrapped: int, records: Table, n: int
) -> int:
    """Read the message that fills `arena[position:end]` into column `n` and return a status.

    The caller has proven that range and that it holds a message v0 at least.
    """
    magic = arena[position + layout.MAGIC_POSITION]
    if magic > 1:
        return codes.BAD_MAGIC
    key_position = position + layout.MESSAGE_KEY_POSITION_V0
    timestamp = layout.NO_TIMESTAMP
    if magic == 1:
        if end - position < layout.MESSAGE_SIZE_MIN_V1:
            return codes.BAD_LENGTH
        key_position = position + layout.MESSAGE_KEY_POSITION_V1
        timestamp = ops.big_64(arena, position + layout.MESSAGE_TIMESTAMP_POSITION)
    if is_wrapped != 0:
        if arena[position + layout.MESSAGE_ATTRIBUTES_POSITION] & layout.CODEC_MASK != 0:
            return codes.BAD_NESTING
        crc = ops.big_32(arena, position + layout.MESSAGE_CRC_POSITION) & ops.LOW_32
        if crc32(arena, position + layout.MAGIC_POSITION, end) != crc:
            return codes.BAD_CHECKSUM
    key_size = ops.big_32(arena, key_position)
    key_position += 4
    value_position = key_position + max(key_size, 0)
    if value_position > end - 4:
        return codes.BAD_FIELD
    value_size = ops.big_32(arena, value_position)
    value_position += 4
    if value_size > end - value_position:
        return codes.BAD_FIELD
    records[0, n] = position
    records[1, n] = end
    records[2, n] = ops.big_64(arena, position)
    records[3, n] = timestamp
    records[4, n] = key_position
    records[5, n] = max(key_size, -1)
    records[6, n] = value_position
    records[7, n] = max(value_size, -1)
    records[8, n] = -1
    return codes.OK


def index_messages(arena: Bytes, sections: Table, records: Table) -> tuple[int, int, int]:
    """Index the messages of each section and return (status, section, position in the arena).

    sections: int64 (8, s), as `count_messages` has counted them: start, end, count, lowest offset
    allowed, highest, what to add to the offsets found, append timestamp (what every message v1
    reads; the smallest int64 for none), whether they were wrapped (1) or one is the section (0)
    records: int64 (9, n), written, as by `index_records`; without headers their position is -1
    """
    n = 0
    none = ops.INT64_MIN
    for section in range(sections.shape[1]):
        position = sections[0, section]
        section_end = sections[1, section]
        count = sections[2, section]
        if position < 0 or section_end < position or section_end > arena.shape[0]:
            return codes.BAD_RANGE, section, position
        if count < 0 or count > records.shape[1] - n:
            return codes.BAD_COUNT, section, position
        base_offset = sections[5, section]
        last_found = -1
        for _ in range(count):
            if section_end - position < layout.MESSAGE_SIZE_MIN_V0:
                return codes.BAD_COUNT, section, position
            size = layout.LOG_OVERHEAD + ops.big_32(arena, position + layout.LENGTH_POSITION)
            if size < layout.MESSAGE_SIZE_MIN_V0 or size > section_end - position:
                return codes.BAD_LENGTH, section, position
            end = position + size
            status = read_message(arena, position, end, sections[7, section], records, n)
            if status != codes.OK:
                return status, section, position
            found = records[2, n]
            if found <= last_found or found > ops.wrap(sections[4, section] - base_offset):
                return codes.BAD_OFFSET, section, position
            if ops.wrap(base_offset + found) < sections[3, section]:
                return codes.BAD_OFFSET, section, position
            last_found = found
            records[2, n] = ops.wrap(base_offset + found)
            if sections[6, section] != none and arena[position + layout.MAGIC_POSITION] == 1:
                records[3, n] = sections[6, section]
            position = end
            n += 1
    return codes.OK, n, 0


ops.plain(globals())
