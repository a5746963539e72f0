"""How the keys and values of a topic's records are decoded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kafkalog.errors import InvalidInputError
from kafkalog.values.bad_values import with_reason
from kafkalog.values.bare_avro import BareAvro
from kafkalog.values.change_documents import AvroChanges, JsonChanges, envelope_of
from kafkalog.values.debezium import Debezium
from kafkalog.values.framed_avro import FramedAvro
from kafkalog.values.json_documents import JsonDocuments
from kafkalog.values.schema_registry import SchemaRegistry
from kafkalog.values.spark_sql import fields_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class Documents(Protocol):
    """The documents in a column, of one encoding."""

    def decoded(self, df: DataFrame, /) -> DataFrame:
        """Return `df` with structs in the column, and with reasons in `kl_bad`.

        A struct is null for a tombstone and for a bad record.
        """


@dataclass(frozen=True)
class RecordForm:
    """The documents in the keys and in the values; None for what stays bytes."""

    value: Documents | None
    key: Documents | None = None

    def ask_for(self, records: DataFrame) -> None:
        """Ask registries for the schemas of all records of a frame that is not a stream."""
        for each in self._framed():
            each.ask_for(records)

    def expect(self, topics: Collection[str]) -> None:
        """Ask registries for the schemas of records that are still to come."""
        for each in self._framed():
            each.expect(topics)

    def prepare(self, records: DataFrame, topics: Collection[str] = ()) -> None:
        """Ask registries for the schemas of a frame's records, whether they have come or not."""
        if records.isStreaming:
            self.expect(topics)
        else:
            self.ask_for(records)

    def decoded(self, records: DataFrame) -> DataFrame:
        """Return the records with structs in `key` and `value`, and with reasons in `kl_bad`."""
        from pyspark.sql import functions as F

        frame = with_reason(records, F.lit(None).cast("string"))
        for each in (self.key, self.value):
            if each is not None:
                frame = each.decoded(frame)
        return frame

    def _framed(self) -> list[FramedAvro]:
        sides = (
            each.documents if isinstance(each, AvroChanges) else each
            for each in (self.key, self.value)
        )
        return [each for each in sides if isinstance(each, FramedAvro)]


def documents_of(
    column: str,
    *,
    json: StructType | str | None = None,
    avro: str | SchemaRegistry | None = None,
    reader: str | None = None,
    subject: str | None = None,
    envelope: Debezium | str | None = None,
    options: Mapping[str, str] | None = None,
    is_strict: bool = True,
) -> Documents | None:
    """Return how a column is decoded, by the arguments of `value_columns`; None if it stays bytes.

    Raises InvalidInputError.
    """
    prefix = "" if column == "value" else f"{column}_"
    if json is not None and avro is not None:
        raise InvalidInputError(
            f"give either {prefix}json= (a Spark schema) or {prefix}avro= (an Avro schema, or a "
            "SchemaRegistry), not both"
        )
    if avro is None and (reader or subject):
        raise InvalidInputError(f"{prefix}reader= and {prefix}subject= go with {prefix}avro=")
    change = envelope_of(envelope)
    if json is not None:
        fields = fields_of(json, f"{prefix}json")
        if change is not None:
            return JsonChanges(change, fields, column, options=options)
        return JsonDocuments(fields, column, options=options, is_strict=is_strict)
    documents: BareAvro | FramedAvro
    if isinstance(avro, SchemaRegistry):
        documents = FramedAvro(avro, column, reader=reader, subject=subject, options=options)
    elif subject:
        raise InvalidInputError(f"{prefix}subject= goes with a SchemaRegistry in {prefix}avro=")
    elif avro is not None:
        documents = BareAvro(avro, column, reader=reader, options=options)
    else:
        return None
    return documents if change is None else AvroChanges(change, documents, column)
