"""Convert records to Arrow columns, and Arrow columns to the input of kernels.

For a kernel, a binary column is an array of bytes and a (2, n) table of positions and sizes in it,
with size -1 for null. Records lie like that in a batch, and Arrow columns nearly so. Both
directions therefore copy each value once.

Spark holds an Arrow batch several times: in the worker, in the pipe, and in the JVM. Records are
therefore split into batches by bytes. Only a single larger record makes a larger batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.records import codes
from kafkalog.storage_engine.records.kernels import decode, gather

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.records.tables import BatchTable, Integers, RecordTable

ARROW_SIZE: Final = 4 << 20
"""Largest size of an Arrow batch in bytes, unless one row is larger."""
_FIXED: Final = {"partition": 4, "offset": 8, "timestamp": 8, "timestampType": 4}
_OFFSET: Final = 4
"""Bytes of Arrow's offset to a value of variable size."""
MICROSECOND_MS_MAX: Final = layout.INT64_MAX // 1000
_LARGE: Final = 1 << 20
"""From this size in bytes on, a single value is not copied."""


@dataclass(frozen=True, slots=True)
class BinaryColumn:
    """n values in `data`; places: int64 (2, n), position and size, size -1 for null."""

    data: npt.NDArray[np.uint8]
    places: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeaderColumn:
    """The headers of n rows; lists: int64 (2, n), first header and number of headers.

    (2, 0) if no row has any.
    """

    lists: npt.NDArray[np.int64]
    keys: BinaryColumn
    values: BinaryColumn


_SMALL_SIZE = 16 << 10


def allocate(count: int, dtype: type[Any] = np.uint8) -> npt.NDArray[Any]:
    """Return an uninitialised array from Arrow's memory pool.

    The pool keeps its pages. NumPy returns large arrays to the system at once, and the page faults
    of the next array cost several times the decoding into it (measured).
    """
    size = count * np.dtype(dtype).itemsize
    if size <= _SMALL_SIZE:  # NumPy is faster for these
        return np.empty(count, dtype)
    import pyarrow as pa

    return np.frombuffer(pa.allocate_buffer(size), dtype=dtype)


