"""Read the records of batches v2: their fields, their columns and their headers.

A position is compared with the end of its record, that end with the end of its section, and that
with the array, before a byte is read.

Kafka: DefaultRecord.readFrom, ByteUtils.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout, ops
from kafkalog.storage_engine.records import codes

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Int32s, Int64s, Table


def read_varint(buffer: Bytes, position: int, end: int) -> tuple[int, int]:
    """Return (value, next position) of the zigzag varint in `buffer[position:end]`.

    The next position is -1 when it is truncated or longer than 5 bytes. Bits past the 32nd are
    dropped, as in Java.
    """
    if end - position >= 2:  # one or two bytes, nearly always
        first = buffer[position]
        if first < 0x80:
            return (first >> 1) ^ -(first & 1), position + 1
        second = buffer[position + 1]
        if second < 0x80:
            pair = (first & 0x7F) | (second << 7)
            return (pair >> 1) ^ -(pair & 1), position + 2
    value = 0
    for i in range(5):
        if position + i >= end:
            break
        byte = buffer[position + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            value &= ops.LOW_32
            return (value >> 1) ^ -(value & 1), position + i + 1
    return 0, -1


def read_varlong(buffer: Bytes, position: int, end: int) -> tuple[int, int]:
    """Return (value, next position) of the zigzag varlong: as `read_varint`, up to 10 bytes."""
    # The same fast path again: as a function that both call, it costs a read some 3 % of its time.
    if end - position >= 2:
        first = buffer[position]
        if first < 0x80:
            return (first >> 1) ^ -(first & 1), position + 1
        second = buffer[position + 1]
        if second < 0x80:
            pair = (first & 0x7F) | (second << 7)
            return (pair >> 1) ^ -(pair & 1), position + 2
    value = 0
    for i in range(10):
        if position + i >= end:
            break
        byte = buffer[position + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            unsigned_half = (value >> 1) & ops.INT64_MAX  # logical shift
            return unsigned_half ^ -(value & 1), position + i + 1
    return 0, -1


def skip_headers(buffer: Bytes, position: int, end: int) -> tuple[int, int]:
    """Return (status, position after the headers) of the header count and headers at `position`."""
    if position < end and buffer[position] == 0:  # no headers, nearly always
        return codes.OK, position + 1
    count, position = read_varint(buffer, position, end)
    if position < 0:
        return codes.BAD_VARINT, position
    if count < 0 or count > end - position:
        return codes.BAD_HEADER_COUNT, position
    for _ in range(count):
        size, position = read_varint(buffer, position, end)
        if position < 0:
            return codes.BAD_VARINT, position
        if size < 0 or size > end - position:
            return codes.BAD_FIELD, position
        position += size
        size, position = read_varint(buffer, position, end)
        if position < 0:
            return codes.BAD_VARINT, position
        if size > end - position:
            return codes.BAD_FIELD, position
        if size > 0:
            position += size
    return codes.OK, position


def read_record(buffer: Bytes, position: int, section_end: int, records: Table, n: int) -> int:
    """Read the record at `position` into column `n` of `records` and return a status.

    The offset and the timestamp are left as deltas. The rows are those of `index_records`.
    """
    start = position
    length, position = read_varint(buffer, position, section_end)
    if position < 0:
        return codes.BAD_VARINT
    if length < 1 or length > section_end - position:
        return codes.BAD_LENGTH
    end = position + length
    timestamp_delta, position = read_varlong(buffer, position + 1, end)
    if position < 0:
        return codes.BAD_VARINT
    offset_delta, position = read_varint(buffer, position, end)
    if position < 0:
        return codes.BAD_VARINT
    key_size, key_position = read_varint(buffer, position, end)
    if key_position < 0:
        return codes.BAD_VARINT
    if key_size > end - key_position:
        return codes.BAD_FIELD
    value_size, value_position = read_varint(buffer, key_position + max(key_size, 0), end)
    if value_position < 0:
        return codes.BAD_VARINT
    if value_size > end - value_position:
        return codes.BAD_FIELD
    header_position = value_position + max(value_size, 0)
    status, position = skip_headers(buffer, header_position, end)
    if status != codes.OK:
        return status
    if position != end:
        return codes.BAD_END
    records[0, n] = start
    records[1, n] = end
    records[2, n] = offset_delta
    records[3, n] = timestamp_delta
    records[4, n] = key_position
    records[5, n] = max(key_size, -1)
    records[6, n] = value_position
    records[7, n] = max(value_size, -1)
    records[8, n] = header_position
    return codes.OK


def index_records(arena: Bytes, sections: Table, records: Table) -> tuple[int, int, int]:
    """Index the records of each section and return (status, section, position in the arena).

    sections: int64 (7, s), the record bytes of one batch each: start, end, count, base offset,
    last offset delta, base timestamp, append timestamp (what every record of the section reads;
    the smallest int64 for none, then a record reads its own)
    records: int64 (9, n), written: start, end, offset, timestamp, key position and size, value
    position and size, header position; n is the sum of the counts at least
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
        base_offset = sections[3, section]
        last_offset_delta = sections[4, section]
        base_timestamp = sections[5, section]
        append_timestamp = sections[6, section]
        last_delta = -1
        for _ in range(count):
            if position >= section_end:
                return codes.BAD_COUNT, section, position
            status = read_record(arena, position, section_end, records, n)
            if status != codes.OK:
                return status, section, position
            delta = records[2, n]
            if delta <= last_delta or delta > last_offset_delta:
                return codes.BAD_OFFSET, section, position
            last_delta = delta
            position = records[1, n]
            records[2, n] = ops.wrap(base_offset + delta)
            if append_timestamp == none:
                records[3, n] = ops.wrap(records[3, n] + base_timestamp)
            else:
                records[3, n] = append_timestamp
            n += 1
        if count > 0 and position != section_end:
            return codes.BAD_COUNT, section, position
    return codes.OK, n, 0


