"""Documents that are change events, decoded to the rows in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.values.bare_avro import BareAvro
from kafkalog.values.debezium import Debezium
from kafkalog.values.framed_avro import FramedAvro
from kafkalog.values.json_documents import JsonDocuments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class JsonChanges:
    """The JSON events in a `column`, or the keys of events, whose rows have the fields of `row`.

    `options` are those of `from_json`.
    """

    def __init__(
        self,
        envelope: Debezium,
        row: StructType,
        column: str,
        *,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._envelope = envelope
        self._row = row
        self._column = column
        schema = envelope.json_schema(row, is_key=column == "key")
        self._documents = JsonDocuments(schema, column, options=options, form=row)

    def names(self) -> list[str]:
        """Return the fields of the rows."""
        added = self._envelope.added_names() if self._column == "value" else []
        return [*self._row.fieldNames(), *added]

    def decoded(self, df: DataFrame) -> DataFrame:
        """Return `df` with rows in the column, null for none, and with reasons in `kl_bad`."""
        text = f"kl_{self._column}_whole"
        frame = self._documents.decoded(df.withColumn(text, self._documents.text()))
        if self._column == "key":
            frame = self._envelope.json_keys(frame, self._row, text, self._column)
        else:
            frame = self._envelope.json_rows(frame, self._row, text, self._column)
        return frame.drop(text)


class AvroChanges:
    """The Avro events in a `column`, or the keys of events, that `documents` decode."""

    def __init__(self, envelope: Debezium, documents: BareAvro | FramedAvro, column: str) -> None:
        self._envelope = envelope
        self.documents = documents
        self._column = column

    def names(self) -> list[str]:
        """Return the fields of the rows; raises what `decoded` raises."""
        return self._envelope.avro_names(self.documents.reader(), is_key=self._column == "key")

    def decoded(self, df: DataFrame) -> DataFrame:
        """Return `df` with rows in the column, null for none, and with reasons in `kl_bad`.

        Raises what the documents raise, and InvalidInputError for a schema of another kind.
        """
        frame = self.documents.decoded(df)
        reader = self.documents.reader()
        if self._column == "key":
            return self._envelope.avro_keys(frame, reader, self._column)
        return self._envelope.avro_rows(frame, reader, self._column)


def envelope_of(given: Debezium | str | None) -> Debezium | None:
    """Return what the argument `envelope=` means; raises InvalidInputError."""
    if given is None or isinstance(given, Debezium):
        return given
    if given == "debezium":
        return Debezium()
    raise InvalidInputError(
        f"envelope: expected 'debezium' or a kafkalog.Debezium, found {given!r}"
    )
