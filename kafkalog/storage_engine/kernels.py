"""The loops over bytes: finding batches and records, gathering columns, writing records.

Arrays in, arrays out. Nothing here raises, allocates per record or knows a file: a kernel returns a
status, and `records.py` names the place in an error.

Bytes come from disks and strangers, so each kernel proves its bounds: a position is compared with
the end of its record, that end with the end of its section, and that with the array, before a byte
is read; whatever is gathered or copied is measured by a kernel that checks every range. Integers
wrap where Java's do. The test suite runs all of this under numba's own bounds checks too.

Kafka: DefaultRecord.readFrom and writeTo, ByteUtils.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from kafkalog.storage_engine import layout

RELEASE = "0.1.0"  # a new release gets a new numba cache
# No reference counts: without them a call costs nothing, with them a record took four times as long
# (measured). It holds for kernels that allocate nothing, and so for all of these.
kernel = partial(njit, cache=True, nogil=True, _nrt=False)
inlined = partial(kernel, forceinline=True)

Int: TypeAlias = Any  # int, and without the JIT np.int64: what a kernel computes is either
Pair: TypeAlias = tuple[Int, Int]
Triple: TypeAlias = tuple[Int, Int, Int]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]
Offsets: TypeAlias = npt.NDArray[np.int32]

I64: Any = types.int64
VOID: Any = types.void
BYTES = types.Array(types.uint8, 1, "C", readonly=True)  # accepts writable arrays too
INTEGERS = types.Array(types.int64, 1, "C", readonly=True)
BYTES_OUT = types.Array(types.uint8, 1, "C")
INTEGERS_OUT = types.Array(types.int64, 1, "C")
OFFSETS_OUT = types.Array(types.int32, 1, "C")
TABLE = types.Array(types.int64, 2, "C", readonly=True)
TABLE_OUT = types.Array(types.int64, 2, "C")
PAIR: Any = types.UniTuple(types.int64, 2)
FIVE: Any = types.UniTuple(types.int64, 5)
TRIPLE: Any = types.UniTuple(types.int64, 3)

# What a kernel found wrong; `records.py` has a sentence for each.
OK = 0
BAD_VARINT = 1
BAD_LENGTH = 2
BAD_FIELD = 3
BAD_HEADER_COUNT = 4
BAD_END = 5
BAD_OFFSET = 6
BAD_COUNT = 7
BAD_RANGE = 8
BAD_HEADER_KEY = 9
TOO_LARGE = 10
BAD_CHECKSUM = 11
BAD_NESTING = 12
BAD_MAGIC = 13

# Why a scan ended.
SCAN_END = 0
SCAN_LENGTH = 1
SCAN_MAGIC = 2

HEADER_FIELDS = 14
RECORD_FIELDS = 9
PLAN_FIELDS = 5
RECORD_SIZE_MIN = 7
"""Seven varints of one byte: length, attributes, two deltas, two sizes, header count."""

if getattr(config, "DISABLE_JIT", False):

    def copy_bytes(target: Any, to: Int, source: Any, start: Int, size: Int) -> None:
        """Copy as the compiled one does."""
        target[to : to + size] = source[start : start + size]

else:
    # Numba passes its own types to an intrinsic, for which there are no stubs.
    @intrinsic
    def copy_bytes(typing_context, target, to, source, start, size):  # type: ignore[no-untyped-def]
        """Copy `size` bytes by memcpy; the caller has proven both ranges."""
        signature = types.void(target, types.intp, source, types.intp, types.intp)

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = ir.IntType(8).as_pointer()
            target, to, source, start, size = arguments
            target_array = make_array(signature.args[0])(context, builder, target)
            source_array = make_array(signature.args[2])(context, builder, source)
            cgutils.raw_memcpy(
                builder,
                builder.gep(builder.bitcast(target_array.data, pointer), [to]),
                builder.gep(builder.bitcast(source_array.data, pointer), [start]),
                size,
                1,
            )
            return context.get_dummy_value()

        return signature, codegen


# --- varints: ByteUtils --------------------------------------------------------------------------
@inlined([PAIR(BYTES, I64, I64)])
def read_varint(buffer: Bytes, position: Int, end: Int) -> Pair:
    """Return (value, next position) of the zigzag varint in `buffer[position:end]`.

    The next position is -1 when it is cut off or longer than 5 bytes. Bits past the 32nd are
    dropped, as in Java.
    """
    if end - position >= 2:  # one or two bytes, nearly always
        first = np.int64(buffer[np.uint64(position)])
        if first < 0x80:
            return (first >> 1) ^ -(first & 1), position + 1
        second = np.int64(buffer[np.uint64(position + 1)])
        if second < 0x80:
            pair = (first & 0x7F) | (second << 7)
            return (pair >> 1) ^ -(pair & 1), position + 2
    value = np.int64(0)
    for i in range(5):
        if position + i >= end:
            break
        byte = np.int64(buffer[position + i])  # widen: uint8 arithmetic differs without JIT
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            value &= 0xFFFF_FFFF
            return (value >> 1) ^ -(value & 1), position + i + 1
    return np.int64(0), np.int64(-1)


@inlined([PAIR(BYTES, I64, I64)])
def read_varlong(buffer: Bytes, position: Int, end: Int) -> Pair:
    """Return (value, next position) of the zigzag varlong: as `read_varint`, up to 10 bytes."""
    if end - position >= 2:
        first = np.int64(buffer[np.uint64(position)])
        if first < 0x80:
            return (first >> 1) ^ -(first & 1), position + 1
        second = np.int64(buffer[np.uint64(position + 1)])
        if second < 0x80:
            pair = (first & 0x7F) | (second << 7)
            return (pair >> 1) ^ -(pair & 1), position + 2
    value = np.int64(0)
    for i in range(10):
        if position + i >= end:
            break
        byte = np.int64(buffer[position + i])
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            unsigned_half = (value >> 1) & np.int64(0x7FFF_FFFF_FFFF_FFFF)  # logical shift
            return unsigned_half ^ -(value & 1), position + i + 1
    return np.int64(0), np.int64(-1)


@inlined([I64(I64)])
def varint_size(value: Int) -> Int:
    """Return the bytes of `value` as a zigzag varint or varlong."""
    rest = (value << 1) ^ (value >> 63)
    size = np.int64(1)
    while rest & ~np.int64(0x7F) != 0:
        rest = (rest >> 7) & np.int64(0x01FF_FFFF_FFFF_FFFF)  # logical shift
        size += 1
    return size


@inlined([I64(BYTES_OUT, I64, I64)])
def write_varint(target: Bytes, position: Int, value: Int) -> Int:
    """Write `value` as a zigzag varint or varlong and return the next position.

    The caller has proven the room, by `varint_size`.
    """
    rest = (value << 1) ^ (value >> 63)
    while rest & ~np.int64(0x7F) != 0:
        target[position] = (rest & 0x7F) | 0x80
        rest = (rest >> 7) & np.int64(0x01FF_FFFF_FFFF_FFFF)
        position += 1
    target[position] = rest
    return position + 1


# --- batches -------------------------------------------------------------------------------------
@inlined([I64(BYTES, I64, I64)])
def read_integer(buffer: Bytes, position: Int, size: Int) -> Int:
    """Return the signed big-endian integer of `size` bytes; the caller has proven the range."""
    value = np.int64(buffer[position])
    if value > 0x7F:
        value -= 0x100
    for i in range(1, size):
        value = (value << 8) | np.int64(buffer[position + i])
    return value


@inlined([VOID(BYTES, I64, I64, TABLE_OUT, I64)])
def scan_message(buffer: Bytes, position: Int, magic: Int, table: Integers, i: Int) -> None:
    """Fill column `i` of `scan_batches` for a message v0 or v1, but for the first rows."""
    attributes = np.int64(buffer[position + layout.MESSAGE_ATTRIBUTES_POSITION])
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
    table[12, i] = crc & 0xFFFF_FFFF


@kernel([TRIPLE(BYTES)])
def count_batches(buffer: Bytes) -> Triple:
    """Return (number of complete batches, position after the last, why the scan ended).

    A message v0 or v1 counts as a batch.
    """
    position = np.int64(0)
    count = np.int64(0)
    while buffer.size - position >= layout.LOG_OVERHEAD:
        size = layout.LOG_OVERHEAD + read_integer(buffer, position + layout.LENGTH_POSITION, 4)
        if size < layout.MESSAGE_SIZE_MIN_V0:
            return count, position, np.int64(SCAN_LENGTH)
        if buffer.size - position <= layout.MAGIC_POSITION:
            break
        magic = buffer[position + layout.MAGIC_POSITION]
        if magic > layout.MAGIC:
            return count, position, np.int64(SCAN_MAGIC)
        if (magic == layout.MAGIC and size < layout.BATCH_OVERHEAD) or (
            magic == 1 and size < layout.MESSAGE_SIZE_MIN_V1
        ):
            return count, position, np.int64(SCAN_LENGTH)
        if size > buffer.size - position:
            break
        count += 1
        position += size
    return count, position, np.int64(SCAN_END)


@kernel([VOID(BYTES, TABLE_OUT)])
def scan_batches(buffer: Bytes, table: Integers) -> None:
    """Fill `table` (14 fields, b batches) with the headers of the batches `count_batches` found.

    The rows are those of `tables.BatchTable`, in its order, but for the last offset, which is a
    delta, and the base offset of a wrapper, which is its last.
    """
    position = np.int64(0)
    for i in range(table.shape[1]):
        size = layout.LOG_OVERHEAD + read_integer(buffer, position + layout.LENGTH_POSITION, 4)
        base_offset = read_integer(buffer, position, 8)
        table[0, i] = position
        table[1, i] = size
        table[2, i] = base_offset
        magic = np.int64(buffer[position + layout.MAGIC_POSITION])
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
        table[12, i] = read_integer(buffer, position + layout.CRC_POSITION, 4) & 0xFFFF_FFFF
        position += size


# --- records of batches --------------------------------------------------------------------------
@inlined([PAIR(BYTES, I64, I64)])
def skip_headers(buffer: Bytes, position: Int, end: Int) -> Pair:
    """Return (status, position after the headers) of the header count and headers at `position`."""
    if position < end and buffer[position] == 0:  # no headers, nearly always
        return np.int64(OK), position + 1
    count, position = read_varint(buffer, position, end)
    if position < 0:
        return np.int64(BAD_VARINT), position
    if count < 0 or count > end - position:
        return np.int64(BAD_HEADER_COUNT), position
    for _ in range(count):
        size, position = read_varint(buffer, position, end)
        if position < 0:
            return np.int64(BAD_VARINT), position
        if size < 0 or size > end - position:
            return np.int64(BAD_FIELD), position
        position += size
        size, position = read_varint(buffer, position, end)
        if position < 0:
            return np.int64(BAD_VARINT), position
        if size > end - position:
            return np.int64(BAD_FIELD), position
        if size > 0:
            position += size
    return np.int64(OK), position


@inlined([I64(BYTES, I64, I64, TABLE_OUT, I64)])
def read_record(buffer: Bytes, position: Int, section_end: Int, records: Integers, n: Int) -> Int:
    """Read the record at `position` into column `n` of `records` and return a status.

    The offset and the timestamp are left as deltas. The rows are those of `index_records`.
    """
    start = position
    length, position = read_varint(buffer, position, section_end)
    if position < 0:
        return BAD_VARINT
    if length < 1 or length > section_end - position:
        return BAD_LENGTH
    end = position + length
    timestamp_delta, position = read_varlong(buffer, position + 1, end)
    if position < 0:
        return BAD_VARINT
    offset_delta, position = read_varint(buffer, position, end)
    if position < 0:
        return BAD_VARINT
    key_size, key_position = read_varint(buffer, position, end)
    if key_position < 0:
        return BAD_VARINT
    if key_size > end - key_position:
        return BAD_FIELD
    value_size, value_position = read_varint(buffer, key_position + max(key_size, 0), end)
    if value_position < 0:
        return BAD_VARINT
    if value_size > end - value_position:
        return BAD_FIELD
    header_position = value_position + max(value_size, 0)
    status, position = skip_headers(buffer, header_position, end)
    if status != OK:
        return status
    if position != end:
        return BAD_END
    records[0, n] = start
    records[1, n] = end
    records[2, n] = offset_delta
    records[3, n] = timestamp_delta
    records[4, n] = key_position
    records[5, n] = max(key_size, -1)
    records[6, n] = value_position
    records[7, n] = max(value_size, -1)
    records[8, n] = header_position
    return OK


@kernel([TRIPLE(BYTES, TABLE, TABLE_OUT)])
def index_records(arena: Bytes, sections: Integers, records: Integers) -> Triple:
    """Index the records of each section and return (status, section, position in the arena).

    sections: int64 (7, s), the record bytes of one batch each: start, end, count, base offset,
    last offset delta, base timestamp, append timestamp (what every record of the section reads;
    the smallest int64 for none, then a record reads its own)
    records: int64 (9, n), written: start, end, offset, timestamp, key position and size, value
    position and size, header position; n is the sum of the counts at least
    """
    n = np.int64(0)
    none = np.int64(-(2**63))
    for section in range(sections.shape[1]):
        position = sections[0, section]
        section_end = sections[1, section]
        count = sections[2, section]
        if position < 0 or section_end < position or section_end > arena.size:
            return np.int64(BAD_RANGE), np.int64(section), np.int64(position)
        if count < 0 or count > records.shape[1] - n:
            return np.int64(BAD_COUNT), np.int64(section), np.int64(position)
        base_offset = sections[3, section]
        last_offset_delta = sections[4, section]
        base_timestamp = sections[5, section]
        append_timestamp = sections[6, section]
        last_delta = np.int64(-1)
        for _ in range(count):
            if position >= section_end:
                return np.int64(BAD_COUNT), np.int64(section), np.int64(position)
            status = read_record(arena, position, section_end, records, n)
            if status != OK:
                return np.int64(status), np.int64(section), np.int64(position)
            delta = records[2, n]
            if delta <= last_delta or delta > last_offset_delta:
                return np.int64(BAD_OFFSET), np.int64(section), np.int64(position)
            last_delta = delta
            position = records[1, n]
            records[2, n] = base_offset + delta
            if append_timestamp == none:
                records[3, n] += base_timestamp
            else:
                records[3, n] = append_timestamp
            n += 1
        if count > 0 and position != section_end:
            return np.int64(BAD_COUNT), np.int64(section), np.int64(position)
    return np.int64(OK), n, np.int64(0)


@inlined([I64(OFFSETS_OUT, BYTES_OUT, BYTES_OUT, I64)])
def column_room(offsets: Offsets, validity: Bytes, data: Bytes, count: Int) -> Int:
    """Return for how many bytes of `count` values a column has room; -1 for too few values."""
    if offsets.size == 0:
        return np.int64(2**31 - 1)
    if offsets.size <= count or validity.size < (count + 7) // 8:
        return np.int64(-1)
    return np.int64(min(data.size, 2**31 - 1))


@inlined([I64(BYTES, TABLE_OUT, I64, I64, OFFSETS_OUT, BYTES_OUT, BYTES_OUT, I64)])
def append_value(
    arena: Bytes, record: Integers, field: Int, n: Int, offsets: Offsets, validity: Bytes,
    data: Bytes, end: Int,
) -> Int:  # fmt: skip
    """Append a field of `record` (its position's row) as value `n` of a column; return its size.

    -1 for null. The caller has proven that `data` has room from `end` on.
    """
    size = record[field + 1, 0]
    offsets[n] = end
    if size >= 0:
        validity[n >> 3] |= 1 << (n & 7)
        if size == 8:  # inlined by the compiler, unlike a copy of unknown size
            copy_bytes(data, end, arena, record[field, 0], 8)
        else:
            copy_bytes(data, end, arena, record[field, 0], size)
    return size


@kernel([FIVE(BYTES, TABLE, TABLE_OUT, TABLE_OUT, *[OFFSETS_OUT, BYTES_OUT, BYTES_OUT] * 2)])
def decode_records(
    arena: Bytes, sections: Integers, record: Integers, numbers: Integers, key_offsets: Offsets,
    key_validity: Bytes, keys: Bytes, value_offsets: Offsets, value_validity: Bytes,
    values: Bytes,
) -> tuple[Int, Int, Int, Int, Int]:  # fmt: skip
    """Do what `index_records` and two of `gather_column` do for all records, in one pass.

    Returns (status, section, position, nulls among the keys, nulls among the values).
    record: int64 (9, 1), to work in; numbers: int64 (2, n), written: offset, and timestamp in
    microseconds, or the nearest that there is; key and value: as in `gather_column`, with room for
    what `arena` holds; a column without offsets is not wanted
    """
    n = np.int64(0)
    none = np.int64(-(2**63))
    largest = np.int64((2**63 - 1) // 1000)
    key_end, value_end = np.int64(0), np.int64(0)
    key_nulls, value_nulls = np.int64(0), np.int64(0)
    key_room = column_room(key_offsets, key_validity, keys, numbers.shape[1])
    value_room = column_room(value_offsets, value_validity, values, numbers.shape[1])
    room = min(key_room, value_room)
    for section in range(sections.shape[1]):
        position, section_end = sections[0, section], sections[1, section]
        count, last_delta = sections[2, section], np.int64(-1)
        at = np.int64(section)
        if position < 0 or section_end < position or section_end > arena.size:
            return np.int64(BAD_RANGE), at, np.int64(position), key_nulls, value_nulls
        room -= section_end - position  # no more bytes than these are copied
        if room < 0:
            return np.int64(BAD_RANGE), at, np.int64(position), key_nulls, value_nulls
        if count < 0 or count > numbers.shape[1] - n:
            return np.int64(BAD_COUNT), at, np.int64(position), key_nulls, value_nulls
        for _ in range(count):
            if position >= section_end:
                return np.int64(BAD_COUNT), at, np.int64(position), key_nulls, value_nulls
            status = read_record(arena, position, section_end, record, 0)
            if status != OK:
                return np.int64(status), at, np.int64(position), key_nulls, value_nulls
            delta = record[2, 0]
            if delta <= last_delta or delta > sections[4, section]:
                return np.int64(BAD_OFFSET), at, np.int64(position), key_nulls, value_nulls
            last_delta = delta
            position = record[1, 0]
            numbers[0, n] = sections[3, section] + delta
            timestamp = sections[6, section]
            if timestamp == none:
                timestamp = record[3, 0] + sections[5, section]
            numbers[1, n] = min(max(timestamp, -largest), largest) * 1000
            if key_offsets.size > 0:
                size = append_value(arena, record, 4, n, key_offsets, key_validity, keys, key_end)
                key_nulls += size < 0
                key_end += max(size, 0)
            if value_offsets.size > 0:
                size = append_value(
                    arena, record, 6, n, value_offsets, value_validity, values, value_end
                )
                value_nulls += size < 0
                value_end += max(size, 0)
            n += 1
        if count > 0 and position != section_end:
            return np.int64(BAD_COUNT), at, np.int64(position), key_nulls, value_nulls
    if key_offsets.size > 0:
        key_offsets[n] = key_end
    if value_offsets.size > 0:
        value_offsets[n] = value_end
    return np.int64(OK), n, np.int64(0), key_nulls, value_nulls


# --- messages v0 and v1 --------------------------------------------------------------------------
def crc32_tables() -> Integers:
    """Return the tables of CRC-32 (zlib's), eight bytes at a time: int64 (8, 256)."""
    tables = np.zeros((8, 256), dtype=np.int64)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = (tables[0] >> 1) ^ np.where(tables[0] & 1, 0xEDB8_8320, 0)
    for i in range(1, 8):
        tables[i] = (tables[i - 1] >> 8) ^ tables[0][tables[i - 1] & 0xFF]
    return tables


CRC32_TABLES = crc32_tables()


@kernel([I64(BYTES, I64, I64)])
def crc32(buffer: Bytes, start: Int, end: Int) -> Int:
    """Return the CRC-32 (zlib's) of `buffer[start:end]`; the caller has proven the range."""
    crc = np.int64(0xFFFF_FFFF)
    position = start
    while end - position >= 8:
        mixed = np.int64(0)
        for i in range(4):
            byte = np.int64(buffer[position + i]) ^ ((crc >> (8 * i)) & 0xFF)
            mixed ^= CRC32_TABLES[7 - i, byte]
        for i in range(4, 8):
            mixed ^= CRC32_TABLES[7 - i, np.int64(buffer[position + i])]
        crc = mixed
        position += 8
    while position < end:
        byte = np.int64(buffer[position]) ^ (crc & 0xFF)
        crc = (crc >> 8) ^ CRC32_TABLES[0, byte]
        position += 1
    return crc ^ 0xFFFF_FFFF


@kernel([PAIR(BYTES, INTEGERS, INTEGERS, INTEGERS)])
def find_wrong_crc32(buffer: Bytes, starts: Integers, ends: Integers, crcs: Integers) -> Pair:
    """Return (index, CRC-32 found) of the first range that has another one than it should.

    (-1, 0) when there is none. A range outside the buffer is wrong.
    """
    for i in range(starts.size):
        if starts[i] < 0 or ends[i] < starts[i] or ends[i] > buffer.size:
            return np.int64(i), np.int64(0)
        found = crc32(buffer, starts[i], ends[i])
        if found != crcs[i]:
            return np.int64(i), np.int64(found)
    return np.int64(-1), np.int64(0)


@kernel([TRIPLE(BYTES, TABLE, INTEGERS_OUT, INTEGERS_OUT)])
def count_messages(
    arena: Bytes, sections: Integers, counts: Integers, last_offsets: Integers
) -> Triple:
    """Count the whole messages of each section and return (status, section, position).

    sections: int64 (2, s), start and end of a set of messages; a last one cut off is none
    counts, last_offsets: int64 (s,), written: messages, and the offset that the last one has
    """
    for section in range(sections.shape[1]):
        position = sections[0, section]
        end = sections[1, section]
        if position < 0 or end < position or end > arena.size:
            return np.int64(BAD_RANGE), np.int64(section), np.int64(position)
        count = np.int64(0)
        last_offset = np.int64(-1)
        while end - position >= layout.LOG_OVERHEAD:
            size = layout.LOG_OVERHEAD + read_integer(arena, position + layout.LENGTH_POSITION, 4)
            if size < layout.MESSAGE_SIZE_MIN_V0:
                return np.int64(BAD_LENGTH), np.int64(section), np.int64(position)
            if size > end - position:
                break
            last_offset = read_integer(arena, position, 8)
            count += 1
            position += size
        if count == 0:
            return np.int64(BAD_COUNT), np.int64(section), np.int64(position)
        counts[section] = count
        last_offsets[section] = last_offset
    return np.int64(OK), np.int64(0), np.int64(0)


@inlined([I64(BYTES, I64, I64, I64, TABLE_OUT, I64)])
def read_message(
    arena: Bytes, position: Int, end: Int, is_wrapped: Int, records: Integers, n: Int
) -> Int:
    """Read the message that fills `arena[position:end]` into column `n` and return a status.

    The caller has proven that range and that it holds a message v0 at least.
    """
    magic = np.int64(arena[position + layout.MAGIC_POSITION])
    if magic > 1:
        return BAD_MAGIC
    key_position = position + layout.MESSAGE_KEY_POSITION_V0
    timestamp = np.int64(layout.NO_TIMESTAMP)
    if magic == 1:
        if end - position < layout.MESSAGE_SIZE_MIN_V1:
            return BAD_LENGTH
        key_position = position + layout.MESSAGE_KEY_POSITION_V1
        timestamp = read_integer(arena, position + layout.MESSAGE_TIMESTAMP_POSITION, 8)
    if is_wrapped != 0:
        if arena[position + layout.MESSAGE_ATTRIBUTES_POSITION] & layout.CODEC_MASK != 0:
            return BAD_NESTING
        crc = read_integer(arena, position + layout.MESSAGE_CRC_POSITION, 4) & 0xFFFF_FFFF
        if crc32(arena, position + layout.MAGIC_POSITION, end) != crc:
            return BAD_CHECKSUM
    key_size = read_integer(arena, key_position, 4)
    key_position += 4
    value_position = key_position + max(key_size, 0)
    if value_position > end - 4:
        return BAD_FIELD
    value_size = read_integer(arena, value_position, 4)
    value_position += 4
    if value_size > end - value_position:
        return BAD_FIELD
    records[0, n] = position
    records[1, n] = end
    records[2, n] = read_integer(arena, position, 8)
    records[3, n] = timestamp
    records[4, n] = key_position
    records[5, n] = max(key_size, -1)
    records[6, n] = value_position
    records[7, n] = max(value_size, -1)
    records[8, n] = -1
    return OK


@kernel([TRIPLE(BYTES, TABLE, TABLE_OUT)])
def index_messages(arena: Bytes, sections: Integers, records: Integers) -> Triple:
    """Index the messages of each section and return (status, section, position in the arena).

    sections: int64 (8, s), as `count_messages` has counted them: start, end, count, lowest offset
    allowed, highest, what to add to the offsets found, append timestamp (what every message v1
    reads; the smallest int64 for none), whether they were wrapped (1) or one is the section (0)
    records: int64 (9, n), written, as by `index_records`; without headers their position is -1
    """
    n = np.int64(0)
    none = np.int64(-(2**63))
    for section in range(sections.shape[1]):
        position = sections[0, section]
        section_end = sections[1, section]
        count = sections[2, section]
        if position < 0 or section_end < position or section_end > arena.size:
            return np.int64(BAD_RANGE), np.int64(section), np.int64(position)
        if count < 0 or count > records.shape[1] - n:
            return np.int64(BAD_COUNT), np.int64(section), np.int64(position)
        base_offset = sections[5, section]
        last_found = np.int64(-1)
        for _ in range(count):
            if section_end - position < layout.MESSAGE_SIZE_MIN_V0:
                return np.int64(BAD_COUNT), np.int64(section), np.int64(position)
            size = layout.LOG_OVERHEAD + read_integer(arena, position + layout.LENGTH_POSITION, 4)
            if size < layout.MESSAGE_SIZE_MIN_V0 or size > section_end - position:
                return np.int64(BAD_LENGTH), np.int64(section), np.int64(position)
            end = position + size
            status = read_message(arena, position, end, sections[7, section], records, n)
            if status != OK:
                return np.int64(status), np.int64(section), np.int64(position)
            found = records[2, n]
            if found <= last_found or found > sections[4, section] - base_offset:
                return np.int64(BAD_OFFSET), np.int64(section), np.int64(position)
            if base_offset + found < sections[3, section]:
                return np.int64(BAD_OFFSET), np.int64(section), np.int64(position)
            last_found = found
            records[2, n] = base_offset + found
            if sections[6, section] != none and arena[position + layout.MAGIC_POSITION] == 1:
                records[3, n] = sections[6, section]
            position = end
            n += 1
    return np.int64(OK), n, np.int64(0)


# --- columns -------------------------------------------------------------------------------------
@kernel([PAIR(I64, INTEGERS, INTEGERS, INTEGERS)])
def measure_column(arena_size: Int, positions: Integers, sizes: Integers, rows: Integers) -> Pair:
    """Return (bytes, nulls) of the values of `rows`; (-1, row) when one lies outside the arena."""
    total = np.int64(0)
    nulls = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= positions.size or row >= sizes.size:
            return np.int64(-1), np.int64(row)
        size = sizes[row]
        if size < 0:
            nulls += 1
        else:
            position = positions[row]
            if position < 0 or position > arena_size or size > arena_size - position:
                return np.int64(-1), np.int64(row)
            total += size
    return total, nulls


@kernel([VOID(BYTES, INTEGERS, INTEGERS, INTEGERS, OFFSETS_OUT, BYTES_OUT, BYTES_OUT)])
def gather_column(
    arena: Bytes, positions: Integers, sizes: Integers, rows: Integers, offsets: Offsets,
    validity: Bytes, data: Bytes,
) -> None:  # fmt: skip
    """Copy the values of `rows` into an Arrow binary column that `measure_column` has measured.

    offsets: int32 (m + 1,); data: exactly the bytes measured, at most 2^31 - 1
    validity: zeroed bitmap, one bit for each of the m rows; empty when there are no nulls
    """
    total = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        size = sizes[row]
        offsets[i] = total
        if size >= 0:
            if validity.size > 0:
                validity[i >> 3] |= 1 << (i & 7)
            if size == 8:  # inlined by the compiler, unlike a copy of unknown size
                copy_bytes(data, total, arena, positions[row], 8)
            else:
                copy_bytes(data, total, arena, positions[row], size)
            total += size
    offsets[rows.size] = total


@kernel([FIVE(BYTES, INTEGERS, INTEGERS, INTEGERS)])
def measure_headers(
    arena: Bytes, header_positions: Integers, ends: Integers, rows: Integers
) -> tuple[Int, Int, Int, Int, Int]:
    """Return (status, rows with headers, headers, key bytes, value bytes) of `rows`.

    A position of -1 means no headers, as messages v0 and v1 have none.
    """
    zero = np.int64(0)
    lists = np.int64(0)
    headers = np.int64(0)
    key_bytes = np.int64(0)
    value_bytes = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= header_positions.size or row >= ends.size:
            return np.int64(BAD_RANGE), zero, zero, zero, zero
        position = header_positions[row]
        end = ends[row]
        if position < 0 or end > arena.size:
            if position == -1:
                continue
            return np.int64(BAD_RANGE), zero, zero, zero, zero
        status, _ = skip_headers(arena, position, end)
        if status != OK:
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
    return np.int64(OK), lists, headers, key_bytes, value_bytes


@kernel([VOID(BYTES, *[INTEGERS] * 3, *[OFFSETS_OUT, BYTES_OUT] * 3, BYTES_OUT)])
def gather_headers(
    arena: Bytes, header_positions: Integers, ends: Integers, rows: Integers,
    list_offsets: Offsets, list_validity: Bytes, key_offsets: Offsets, key_data: Bytes,
    value_offsets: Offsets, value_validity: Bytes, value_data: Bytes,
) -> None:  # fmt: skip
    """Copy the headers of `rows` into Arrow columns that `measure_headers` has measured.

    The bitmaps are zeroed. A row without headers is a null list.
    """
    headers = np.int64(0)
    key_bytes = np.int64(0)
    value_bytes = np.int64(0)
    for i in range(rows.size):
        list_offsets[i] = headers
        end = ends[rows[i]]
        if header_positions[rows[i]] < 0:
            continue
        count, position = read_varint(arena, header_positions[rows[i]], end)
        if count > 0:
            list_validity[i >> 3] |= 1 << (i & 7)
        for _ in range(count):
            size, position = read_varint(arena, position, end)
            copy_bytes(key_data, key_bytes, arena, position, size)
            key_offsets[headers] = key_bytes
            value_offsets[headers] = value_bytes
            position += size
            key_bytes += size
            size, position = read_varint(arena, position, end)
            if size >= 0:
                value_validity[headers >> 3] |= 1 << (headers & 7)
                copy_bytes(value_data, value_bytes, arena, position, size)
                position += size
                value_bytes += size
            headers += 1
    list_offsets[rows.size] = headers
    key_offsets[headers] = key_bytes
    value_offsets[headers] = value_bytes


# --- writing records -----------------------------------------------------------------------------
@inlined([I64(TABLE, I64, I64, I64)])
def measure_fields(column: Integers, row: Int, data_size: Int, minimum: Int) -> Int:
    """Return the bytes of a size and its value; -1 when the value does not lie in its data.

    column: int64 (2, m), positions and sizes; `minimum` is the smallest size allowed
    """
    position = column[0, row]
    size = column[1, row]
    if size < minimum or position < 0 or max(size, 0) > data_size - position:
        return -1
    return varint_size(size) + max(size, 0)


@kernel(
    [
        TRIPLE(
            *[TABLE, I64] * 2, *[TABLE] * 2, I64, TABLE, I64, *[INTEGERS] * 3, I64, I64,
            INTEGERS_OUT, TABLE_OUT,
        )
    ]
)  # fmt: skip
def plan_batches(
    keys: Integers, key_data_size: Int, values: Integers, value_data_size: Int,
    header_lists: Integers, header_keys: Integers, header_key_data_size: Int,
    header_values: Integers, header_value_data_size: Int, timestamps: Integers, rows: Integers,
    groups: Integers, batch_size: Int, size_max: Int, body_sizes: Integers, batches: Integers,
) -> Triple:  # fmt: skip
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
    count = np.int64(0)
    size = np.int64(0)
    group = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        is_first = count == 0
        if group < groups.size and groups[group] <= i:
            is_first = True
            group += 1
        if row < 0 or row >= keys.shape[1] or row >= values.shape[1] or row >= timestamps.size:
            return np.int64(BAD_RANGE), count, np.int64(row)
        key_size = measure_fields(keys, row, key_data_size, -1)
        value_size = measure_fields(values, row, value_data_size, -1)
        if key_size < 0 or value_size < 0:
            return np.int64(BAD_RANGE), count, np.int64(row)
        headers = np.int64(0)
        headers_size = np.int64(1)
        if header_lists.shape[1] > 0:
            first = header_lists[0, row]
            headers = header_lists[1, row]
            if first < 0 or headers < 0 or headers > header_keys.shape[1] - first:
                return np.int64(BAD_RANGE), count, np.int64(row)
            headers_size = varint_size(headers)
            for header in range(first, first + headers):
                name_size = measure_fields(header_keys, header, header_key_data_size, 0)
                text_size = measure_fields(header_values, header, header_value_data_size, -1)
                if name_size < 0:
                    return np.int64(BAD_HEADER_KEY), count, np.int64(row)
                if text_size < 0:
                    return np.int64(BAD_RANGE), count, np.int64(row)
                headers_size += name_size + text_size
        fixed = 1 + key_size + value_size + headers_size
        timestamp = timestamps[row]
        body = np.int64(0)
        record_size = np.int64(0)
        if not is_first:
            delta = timestamp - batches[3, count - 1]
            body = fixed + varint_size(delta) + varint_size(i - batches[0, count - 1])
            record_size = varint_size(body) + body
        if is_first or size + record_size > batch_size:
            batches[0, count] = i
            batches[3, count] = timestamp
            batches[4, count] = timestamp
            body = fixed + 2  # both deltas are zero
            record_size = varint_size(body) + body
            size = np.int64(layout.BATCH_OVERHEAD)
            if record_size > size_max - size:
                return np.int64(TOO_LARGE), size + record_size, np.int64(row)
            count += 1
        size += record_size
        body_sizes[i] = body
        batches[1, count - 1] = i + 1
        batches[2, count - 1] = size
        batches[4, count - 1] = max(batches[4, count - 1], timestamp)
    return np.int64(OK), count, np.int64(-1)


@inlined([I64(BYTES_OUT, I64, BYTES, TABLE, I64)])
def write_field(target: Bytes, position: Int, data: Bytes, column: Integers, row: Int) -> Int:
    """Write a size and its value and return the next position."""
    size = column[1, row]
    position = write_varint(target, position, size)
    if size == 8:
        copy_bytes(target, position, data, column[0, row], 8)
    elif size > 0:
        copy_bytes(target, position, data, column[0, row], size)
    return position + max(size, 0)


@kernel([I64(BYTES_OUT, *[BYTES, TABLE] * 2, TABLE, *[BYTES, TABLE] * 2, *[INTEGERS] * 3, TABLE)])
def write_records(
    target: Bytes, key_data: Bytes, keys: Integers, value_data: Bytes, values: Integers,
    header_lists: Integers, header_key_data: Bytes, header_keys: Integers,
    header_value_data: Bytes, header_values: Integers, timestamps: Integers, rows: Integers,
    body_sizes: Integers, batches: Integers,
) -> Int:  # fmt: skip
    """Write the records of batches that `plan_batches` has planned, with the same arrays.

    The 61 bytes before each batch's records are left free. Returns the bytes used, or -1 when
    they are not what was planned.
    """
    position = np.int64(0)
    for batch in range(batches.shape[1]):
        batch_end = position + batches[2, batch]
        if batch_end > target.size:
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
            position = write_varint(target, position + 1, timestamps[row] - base_timestamp)
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


@kernel([I64(BYTES, TABLE, INTEGERS, I64, I64, BYTES_OUT)])
def rewrite_records(
    arena: Bytes, records: Integers, rows: Integers, base_offset: Int, base_timestamp: Int,
    target: Bytes,
) -> Int:  # fmt: skip
    """Write the records `rows` under another base and return their bytes; -1 for a fault.

    Key, value and headers are copied; attributes are zero and both deltas new.
    records: int64 (9, n) of `index_records`, offsets and timestamps absolute
    target: written; when it is empty the bytes are only counted
    """
    position = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= records.shape[1]:
            return -1
        # The key's size is written anew: a stranger's varint may be longer than it need be.
        start = records[4, row]
        end = records[1, row]
        key_size = records[5, row]
        if start < 0 or end < start or end > arena.size:
            return -1
        timestamp_delta = records[3, row] - base_timestamp
        offset_delta = records[2, row] - base_offset
        body = 1 + varint_size(timestamp_delta) + varint_size(offset_delta)
        body += varint_size(key_size) + end - start
        size = varint_size(body) + body
        if target.size == 0:
            position += size
            continue
        if size > target.size - position:
            return -1
        position = write_varint(target, position, body)
        target[position] = 0
        position = write_varint(target, position + 1, timestamp_delta)
        position = write_varint(target, position, offset_delta)
        position = write_varint(target, position, key_size)
        copy_bytes(target, position, arena, start, end - start)
        position += end - start
    return position
