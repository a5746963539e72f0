"""The columns with which `select` marks rows: `deleted` and `bad`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType


def deletion_column(names: Iterable[str]) -> str | None:
    """Return the column that marks deletions: `deleted`, in any letter case as in Spark."""
    return next((name for name in names if name.lower() == "deleted"), None)


def is_bad(name: str) -> bool:
    """Return whether a column marks bad rows: `bad`, in any letter case as in Spark."""
    return name.lower() == "bad"


def check_mark(name: str, kind: DataType, what: str) -> None:
    """Raise InvalidInputError if a column of `select` that marks rows has another type."""
    if kind.typeName() != "boolean":
        raise InvalidInputError(
            f"select gives a column '{name}' of type {kind.simpleString()}; it says which rows "
            f"{what}, so it must be boolean; give a column to be stored another name"
        )


def marks_deletion(schema: StructType) -> Column | None:
    """Return whether a row is a deletion by the column of `select` that says so; None without one.

    Raises InvalidInputError for a column that is not boolean.
    """
    from pyspark.sql import functions as F

    types = {field.name: field.dataType for field in schema.fields}
    name = deletion_column(types)
    if name is None:
        return None
    check_mark(name, types[name], "are deletions")
    return F.coalesce(F.col(quoted(name)), F.lit(False))
