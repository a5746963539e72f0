"""How the keys and values of a topic's records are decoded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack, cast

from kafkalog.errors import InvalidInputError
from kafkalog.values.bad_values import PLACE, with_reason
from kafkalog.values.bare_avro import BareAvro
from kafkalog.values.change_documents import AvroChanges, JsonChanges, envelope_of
from kafkalog.values.debezium import Debezium
from kafkalog.values.framed_avro import FramedAvro
from kafkalog.values.framing import head
from kafkalog.values.json_documents import JsonDocuments
from kafkalog.values.schema_registry import SchemaRegistry
from kafkalog.values.spark_avro import END
from kafkalog.values.spark_sql import fields_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class DocumentArguments(TypedDict, total=False):
    """The arguments that say how keys and values are decoded; see `value_columns`."""

    json: StructType | str | None
    avro: str | SchemaRegistry | None
    key_json: StructType | str | None
    key_avro: str | SchemaRegistry | None
    reader: str | None
    key_reader: str | None
    subject: str | None
    key_subject: str | None
    envelope: Debezium | str | None


def document_arguments(
    given: Mapping[str, Any], known: type[DocumentArguments] = DocumentArguments
) -> DocumentArguments:
    """Return the arguments that have a value; raises InvalidInputError for another name.

    `known` has all arguments of the caller, for what may have been meant.
    """
    for name in given:
        if name not in DocumentArguments.__annotations__:
            names = sorted(known.__annotations__)
            meant = get_close_matches(name, names, 1)
            expected = f"{meant[0]}=" if meant else f"one of {', '.join(names)}"
            raise InvalidInputError(f"there is no argument {name}= (expected {expected})")
    return cast("DocumentArguments", {n: each for n, each in given.items() if each is not None})


class Documents(Protocol):
    """The documents in a column, of one encoding."""

    def names(self) -> list[str]:
        """Return the fields of the structs."""

    def decoded(self, df: DataFrame, /) -> DataFrame:
        """Return `df` with structs in the column, and with reasons in `kl_bad`.

        A struct is null for a tombstone and for a bad record.
        """


@dataclass(frozen=True)
class RecordForm:
    """The documents in the keys and in the values; None for what stays bytes."""

    value: Documents | None
    key: Documents | None = None
    refuses_null_keys: bool = False

    @classmethod
    def of(
        cls,
        *,
        options: Mapping[str, str] | None = None,
        is_strict: bool = True,
        refuses_null_keys: bool = False,
        unavailable_column: str | None = None,
        **given: Unpack[DocumentArguments],
    ) -> RecordForm:
        """Return the form by `document_arguments`; raises InvalidInputError.

        With `refuses_null_keys` a record is bad if a field of its key is null. An envelope that
        names no column for the fields without a value gets `unavailable_column`.
        """
        envelope = envelope_of(given.get("envelope"))
        if envelope is not None and envelope.unavailable_column is None:
            envelope = replace(envelope, unavailable_column=unavailable_column)
        how = _How(options, is_strict, envelope)
        value = _documents_of(
            "value",
            how,
            json=given.get("json"),
            avro=given.get("avro"),
            reader=given.get("reader"),
            subject=given.get("subject"),
        )
        key = _documents_of(
            "key",
            how,
            json=given.get("key_json"),
            avro=given.get("key_avro"),
            reader=given.get("key_reader"),
            subject=given.get("key_subject"),
        )
        if how.envelope is not None and value is None:
            raise InvalidInputError("envelope= goes with json= or avro=, the rows in the events")
        return cls(value, key, refuses_null_keys=refuses_null_keys)

    @property
    def has_events(self) -> bool:
        """Whether a record with a value may be a deletion, as a change event may."""
        return isinstance(self.value, (AvroChanges, JsonChanges))

    def ask_for(self, records: DataFrame, topics: Collection[str] = ()) -> None:
        """Ask registries for the schemas of all records of a frame that is not a stream.

        `topics` are those of the records, if they are known. The frame is read once for the ids.
        """
        framed = self._framed()
        if not framed:
            return
        asked = [each.head().alias(f"kl_head_{number}") for number, each in enumerate(framed)]
        is_asked = not topics and "topic" in records.columns
        if is_asked and any(each.needs_topic for each in framed):
            asked.append(records["topic"].alias("kl_topic"))
        rows = [row.asDict() for row in records.select(*asked).distinct().collect()]
        known = topics or {row["kl_topic"] for row in rows if "kl_topic" in row}
        for number, each in enumerate(framed):
            heads = [head for row in rows if (head := row[f"kl_head_{number}"]) is not None]
            ids = {int.from_bytes(head[1:]) for head in heads}
            each.ask(ids, known, partial(_place_of, records, each))

    def knows_columns(self, topics: Collection[str]) -> bool:
        """Return whether the columns are known before any record; registries are asked."""
        return all(each.knows_reader(topics) for each in self._framed())

    def prepare(self, records: DataFrame, topics: Collection[str] = ()) -> None:
        """Ask registries for the schemas of a frame's records, before it is decoded.

        A batch is read for its ids only if nobody has said which schemas it may have.

        Raises InvalidInputError for a stream if nobody has said which schemas it may have.
        """
        for each in self._framed():
            if records.isStreaming:
                if not each.expect(topics):
                    raise each.unexpected(topics)
            elif not each.expects_all(topics):
                self.ask_for(records, topics)
                return

    def decoded(self, records: DataFrame) -> DataFrame:
        """Return the records with structs in `key` and `value`, and with reasons in `kl_bad`."""
        from pyspark.sql import functions as F

        frame = with_reason(records, F.lit(None).cast("string"))
        for each in (self.key, self.value):
            if each is not None:
                frame = each.decoded(frame)
            if each is self.key is not None and self.refuses_null_keys:
                names = [F.when(F.col("key")[n].isNull(), F.lit(n)) for n in self.key.names()]
                missing = F.concat(F.lit("the key has no "), F.coalesce(*names))
                frame = with_reason(frame, F.when(F.col("key").isNotNull(), missing))
        return frame

    def readers(self) -> list[str]:
        """Return the readers' schemas of framed documents; registries have been asked."""
        return [json.dumps(each.reader()) for each in self._framed()]

    def _framed(self) -> list[FramedAvro]:
        sides = (
            each.documents if isinstance(each, AvroChanges) else each
            for each in (self.key, self.value)
        )
        return [each for each in sides if isinstance(each, FramedAvro)]