def column_room(offsets: Int32s, validity: Bytes, data: Bytes, count: int) -> int:
    """Return for how many bytes of `count` values a column has room; -1 for too few values."""
    if offsets.shape[0] == 0:
        return layout.INT32_MAX
    if offsets.shape[0] <= count or validity.shape[0] < (count + 7) // 8:
        return -1
    return min(data.shape[0], layout.INT32_MAX)


def append_value(
    arena: Bytes, record: Table, field: int, n: int, offsets: Int32s, validity: Bytes,
    data: Bytes, end: int,
) -> int:  # fmt: skip
    """Append a field of `record` (its position's row) as value `n` of a column; return its size.

    -1 for null. The caller has proven that `data` has room from `end` on.
    """
    size = record[field + 1, 0]
    offsets[n] = end
    if size >= 0:
        validity[n >> 3] |= 1 << (n & 7)
        if size == 8:  # inlined by the compiler, unlike a copy of unknown size
            ops.copy_bytes(data, end, arena, record[field, 0], 8)
        else:
            ops.copy_bytes(data, end, arena, record[field, 0], size)
    return size


def decode_records(
    arena: Bytes, sections: Table, record: Table, numbers: Table, key_offsets: Int32s,
    key_validity: Bytes, keys: Bytes, value_offsets: Int32s, value_validity: Bytes,
    values: Bytes,
) -> tuple[int, int, int, int, int]:  # fmt: skip
    """Do what `index_records` and two of `gather_column` do for all records, in one pass.

    Returns (status, section, position, nulls among the keys, nulls among the values).
    record: int64 (9, 1), to work in; numbers: int64 (2, n), written: offset, and timestamp in
    microseconds, or the nearest that there is; key and value: as in `gather_column`, with room for
    what `arena` holds; a column without offsets is not wanted
    """
    n = 0
    none = ops.INT64_MIN
    largest = ops.INT64_MAX // 1000
    key_end, value_end = 0, 0
    key_nulls, value_nulls = 0, 0
    key_room = column_room(key_offsets, key_validity, keys, numbers.shape[1])
    value_room = column_room(value_offsets, value_validity, values, numbers.shape[1])
    room = min(key_room, value_room)
    for section in range(sections.shape[1]):
        position, section_end = sections[0, section], sections[1, section]
        count, last_delta = sections[2, section], -1
        at = section
        if position < 0 or section_end < position or section_end > arena.shape[0]:
            return codes.BAD_RANGE, at, position, key_nulls, value_nulls
        room -= section_end - position  # no more bytes than these are copied
        if room < 0:
            return codes.BAD_RANGE, at, position, key_nulls, value_nulls
        if count < 0 or count > numbers.shape[1] - n:
            return codes.BAD_COUNT, at, position, key_nulls, value_nulls
        for _ in range(count):
            if position >= section_end:
                return codes.BAD_COUNT, at, position, key_nulls, value_nulls
            status = read_record(arena, position, section_end, record, 0)
            if status != codes.OK:
                return status, at, position, key_nulls, value_nulls
            delta = record[2, 0]
            if delta <= last_delta or delta > sections[4, section]:
                return codes.BAD_OFFSET, at, position, key_nulls, value_nulls
            last_delta = delta
            position = record[1, 0]
            numbers[0, n] = ops.wrap(sections[3, section] + delta)
            timestamp = sections[6, section]
            if timestamp == none:
                timestamp = ops.wrap(record[3, 0] + sections[5, section])
            numbers[1, n] = min(max(timestamp, -largest), largest) * 1000
            if key_offsets.shape[0] > 0:
                size = append_value(arena, record, 4, n, key_offsets, key_validity, keys, key_end)
                key_nulls += size < 0
                key_end += max(size, 0)
            if value_offsets.shape[0] > 0:
                size = append_value(
                    arena, record, 6, n, value_offsets, value_validity, values, value_end
                )
                value_nulls += size < 0
                value_end += max(size, 0)
            n += 1
        if count > 0 and position != section_end:
            return codes.BAD_COUNT, at, position, key_nulls, value_nulls
    if key_offsets.shape[0] > 0:
        key_offsets[n] = key_end
    if value_offsets.shape[0] > 0:
        value_offsets[n] = value_end
    return codes.OK, n, 0, key_nulls, value_nulls


