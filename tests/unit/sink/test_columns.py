"""Which columns of a DataFrame become which part of a record."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from pyspark.sql import types as spark_types
from pyspark.sql.types import StructType

from kafkalog.errors import InvalidInputError
from kafkalog.sink.columns import SinkColumns

HEADER = StructType().add("key", spark_types.StringType()).add("value", spark_types.BinaryType())
TYPES = {
    "string": spark_types.StringType(),
    "binary": spark_types.BinaryType(),
    "int": spark_types.IntegerType(),
    "bigint": spark_types.LongType(),
    "timestamp": spark_types.TimestampType(),
    "headers": spark_types.ArrayType(HEADER, containsNull=False),
    "map": spark_types.MapType(spark_types.StringType(), spark_types.BinaryType()),
}


def columns(schema: str, topic: str | None = "t") -> SinkColumns:
    """Find the columns of a schema written as `name type, name type`; needs no JVM."""
    struct = StructType()
    for column in schema.split(", "):
        name, kind = column.split()
        struct = struct.add(name, TYPES[kind])
    return SinkColumns.of(struct, topic)


def test_columns_are_found_by_exact_name_and_others_ignored() -> None:
    found = columns("x int, value string, Key string, key binary, offset bigint")
    assert (found.value, found.key, found.partition) == (1, 3, -1)


def test_the_topic_option_wins_over_the_column_whatever_its_type() -> None:
    assert columns("topic int, value binary").topic == -1
    assert columns("value binary, topic string", topic=None).topic == 1


def test_rows_of_the_source_can_be_written_as_they_are() -> None:
    found = columns(
        "key binary, value binary, topic string, partition int, offset bigint, "
        "timestamp timestamp, timestampType int, headers headers",
        topic=None,
    )
    assert (found.topic, found.partition, found.timestamp, found.headers) == (2, 3, 5, 7)


@pytest.mark.parametrize(
    ("schema", "topic", "text"),
    [
        (
            "value string",
            None,
            "topic option required when no 'topic' attribute is present. "
            "Use the topic option for setting a topic.",
        ),
        ("key string", "t", "Required attribute 'value' not found"),
        (
            "topic int, value string",
            None,
            "topic attribute unsupported type int. topic must be a(n) string",
        ),
        (
            "key int, value string",
            "t",
            "key attribute unsupported type int. key must be a(n) string or binary",
        ),
        (
            "value bigint",
            "t",
            "value attribute unsupported type bigint. value must be a(n) string or binary",
        ),
        (
            "value string, partition string",
            "t",
            "partition attribute unsupported type string. partition must be a(n) int",
        ),
        (
            "value string, headers map",
            "t",
            "headers attribute unsupported type map<string,binary>. "
            "headers must be a(n) array<struct<key:string,value:binary>>",
        ),
        (
            "value string, timestamp string",
            "t",
            "timestamp attribute unsupported type string. timestamp must be a(n) timestamp",
        ),
    ],
)
def test_wrong_columns_are_refused_in_the_words_of_sparks_sink(
    schema: str, topic: str | None, text: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        columns(schema, topic)
    assert str(caught.value) == text


def test_texts_become_their_bytes() -> None:
    batch = pa.RecordBatch.from_pydict({"value": ["é", None], "key": [b"k", None]})
    records = columns("value string, key binary").records(batch)
    assert records.to_pydict() == {"key": [b"k", None], "value": ["é".encode(), None]}
    assert records.schema.field("value").type == pa.binary()


def test_rows_of_one_topic_keep_their_order() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"topic": ["b", "a", "b", "a", "c"], "value": [b"1", b"2", b"3", b"4", b"5"]}
    )
    split = columns("topic string, value binary", topic=None).by_topic(batch)
    found = {topic: records.column("value").to_pylist() for topic, records in split}
    assert found == {"b": [b"1", b"3"], "a": [b"2", b"4"], "c": [b"5"]}


def test_a_null_topic_is_refused_in_the_words_of_sparks_sink() -> None:
    batch = pa.RecordBatch.from_pydict({"topic": ["a", None], "value": [b"1", b"2"]})
    with pytest.raises(InvalidInputError, match="KAFKA_NULL_TOPIC_IN_DATA"):
        list(columns("topic string, value binary", topic=None).by_topic(batch))


def test_a_batch_with_one_topic_is_not_copied() -> None:
    times = [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)] * 2
    batch = pa.RecordBatch.from_pydict(
        {"topic": ["a", "a"], "value": [b"1", b"2"], "timestamp": times}
    )
    schema = "topic string, value binary, timestamp timestamp"
    ((topic, records),) = columns(schema, topic=None).by_topic(batch)
    assert topic == "a"
    before, after = (part.column("value").buffers()[2].address for part in (batch, records))
    assert before == after
    assert records.column("timestamp").to_pylist() == times
