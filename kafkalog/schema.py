"""The columns of a log, as Arrow and Spark see them: those of Spark's Kafka source."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from kafkalog.errors import InvalidInputError

__all__ = ["HEADERS", "changelog_schema", "chosen_columns"]

HEADERS = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)

_FIELDS = [
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    pa.field("timestampType", pa.int32()),
]


def changelog_schema(*, include_headers: bool = False) -> pa.Schema:
    """Return the schema of a read; `include_headers` adds the eighth column.

    A null value is a tombstone; `headers` is null, not empty, for a record without headers;
    `timestampType` is 0 for CreateTime and 1 for LogAppendTime.
    """
    headers = [pa.field("headers", HEADERS)] if include_headers else []
    return pa.schema(_FIELDS + headers)


def chosen_columns(columns: Sequence[str] | None, *, include_headers: bool = False) -> pa.Schema:
    """Return the schema of the given columns, in their order; None: all but `headers`.

    Raises InvalidInputError for an unknown column, and for one name alone.
    """
    if isinstance(columns, str):
        raise InvalidInputError(f"columns: expected several names, found the text {columns!r}")
    schema = changelog_schema(include_headers=include_headers or "headers" in (columns or ()))
    if columns is None:
        return schema
    unknown = sorted(set(columns) - set(schema.names))
    if unknown:
        raise InvalidInputError(f"unknown column {unknown[0]!r}; known: {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in columns])
