"""From the records of a micro-batch to the rows of a table.

Beside the table's columns, each row says whether it is a deletion and which record it comes from.
Targets find the newer of two rows by it, and name the record that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.latest import latest_per_key, latest_rows, with_keys

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

__all__ = [
    "DELETED",
    "RECORD",
    "RowShape",
    "UpsertRows",
    "column_of",
    "deletion_column",
    "record_fault",
]

DELETED = "kl_deleted"
RECORD = {
    "kl_topic": ("topic", "string"),
    "kl_partition": ("partition", "int"),
    "kl_offset": ("offset", "bigint"),
    "kl_timestamp": ("timestamp", "timestamp"),
}
"""The columns that name a row's record: (the source's column, its type)."""
_RAW = ("key", "value", "topic", "partition", "offset")
_CORRUPT = "kl_corrupt"


@dataclass(frozen=True, slots=True)
class UpsertRows:
    """Rows for a target."""

    frame: DataFrame
    """`kl_deleted` (boolean, never null), `kl_topic`, `kl_partition`, `kl_offset`, `kl_timestamp`
    (null where a `select` function drops them), then the table's columns."""
    names: list[str]
    """The table's columns, one of them `key`."""
    types: list[DataType]


class RowShape:
    """How records become rows.

    - By default the columns are `key` and `value` (binary), `topic`, `partition`, `offset`.
    - `schema` ("count int, name string", or a StructType): values are JSON documents of these
      fields; the columns are `key` and the fields. Another value, or a field of another type, fails
      the micro-batch, and the error names the record. A missing field is null. Spark's `from_json`
      ignores text behind the document.
    - `select` as a list of SQL expressions or Columns is evaluated for each record.
    - `select` as a function from DataFrame to DataFrame gets the latest record of each key.

    `select` must return a column `key` without nulls. The rows of a list are reduced to the latest
    per returned key. A function gets records reduced by the record's key, so its keys must be
    one-to-one with those. A row is a deletion if its boolean column `deleted` (any letter case) is
    true; that column is not stored. Without it, a row is a deletion if `value` is null: the
    record's value, or with a function the value in its result.

    `key_type` "string" reads the key as UTF-8 text; it goes without `select`.
    """

    def __init__(
        self,
        *,
        select: Callable[[DataFrame], DataFrame] | Sequence[str | Column] | None = None,
        schema: StructType | str | None = None,
        key_type: str = "binary",
    ) -> None:
        if select is not None and schema is not None:
            raise InvalidInputError("an upsert takes select or schema, not both")
        if isinstance(select, str):
            raise InvalidInputError(f"select is a list of expressions or a function: [{select!r}]")
        if key_type not in {"binary", "string"}:
            raise InvalidInputError(f'key_type is "binary" or "string", not {key_type!r}')
        if select is not None and key_type != "binary":
            raise InvalidInputError("key_type goes without select, which makes the key itself")
        self._select = select
        self._schema = schema
        self._key = "key" if key_type == "binary" else "cast(key as string) as key"

    @property
    def is_row_by_row(self) -> bool:
        """Whether `rows` works with `latest=False`."""
        return not callable(self._select)

    def rows(self, df: DataFrame, *, latest: bool, parts: int | None = None) -> UpsertRows:
        """Return the rows of a micro-batch's records; records without a key make none.

        With `latest` Spark reduces them to the latest per key, in `parts` tasks (default: Spark's
        own number). Without it the target must do so, which a `select` function does not allow.
        Raises InvalidInputError if columns are missing.
        """
        if callable(self._select):
            if not latest:
                raise InvalidInputError(
                    "rows that are not the latest of their key, and a select function"
                )
            shaped = self._select(latest_per_key(df, parts))
            return _rows(shaped, _deletion(shaped), _record_of(shaped), list(shaped.columns))
        # A list may make other keys than the records have, so it is evaluated before the reduction.
        is_before = latest and self._select is None
        records = latest_per_key(df, parts) if is_before else with_keys(df)
        if self._schema is not None:
            shaped = _parsed(records, self._schema, self._key)
        else:
            wanted = self._select if self._select is not None else [self._key, *_RAW[1:]]
            shaped = records.select(*_of_record(), *map(_expression, wanted))
        names = list(shaped.columns)[len(RECORD) + 1 :]
        _check_names(names)
        has_own = self._select is not None and deletion_column(names) is not None
        deleted = _deletion(shaped) if has_own else DELETED
        rows = _rows(shaped, deleted, list(RECORD), names)
        if not latest or is_before:
            return rows
        return replace(rows, frame=latest_rows(rows.frame, list(RECORD), parts))


def _expression(given: str | Column) -> Column:
    from pyspark.sql import functions as F

    return F.expr(given) if isinstance(given, str) else given


def _of_record() -> list[Column]:
    from pyspark.sql import functions as F

    origin = [F.col(source).cast(kind).alias(name) for name, (source, kind) in RECORD.items()]
    return [F.col("value").isNull().alias(DELETED), *origin]


