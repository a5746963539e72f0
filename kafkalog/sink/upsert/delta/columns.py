"""Rows as a Delta table can take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.kept_values import KEPT, NO_ROW_BEFORE, is_kept
from kafkalog.sink.upsert.rows import DELETED, RECORD, REMEDY, UpsertRows, column_of, record_fault
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType


_PLAIN = {
    *("binary", "string", "boolean", "byte", "short", "integer", "long", "float", "double"),
    *("decimal", "date", "timestamp", "timestamp_ntz"),
}
_NO_VALUE: Final = ("", "__HIVE_DEFAULT_PARTITION__")
"""The texts by which the name of a partition's directory means null."""
_INTEGERS = ("byte", "short", "integer", "long")
_IN_A_DOUBLE = {"byte", "short", "integer", "float"}
"""Types whose values a double holds exactly."""


class DeltaRows:
    """Rows with the types of a new table; what Delta lacks has become text."""

    def __init__(self, rows: UpsertRows, *, may_repeat_keys: bool) -> None:
        from pyspark.sql.types import StringType, StructField, StructType

        kinds = [delta_type(kind) or StringType() for kind in rows.types]
        self.names = rows.names
        self.keys = rows.keys
        self.keeps = rows.keeps
        """Whether a row may lack values that the table keeps; see `stored`."""
        self.schema: StructType = StructType(
            [
                StructField(name, kind, nullable=name not in rows.keys)
                for name, kind in zip(rows.names, kinds, strict=True)
            ]
        )
        """The schema of a new table."""
        self.spark: SparkSession = rows.frame.sparkSession
        self._frame = _with_single_keys(rows.frame, rows.keys) if may_repeat_keys else rows.frame

    def stored(self, partition_columns: Sequence[str]) -> DataFrame:
        """Return `kl_deleted` and the columns, for a table that is partitioned by some columns.

        Rows that may lack values have `KEPT` and the columns of their records too. A row that is
        wrong in itself fails, and names its record.
        """
        naming = {name.lower() for name in partition_columns}
        columns = [
            _stored(field.name, field.dataType, names_partitions=field.name.lower() in naming)
            for field in self.schema
        ]
        more = [*RECORD, KEPT] if self.keeps else []
        return self._frame.select(DELETED, *more, *columns)

    def insertions(self) -> dict[str, str]:
        """Return, for each column, its value in a new row, in SQL; a row that lacks one fails."""
        new = {name: f"s.{quoted(name)}" for name in self.names}
        if self.keeps:
            words = f": {NO_ROW_BEFORE}. {REMEDY}".replace("'", "''")
            fault = (
                "raise_error(concat(s.kl_topic, '-', s.kl_partition, ' offset ', s.kl_offset, "
                f"'{words}'))"
            )
            first = self.keys[0]
            new[first] = f"if(s.{KEPT} IS NULL, {new[first]}, {fault})"
        return new

    def assignments(self) -> dict[str, str]:
        """Return, for each column, its new value in the row of a merge, in SQL."""
        new = {name: f"s.{quoted(name)}" for name in self.names}
        if not self.keeps:
            return new
        return {
            name: f"if({is_kept('s', place)}, t.{quoted(name)}, {new[name]})"
            for place, name in enumerate(self.names)
        }

    def missing(self, where: str, table: StructType) -> list[StructField]:
        """Return the columns that the table lacks; raises InvalidInputError for one of its key."""
        found = {name.lower() for name in table.names}
        missing = [field for field in self.schema if field.name.lower() not in found]
        if keys := [field.name for field in missing if field.name in self.keys]:
            raise InvalidInputError(
                f"{where}: it lacks columns of its key (expected {', '.join(keys)}, found "
                f"{', '.join(table.names)}). Name the table's own key with key=, or give another "
                "table."
            )
        return missing

    def check(self, where: str, table: StructType) -> None:
        """Raise InvalidInputError if the type of a column of the table would change values."""
        types = {field.name.lower(): field.dataType for field in table}
        for field in self.schema:
            wanted = types[field.name.lower()]
            if not _keeps_values(field.dataType, wanted):
                raise InvalidInputError(
                    f"{where}: column {field.name} is {wanted.simpleString()}, the rows bring "
                    f"{field.dataType.simpleString()}; cast it with select="
                )


def delta_type(kind: DataType) -> DataType | None:
    """Return the type of a column for values of `kind`; None if Delta lacks one.

    Parts of nested values may be null, since Delta does not check that they are not.
    """
    from pyspark.sql.types import ArrayType, MapType, StructField, StructType

    if isinstance(kind, ArrayType):
        element = delta_type(kind.elementType)
        return None if element is None else ArrayType(element)
    if isinstance(kind, MapType):
        key, value = delta_type(kind.keyType), delta_type(kind.valueType)
        return None if key is None or value is None else MapType(key, value)
    if isinstance(kind, StructType):
        types = [delta_type(field.dataType) for field in kind]
        fields = [
            StructField(field.name, each)
            for field, each in zip(kind, types, strict=True)
            if each is not None
        ]
        return StructType(fields) if len(fields) == len(types) else None
    return kind if kind.typeName() in _PLAIN else None


def _stored(name: str, kind: DataType, *, names_partitions: bool) -> Column:
    """Return a column in its stored type; text must be UTF-8, which other readers insist on.

    If its values name partitions, the value must come back from the text of such a name.
    """
    from pyspark.sql import functions as F

    column = column_of(name)
    text = column.cast("string")
    if kind.typeName() == "string":
        fault = record_fault(f"column {name} is text, the row brings bytes that are not UTF-8")
        column = F.when(text.isNull() | F.is_valid_utf8(text), text).otherwise(fault)
    if names_partitions:
        # A time in an hour that a clock repeats may not come back. Delta cannot write a NUL.
        is_kept = F.is_valid_utf8(text) & ~text.contains("\0") & ~text.isin(*_NO_VALUE)
        is_kept &= text.cast(kind) == column
        fault = record_fault(
            f"column {name} partitions the table, and Delta would store another value there"
        )
        column = F.when(F.col(DELETED) | text.isNull() | is_kept, column).otherwise(fault)
    return column.alias(name)


def _with_single_keys(frame: DataFrame, keys: Sequence[str]) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    count = F.count("*").over(Window.partitionBy(*map(column_of, keys)))
    fault = record_fault(
        "select makes one key of several keys of the log; make it one-to-one with the record's key"
    )
    first = keys[0]
    return frame.withColumn(first, F.when(count == 1, column_of(first)).otherwise(fault))


def _keeps_values(given: DataType, wanted: DataType) -> bool:
    """Return whether each value stays the same in the wanted type, or is refused by Spark."""
    from pyspark.sql.types import DecimalType

    mine, other = given.typeName(), wanted.typeName()
    if isinstance(given, DecimalType) and isinstance(wanted, DecimalType):
        return given.scale <= wanted.scale
    if mine in _INTEGERS and (other in _INTEGERS or isinstance(wanted, DecimalType)):
        return True
    if mine in _IN_A_DOUBLE and other == "double":
        return True
    return given.simpleString() == wanted.simpleString()