def measure_headers(
    arena: Bytes, header_positions: Int64s, ends: Int64s, rows: Int64s
) -> tuple[int, int, int, int, int]:
    """Return (status, rows with headers, headers, key bytes, value bytes) of `rows`.

    A position of -1 means no headers, as messages v0 and v1 have none.
    """
    zero = 0
    lists = 0
    headers = 0
    key_bytes = 0
    value_bytes = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if row < 0 or row >= header_positions.shape[0] or row >= ends.shape[0]:
            return codes.BAD_RANGE, zero, zero, zero, zero
        position = header_positions[row]
        end = ends[row]
        if position < 0 or end > arena.shape[0]:
            if position == -1:
                continue
            return codes.BAD_RANGE, zero, zero, zero, zero
        status, _ = skip_headers(arena, position, end)
        if status != codes.OK:
            return status, zero, zero, zero, zero
        count, position = read_varint(arena, position, end)
        lists += count > 0
        headers += count
        for _ in range(count):
            size, position = read_varint(arena, position, end)
            position += size
            key_bytes += size
            size, position = read_varint(arena, position, end)
            if size > 0:
                position += size
                value_bytes += size
    return codes.OK, lists, headers, key_bytes, value_bytes


def gather_headers(
    arena: Bytes, header_positions: Int64s, ends: Int64s, rows: Int64s,
    list_offsets: Int32s, list_validity: Bytes, key_offsets: Int32s, key_data: Bytes,
    value_offsets: Int32s, value_validity: Bytes, value_data: Bytes,
) -> None:  # fmt: skip
    """Copy the headers of `rows` into Arrow columns that `measure_headers` has measured.

    The bitmaps are zeroed. A row without headers is a null list.
    """
    headers = 0
    key_bytes = 0
    value_bytes = 0
    for i in range(rows.shape[0]):
        list_offsets[i] = headers
        end = ends[rows[i]]
        if header_positions[rows[i]] < 0:
            continue
        count, position = read_varint(arena, header_positions[rows[i]], end)
        if count > 0:
            list_validity[i >> 3] |= 1 << (i & 7)
        for _ in range(count):
            size, position = read_varint(arena, position, end)
            ops.copy_bytes(key_data, key_bytes, arena, position, size)
            key_offsets[headers] = key_bytes
            value_offsets[headers] = value_bytes
            position += size
            key_bytes += size
            size, position = read_varint(arena, position, end)
            if size >= 0:
                value_validity[headers >> 3] |= 1 << (headers & 7)
                ops.copy_bytes(value_data, value_bytes, arena, position, size)
                position += size
                value_bytes += size
            headers += 1
    list_offsets[rows.shape[0]] = headers
    key_offsets[headers] = key_bytes
    value_offsets[headers] = value_bytes


ops.plain(globals())
