"""The columns of a write: which column of a DataFrame becomes which part of a record.

The rules are those of Spark's Kafka sink. Names match exactly, including letter case. If two
columns have one name, the first counts. Other columns are ignored, so rows of `format("kafka")` or
of this source can be written unchanged. One rule differs: a `timestamp` column is stored, whereas
Spark's sink stamps every record with its own clock.

Spark: org.apache.spark.sql.kafka010.KafkaWriter.validateQuery.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

_HEADERS_TYPE = "array<struct<key:string,value:binary>>"
_NO_TOPIC = (
    "topic option required when no 'topic' attribute is present. "
    "Use the topic option for setting a topic."
)
_NULL_TOPIC = (
    "[KAFKA_NULL_TOPIC_IN_DATA] The Kafka message data sent to the producer contains a null topic. "
    "Use the `topic` option for setting a default topic."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkColumns:
    """Positions of the sink's columns in a DataFrame; -1 for a missing one."""

    value: int
    key: int = -1
    topic: int = -1
    """-1 too if the option `topic` is set, since it wins over the column."""
    partition: int = -1
    headers: int = -1
    timestamp: int = -1

    @classmethod
    def of(cls, schema: StructType, topic: str | None) -> SinkColumns:
        """Find the columns; raises InvalidInputError in the words of Spark's Kafka sink."""
        topic_place = -1 if topic is not None else _find(schema, "topic", "string")
        if topic is None and topic_place < 0:
            raise InvalidInputError(_NO_TOPIC)
        key = _find(schema, "key", "string", "binary")
        value = _find(schema, "value", "string", "binary")
        if value < 0:
            raise InvalidInputError("Required attribute 'value' not found")
        return cls(
            value=value,
            key=key,
            topic=topic_place,
            headers=_find(schema, "headers", _HEADERS_TYPE),
            partition=_find(schema, "partition", "int"),
            timestamp=_find(schema, "timestamp", "timestamp"),
        )

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return key?, value, headers?, timestamp?, partition?; texts as UTF-8, without a copy."""
        import pyarrow as pa

        names, columns = [], []
        for name in ("key", "value", "headers", "timestamp", "partition"):
            place = getattr(self, name)
            if place < 0:
                continue
            column = batch.column(place)
            if name in {"key", "value"}:
                column = _bytes(column)
            names.append(name)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=names)

    def by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Split the records by `topic`, in order; raises InvalidInputError for a null topic."""
        import numpy as np
        import pyarrow as pa

        if batch.num_rows == 0:
            return
        topics = batch.column(self.topic)
        if topics.null_count:
            raise InvalidInputError(_NULL_TOPIC)
        records = self.records(batch)
        encoded = topics.dictionary_encode()
        if len(encoded.dictionary) == 1:
            yield encoded.dictionary[0].as_py(), records
            return
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        ordered = records.take(pa.array(np.argsort(codes, kind="stable")))
        start = 0
        for topic, count in zip(
            encoded.dictionary.to_pylist(), np.bincount(codes).tolist(), strict=True
        ):
            yield topic, ordered.slice(start, count)
            start += count


def _bytes(column: pa.Array) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.view(pa.large_binary())
    return column


def _find(schema: StructType, name: str, *types: str) -> int:
    """Return the position of the first column of that name; raises InvalidInputError."""
    for place, column in enumerate(schema.fields):
        if column.name == name:
            found = _type_name(column.dataType)
            if found not in types:
                raise InvalidInputError(
                    f"{name} attribute unsupported type {found}. "
                    f"{name} must be a(n) {' or '.join(types)}"
                )
            return place
    return -1


def _type_name(data_type: DataType) -> str:
    """Return Spark's name of a type, without the collation of a text."""
    from pyspark.sql.types import StringType

    return "string" if type(data_type) is StringType else data_type.simpleString()
