"""The columns of a read: those of Spark's Kafka source, or a subset that the user names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

_HEADERS = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)


def spark_schema(*, include_headers: bool) -> StructType:
    """Return the schema of a read; every column is nullable, as Spark demands of Arrow batches."""
    columns = [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
    if include_headers:
        columns.append(StructField("headers", _HEADERS))
    return StructType(columns)


def check_columns(schema: StructType) -> None:
    """Check a schema given by the user; raises InvalidInputError.

    A subset of the columns, in any order, is honoured, and the others are not decoded. Spark offers
    a Python source no other column pruning.
    """
    ours = {field.name: field.dataType for field in spark_schema(include_headers=True)}
    names = [field.name for field in schema]
    wrong = [f.name for f in schema if not f.nullable or f.dataType != ours.get(f.name)]
    if wrong or not names or len(set(names)) < len(names):
        columns = ", ".join(f"{name} {kind.simpleString()}" for name, kind in ours.items())
        raise InvalidInputError(
            "Kafka source has a fixed schema and cannot be set with a custom one, except for a "
            f"subset of its nullable columns: {columns}; got {schema.simpleString()}"
        )


def arrow_schema(names: Iterable[str]) -> pa.Schema:
    """Return the Arrow schema of some columns; Spark compares it with that of our batches."""
    import pyarrow as pa

    from kafkalog.schema import changelog_schema

    columns = changelog_schema(include_headers=True)
    return pa.schema([columns.field(name) for name in names])
