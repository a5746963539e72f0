"""What callers may append, brought into one form: record batches with known columns."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["record_batches", "to_bytes"]


def record_batches(records: Any) -> Iterable[pa.RecordBatch]:
    """Return record batches of a table, a batch or (key, value) pairs; see `Engine.append`.

    Raises InvalidInputError, which names the column and its types.
    """
    import pyarrow as pa

    if isinstance(records, pa.RecordBatch):
        return [_checked(records)]
    if isinstance(records, pa.Table):
        return [_checked(batch) for batch in records.to_batches()]
    if isinstance(records, Mapping):
        raise InvalidInputError("records: expected (key, value) pairs, found a dict: give .items()")
    try:
        pairs = [(to_bytes(key), to_bytes(value)) for key, value in records]
    except (TypeError, ValueError) as fault:
        raise InvalidInputError(
            f"records: expected a pyarrow table or (key, value) pairs of bytes or text: {fault}"
        ) from None
    columns = {
        "key": pa.array([key for key, _ in pairs], pa.binary()),
        "value": pa.array([value for _, value in pairs], pa.binary()),
    }
    return [pa.RecordBatch.from_pydict(columns)]


def to_bytes(value: bytes | str | None) -> bytes | None:
    """Return a key or a value as it is written; raises TypeError, and ValueError for no Unicode."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"{type(value).__name__} is neither bytes nor text")


@functools.cache
def _rules() -> dict[str, tuple[str, Any]]:
    """Return, by column, the types that it may have: in words, and the test for it."""
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


def _checked(rows: pa.RecordBatch) -> pa.RecordBatch:
    schema, rules = rows.schema, _rules()
    names = schema.names
    if "value" not in names:
        raise InvalidInputError("records: required column 'value' not found")
    for name, type_ in zip(names, schema.types, strict=True):
        if name not in rules:
            raise InvalidInputError(f"records: unknown column {name!r}; known: {', '.join(rules)}")
        expected, fits = rules[name]
        if not fits(type_):
            raise InvalidInputError(f"records: column {name!r} is {type_}, expected {expected}")
    return rows
