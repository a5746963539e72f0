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
    from pyspark.sql.types import DataType

    from kafkalog.values.registered_schema import RegisteredSchema

_VALUE: Final = "value"
_OF_RECORD: Final = frozenset(
    {"key", "topic", "partition", "offset", "timestamp", "timestamptype", "headers"}
)
"""The columns of a record that are no fields of its value."""
_MILLIS: Final = frozenset({"timestamp-millis", "local-timestamp-millis"})
"""Spark would cut off the microseconds."""


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
    query, and so does a moment that has microseconds where the field has milliseconds. Raises
    InvalidInputError for columns that are not the schema's fields or of other types, and if Spark's
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
    row = F.struct(*_packed(df, {same(name): name for name in given}, chosen, same))
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
    df: DataFrame,
    given: Mapping[str, str],
    schema: RegisteredSchema,
    same: Callable[[str], str],
) -> list[Column]:
    """Return the columns that are the schema's fields; what it cannot have fails the query.

    Raises InvalidInputError for a column that is not a field or of another type, and for a field
    without a column.
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
    types = {field.name: field.dataType for field in df.schema}
    wanted = _types(df, schema)
    packed: list[Column] = []
    for name, (can_be_null, is_in_millis) in fields.items():
        if same(name) in given:
            column = given[same(name)]
            if name in wanted and not _fits(types[column], wanted[name]):
                kind = wanted[name].simpleString()
                raise InvalidInputError(
                    f"value_bytes: the column {column} is {types[column].simpleString()} (expected "
                    f"{kind}, for the field {name} of the schema {schema.id}). Cast it."
                )
            value = F.col(quoted(column))
            if not can_be_null:
                words = f"value_bytes: the field {name} is null, and the schema {schema.id} has no "
                failure = F.raise_error(F.lit(f"{words}null for it. Give a value."))
                value = F.when(value.isNull(), failure).otherwise(value)
            if is_in_millis:
                words = f"value_bytes: the field {name} has microseconds, and the schema "
                words += f"{schema.id} has milliseconds. Truncate it with date_trunc."
                is_cut = F.date_part(F.lit("SECONDS"), value) * 1000 % 1 != 0
                value = F.when(is_cut, F.raise_error(F.lit(words))).otherwise(value)
            packed.append(value.alias(name))
        elif not can_be_null:
            raise InvalidInputError(
                f"value_bytes: there is no column {name!r}, a field of the schema {schema.id} that "
                "cannot be null. Add the column."
            )
    return packed


def _types(df: DataFrame, schema: RegisteredSchema) -> dict[str, DataType]:
    """Return the types that Spark has for the fields of a schema."""
    from pyspark.sql import functions as F
    from pyspark.sql.avro.functions import from_avro
    from pyspark.sql.types import StructType

    nothing, options = F.lit(None).cast("binary"), {"recursiveFieldMaxDepth": "2"}
    probe = with_decoded(df, "kl_types", lambda: from_avro(nothing, schema.text, options))
    found = probe.schema["kl_types"].dataType
    return {each.name: each.dataType for each in found} if isinstance(found, StructType) else {}


def _fits(kind: DataType, wanted: DataType) -> bool:
    """Return whether `to_avro` writes values of a type as they are, where it says so before.

    It would write a timestamp as a plain number of milliseconds. It has nested records by name.
    """
    from pyspark.sql import types as T

    if isinstance(wanted, T.StructType):
        return isinstance(kind, T.StructType)
    if isinstance(wanted, T.ArrayType):
        return isinstance(kind, T.ArrayType) and _fits(kind.elementType, wanted.elementType)
    if isinstance(wanted, T.MapType):
        return isinstance(kind, T.MapType) and _fits(kind.valueType, wanted.valueType)
    is_small = isinstance(kind, (T.ByteType, T.ShortType)) and isinstance(wanted, T.IntegerType)
    return is_small or kind == wanted


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


def _fields(schema: RegisteredSchema) -> dict[str, tuple[bool, bool]]:
    """Return the fields of a record: whether it may be null, and is a moment in milliseconds.

    Raises InvalidInputError.
    """
    record: Any = AvroType(schema_of(schema.text)).record()
    if not isinstance(record, Mapping) or "fields" not in record:
        raise InvalidInputError(f"value_bytes: the schema {schema.id} is not that of a record")
    found: dict[str, tuple[bool, bool]] = {}
    for each in record["fields"]:
        branches = each["type"] if isinstance(each["type"], list) else [each["type"]]
        logical = {part.get("logicalType") for part in branches if isinstance(part, Mapping)}
        found[each["name"]] = "null" in branches, not _MILLIS.isdisjoint(logical)
    return found
