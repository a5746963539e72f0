"""Bad values: the reason, and the place of the record in an error.

Every way of decoding gives a frame of one form: the decoded column is a struct, null for a
tombstone and for a bad value. The column `kl_bad` says why a value is bad; it is null if it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


BAD: Final = "kl_bad"
"""The column with the reason why a record is bad."""
PLACE: Final = ("topic", "partition", "offset")
"""The columns that say where a record is."""


def with_reason(df: DataFrame, reason: Column) -> DataFrame:
    """Return `df` with a reason in `kl_bad`, unless there is one already."""
    from pyspark.sql import functions as F

    return df.withColumn(BAD, F.coalesce(BAD, reason) if BAD in df.columns else reason)


def with_struct(df: DataFrame, column: str, value: Column) -> DataFrame:
    """Return `df` with a struct in a column of bytes, null for a tombstone and a bad record."""
    from pyspark.sql import functions as F

    return df.withColumn(column, F.when(F.col(column).isNotNull() & F.col(BAD).isNull(), value))


def raised(df: DataFrame, reason: Column, caller: str = "value_columns") -> Column:
    """Return an expression that fails the query with a reason, after its place if `df` has it.

    Without a place, the name of the function that was called comes first.
    """
    from pyspark.sql import functions as F

    if not set(PLACE) <= set(df.columns):
        return F.raise_error(F.concat(F.lit(f"{caller}: "), reason))
    return F.raise_error(F.format_string("%s-%s offset %s: %s", *map(F.col, PLACE), reason))


def found(column: Column, most: int = 20) -> Column:
    """Return the first bytes of a value, as SQL writes them: X'00FF'."""
    from pyspark.sql import functions as F

    return F.concat(F.lit("X'"), F.hex(F.substring(column.cast("binary"), 1, most)), F.lit("'"))
