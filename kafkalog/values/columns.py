"""The fields of JSON or Avro documents as columns, by Spark's own functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, Unpack

from kafkalog.errors import InvalidInputError
from kafkalog.values.bad_values import BAD, raised
from kafkalog.values.record_form import (
    DocumentArguments,
    RecordForm,
    document_arguments,
    names_in,
)
from kafkalog.values.spark_avro import comparison
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SIDES: Final = ("key", "value")


def value_columns(
    df: DataFrame,
    *,
    bad_column: str | None = None,
    options: Mapping[str, str] | None = None,
    **documents: Unpack[DocumentArguments],
) -> DataFrame:
    """Return `df` with the fields of its documents as columns in place of `value`, and of `key`.

    Give one of `json` and `avro`. `json` is a Spark schema or its DDL (`"id bigint, name string"`).
    `avro` is a schema in Avro's JSON, or a `SchemaRegistry` for framed values. `key_json` and
    `key_avro` do the same with the column `key`. The columns are binary or string. A document that
    is not a record becomes one column, with the name that it had. Another column with the name of a
    field becomes `_<name>`; letter case counts if `spark.sql.caseSensitive` is true. `options` are
    those of Spark's `from_json` or `from_avro`.

    A tombstone gives nulls in all fields. A bad document fails the query, and the error has its
    place and the reason. With `mode=PERMISSIVE` in `options` it gives nulls. That is the default of
    JSON, as in Spark's `from_json`. `bad_column` is the name of a further column, which says why a
    record is bad. It is null if the record is not. Nothing fails then, and the fields of a bad
    record are null.

    A schema in `avro` is for bare values. One with the five bytes that Confluent's serializers put
    before it is bad, and the reason says how to decode it. With a registry it is the other way
    round. Each value is then decoded with the schema that it was written with, into the columns of
    a reader's schema: `reader`, else the latest of `subject`. Without both, a batch is read once
    for the ids in it. The reader's schema is then the latest of `<topic>-value` if the registry has
    it, else the schema in use with the highest id. A stream takes all versions of the subject. A
    value with a newer id stops it with an error; start it again, and it continues. `json` takes
    framed documents as it takes bare ones.

    With `envelope="debezium"` the documents are change events and their keys, and `json` and
    `key_json` are the schemas of rows; see `kafkalog.Debezium`, which may be given instead.

    Raises InvalidInputError for an invalid schema, for equal column names, for schemas that Avro
    would read as other values (a decimal of another scale, a time of another unit), and if Spark's
    Avro package is not on the class path; SchemaNotFoundError, SchemaRegistryError.
    """
    arguments = document_arguments(documents)
    if arguments.keys().isdisjoint({"json", "avro", "key_json", "key_avro"}):
        raise InvalidInputError(
            "value_columns: give either json= (a Spark schema) or avro= (an Avro schema)"
        )
    given = dict(options or {})
    mode = next((text.upper() for name, text in given.items() if name.lower() == "mode"), None)
    if mode not in {None, "PERMISSIVE", "FAILFAST"}:
        raise InvalidInputError(f"value_columns: mode is PERMISSIVE or FAILFAST, not {mode}")
    is_lenient = mode == "PERMISSIVE" and bad_column is None
    form = RecordForm.of(
        options=given, is_strict=mode == "FAILFAST" or bad_column is not None, **arguments
    )
    return columns_of(df, form, bad_column=bad_column, is_lenient=is_lenient)


def columns_of(
    df: DataFrame,
    form: RecordForm,
    *,
    bad_column: str | None = None,
    is_lenient: bool = False,
    topics: Collection[str] = (),
    deleted: str | None = None,
    is_table: bool = False,
) -> DataFrame:
    """Return `df` with the fields of its documents as columns, see `value_columns`.

    `topics` are those of a stream, for the subjects of their schemas. The column `deleted` is true
    for an event that is a deletion; a frame that `is_table` has no row for it.
    """
    from pyspark.sql import functions as F

    sides = [side for side, each in zip(_SIDES, (form.key, form.value), strict=True) if each]
    for side in sides:
        if side not in df.columns:
            raise InvalidInputError(
                f"value_columns: there is no column {side}; the columns are: "
                f"{', '.join(df.columns)}"
            )
    form.prepare(df, topics)
    decoded = form.decoded(df)
    if form.has_events and (deleted is not None or is_table):
        is_deletion = F.col("value").isNull() & F.col(BAD).isNull()
        decoded = decoded.where(~is_deletion) if is_table else decoded
        if deleted is not None:
            decoded = decoded.withColumn(deleted, is_deletion)
    if not is_lenient and bad_column is None:
        for side in sides:
            fine = F.when(F.col(BAD).isNull(), F.col(side))
            decoded = decoded.withColumn(side, fine.otherwise(raised(df, F.col(BAD))))
    return _spread(df, decoded, sides, bad_column)


def _spread(
    df: DataFrame, decoded: DataFrame, sides: Collection[str], bad_column: str | None
) -> DataFrame:
    """Return decoded records with the fields of their structs as columns."""
    from pyspark.sql import functions as F

    fields = {side: names_in(decoded, side) for side in sides}
    same = comparison(df)
    values = {same(name) for name in fields.get("value", ())}
    keys = {same(name) for name in fields.get("key", ())}
    columns: list[tuple[str, Column]] = []
    for name in df.columns:
        if name not in sides:
            alias = f"_{name}" if same(name) in values | keys else name
            columns.append((alias, F.col(quoted(name))))
            continue
        for field in fields[name]:
            alias = f"_{field}" if name == "key" and same(field) in values else field
            columns.append((alias, F.col(name)[field]))
    if bad_column is not None:
        columns.append((bad_column, F.col(BAD)))
    _check_distinct([name for name, _ in columns], same)
    return decoded.select(*[column.alias(name) for name, column in columns])


def _check_distinct(names: list[str], same: Callable[[str], str]) -> None:
    """Raise InvalidInputError for two columns with names that Spark cannot distinguish."""
    first: dict[str, str] = {}
    for name in names:
        other = first.get(same(name))
        if other == name:
            raise InvalidInputError(f"value_columns: several columns would be called {name!r}")
        if other is not None:
            raise InvalidInputError(
                f"value_columns: columns would be called {other!r} and {name!r}, which are the "
                "same to Spark unless spark.sql.caseSensitive is true"
            )
        first[same(name)] = name
