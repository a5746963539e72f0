"""Bring rows of one key to the sink in the order of a column.

Spark promises no order between files of a micro-batch or tasks of a stage, and cannot sort a
stream. Here the rows of a key go to one task, which sorts all its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_ROWS_MAX = 10_000
_BYTES_MAX = 16 << 20
_NOT_IN_ARROW = {"yearmonthinterval", "interval"}


def in_order(
    df: DataFrame,
    by: str | Sequence[str] = "seq",
    partitions: int | None = None,
    *,
    key: str | Sequence[str] = "key",
) -> DataFrame:
    """Return the rows of `df`, those of each key in one task and in ascending order of `by`.

    Works on streams (within each micro-batch) and on plain DataFrames. `partitions` is the number
    of tasks; None leaves it to Spark (`spark.sql.shuffle.partitions`). A task sorts all its rows in
    memory, so a large micro-batch needs more partitions. Nulls of `by` come first; rows with equal
    `by` come in any order. The sink does not write the column `by`.

    Raises InvalidInputError for columns that do not exist or have no order, and for intervals of
    months, which Spark cannot hand to Python.
    """
    names = [by] if isinstance(by, str) else list(by)
    keys = [key] if isinstance(key, str) else list(key)
    _check_columns(df, names, keys)
    if partitions is not None and (isinstance(partitions, bool) or int(partitions) < 1):
        raise InvalidInputError(f"in_order: partitions: expected 1 or more, found {partitions!r}")
    columns = list(map(quoted, keys))
    gathered = (
        df.repartition(*columns)
        if partitions is None
        else df.repartition(int(partitions), *columns)
    )
    return gathered.mapInArrow(lambda batches: sorted_batches(batches, names), df.schema)


def _check_columns(df: DataFrame, names: Sequence[str], keys: Sequence[str]) -> None:
    if not names or not keys:
        raise InvalidInputError("in_order: expected at least one column to order by, and one key")
    for column in df.schema.fields:
        if column.dataType.typeName() in _NOT_IN_ARROW:
            role = "by=" if column.name in names else "column "
            raise InvalidInputError(
                f"in_order: {role}{column.name!r}: Spark cannot hand "
                f"{column.dataType.simpleString()} to Python; cast it to a number first"
            )
    types = {column.name: column.dataType.typeName() for column in df.schema.fields}
    for role, wanted in (("by", names), ("key", keys)):
        for name in wanted:
            if name not in types:
                raise InvalidInputError(
                    f"in_order: {role}={name!r}: no such column; "
                    f"the columns are: {', '.join(types) or 'none'}"
                )
    for name in names:
        if types[name] in {"array", "map", "struct", "variant", "void"}:
            raise InvalidInputError(
                f"in_order: by={name!r}: a column of type {types[name]} has no order here"
            )


def sorted_batches(
    batches: Iterable[pa.RecordBatch],
    names: Sequence[str],
    *,
    rows_max: int = _ROWS_MAX,
    bytes_max: int = _BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """Sort all rows of a task by `names`; yield them in batches of bounded size."""
    import pyarrow as pa

    collected = list(batches)
    if not collected:
        return
    table = pa.Table.from_batches(collected)
    del collected
    # One chunk per column: taking rows out of many chunks would copy them all every time.
    table = table.combine_chunks()
    indices = _order(table, names)
    size = max(1, table.nbytes // max(1, table.num_rows))
    step = max(1, min(rows_max, bytes_max // size))
    for start in range(0, table.num_rows, step):
        yield from table.take(indices.slice(start, step)).combine_chunks().to_batches()


def _order(table: pa.Table, names: Sequence[str]) -> pa.Array:
    """Return the row numbers in ascending order, nulls first as in Spark."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = []
    for name in names:
        column = table.column(table.schema.get_all_field_indices(name)[0])
        if column.null_count:
            columns.append(pc.is_valid(column))
        columns.append(column)
    keys = pa.table(columns, names=[str(place) for place in range(len(columns))])
    return pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
