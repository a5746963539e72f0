"""The loops over bytes: finding batches and records, gathering columns, writing records.

Arrays in, arrays out. Nothing here raises, allocates per record or knows a file: a kernel returns a
status, and `records.py` names the place in an error.

Bytes come from disks and strangers, so each kernel proves its bounds: a position is compared with
the end of its record, that end with the end of its section, and that with the array, before a byte
is read; whatever is gathered or copied is measured by a kernel that checks every range. Integers
wrap like Java's. The test suite also runs builds with bounds checks and sanitizers.

Kafka: DefaultRecord.readFrom and writeTo, ByteUtils.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from kafkalog.storage_engine.format import layout, ops
from kafkalog.storage_engine.records import codes

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Int32s, Int64s, Table


# --- varints: ByteUtils --------------------------------------------------------------------------
def read_varint(buffer: Bytes, position: int, end: int) -> tuple[int, int]:
    """Return (value, next position) of the zigzag varint in `buffer[position:end]`.

    The next position is -1 when it is cut off or longer than 5 bytes. Bits past the 32nd are
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


def varint_size(value: int) -> int:
    """Return the bytes of `value` as a zigzag varint or varlong."""
    rest = ops.zigzag(value)
    size = 1
    while rest > 0x7F:
        rest >>= 7
        size += 1
    return size


def write_varint(target: Bytes, position: int, value: int) -> int:
    """Write `value` as a zigzag varint or varlong and return the next position.

    The caller has proven the room, by `varint_size`.
    """
    rest = ops.zigzag(value)
    while rest > 0x7F:
        target[position] = (rest & 0x7F) | 0x80
        rest >>= 7
        position += 1
    target[position] = rest
    return position + 1


# --- batches -------------------------------------------------------------------------------------
def read_integer(buffer: Bytes, position: int, size: int) -> int:
    """Return the signed big-endian integer of `size` bytes; the caller has proven the range."""
    value = buffer[position]
    if value > 0x7F:
        value -= 0x100
    for i in range(1, size):
        value = (value << 8) | buffer[position + i]
    return value


def scan_message(buffer: Bytes, position: int, magic: int, table: Table, i: int) -> None:
    """Fill column `i` of `scan_batches` for a message v0 or v1, but for the first rows."""
    attributes = buffer[position + layout.MESSAGE_ATTRIBUTES_POSITION]
    for row in range(3, 12):
        table[row, i] = -1
    table[3, i] = 0
    table[5, i] = attributes & layout.CODEC_MASK
    if magic == 1:
        table[5, i] = attributes & (layout.CODEC_MASK | layout.TIMESTAMP_TYPE_BIT)
        table[6, i] = read_integer(buffer, position + layout.MESSAGE_TIMESTAMP_POSITION, 8)
        table[7, i] = table[6, i]
    if attributes & layout.CODEC_MASK == 0:
        table[11, i] = 1
    crc = read_integer(buffer, position + layout.MESSAGE_CRC_POSITION, 4)
    table[12, i] = crc & ops.LOW_32


def count_batches(buffer: Bytes) -> tuple[int, int, int]:
    """Return (number of complete batches, position after the last, why the scan ended).

    A message v0 or v1 counts as a batch.
    """
    position = 0
    count = 0
    while buffer.shape[0] - position >= layout.LOG_OVERHEAD:
        size = layout.LOG_OVERHEAD + read_integer(buffer, position + layout.LENGTH_POSITION, 4)
        if size < layout.MESSAGE_SIZE_MIN_V0:
            return count, position, codes.SCAN_LENGTH
        if buffer.shape[0] - position <= layout.MAGIC_POSITION:
            break
        magic = buffer[position + layout.MAGIC_POSITION]
        if magic > layout.MAGIC:
            return count, position, codes.SCAN_MAGIC
        if (magic == layout.MAGIC and size < layout.BATCH_OVERHEAD) or (
            magic == 1 and size < layout.MESSAGE_SIZE_MIN_V1
        ):
            return count, position, codes.SCAN_LENGTH
        if size > buffer.shape[0] - position:
            break
        count += 1
        position += size
    return count, position, codes.SCAN_END