def _record_of(shaped: DataFrame) -> list[Column | str]:
    """Return the record's columns, null for those that a `select` function dropped."""
    from pyspark.sql import functions as F

    types = {field.name: field.dataType.simpleString() for field in shaped.schema.fields}
    return [
        F.col(source).alias(name)
        if types.get(source) == kind
        else F.lit(None).cast(kind).alias(name)
        for name, (source, kind) in RECORD.items()
    ]


def deletion_column(names: Sequence[str]) -> str | None:
    """Return the column that marks deletions: `deleted`, in any letter case as in Spark."""
    return next((name for name in names if name.lower() == "deleted"), None)


def _deletion(shaped: DataFrame) -> Column:
    from pyspark.sql import functions as F

    types = {field.name: field.dataType.simpleString() for field in shaped.schema.fields}
    name = deletion_column(list(types))
    if name is not None:
        if types[name] != "boolean":
            raise InvalidInputError(
                f"select gives a column '{name}' of type {types[name]}; it says which rows "
                "are deletions, so it must be boolean; give a column to be stored another name"
            )
        return F.coalesce(F.col(name), F.lit(False)).alias(DELETED)
    if "value" not in types:
        raise InvalidInputError(
            "select gives neither 'deleted' nor 'value', one of which marks deletions; "
            'add "value is null as deleted"'
        )
    return F.col("value").isNull().alias(DELETED)


def _parsed(records: DataFrame, schema: StructType | str, key: str) -> DataFrame:
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    fields = _struct(schema)
    _check_names(["key", *fields.names])
    whole = StructType(list(fields.fields)).add(_CORRUPT, "string")
    document = F.from_json(
        F.col("value").cast("string"), whole, {"columnNameOfCorruptRecord": _CORRUPT}
    )
    fault = record_fault(
        f"the value is not a JSON document of {fields.simpleString()}", F.col("kl_text")
    )
    # Each step is its own projection, so that Spark parses once, not once per field.
    parsed = records.select(
        *_of_record(),
        F.expr(key),
        F.substring(F.col("value").cast("string"), 1, 100).alias("kl_text"),
        document.alias("kl_document"),
    )
    is_wrong = ~F.col(DELETED) & (
        F.col("kl_document").isNull() | F.col(f"kl_document.{_CORRUPT}").isNotNull()
    )
    checked = parsed.select(
        DELETED,
        *RECORD,
        "key",
        F.when(is_wrong, fault.cast(whole)).otherwise(F.col("kl_document")).alias("kl_document"),
    )
    return checked.select(
        DELETED, *RECORD, "key", *[F.col("kl_document")[name].alias(name) for name in fields.names]
    )


def _struct(schema: StructType | str) -> StructType:
    from pyspark.sql.types import StructType

    fields = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(fields, StructType):
        raise InvalidInputError(f"schema names columns and their types, {schema!r} does not")
    return fields


def record_fault(text: str, found: Column | None = None) -> Column:
    """Return an expression that fails the micro-batch and names the record."""
    from pyspark.sql import functions as F

    form = "%s-%s offset %s: " + text.replace("%", "%%")
    columns = [F.col(name) for name in list(RECORD)[:3]]
    if found is not None:
        form, columns = form + "; found '%s'", [*columns, found]
    return F.raise_error(F.format_string(form, *columns))


def _check_names(names: Sequence[str]) -> None:
    lowered = [name.lower() for name in names]
    taken = [name for name in names if name.lower().startswith("kl_")]
    doubled = sorted({name for name in lowered if lowered.count(name) > 1})
    if taken:
        raise InvalidInputError(f"columns whose names begin with kl_ are taken: {', '.join(taken)}")
    if doubled:
        raise InvalidInputError(f"an upsert's columns need different names: {', '.join(doubled)}")


def _rows(
    shaped: DataFrame,
    deleted: Column | str,
    record: Sequence[Column | str],
    given: Sequence[str],
) -> UpsertRows:
    from pyspark.sql import functions as F

    _check_names(given)
    dropped = None if isinstance(deleted, str) else deletion_column(given)
    names = [name for name in given if name != dropped]
    if "key" not in names:
        raise InvalidInputError(
            f"select gives no column 'key'; its columns are: {', '.join(given) or 'none'}"
        )
    marked = shaped.select(deleted, *record, *[column_of(name) for name in names])
    checked = F.coalesce(F.col("key"), record_fault("select makes the key null")).alias("key")
    frame = marked.select(
        DELETED, *RECORD, *[checked if name == "key" else column_of(name) for name in names]
    )
    types = [field.dataType for field in frame.schema.fields[len(RECORD) + 1 :]]
    return UpsertRows(frame, names, types)


def column_of(name: str) -> Column:
    """Return the column with exactly this name, whatever characters it has."""
    from pyspark.sql import functions as F

    return F.col("`" + name.replace("`", "``") + "`")
