"""Columns become framed values: Avro behind the five bytes of Confluent's serializers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError
from kafkalog.values.avro_schema import AvroType
from kafkalog.values.framing import head
from kafkalog.values.schema_registry import SchemaRegistry
from kafkalog.values.spark_avro import comparison, schema_of, with_decoded

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from kafkalog.values.registered_schema import RegisteredSchema

_VALUE: Final = "value"
_OF_RECORD: Final = frozenset(
    {"key", "topic", "partition", "offset", "timestamp", "timestamptype", "headers"}
)
"""The columns of a record that are no fields of its value."""


def value_bytes(
    df: DataFrame,
    *,
    avro: SchemaRegistry,
    subject: str,
    schema: str | int | None = None,
    columns: Sequence[str] | None = None,
    deleted: str | None = None,
) -> DataFrame:
    """Return `df` with a framed value in the column `value` in place of the fields of its rows.

        rows = kafkalog.value_bytes(rows, avro=registry, subject="orders-value", schema=text)
        rows.write.format("kafkalog").options(path=path, topic="orders").mode("append").save()

    The fields are the `columns`, by default all but those of a record: `key`, `topic`,
    `partition`, `offset`, `timestamp`, `timestampType`, `headers`. Columns and fields go together
    by name. `schema` is the text of a record's schema, which is registered with the subject; or the
    id of one that the registry has; by default it is the subject's latest. A row whose boolean
    column `deleted` names is true has no value: it is a tombstone.

    Spark's `to_avro` encodes. A null in a field that the schema does not let be null fails the
    query. Raises InvalidInputError for columns that are not the schema's fields, and if Spark's
    Avro package is not on the class path; SchemaNotFoundError, SchemaRegistryError.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.avro.functions import to_avro

    from kafkalog.values.spark_sql import quoted

    chosen = _registered(avro, subject, schema)
    same = comparison(df)
    left_out = set() if deleted is None else {same(deleted)}
    given = columns
    if given is None:
        given = [n for n in df.columns if n.lower() not in _OF_RECORD and same(n) not in left_out]
    row = F.struct(*_packed({same(name): name for name in given}, chosen, same))
    is_deleted = (
        F.lit(False) if deleted is None else F.coalesce(F.col(quoted(deleted)), F.lit(False))
    )

    def framed() -> Column:
        value = F.when(~is_deleted, row)
        return F.concat(head(chosen.id), to_avro(value, chosen.text))

    dropped = {*map(same, given), *left_out}
    kept = [F.col(quoted(name)) for name in df.columns if same(name) not in dropped]
    encoded = with_decoded(df, "kl_framed", framed)
    return encoded.select(*kept, F.col("kl_framed").alias(_VALUE))


def _packed(
    given: Mapping[str, str], schema: RegisteredSchema, same: Callable[[str], str]
) -> list[Column]:
    """Return the columns that are the schema's fields; a null that it forbids fails the query.

    Raises InvalidInputError for a column that is not a field, and for a field without a column.
    """
    from pyspark.sql import functions as F

    from kafkalog.values.spark_sql import quoted

    fields = _fields(schema)
    known = {same(name) for name in fields}
    if extra := [name for key, name in given.items() if key not in known]:
        raise InvalidInputError(
            f"value_bytes: the schema {schema.id} has no field {extra[0]!r} (its fields are: "
            f"{', '.join(fields)}). Drop the column, or name the fields with columns="
        )
    packed: list[Column] = []
    for name, can_be_null in fields.items():
        if same(name) in given:
            value = F.col(quoted(given[same(name)]))
            if not can_be_null:
                words = f"value_bytes: the field {name} is null, and the schema {schema.id} has no "
                failure = F.raise_error(F.lit(f"{words}null for it. Give a value."))
                value = F.when(value.isNull(), failure).otherwise(value)
            packed.append(value.alias(name))
        elif not can_be_null:
            raise InvalidInputError(
                f"value_bytes: there is no column {name!r}, a field of the schema {schema.id} that "
                "cannot be null. Add the column."
            )
    return packed


def _registered(
    registry: SchemaRegistry, subject: str, schema: str | int | None
) -> RegisteredSchema:
    """Return the schema to write with, which the registry has; raises InvalidInputError."""
    if schema is None:
        chosen = registry.latest(subject)
    elif isinstance(schema, str):
        schema_of(schema)
        chosen = registry.schema(registry.register(subject, schema))
    else:
        chosen = registry.schema(schema)
    if chosen.kind != "AVRO":
        raise InvalidInputError(
            f"value_bytes: expected an Avro schema, found one of {chosen.kind}, {chosen.id}"
        )
    return chosen


def _fields(schema: RegisteredSchema) -> dict[str, bool]:
    """Return the fields of a record, and whether each may be null; raises InvalidInputError."""
    record: Any = AvroType(schema_of(schema.text)).record()
    if not isinstance(record, Mapping) or "fields" not in record:
        raise InvalidInputError(f"value_bytes: the schema {schema.id} is not that of a record")
    return {
        each["name"]: each["type"] == "null"
        or (isinstance(each["type"], list) and "null" in each["type"])
        for each in record["fields"]
    }