def scan_batches(buffer: Bytes, table: Table) -> None:
    """Fill `table` (14 fields, b batches) with the headers of the batches `count_batches` found.

    The rows are those of `tables.BatchTable`, in its order, but for the last offset, which is a
    delta, and the base offset of a wrapper, which is its last.
    """
    position = 0
    for i in range(table.shape[1]):
        size = layout.LOG_OVERHEAD + read_integer(buffer, position + layout.LENGTH_POSITION, 4)
        base_offset = read_integer(buffer, position, 8)
        table[0, i] = position
        table[1, i] = size
        table[2, i] = base_offset
        magic = buffer[position + layout.MAGIC_POSITION]
        table[13, i] = magic
        if magic != layout.MAGIC:
            scan_message(buffer, position, magic, table, i)
            position += size
            continue
        table[3, i] = read_integer(buffer, position + layout.LAST_OFFSET_DELTA_POSITION, 4)
        table[4, i] = read_integer(buffer, position + layout.EPOCH_POSITION, 4)
        table[5, i] = read_integer(buffer, position + layout.ATTRIBUTES_POSITION, 2)
        table[6, i] = read_integer(buffer, position + layout.BASE_TIMESTAMP_POSITION, 8)
        table[7, i] = read_integer(buffer, position + layout.MAX_TIMESTAMP_POSITION, 8)
        table[8, i] = read_integer(buffer, position + layout.PRODUCER_ID_POSITION, 8)
        table[9, i] = read_integer(buffer, position + layout.PRODUCER_EPOCH_POSITION, 2)
        table[10, i] = read_integer(buffer, position + layout.BASE_SEQUENCE_POSITION, 4)
        table[11, i] = read_integer(buffer, position + layout.RECORDS_COUNT_POSITION, 4)
        table[12, i] = read_integer(buffer, position + layout.CRC_POSITION, 4) & ops.LOW_32
        position += size


# --- records of batches --------------------------------------------------------------------------
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


# --- messages v0 and v1 --------------------------------------------------------------------------
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

    (-1, 0) when there is none. A range outside the buffer is wrong.
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

    sections: int64 (2, s), start and end of a set of messages; a last one cut off is none
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
            size = layout.LOG_OVERHEAD + read_integer(arena, position + layout.LENGTH_POSITION, 4)
            if size < layout.MESSAGE_SIZE_MIN_V0:
                return codes.BAD_LENGTH, section, position
            if size > end - position:
                break
            last_offset = read_integer(arena, position, 8)
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
        timestamp = read_integer(arena, position + layout.MESSAGE_TIMESTAMP_POSITION, 8)
    if is_wrapped != 0:
        if arena[position + layout.MESSAGE_ATTRIBUTES_POSITION] & layout.CODEC_MASK != 0:
            return codes.BAD_NESTING
        crc = read_integer(arena, position + layout.MESSAGE_CRC_POSITION, 4) & ops.LOW_32
        if crc32(arena, position + layout.MAGIC_POSITION, end) != crc:
            return codes.BAD_CHECKSUM
    key_size = read_integer(arena, key_position, 4)
    key_position += 4
    value_position = key_position + max(key_size, 0)
    if value_position > end - 4:
        return codes.BAD_FIELD
    value_size = read_integer(arena, value_position, 4)
    value_position += 4
    if value_size > end - value_position:
        return codes.BAD_FIELD
    records[0, n] = position
    records[1, n] = end
    records[2, n] = read_integer(arena, position, 8)
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
            size = layout.LOG_OVERHEAD + read_integer(arena, position + layout.LENGTH_POSITION, 4)
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


# --- columns -------------------------------------------------------------------------------------
def measure_column(
    arena_size: int, positions: Int64s, sizes: Int64s, rows: Int64s
) -> tuple[int, int]:
    """Return (bytes, nulls) of the values of `rows`; (-1, row) when one lies outside the arena."""
    total = 0
    nulls = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if row < 0 or row >= positions.shape[0] or row >= sizes.shape[0]:
            return -1, row
        size = sizes[row]
        if size < 0:
            nulls += 1
        else:
            position = positions[row]
            if position < 0 or position > arena_size or size > arena_size - position:
                return -1, row
            total += size
    return total, nulls


