"""Convert the arguments of `append` to record batches with known columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs.files import users_items
from kafkalog.storage_engine.records.record_fields import (
    names_of,
    shown,
    to_bytes,
    to_epoch_ms,
    to_headers,
)

if TYPE_CHECKING:
    import pyarrow as pa

_FIELDS: Final = ("key", "value", "headers", "timestamp")
_BYTES: Final = ("key", "value")
_SIZES: Final = {2, 3, 4}
_SINGLE: Final = (Mapping, str, bytes, bytearray, memoryview)
"""Iterable types that are not a list of records."""
_FORMS: Final = 'Give [("k1", "v1")], [{"key": "k1", "value": "v1"}] or an Arrow table.'
_DROP: Final = "Leave it out, or append with drop_extra=True."


def record_batches(records: Any, *, drop_extra: bool = False) -> list[pa.RecordBatch]:
    """Return record batches from the argument of `KafkaLog.append`.

    `drop_extra` drops columns and fields that a record doesn't have. Raises InvalidInputError,
    which names the record and the field, or the column and its types.
    """
    import pyarrow as pa

    if isinstance(records, pa.RecordBatch):
        return [_checked(records, drop_extra)]
    if isinstance(records, pa.Table):
        return [_checked(batch, drop_extra) for batch in records.to_batches()]
    if not isinstance(records, Iterable) or isinstance(records, _SINGLE):
        advice = " A dict of keys and values has .items()." if _is_of_values(records) else ""
        raise InvalidInputError(
            "records: not a list of records (expected tuples or dicts in a list, found "
            f"{type(records).__name__}). {_FORMS}{advice}"
        )
    found, rows = list[pa.RecordBatch](), list[tuple[Any, ...]]()
    for place, record in enumerate(users_items(records)):
        if isinstance(record, pa.RecordBatch):
            found.append(_checked(record, drop_extra))
        else:
            is_tuple = type(record) is tuple
            rows.append(record if is_tuple else _as_tuple(place, record, drop_extra))
    if found and rows:
        raise InvalidInputError(
            f"records: {len(found)} record batches and {len(rows)} other records (expected one "
            "kind). Append them one after the other."
        )
    return found or [_of_tuples(rows)]


def _is_of_values(records: Any) -> bool:
    return isinstance(records, Mapping) and not records.keys() <= set(_FIELDS)


def _as_tuple(place: int, record: Any, drop_extra: bool) -> tuple[Any, ...]:
    """Return the fields of a dict, a list, or a named tuple such as Spark's Row."""
    if isinstance(record, tuple):
        names = names_of(record)
        if not set(names).isdisjoint(_FIELDS):
            record = dict(zip(names, record, strict=True))
    if isinstance(record, tuple | list):
        return tuple(record)
    if not isinstance(record, Mapping):
        raise InvalidInputError(
            f"records[{place}]: not a record (expected a tuple or a dict, found "
            f"{type(record).__name__} {shown(record)}). {_FORMS}"
        )
    for name in record:
        if name not in _FIELDS and not drop_extra:
            advice = f"{_DROP} " if "value" in record else ""
            raise InvalidInputError(
                f"records[{place}]: unknown field {shown(name)} "
                f"(expected {', '.join(_FIELDS)}). {advice}{_FORMS}"
            )
    if "value" not in record:
        found = ", ".join(record) or "no field"
        raise InvalidInputError(
            f"records[{place}]: a record without a value (expected the field 'value', found "
            f"{found}). Give None as the value of a tombstone. {_FORMS}"
        )
    return tuple(map(record.get, _FIELDS))


def _of_tuples(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    import pyarrow as pa

    from kafkalog.schema import HEADERS

    sizes = set(map(len, rows))
    if not sizes <= _SIZES:
        place = next(place for place, row in enumerate(rows) if len(row) not in _SIZES)
        raise InvalidInputError(
            f"records[{place}]: not a record (expected (key, value[, headers, timestamp]), found a "
            f"tuple of {len(rows[place])}). {_FORMS}"
        )
    columns = {
        "key": pa.array(_converted(rows, 0, to_bytes), pa.binary()),
        "value": pa.array(_converted(rows, 1, to_bytes), pa.binary()),
    }
    if max(sizes, default=0) > 2:
        rows = [(*row, None, None) for row in rows]
        headers = _converted(rows, 2, to_headers)
        if any(headers):
            columns["headers"] = pa.array(headers, HEADERS)
        times = _converted(rows, 3, lambda time: None if time is None else to_epoch_ms(time))
        if any(time is not None for time in times):
            columns["timestamp"] = pa.array(times, pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def _converted(
    rows: list[tuple[Any, ...]], number: int, convert: Callable[[Any], Any]
) -> list[Any]:
    found: list[Any] = []
    try:
        for row in rows:
            found.append(convert(row[number]))
    except (TypeError, ValueError) as fault:
        raise InvalidInputError(
            f"records[{len(found)}]: {_FIELDS[number]}: {fault}. {_FORMS}"
        ) from None
    return found


@functools.cache
def _rules() -> dict[str, tuple[str, Any]]:
    """Return, by column, the allowed types: in words, and as a test."""
    import pyarrow as pa

    types = pa.types
    return {
        "key": ("binary or string", lambda t: types.is_binary(t) or types.is_string(t)),
        "value": ("binary or string", lambda t: types.is_binary(t) or types.is_string(t)),
        "headers": ("list<struct<key: string, value: binary>>", types.is_list),
        "timestamp": (
            "timestamp, or int64 epoch ms",
            lambda t: types.is_timestamp(t) or t == pa.int64(),
        ),
        "partition": ("int32 or int64", types.is_integer),
    }


def _checked(rows: pa.RecordBatch, drop_extra: bool) -> pa.RecordBatch:
    rules = _rules()
    if drop_extra:
        rows = rows.select([name for name in rows.schema.names if name in rules])
    schema = rows.schema
    names = schema.names
    if "value" not in names:
        found = ", ".join(names) or "no column"
        raise InvalidInputError(
            f"records: required column 'value' not found (found {found}). Rename the one that has "
            "the values."
        )
    for name, type_ in zip(names, schema.types, strict=True):
        if names.count(name) > 1:
            raise InvalidInputError(f"records: more than one column {name!r} (expected one)")
        if name not in rules:
            raise InvalidInputError(
                f"records: unknown column {name!r} (expected {', '.join(rules)}). {_DROP}"
            )
        expected, fits = rules[name]
        if name in _BYTES and not fits(type_):
            rows = rows.set_column(names.index(name), name, _plain(rows.column(name)))
        if not fits(rows.schema.field(name).type):
            raise InvalidInputError(f"records: column {name!r} is {type_}, expected {expected}")
    return rows


def _plain(column: pa.Array) -> pa.Array:
    """Return text or bytes in the plain form: they may be large, views, a dictionary, or all null.

    Any other column is returned as it is. Raises InvalidInputError for more than 2 GiB.
    """
    import pyarrow as pa

    types = pa.types
    found = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_large_string(found) or types.is_string_view(found) or types.is_string(found):
        plain = pa.string()
    elif types.is_binary(found) or str(found) in {"large_binary", "binary_view", "null"}:
        plain = pa.binary()
    else:
        return column
    try:
        return column.cast(plain)
    except pa.ArrowNotImplementedError:  # in an older release of pyarrow
        return column
    except pa.ArrowInvalid as fault:
        raise InvalidInputError(f"records: {fault}. Append fewer records at once.") from None
