"""Split rows into batches v2 and write their records.

A kernel measures every range before one copies it.

Kafka: DefaultRecord.writeTo, ByteUtils.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout, ops
from kafkalog.storage_engine.records import codes

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Int64s, Table


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
        # The key's size is written again: a stranger's varint may be longer than it need be.
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
