"""Spark's types in PostgreSQL: the type of a new column, and columns that would change values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kafkalog.sink.upsert.rows import column_of
from kafkalog.sink.upsert.value_text import JSON_TYPES, document_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType


_SIMPLE_TYPES = {
    "binary": "bytea",
    "string": "text",
    "byte": "smallint",
    "short": "smallint",
    "integer": "integer",
    "long": "bigint",
    "float": "real",
    "double": "double precision",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
}
_TIMES = {"timestamp", "timestamp_ntz"}
_WHOLE_DIGITS = {"byte": 3, "short": 5, "integer": 10, "long": 19}
_KEPT_DIGITS = {"real": 6, "double precision": 15}
"""Decimal digits that a floating-point column returns unchanged."""
_DECLARED_SCALE = re.compile(r"numeric\(\d+,(-?\d+)\)")
_COARSE_TIME = re.compile(r"date|time\b.*|timestamp\([0-5]\).*")


def column_type(data_type: DataType) -> str:
    """Return the type of a column that is created for Spark's type."""
    name = data_type.typeName()
    if name == "decimal":
        return data_type.simpleString().replace("decimal", "numeric")
    if name in JSON_TYPES:
        return "jsonb"
    return _SIMPLE_TYPES.get(name, "text")


def staged_type(data_type: DataType) -> str:
    """Return the type of a staged column, as ADBC copies Spark's type."""
    name = data_type.typeName()
    return "numeric" if name == "decimal" else _SIMPLE_TYPES.get(name, "text")


def changes_values(data_type: DataType, kind: str) -> bool:
    """Return whether a column of PostgreSQL's type `kind` would round or truncate Spark's values.

    PostgreSQL does so silently: a timestamp becomes a date, decimals are rounded. Text is left to
    the column's type, and ranges to PostgreSQL's errors.
    """
    from pyspark.sql.types import DecimalType

    name = data_type.typeName()
    if name in _TIMES:
        return _COARSE_TIME.fullmatch(kind) is not None
    digits, scale = _WHOLE_DIGITS.get(name), 0
    if isinstance(data_type, DecimalType):
        digits, scale = data_type.precision, data_type.scale
    if declared := _DECLARED_SCALE.fullmatch(kind):
        is_floating = name in {"float", "double"}
        return is_floating or (digits is not None and scale > int(declared[1]))
    if name == "double":
        return kind == "real"
    return digits is not None and digits > _KEPT_DIGITS.get(kind, digits)


def for_postgres(frame: DataFrame, names: Sequence[str], types: Sequence[DataType]) -> DataFrame:
    """Return the rows with nested columns as JSON, and columns of other unknown types as text."""
    columns = []
    for name, data_type in zip(names, types, strict=True):
        kind = data_type.typeName()
        column = column_of(name)
        if kind in JSON_TYPES:
            column = document_text(column, data_type).alias(name)
        elif kind != "decimal" and kind not in _SIMPLE_TYPES:
            column = column.cast("string").alias(name)
        columns.append(column)
    return frame.select(*frame.columns[: len(frame.columns) - len(names)], *columns)
