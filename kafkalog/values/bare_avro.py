"""Avro values without a header, decoded by one schema to their last byte.

Avro says nothing of where a value ends, and Spark reads no further than the schema goes. The five
bytes that Confluent's serializers put before a value would so become the first fields of garbage. A
marker is therefore put behind the value, and behind both schemas: a value of another schema, or one
that is too short or too long, does not end at the marker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_VALUE: Final = "value"
_DECODED: Final = "kl_decoded"
_MARKER: Final = bytes.fromhex("b1d3f7a98ec4e25f")
"""No field of a value is likely to have these bytes."""
_HEADER_SIZE: Final = 5
"""A zero byte and a schema id of four bytes, as in io.confluent.kafka.serializers
.AbstractKafkaSchemaSerDe."""
_PRIMITIVE: Final = {*("null", "boolean", "int", "long", "float", "double", "bytes", "string")}
_PLACE: Final = ("topic", "partition", "offset")
_HOW: Final = (
    'Decode the bodies: kafkalog.value_columns(frame.withColumn("value", expr("substring(value, '
    '6)")), avro=...) with the schema of that id'
)


class BareAvro:
    """The values of one schema; raises InvalidInputError if `schema` is not that of a record.

    `options` are those of Spark's `from_avro`, among them a reader's schema, `avroSchema`.
    """

    def __init__(self, schema: str, options: Mapping[str, str] | None = None) -> None:
        known = {name.lower(): name for name in options or {}}
        given = dict(options or {})
        mode = given.get(known.get("mode", ""), "FAILFAST").upper()
        self._is_permissive = mode == "PERMISSIVE"
        if mode in {"PERMISSIVE", "FAILFAST"}:  # Spark refuses others
            given.pop(known.get("mode", ""), None)
            given["mode"] = "PERMISSIVE"
        self._has_other_reader = "avroschema" in known
        if reader := known.get("avroschema"):
            given[reader] = _marked(given[reader])
        self._schema = _marked(schema)
        self._options = given

    def replace_values(self, df: DataFrame) -> DataFrame:
        """Return `df` with the decoded record in the column `value`.

        Raises InvalidInputError if Spark's Avro package is not on the class path.
        """
        from pyspark.errors import AnalysisException
        from pyspark.sql import functions as F

        whole = F.col(_VALUE).cast("binary")
        try:
            decoded = df.withColumn(_DECODED, self._decoded(whole))
            _ = decoded.schema  # Spark Connect resolves nothing before it is asked for the schema
        except (TypeError, AttributeError):  # releases without the built-in function
            raise _no_avro(df) from None
        except AnalysisException as fault:
            if "AVRO_NOT_LOADED" in str(fault):
                raise _no_avro(df) from None
            raise
        has_header = F.substring(whole, 1, 1) == F.lit(b"\0")
        # A schema id is positive.
        has_header &= (F.length(whole) >= _HEADER_SIZE) & (
            F.substring(whole, 2, 1) < F.lit(b"\x80")
        )
        # Such a value, and it alone, is decoded once more: without the first five bytes.
        is_framed = has_header & self._is_value(
            F.substring(whole, F.lit(_HEADER_SIZE + 1), F.length(whole))
        )
        is_whole = _ends(F.col(_DECODED))
        failure = (
            F.lit(None)
            if self._is_permissive
            else F.raise_error(self._reason(df, whole, is_whole, is_framed, has_header))
        )
        value = F.when(whole.isNull() | (is_whole & ~is_framed), F.col(_DECODED)["kl_value"])
        return decoded.withColumn(_VALUE, value.otherwise(failure)).drop(_DECODED)

    def _decoded(self, body: Column) -> Column:
        from pyspark.sql import functions as F
        from pyspark.sql.avro.functions import from_avro

        return from_avro(F.concat(body, F.lit(_MARKER)), self._schema, self._options)

    def _is_value(self, body: Column) -> Column:
        """Return whether bytes are a value of the schema, as an encoder writes it.

        Avro reads any byte as a boolean, so bytes of the middle of a value could pass for one.
        """
        from pyspark.sql import functions as F
        from pyspark.sql.avro.functions import to_avro

        decoded = self._decoded(body)
        record = json.loads(self._schema)
        if self._has_other_reader or '"boolean"' not in self._schema or not _is_plain(record):
            return _ends(decoded)
        encoded = F.when(_ends(decoded), to_avro(decoded, self._schema))
        return F.coalesce(encoded == F.concat(body, F.lit(_MARKER)), F.lit(False))

    @staticmethod
    def _reason(
        df: DataFrame, whole: Column, is_whole: Column, is_framed: Column, has_header: Column
    ) -> Column:
        """Return why a value is not decoded, beginning with its place if `df` has that."""
        from pyspark.sql import functions as F

        where = F.lit("value_columns")
        if set(_PLACE) <= set(df.columns):
            topic, partition, offset = map(F.col, _PLACE)
            where = F.format_string("%s-%s offset %s", topic, partition, offset)
        number = F.conv(F.hex(F.substring(whole, 2, 4)), 16, 10)
        found = F.hex(F.substring(whole, 1, 20))
        framed = "the value is framed (expected Avro of the schema alone, found a zero byte and "
        either = "the value has two meanings (expected Avro of the schema alone, found bytes that "
        either += "are so whole, and without the first five, a zero byte and "
        neither = "the value is not Avro of the schema (expected one that ends where the schema "
        return F.concat(
            where,
            F.lit(": "),
            F.when(
                is_framed & is_whole,
                F.format_string(
                    f"{either}the schema id %s). {_HOW}. If they are bare, decode them with "
                    "Spark's from_avro.",
                    number,
                ),
            )
            .when(is_framed, F.format_string(f"{framed}the schema id %s). {_HOW}.", number))
            .when(
                has_header,
                F.format_string(
                    f"{neither}does, found X'%s'). If it is framed, its schema id is %s. {_HOW}.",
                    found,
                    number,
                ),
            )
            .otherwise(
                F.format_string(
                    f"{neither}does, found X'%s'). Give the schema that it was written with, or "
                    'options={"mode": "PERMISSIVE"}, which makes nulls of such values.',
                    found,
                )
            ),
        )


def _ends(decoded: Column) -> Column:
    """Return whether a decoded value ends at the marker; false for none."""
    from pyspark.sql import functions as F

    return F.coalesce(decoded["kl_end"] == F.lit(_MARKER), F.lit(False))


def _marked(schema: str) -> str:
    """Return the schema of a record with the marker behind it; raises InvalidInputError."""
    try:
        record: Any = json.loads(schema)
        is_record = record["type"] == "record"
    except (ValueError, TypeError, KeyError):
        is_record = False
    if not is_record:
        raise InvalidInputError("avro= takes the schema of a record, in Avro's JSON")
    end = {"type": "fixed", "name": "kl_end", "size": len(_MARKER)}
    fields = [{"name": "kl_value", "type": record}, {"name": "kl_end", "type": end}]
    return json.dumps({"type": "record", "name": "kl_marked", "fields": fields})


def _is_plain(schema: Any) -> bool:
    """Return whether Spark encodes values of a schema as it has decoded them.

    It may not if the schema names a type of its own, or has a union of several types.
    """
    if isinstance(schema, list):
        return len(schema) == 2 and "null" in schema and all(map(_is_plain, schema))
    if isinstance(schema, str):
        return schema in _PRIMITIVE
    kind = schema["type"]
    if kind == "record":
        return all(_is_plain(field["type"]) for field in schema["fields"])
    if kind in {"array", "map"}:
        return _is_plain(schema["items" if kind == "array" else "values"])
    return kind in {"enum", "fixed"} or _is_plain(kind)


def _no_avro(df: DataFrame) -> InvalidInputError:
    from kafkalog.spark_release import avro_package

    return InvalidInputError(
        "Avro values need Spark's Avro package on the class path: start the session with "
        f"spark.jars.packages={avro_package(df.sparkSession.version)}"
    )
