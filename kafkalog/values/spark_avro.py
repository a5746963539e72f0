"""Spark's `from_avro`, with which no value is read beyond its end, or short of it.

Avro says nothing of where a value ends, and Spark reads no further than the schema goes. A marker
is therefore put behind the value, and behind both schemas. A value of another schema does not end
at the marker, nor does one that is too short or too long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import files
from kafkalog.values.avro_schema import AvroType
from kafkalog.values.framing import HEAD_SIZE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_PRIMITIVE: Final = {*("null", "boolean", "int", "long", "float", "double", "bytes", "string")}
_MARKER: Final = bytes.fromhex("b1d3f7a98ec4e2dfa701")
"""A whole number in Avro. No field of a value is likely to have these bytes."""
END: Final = "kl_end"
"""The marker's field."""
_VALUE: Final = "kl_value"
_NUMBER: Final = -6043765899387663577
"""The number."""
_OF_SCHEMA: Final = re.compile(
    r"(?:(?:SchemaParse|AvroType|IncompatibleSchema)Exception: |"
    r"\[(?=DECIMAL_PRECISION_EXCEEDS_MAX_PRECISION))(.*)"
)
"""What Avro and Spark say of a schema."""


def schema_of(text: str) -> Any:
    """Return a schema as JSON's values; raises InvalidInputError for text that is not a schema."""
    try:
        schema = json.loads(text)
    except (ValueError, TypeError):
        schema = text
    try:
        tree = AvroType(schema).record()
    except (TypeError, KeyError, AttributeError):
        tree = None
    if tree is None or (isinstance(tree, str) and tree not in _PRIMITIVE):
        raise InvalidInputError(
            "avro= takes the schema of a record, in Avro's JSON, or a SchemaRegistry (found "
            f"{str(text)[:80]!r})"
        )
    return schema


def row_of(schema: Any) -> Any:
    """Return the record of a union with null, which is what its rows are read as; else `schema`."""
    if isinstance(schema, list):
        branches = [each for each in schema if each != "null"]
        if len(branches) == 1 and is_record(branches[0]):
            return branches[0]
    return schema


def is_record(schema: Any) -> bool:
    """Return whether a schema is that of a record."""
    return isinstance(schema, Mapping) and schema["type"] == "record"


def names_of(schema: Any, column: str) -> list[str]:
    """Return the fields of the structs of a reader's schema, see `value_of`."""
    return [field["name"] for field in schema["fields"]] if is_record(schema) else [column]


def check_readable(schema: Any, df: DataFrame, options: Mapping[str, str]) -> None:
    """Raise InvalidInputError for a schema whose values Spark cannot have as columns."""
    kind = AvroType(schema)
    known = {name.lower() for name in options}
    if kind.recursive and "recursivefieldmaxdepth" not in known:
        raise InvalidInputError(
            f"the Avro schema is recursive: {kind.recursive} contains itself, and Spark's columns "
            'cannot. Give options={"recursiveFieldMaxDepth": "5"}; what lies deeper is then left '
            "out."
        )
    alike = kind.fields_alike(comparison(df))
    if alike:
        raise InvalidInputError(
            f"the Avro schema has the fields {alike[0]!r} and {alike[1]!r} in one record, which "
            "are the same to Spark unless spark.sql.caseSensitive is true"
        )


def comparison(df: DataFrame) -> Any:
    """Return the function that makes names equal if Spark treats them as the same."""
    is_exact = df.sparkSession.conf.get("spark.sql.caseSensitive", "false")
    return str if str(is_exact).lower() == "true" else str.lower


def are_flat(schemas: Iterable[Any]) -> bool:
    """Return whether the marker can be a last field of the records themselves.

    Spark then makes one row per value, not one in another. A union is not a record. A record that
    contains itself would have the marker in it several times.
    """
    return all(is_record(each) and AvroType(each).recursive is None for each in schemas)


def marked(schema: Any, *, is_flat: bool, has_head: bool = False) -> str:
    """Return the schema of a value with the marker behind it.

    It is that of the value's own record if it `is_flat`, else that of a record around it. With
    `has_head` the five bytes of a framed value come first.
    """
    around = {"type": "record", "name": "kl_marked", "fields": [{"name": _VALUE, "type": schema}]}
    record = schema if is_flat else around
    head = {"type": "fixed", "name": "kl_head", "size": HEAD_SIZE}
    first = [{"name": "kl_head", "type": head}] if has_head else []
    fields = [*first, *record["fields"], {"name": END, "type": "long"}]
    text = json.dumps({**record, "fields": fields})
    return json.dumps(json.loads(text, object_hook=_as_spark_has_it))


def _as_spark_has_it(node: dict[str, Any]) -> dict[str, Any]:
    """Return a decimal with a precision that Spark has; one with more digits is then bad.

    Confluent's AvroConverter writes 64 where Connect does not know the precision.
    """
    is_decimal = node.get("logicalType") == "decimal" and isinstance(node.get("precision"), int)
    return node | {"precision": min(38, node["precision"])} if is_decimal else node


def decoded(body: Column, writer: str, options: Mapping[str, str]) -> Column:
    """Return bytes with the marker, of one `marked` schema, as a struct; see `ends`, `value_of`."""
    from pyspark.sql.avro.functions import from_avro

    permissive = {name: text for name, text in options.items() if name.lower() != "mode"}
    return from_avro(body, writer, {**permissive, "mode": "PERMISSIVE"})


def with_marker(body: Column) -> Column:
    """Return bytes with the marker behind them."""
    from pyspark.sql import functions as F

    return F.concat(body, F.lit(_MARKER))


def ends(decoded: Column) -> Column:
    """Return whether a decoded value ends at the marker; false for none."""
    from pyspark.sql import functions as F

    return F.coalesce(decoded[END] == F.lit(_NUMBER), F.lit(False))


def value_of(decoded: Column, schema: Any, column: str, *, is_flat: bool) -> Column:
    """Return the struct of a decoded value; one that is not a record is its field `column`.

    The struct of one that `is_flat` has the marker as its last field: to leave it out would copy
    the others.
    """
    from pyspark.sql import functions as F

    if is_flat:
        return decoded
    value = decoded[_VALUE]
    if is_record(schema):
        return value
    return F.struct(value.alias(column))


def with_decoded(df: DataFrame, column: str, make: Callable[[], Column]) -> DataFrame:
    """Return `df` with a column that `make` decodes.

    Raises InvalidInputError if Spark's Avro package is not on the class path, or if Spark cannot
    read the schema.
    """
    try:
        result = df.withColumn(column, make())
        _ = result.schema  # Spark Connect resolves nothing before it is asked for the schema
    except (TypeError, AttributeError):  # releases without the built-in function
        raise _no_avro(df) from None
    except Exception as fault:  # of Spark, of Avro, of the connection to either
        files.pass_on(fault)
        if "AVRO_NOT_LOADED" in str(fault):
            raise _no_avro(df) from None
        reason = _OF_SCHEMA.search(str(fault))
        if reason is None:
            raise
        raise InvalidInputError(
            f"Spark cannot read the Avro schema: {reason[1].strip()}. Give another one with "
            "reader=, or values of another schema."
        ) from fault
    return result


def _no_avro(df: DataFrame) -> InvalidInputError:
    """Return the error for a session without Spark's Avro package."""
    from kafkalog.spark_release import avro_package

    return InvalidInputError(
        "Avro values need Spark's Avro package on the class path: start the session with "
        f"spark.jars.packages={avro_package(df.sparkSession.version)}"
    )
