"""The fields of JSON or Avro values as columns, by Spark's own functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from kafkalog.errors import InvalidInputError
from kafkalog.values.bare_avro import BareAvro

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

_VALUE: Final = "value"


def value_columns(
    df: DataFrame,
    *,
    json: StructType | str | None = None,
    avro: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return `df` with the fields of its documents as columns in place of `value`.

    Give exactly one of `json`, a Spark schema or its DDL (`"id bigint, name string"`), and `avro`,
    a schema in Avro's JSON. The column `value` is binary or string. `options` are those of Spark's
    `from_json` or `from_avro`. Another column with the name of a field becomes `_<name>`; letter
    case counts if `spark.sql.caseSensitive` is true. A tombstone gives nulls in all fields. So does
    a JSON value that does not parse, unless `options` have `mode=FAILFAST`. An Avro value that does
    not end where its schema does fails the query, unless `options` have `mode=PERMISSIVE`.

    `avro` is for bare values. A framed value, with the five bytes that Confluent's serializers put
    before it, fails the query, and the error says how to decode it.

    Works on streams too. Raises InvalidInputError for an invalid schema, for equal column names,
    and if Spark's Avro package is not on the class path.
    """
    from pyspark.sql import functions

    from kafkalog.values.spark_sql import fields_of, quoted

    if (json is None) == (avro is None):
        raise InvalidInputError(
            "value_columns: give either json= (a Spark schema) or avro= (an Avro schema)"
        )
    if _VALUE not in df.columns:
        raise InvalidInputError(
            f"value_columns: there is no column value; the columns are: {', '.join(df.columns)}"
        )
    options = dict(options or {})
    if json is not None:
        text = functions.col(_VALUE).cast("string")
        # Spark Connect refuses an empty map.
        document = functions.from_json(text, fields_of(json, "json"), options or None)
        parsed = df.withColumn(_VALUE, document)
    else:
        assert avro is not None
        parsed = BareAvro(avro, options).replace_values(df)
    fields = _field_names(parsed)
    same = _comparison(df)
    taken = {same(field) for field in fields}
    others = [name for name in df.columns if name != _VALUE]
    renamed = {name: f"_{name}" if same(name) in taken else name for name in others}
    _check_distinct([*renamed.values(), *fields], same)
    columns: list[Column] = []
    for name in df.columns:
        if name == _VALUE:
            columns += [functions.col(_VALUE)[field].alias(field) for field in fields]
        else:
            columns.append(functions.col(quoted(name)).alias(renamed[name]))
    return parsed.select(*columns)


def _comparison(df: DataFrame) -> Callable[[str], str]:
    """Return the function that makes names equal if Spark treats them as the same."""
    is_exact = df.sparkSession.conf.get("spark.sql.caseSensitive", "false")
    return str if str(is_exact).lower() == "true" else str.lower


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


def _field_names(parsed: DataFrame) -> list[str]:
    from pyspark.sql.types import StructType

    kind = parsed.schema[_VALUE].dataType
    assert isinstance(kind, StructType)
    return kind.fieldNames()
