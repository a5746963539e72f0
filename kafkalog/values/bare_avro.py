"""Avro values without a header, decoded by one schema to their last byte.

The five bytes that Confluent's serializers put before a value would become the first fields of
garbage. A value that has them is therefore bad, and the reason says how to decode it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kafkalog.values.bad_values import found, with_reason, with_struct
from kafkalog.values.framing import body_of, id_of, is_framed
from kafkalog.values.spark_avro import (
    are_flat,
    check_readable,
    decoded,
    ends,
    marked,
    names_of,
    row_of,
    schema_of,
    value_of,
    with_decoded,
    with_marker,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_PRIMITIVE: Final = {*("null", "boolean", "int", "long", "float", "double", "bytes", "string")}


class BareAvro:
    """The documents of one schema in a `column`; raises InvalidInputError for another schema.

    `reader` is a schema to read them as, by default their own. `options` are those of Spark's
    `from_avro`.
    """

    def __init__(
        self,
        schema: str,
        column: str = "value",
        *,
        reader: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._column = column
        given = dict(options or {})
        known = {name.lower(): name for name in given}
        other = given.pop(known["avroschema"]) if "avroschema" in known else reader
        self._writer = schema_of(schema)
        self._reader = row_of(self._writer if other is None else schema_of(other))
        self._has_other_reader = self._reader is not self._writer
        self._is_flat = are_flat((self._writer, self._reader))
        self._schema = marked(self._writer, is_flat=self._is_flat)
        if self._has_other_reader:
            given["avroSchema"] = marked(self._reader, is_flat=self._is_flat)
        self._options = given

    def reader(self) -> Any:
        """Return the reader's schema."""
        return self._reader

    def decoded(self, df: DataFrame) -> DataFrame:
        """Return `df` with structs in the column, and with reasons in `kl_bad`.

        Raises InvalidInputError if Spark's Avro package is not on the class path, and for a schema
        that Spark cannot read.
        """
        from pyspark.sql import functions as F

        check_readable(self._reader, df, self._options)
        struct = f"kl_{self._column}"
        whole = F.col(self._column).cast("binary")
        frame = with_decoded(df, struct, lambda: self._decoded(whole))
        has_head = is_framed(whole)
        # Such a value, and it alone, is decoded once more: without the first five bytes.
        has_body = has_head & self._is_value(body_of(whole))
        is_whole = ends(F.col(struct))
        is_fine = whole.isNull() | (is_whole & ~has_body)
        reason = self._reason(whole, is_whole, has_body, has_head)
        frame = with_reason(frame, F.when(~is_fine, reason))
        value = value_of(F.col(struct), self._reader, self._column, is_flat=self._is_flat)
        return with_struct(frame, self._column, value).drop(struct)

    def names(self) -> list[str]:
        """Return the fields of the structs."""
        return names_of(self._reader, self._column)

    def _decoded(self, body: Column) -> Column:
        return decoded(with_marker(body), self._schema, self._options)

    def _is_value(self, body: Column) -> Column:
        """Return whether bytes are a value of the schema, as an encoder writes it.

        Avro reads any byte as a boolean, so bytes of the middle of a value could pass for one.
        """
        from pyspark.sql import functions as F
        from pyspark.sql.avro.functions import to_avro

        value = self._decoded(body)
        record = json.loads(self._schema)
        if self._has_other_reader or '"boolean"' not in self._schema or not _is_plain(record):
            return ends(value)
        encoded = F.when(ends(value), to_avro(value, self._schema))
        return F.coalesce(encoded == with_marker(body), F.lit(False))

    def _reason(
        self, whole: Column, is_whole: Column, has_body: Column, has_head: Column
    ) -> Column:
        """Return why a value is not decoded."""
        from pyspark.sql import functions as F

        number = id_of(whole)
        it = f"the {self._column}"
        argument = "avro=" if self._column == "value" else f"{self._column}_avro="
        how = f"Give {argument}kafkalog.SchemaRegistry(...), which has the schema %s"
        framed = f"{it} is framed (expected Avro of the schema alone, found a zero byte and "
        either = f"{it} has two meanings (expected Avro of the schema alone, found bytes that "
        either += "are so whole, and without the first five, a zero byte and "
        neither = f"{it} is not Avro of the schema (expected one that ends where the schema "
        return (
            F.when(
                has_body & is_whole,
                F.format_string(
                    f"{either}the schema id %s). {how}. If they are bare, decode them with "
                    "Spark's from_avro.",
                    number,
                    number,
                ),
            )
            .when(has_body, F.format_string(f"{framed}the schema id %s). {how}.", number, number))
            .when(
                has_head,
                F.format_string(
                    f"{neither}does, found %s). If it is framed, its schema id is %s. {how}.",
                    found(whole),
                    number,
                    number,
                ),
            )
            .otherwise(
                F.format_string(
                    f"{neither}does, found %s). Give the schema that it was written with.",
                    found(whole),
                )
            )
        )


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