def gather_column(
    arena: Bytes, positions: Int64s, sizes: Int64s, rows: Int64s, offsets: Int32s,
    validity: Bytes, data: Bytes,
) -> None:  # fmt: skip
    """Copy the values of `rows` into an Arrow binary column that `measure_column` has measured.

    offsets: int32 (m + 1,); data: exactly the bytes measured, at most 2^31 - 1
    validity: zeroed bitmap, one bit for each of the m rows; empty when there are no nulls
    """
    total = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        size = sizes[row]
        offsets[i] = total
        if size >= 0:
            if validity.shape[0] > 0:
                validity[i >> 3] |= 1 << (i & 7)
            if size == 8:  # inlined by the compiler, unlike a copy of unknown size
                ops.copy_bytes(data, total, arena, positions[row], 8)
            else:
                ops.copy_bytes(data, total, arena, positions[row], size)
            total += size
    offsets[rows.shape[0]] = total


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


# --- writing records -----------------------------------------------------------------------------
def measure_fields(column: Table, row: int, data_size: int, minimum: int) -> int:
    """Return the bytes of a size and its value; -1 when the value does not lie in its data.

    column: int64 (2, m), positions and sizes; `minimum` is the smallest size allowed
    """
    position = column[0, row]
    size = column[1, row]
    if size < minimum or position < 0 or max(size, 0) > data_size - position:
        return -1
    return varint_size(size) + max(size, 0)


def plan_batches(
    keys: Table, key_data_size: int, values: Table, value_data_size: int,
    header_lists: Table, header_keys: Table, header_key_data_size: int,
    header_values: Table, header_value_data_size: int, timestamps: Int64s, rows: Int64s,
    groups: Int64s, batch_size: int, size_max: int, body_sizes: Int64s, batches: Table,
) -> tuple[int, int, int]:  # fmt: skip
    """Split `rows` into batches and return (status, batches, row at fault).

    A batch of one record that exceeds `size_max` is a fault; then its size is in second place.

    m input rows, r rows to write, h headers.
    keys, values: int64 (2, m), position and size (-1 null) in their data
    header_lists: int64 (2, m), first header and number of headers; (2, 0) when nobody has any
    header_keys, header_values: int64 (2, h), like keys
    timestamps: int64 (m,) ms
    groups: int64 (g,), ascending indexes into `rows` at each of which a new batch begins
    batch_size: bytes of a whole batch; a batch exceeds it only to hold its one record
    body_sizes: int64 (r,), written: bytes of each record after its length
    batches: int64 (5, r), written: first index into `rows`, end of it, bytes of the batch, base
    timestamp, max timestamp
    """
    count = 0
    size = 0
    group = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        is_first = count == 0
        if group < groups.shape[0] and groups[group] <= i:
            is_first = True
            group += 1
        if row < 0 or row >= keys.shape[1] or row >= values.shape[1] or row >= timestamps.shape[0]:
            return codes.BAD_RANGE, count, row
        key_size = measure_fields(keys, row, key_data_size, -1)
        value_size = measure_fields(values, row, value_data_size, -1)
        if key_size < 0 or value_size < 0:
            return codes.BAD_RANGE, count, row
        headers = 0
        headers_size = 1
        if header_lists.shape[1] > 0:
            first = header_lists[0, row]
            headers = header_lists[1, row]
            if first < 0 or headers < 0 or headers > header_keys.shape[1] - first:
                return codes.BAD_RANGE, count, row
            headers_size = varint_size(headers)
            for header in range(first, first + headers):
                name_size = measure_fields(header_keys, header, header_key_data_size, 0)
                text_size = measure_fields(header_values, header, header_value_data_size, -1)
                if name_size < 0:
                    return codes.BAD_HEADER_KEY, count, row
                if text_size < 0:
                    return codes.BAD_RANGE, count, row
                headers_size += name_size + text_size
        fixed = 1 + key_size + value_size + headers_size
        timestamp = timestamps[row]
        body = 0
        record_size = 0
        if not is_first:
            delta = ops.wrap(timestamp - batches[3, count - 1])
            body = fixed + varint_size(delta) + varint_size(i - batches[0, count - 1])
            record_size = varint_size(body) + body
        if is_first or size + record_size > batch_size:
            batches[0, count] = i
            batches[3, count] = timestamp
            batches[4, count] = timestamp
            body = fixed + 2  # both deltas are zero
            record_size = varint_size(body) + body
            size = layout.BATCH_OVERHEAD
            if record_size > size_max - size:
                return codes.TOO_LARGE, size + record_size, row
            count += 1
        size += record_size
        body_sizes[i] = body
        batches[1, count - 1] = i + 1
        batches[2, count - 1] = size
        batches[4, count - 1] = max(batches[4, count - 1], timestamp)
    return codes.OK, count, -1