def to_arrow(
    records: RecordTable,
    table: BatchTable,
    rows: npt.NDArray[np.int64] | None,
    *,
    schema: pa.Schema,
    topic: str,
    partition: int,
) -> pa.RecordBatch:
    """Return `rows` (indexes of records; None for all) as an Arrow batch of `schema`.

    The schema may have any columns of `schema.changelog_schema(include_headers=True)`, in any
    order; only these are built. Timestamps outside the range of microseconds become the nearest
    possible ones. Raises InvalidInputError for another column, and for a column of 2 GiB or more,
    which needs a smaller chunk.
    """
    import pyarrow as pa

    if rows is None:
        rows = np.arange(len(records), dtype=np.int64)
    else:
        rows = np.ascontiguousarray(rows, dtype=np.int64)
    count = len(rows)
    if count and not (rows.min() >= 0 and rows.max() < len(records)):
        raise InvalidInputError(f"rows: expected 0 to {len(records) - 1}, found others")
    columns = []
    for field in schema:
        match field.name:
            case "key":
                column = _binary(records, records.key_positions, records.key_sizes, rows, "key")
            case "value":
                column = _binary(
                    records, records.value_positions, records.value_sizes, rows, "value"
                )
            case "topic":
                column = repeated_text(topic, count)
            case "partition":
                column = repeated_integer(partition, count)
            case "offset":
                column = _taken(records.offsets, rows, pa.int64())
            case "timestamp":
                column = _timestamps(records.timestamps, rows, field.type)
            case "timestampType":
                column = _timestamp_types(records, table, rows)
            case "headers":
                column = _headers(records, rows, field.type)
            case _:
                raise InvalidInputError(f"column {field.name!r}: a log has no such column")
        columns.append(column)
    if not columns:  # a batch without columns still has rows, which Arrow counts by a column
        return pa.RecordBatch.from_struct_array(
            pa.StructArray.from_buffers(pa.struct([]), count, [None])
        )
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _binary(
    records: RecordTable,
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    name: str,
) -> pa.Array:
    import pyarrow as pa

    size, nulls = gather.measure_column(records.arena.size, positions, sizes, rows)
    if size < 0:
        raise InvalidInputError(f"row {nulls}: the record table has no such row in its bytes")
    _check_column_size(name, size)
    if len(rows) == 1 and size >= _LARGE:
        start = int(positions[rows[0]])
        ends = pa.py_buffer(np.array([0, size], dtype=np.int32))
        data = pa.py_buffer(records.arena).slice(start, size)
        return pa.Array.from_buffers(pa.binary(), 1, [None, ends, data], 0)
    offsets = allocate(len(rows) + 1, np.int32)
    validity = np.zeros((len(rows) + 7) // 8 if nulls else 0, dtype=np.uint8)
    data = allocate(size)
    gather.gather_column(records.arena, positions, sizes, rows, offsets, validity, data)
    return of_values(offsets, validity, data, nulls)


def of_values(
    offsets: npt.NDArray[np.int32],
    validity: npt.NDArray[np.uint8],
    data: npt.NDArray[np.uint8],
    nulls: int,
) -> pa.Array:
    """Return a binary column from its three buffers; `validity` is used if there are nulls."""
    import pyarrow as pa

    buffers = [pa.py_buffer(validity) if nulls else None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers, nulls)


def of_integers(values: npt.NDArray[np.integer[Any]], arrow_type: pa.DataType) -> pa.Array:
    """Return a column without nulls, without a copy; the item sizes must be equal.

    `pyarrow.array` would first import pandas to check for its types.
    """
    import pyarrow as pa

    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(values)], 0)


def _check_column_size(name: str, size: int) -> None:
    if size > layout.INT32_MAX:
        raise InvalidInputError(
            f"column {name}: expected at most {layout.INT32_MAX} bytes in one Arrow batch, "
            f"found {size}; read smaller chunks"
        )


def repeated_integer(value: int, count: int) -> pa.Array:
    """Return an int32 column of one value."""
    import pyarrow as pa

    data = allocate(count, np.int32)
    data.fill(value)
    return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(data)], 0)


def repeated_text(text: str, count: int) -> pa.Array:
    """Return a string column of one value."""
    import pyarrow as pa

    item = text.encode()
    size = len(item) * count
    _check_column_size("topic", size)
    offsets = allocate(count + 1, np.int32)
    np.multiply(np.arange(count + 1, dtype=np.int32), len(item), out=offsets)
    data = allocate(size)
    filled = min(len(item), size)
    data[:filled] = np.frombuffer(item, dtype=np.uint8)[:filled]
    while filled < size:  # doubling
        step = min(filled, size - filled)
        data[filled : filled + step] = data[:step]
        filled += step
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), count, buffers, 0)


def _taken(
    values: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], arrow_type: pa.DataType
) -> pa.Array:
    taken = allocate(len(rows), np.int64)
    np.take(values, rows, out=taken, mode="clip")  # this mode saves a copy
    return of_integers(taken, arrow_type)


def _timestamps(
    milliseconds: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], arrow_type: pa.DataType
) -> pa.Array:
    taken = allocate(len(rows), np.int64)
    np.take(milliseconds, rows, out=taken, mode="clip")
    np.clip(taken, -MICROSECOND_MS_MAX, MICROSECOND_MS_MAX, out=taken)
    taken *= 1000
    return of_integers(taken, arrow_type)


def _timestamp_types(
    records: RecordTable, table: BatchTable, rows: npt.NDArray[np.int64]
) -> pa.Array:
    import pyarrow as pa

    types = (table.attributes & layout.TIMESTAMP_TYPE_BIT != 0).astype(np.int32)
    types[table.magics == 0] = layout.NO_TIMESTAMP_TYPE
    if len(types) and types.min() == types.max():  # usual
        return repeated_integer(int(types[0]), len(rows))
    return of_integers(types[records.batch_index[rows]], pa.int32())