def _place_of(records: DataFrame, documents: FramedAvro, number: int) -> str:
    """Return the place of a record with a schema id, as an error begins with it."""
    from pyspark.sql import functions as F

    if not set(PLACE) <= set(records.columns):
        return ""
    found = records.where(documents.head() == head(number)).agg(F.min(F.struct(*PLACE)))
    [(place,)] = found.collect()
    return "" if place is None else "{}-{} offset {}: ".format(*place)


def names_in(decoded: DataFrame, column: str) -> list[str]:
    """Return the fields of the structs in a column of decoded records."""
    from pyspark.sql.types import StructType

    kind = decoded.schema[column].dataType
    assert isinstance(kind, StructType)
    return [name for name in kind.fieldNames() if name != END]


@dataclass(frozen=True)
class _How:
    options: Mapping[str, str] | None
    is_strict: bool
    envelope: Debezium | None


def _documents_of(
    column: str,
    how: _How,
    *,
    json: StructType | str | None,
    avro: str | SchemaRegistry | None,
    reader: str | None,
    subject: str | None,
) -> Documents | None:
    """Return how a column is decoded; None if it stays bytes. Raises InvalidInputError."""
    prefix = "" if column == "value" else f"{column}_"
    if json is not None and avro is not None:
        raise InvalidInputError(
            f"give either {prefix}json= (a Spark schema) or {prefix}avro= (an Avro schema, or a "
            "SchemaRegistry), not both"
        )
    if avro is None and (reader or subject):
        raise InvalidInputError(f"{prefix}reader= and {prefix}subject= go with {prefix}avro=")
    if json is not None:
        fields = fields_of(json, f"{prefix}json")
        if END in fields.names:
            raise InvalidInputError(f"{prefix}json: the name {END} is taken. Rename the field.")
        if how.envelope is not None:
            return JsonChanges(how.envelope, fields, column, options=how.options)
        return JsonDocuments(fields, column, options=how.options, is_strict=how.is_strict)
    documents: BareAvro | FramedAvro
    if isinstance(avro, SchemaRegistry):
        documents = FramedAvro(avro, column, reader=reader, subject=subject, options=how.options)
    elif subject:
        raise InvalidInputError(f"{prefix}subject= goes with a SchemaRegistry in {prefix}avro=")
    elif avro is not None:
        documents = BareAvro(avro, column, reader=reader, options=how.options)
    else:
        return None
    return documents if how.envelope is None else AvroChanges(how.envelope, documents, column)