def write_field(target: Bytes, position: int, data: Bytes, column: Table, row: int) -> int:
    """Write a size and its value and return the next position."""
    size = column[1, row]
    position = write_varint(target, position, size)
    if size == 8:
        ops.copy_bytes(target, position, data, column[0, row], 8)
    elif size > 0:
        ops.copy_bytes(target, position, data, column[0, row], size)
    return position + max(size, 0)


def write_records(
    target: Bytes, key_data: Bytes, keys: Table, value_data: Bytes, values: Table,
    header_lists: Table, header_key_data: Bytes, header_keys: Table,
    header_value_data: Bytes, header_values: Table, timestamps: Int64s, rows: Int64s,
    body_sizes: Int64s, batches: Table,
) -> int:  # fmt: skip
    """Write the records of batches that `plan_batches` has planned, with the same arrays.

    The 61 bytes before each batch's records are left free. Returns the bytes used, or -1 when
    they are not what was planned.
    """
    position = 0
    for batch in range(batches.shape[1]):
        batch_end = position + batches[2, batch]
        if batch_end > target.shape[0]:
            return -1
        position += layout.BATCH_OVERHEAD
        base_timestamp = batches[3, batch]
        first = batches[0, batch]
        for i in range(first, batches[1, batch]):
            row = rows[i]
            if varint_size(body_sizes[i]) + body_sizes[i] > batch_end - position:
                return -1
            position = write_varint(target, position, body_sizes[i])
            target[position] = 0  # attributes
            position = write_varint(
                target, position + 1, ops.wrap(timestamps[row] - base_timestamp)
            )
            position = write_varint(target, position, i - first)
            position = write_field(target, position, key_data, keys, row)
            position = write_field(target, position, value_data, values, row)
            if header_lists.shape[1] == 0:
                target[position] = 0
                position += 1
                continue
            start = header_lists[0, row]
            position = write_varint(target, position, header_lists[1, row])
            for header in range(start, start + header_lists[1, row]):
                position = write_field(target, position, header_key_data, header_keys, header)
                position = write_field(target, position, header_value_data, header_values, header)
        if position != batch_end:
            return -1
    return position


def rewrite_records(
    arena: Bytes, records: Table, rows: Int64s, base_offset: int, base_timestamp: int,
    target: Bytes,
) -> int:  # fmt: skip
    """Write the records `rows` under another base and return their bytes; -1 for a fault.

    Key, value and headers are copied; attributes are zero and both deltas new.
    records: int64 (9, n) of `index_records`, offsets and timestamps absolute
    target: written; when it is empty the bytes are only counted
    """
    position = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if row < 0 or row >= records.shape[1]:
            return -1
        # The key's size is written anew: a stranger's varint may be longer than it need be.
        start = records[4, row]
        end = records[1, row]
        key_size = records[5, row]
        if start < 0 or end < start or end > arena.shape[0]:
            return -1
        timestamp_delta = ops.wrap(records[3, row] - base_timestamp)
        offset_delta = ops.wrap(records[2, row] - base_offset)
        body = 1 + varint_size(timestamp_delta) + varint_size(offset_delta)
        body += varint_size(key_size) + end - start
        size = varint_size(body) + body
        if target.shape[0] == 0:
            position += size
            continue
        if size > target.shape[0] - position:
            return -1
        position = write_varint(target, position, body)
        target[position] = 0
        position = write_varint(target, position + 1, timestamp_delta)
        position = write_varint(target, position, offset_delta)
        position = write_varint(target, position, key_size)
        ops.copy_bytes(target, position, arena, start, end - start)
        position += end - start
    return position


ops.plain(globals())
