"""Values that a change event does not give: the table keeps those of the row before.

PostgreSQL gives no large value (TOAST) that did not change, and Debezium puts a placeholder in its
place. The value is then that of the key's earlier event in the micro-batch, else that of the
table's row. A row without either is bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kafkalog.values.bad_values import BAD
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


KEPT: Final = "kl_kept"
"""The column that says which values a row lacks: text with a digit for each of the table's columns,
1 for a value that the table keeps. It is null for a row that has all."""
NO_ROW_BEFORE: Final = (
    "the event lacks a large value that did not change, for which Debezium has put its "
    "placeholder, and there is no row before it that has the value"
)
"""Why such a row is bad."""


def is_kept(row: str, place: int) -> str:
    """Return whether a row keeps the value of a column, in SQL; the first place is 0."""
    return f"coalesce(substr({row}.{KEPT}, {place + 1}, 1) = '1', false)"


def filled(
    rows: DataFrame, names: Sequence[str], keys: Sequence[str], *, deleted: str
) -> DataFrame:
    """Return rows with the values of their keys' earlier rows in the frame, and the rest `KEPT`.

    `KEPT` has the fields that an event does not give, and becomes text; `kl_bad` gets the reason of
    a row that follows a deletion. Rows of other partitions, and bad ones, give no values.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    place = ("kl_topic", "kl_partition")
    so_far = (
        Window.partitionBy(*map(quoted, keys), *place)
        .orderBy("kl_offset")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    is_gone = F.col(deleted) & F.col(BAD).isNull()
    befores: dict[str, Column] = {}
    for number, name in enumerate(names):
        if name not in keys:
            given = F.struct(F.col(quoted(name)).alias("value"), is_gone.alias("is_gone"))
            is_given = F.col(BAD).isNull() & ~_lacks(name)
            befores[f"kl_before_{number}"] = F.last(F.when(is_given, given), True).over(so_far)
    others = [each for each in rows.columns if each not in {*names, KEPT, BAD}]
    rows = rows.withColumns(befores)
    columns: list[Column] = []
    digits: list[Column] = []
    is_lost = F.lit(False)
    for number, name in enumerate(names):
        column, lacks, before = F.col(quoted(name)), _lacks(name), f"kl_before_{number}"
        digit = F.lit("0")
        if before in befores:
            found = F.col(before)
            is_lost |= lacks & F.coalesce(found["is_gone"], F.lit(False))
            digit = F.when(lacks & found.isNull(), "1").otherwise("0")
            column = F.when(lacks, found["value"]).otherwise(column).alias(name)
        columns.append(column)
        digits.append(digit)
    kept = F.concat(*digits)
    return rows.select(
        *map(quoted, others),
        F.coalesce(F.col(BAD), F.when(is_lost, NO_ROW_BEFORE)).alias(BAD),
        F.when(kept.contains("1"), kept).alias(KEPT),
        *columns,
    )


def _lacks(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.coalesce(F.array_contains(KEPT, name), F.lit(False))