def _headers(
    records: RecordTable, rows: npt.NDArray[np.int64], arrow_type: pa.ListType
) -> pa.Array:
    import pyarrow as pa

    places = (records.arena, records.header_positions, records.ends, rows)
    status, lists, headers, key_size, value_size = decode.measure_headers(*places)
    if status != codes.OK:
        raise InvalidInputError("headers: the record table does not fit its bytes")
    if lists == 0:
        return pa.nulls(len(rows), arrow_type)
    for size in (headers, key_size, value_size):
        _check_column_size("headers", size)
    list_offsets = allocate(len(rows) + 1, np.int32)
    list_validity = np.zeros((len(rows) + 7) // 8, dtype=np.uint8)
    key_offsets = allocate(headers + 1, np.int32)
    key_data = allocate(key_size)
    value_offsets = allocate(headers + 1, np.int32)
    value_validity = np.zeros((headers + 7) // 8, dtype=np.uint8)
    value_data = allocate(value_size)
    decode.gather_headers(
        *places,
        list_offsets,
        list_validity,
        key_offsets,
        key_data,
        value_offsets,
        value_validity,
        value_data,
    )
    keys = _utf8(headers, key_offsets, key_data)
    values = pa.Array.from_buffers(
        pa.binary(),
        headers,
        [pa.py_buffer(value_validity), pa.py_buffer(value_offsets), pa.py_buffer(value_data)],
    )
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(arrow_type.value_type))
    return pa.Array.from_buffers(
        arrow_type,
        len(rows),
        [pa.py_buffer(list_validity), pa.py_buffer(list_offsets)],
        len(rows) - lists,
        children=[pairs],
    )


def _utf8(
    count: int, offsets: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]
) -> pa.StringArray:
    """Return header keys; bytes that are not UTF-8 become U+FFFD, as in Java."""
    import pyarrow as pa

    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    keys = pa.Array.from_buffers(pa.string(), count, buffers, 0)
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        raw = pa.Array.from_buffers(pa.binary(), count, buffers, 0)
        return pa.array([key.decode("utf-8", "replace") for key in raw.to_pylist()], pa.string())
    return keys


def arrow_batches(
    records: RecordTable,
    table: BatchTable,
    rows: Integers | None,
    place: tuple[str, int],
    *,
    schema: pa.Schema,
    max_bytes: int = ARROW_SIZE,
) -> Iterator[pa.RecordBatch]:
    """Yield the records `rows` (None: all), in order, in batches of at most about `max_bytes`.

    `place` is their topic and partition. No batch is empty. Raises like `to_arrow`.
    """
    topic, partition = place
    if rows is None:
        rows = np.arange(len(records), dtype=np.int64)
    ends = np.cumsum(_sizes(records, rows, schema.names, topic))
    first = 0
    while first < len(rows):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(ends.searchsorted(before + max_bytes, side="right")))
        yield to_arrow(
            records, table, rows[first:stop], schema=schema, topic=topic, partition=partition
        )
        first = stop


def row_size(names: list[str], topic: str) -> int:
    """Return the bytes of a row in Arrow without its key, value and headers."""
    fixed = sum(_FIXED.get(name, _OFFSET) for name in names)
    return fixed + (len(topic.encode()) if "topic" in names else 0)


def _sizes(records: RecordTable, rows: Integers, names: list[str], topic: str) -> Integers:
    """Return the bytes of each row in Arrow: int64 (n,); an upper bound with headers."""
    sizes = np.full(len(rows), row_size(names, topic), dtype=np.int64)
    if "key" in names:
        sizes += np.maximum(records.key_sizes[rows], 0)
    if "value" in names:
        sizes += np.maximum(records.value_sizes[rows], 0)
    if "headers" in names:
        # A header takes at least two bytes in a record, and two offsets, eight bytes, in Arrow.
        others = np.maximum(records.key_sizes[rows], 0) + np.maximum(records.value_sizes[rows], 0)
        sizes += 5 * (records.ends[rows] - records.starts[rows] - others)
    return sizes


