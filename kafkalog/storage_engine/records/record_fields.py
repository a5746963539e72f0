"""Convert the fields of a record from a caller's types.

A wrong type raises TypeError or ValueError; the caller adds the record.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from kafkalog.storage_engine.format import layout

Headers: TypeAlias = (
    Mapping[str, bytes | str | None]
    | Iterable[tuple[str, bytes | str | None] | Mapping[str, bytes | str | None]]
)
"""{name: value}, or (name, value) pairs, or {"key": name, "value": value} as reads return them."""

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_HEADER: Final = {"key", "value"}
_HEADER_FORMS: Final = 'give [("name", b"value")] or {"name": b"value"}'


def to_bytes(value: bytes | bytearray | str | None) -> bytes | None:
    """Return a key or a value as bytes; text is UTF-8. Rows of Spark 4.0 hold bytearrays."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray):
        return bytes(value)
    raise TypeError(f"{type(value).__name__} is neither bytes nor text")


def to_int64(number: int) -> int:
    """Return a timestamp or a partition's number."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{type(number).__name__} is not a whole number")
    found = operator.index(number)
    if abs(found) > layout.INT64_MAX:
        raise ValueError(f"{found} takes more than 64 bits")
    return found


def to_epoch_ms(time: int | datetime) -> int:
    """Return a timestamp in epoch ms; a datetime needs a time zone, and is rounded down."""
    if not isinstance(time, datetime):
        return to_int64(time)
    if time.tzinfo is None:
        raise TypeError(f"{time.isoformat()} has no time zone")
    return (time - _EPOCH) // _MILLISECOND


def to_headers(headers: Headers | None) -> list[tuple[str, bytes | None]] | None:
    """Return headers as pairs, or None.

    Refuses a mapping with the names key and value, which may be meant as one header.
    """
    if headers is None:
        return None
    if isinstance(headers, str | bytes | bytearray | memoryview):
        raise TypeError(f"{type(headers).__name__} is not a list of headers: {_HEADER_FORMS}")
    if isinstance(headers, Mapping):
        if set(headers) == _HEADER:
            raise TypeError(f"one header must be in a list too: {_HEADER_FORMS}")
        headers = headers.items()
    found = []
    for header in headers:
        name, value = _pair(header)
        if not isinstance(name, str):
            raise TypeError(f"a header's key is text, not {type(name).__name__}")
        name.encode()  # raises for invalid Unicode
        found.append((name, to_bytes(value)))
    return found or None


def names_of(record: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the field names of a named tuple or a Spark Row, or ()."""
    return tuple(getattr(record, "__fields__", getattr(record, "_fields", ())))


def shown(value: object) -> str:
    """Return a value for an error: short, and in one line."""
    return " ".join(reprlib.repr(value).split())


def _pair(header: Any) -> tuple[Any, Any]:
    if isinstance(header, tuple) and not set(names := names_of(header)).isdisjoint(_HEADER):
        header = dict(zip(names, header, strict=True))
    if isinstance(header, Mapping) and set(header) == _HEADER:
        return header["key"], header["value"]
    if isinstance(header, tuple | list) and len(header) == 2:
        return header[0], header[1]
    raise TypeError(f"a header is a pair, not {shown(header)}: {_HEADER_FORMS}")