def binary_column(array: pa.Array | None, count: int, name: str) -> BinaryColumn:
    """Convert a binary or string column (32-bit or 64-bit offsets) to kernel input, without a copy.

    None is a column of `count` nulls. Raises InvalidInputError for another type or length.
    """
    import pyarrow as pa

    if array is None or pa.types.is_null(array.type):
        places = np.zeros((2, count if array is None else len(array)), dtype=np.int64)
        places[1] = -1
        column = BinaryColumn(np.empty(0, dtype=np.uint8), places)
    else:
        column = _from_arrow(array, name)
    if column.places.shape[1] != count:
        raise InvalidInputError(f"{name}: expected {count} rows, found {column.places.shape[1]}")
    return column


def _from_arrow(array: pa.Array, name: str) -> BinaryColumn:
    import pyarrow as pa

    if pa.types.is_binary(array.type) or pa.types.is_string(array.type):
        offset_type: Any = np.int32
    elif pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type):
        offset_type = np.int64
    else:
        raise InvalidInputError(f"{name}: expected binary or string, found {array.type}")
    count = len(array)
    if count == 0:
        return BinaryColumn(np.empty(0, dtype=np.uint8), np.empty((2, 0), dtype=np.int64))
    _, offset_buffer, data_buffer = array.buffers()
    item = np.dtype(offset_type).itemsize
    offsets = np.frombuffer(
        offset_buffer, dtype=offset_type, count=count + 1, offset=array.offset * item
    )
    places = allocate(2 * count, np.int64).reshape(2, count)
    places[0] = offsets[:-1]
    np.subtract(offsets[1:], offsets[:-1], out=places[1])
    if array.null_count:
        places[1][array.is_null().to_numpy(zero_copy_only=False)] = -1
    if data_buffer is None:
        return BinaryColumn(np.empty(0, dtype=np.uint8), places)
    return BinaryColumn(np.frombuffer(data_buffer, dtype=np.uint8), places)


def header_column(array: pa.Array | None, count: int) -> HeaderColumn:
    """Convert a column list<struct<key: string, value: binary>> to kernel input.

    A null or empty list is a record without headers. Raises InvalidInputError for another type or
    length, and for a null header.
    """
    import pyarrow as pa

    nobody = np.empty((2, 0), dtype=np.int64)
    if array is not None and len(array) != count:
        raise InvalidInputError(f"headers: expected {count} rows, found {len(array)}")
    if array is None or array.null_count == count:
        none = BinaryColumn(np.empty(0, dtype=np.uint8), nobody)
        return HeaderColumn(nobody, none, none)
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    if not is_list or not pa.types.is_struct(array.type.value_type):
        raise InvalidInputError(
            f"headers: expected array<struct<key string, value binary>>, found {array.type}"
        )
    pairs = array.values
    names = {field.name for field in pairs.type}
    if names != {"key", "value"}:
        raise InvalidInputError(
            f"headers: expected the fields key and value, found {', '.join(sorted(names))}"
        )
    offsets = array.offsets.to_numpy().astype(np.int64)
    lists = np.stack((offsets[:-1], np.diff(offsets)))
    if array.null_count:
        lists[1][array.is_null().to_numpy(zero_copy_only=False)] = 0
    # A null pair becomes a null key, which the planning kernel refuses, with its row.
    key, value = pairs.flatten()
    if pairs.type[0].name != "key":
        key, value = value, key
    keys = binary_column(key, len(pairs), "headers.key")
    return HeaderColumn(lists, keys, binary_column(value, len(pairs), "headers.value"))
