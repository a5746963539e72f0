import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from kafkalog.datasource.columns import arrow_schema, spark_schema
from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import TopicPartition
from kafkalog.datasource.range_reader import OffsetRangePartition
from kafkalog.errors import DataLossError, InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import at_times, joined
from tests.builders.log_builder import LogBuilder
from tests.unit.datasource.logs import append, append_to, numbered, rows, source


def read(root: Path, schema: StructType | None = None, **options: str) -> list[dict[str, Any]]:
    data_source = source(root, **options)
    reader = data_source.reader(schema or data_source.schema())
    return rows(reader, reader.partitions())


def ranges(root: Path, **options: str) -> list[tuple[str, int, int]]:
    data_source = source(root, **options)
    planned = data_source.reader(data_source.schema()).partitions()
    return [(str(p.range.partition), p.range.start, p.range.end) for p in planned]


@pytest.mark.parametrize("include_headers", [False, True])
def test_batches_have_exactly_the_schema_spark_compares_them_with(include_headers: bool) -> None:
    schema = spark_schema(include_headers=include_headers)

    assert to_arrow_schema(schema, timezone="UTC").equals(arrow_schema(schema.fieldNames()))


def test_a_read_gives_every_record_with_its_place_and_time(tmp_path: Path) -> None:
    append(tmp_path, "t", [(b"k", b"v"), (None, b"keyless"), (b"gone", None)])

    found = read(tmp_path)

    assert [(row["key"], row["value"]) for row in found] == [
        (b"k", b"v"),
        (None, b"keyless"),
        (b"gone", None),
    ]
    assert [(r["topic"], r["partition"], r["offset"], r["timestampType"]) for r in found] == [
        ("t", 0, 0, 0),
        ("t", 0, 1, 0),
        ("t", 0, 2, 0),
    ]
    assert {row["timestamp"].timestamp() for row in found} == {1_700_000_000.0}


def test_a_planned_read_sees_records_that_came_later(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(3))
    data_source = source(tmp_path)
    reader = data_source.reader(data_source.schema())
    planned = reader.partitions()
    append(tmp_path, "t", numbered(2, start=3))

    assert len(rows(reader, planned)) == 5


def test_a_fixed_end_does_not_move(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(5))
    options = {"startingOffsets": '{"t":{"0":1}}', "endingOffsets": '{"t":{"0":3}}'}

    assert [row["offset"] for row in read(tmp_path, **options)] == [1, 2]


@pytest.mark.parametrize("view", ["changelog", "latest"])
@pytest.mark.parametrize(
    "end", [{"endingTimestamp": "5000"}, {"endingOffsetsByTimestamp": '{"t":{"0":5000}}'}]
)
def test_an_end_by_time_does_not_move_once_a_record_has_that_time(
    tmp_path: Path, view: str, end: dict[str, str]
) -> None:
    log = LogBuilder(tmp_path).topic()
    log.append((b"a", b"before"), timestamp_ms=1_000)
    data_source = source(tmp_path, view=view, **end)
    reader = data_source.reader(data_source.schema())
    planned = reader.partitions()
    log.append((b"a", b"after"), timestamp_ms=9_000).close()

    assert [row["value"] for row in rows(reader, planned)] == [b"before"]


def test_pieces_keep_open_ends_at_the_edges_only(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(9))

    assert ranges(tmp_path, minPartitions="3") == [("t-0", -2, 3), ("t-0", 3, 6), ("t-0", 6, -1)]
    assert ranges(tmp_path, minPartitions="3", startingOffsets='{"t":{"0":1}}') == [
        ("t-0", 1, 3),
        ("t-0", 3, 6),
        ("t-0", 6, -1),
    ]
    assert len(read(tmp_path, minPartitions="3")) == 9


def test_an_empty_partition_with_an_open_end_keeps_its_task(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {1: 4})

    assert ranges(tmp_path, minPartitions="3")[0] == ("t-0", -2, -1)


def test_nothing_planned_reads_as_nothing(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    data_source = source(tmp_path)

    assert rows(data_source.reader(data_source.schema()), [InputPartition(None)]) == []


def test_a_subset_of_the_columns_is_honoured_in_its_order(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    schema = spark_schema(include_headers=False)
    subset = StructType([schema["offset"], schema["key"]])

    assert read(tmp_path, subset) == [{"offset": 0, "key": b"k0"}]


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [StructField("key", StringType())],
        [StructField("key", BinaryType(), nullable=False)],
        [StructField("Key", BinaryType())],
        [StructField("size", IntegerType())],
        [StructField("key", BinaryType()), StructField("key", BinaryType())],
    ],
)
def test_any_other_schema_is_refused(tmp_path: Path, fields: list[StructField]) -> None:
    with pytest.raises(InvalidInputError, match=r"Kafka source has a fixed schema"):
        source(tmp_path).reader(StructType(fields))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "latest"}, r"starting offset can't be latest for batch queries"),
        (
            {"startingOffsets": '{"t":{"0":-1}}'},
            r"startingOffsets for t-0 can't be latest for batch queries on Kafka",
        ),
        ({"endingOffsets": "earliest"}, r"ending offset can't be earliest for batch queries"),
        (
            {"endingOffsets": '{"t":{"0":-2}}'},
            r"ending offset for t-0 can't be earliest for batch queries on Kafka",
        ),
    ],
)
def test_offsets_that_make_no_sense_in_a_batch_are_refused(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    data_source = source(tmp_path, **options)

    with pytest.raises(InvalidInputError, match=message):
        data_source.reader(data_source.schema())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": '{"t":{"0":0,"1":0}}'}, r"If startingOffsets contains specific"),
        ({"endingOffsets": '{"u":"latest"}'}, r"KAFKA_TOPIC_OFFSET_DOES_NOT_MATCH_ASSIGNED"),
        ({"startingOffsets": '{"t":{"0":9}}'}, r"RESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET"),
    ],
)
def test_offsets_that_do_not_fit_the_log_are_refused(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    append(tmp_path, "t", numbered(2))

    with pytest.raises(InvalidInputError, match=message):
        ranges(tmp_path, **options)


def test_the_error_for_a_missing_topic_names_the_topics(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))

    with pytest.raises(UnknownTopicError, match=r"other.*: t"):
        ranges(tmp_path, subscribe="other")


def test_an_end_beyond_the_log_is_data_loss(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(2))
    end = {"endingOffsets": '{"t":{"0":5}}'}

    with pytest.raises(DataLossError, match=r"topic t partition 0.*\[0, 5\).*\[0, 2\)"):
        read(tmp_path, **end)
    assert len(read(tmp_path, failOnDataLoss="false", **end)) == 2


@pytest.mark.parametrize("gone", [TopicPartition("gone", 0), TopicPartition("t", 7)])
def test_a_partition_that_vanished_after_planning_is_data_loss(
    tmp_path: Path, gone: TopicPartition
) -> None:
    append(tmp_path, "t", numbered(2))
    planned = [OffsetRangePartition(OffsetRange(gone, 0, 2))]
    strict, lenient = source(tmp_path), source(tmp_path, failOnDataLoss="false")

    with pytest.raises(DataLossError, match=rf"PARTITIONS_DELETED\] partition {gone} is gone"):
        rows(strict.reader(strict.schema()), planned)
    assert rows(lenient.reader(lenient.schema()), planned) == []


def test_options_without_effect_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # Spark makes an instance for each of its questions
            data_source = source(
                tmp_path, **{"kafka.bootstrap.servers": "h:1", "groupIdPrefix": "g"}
            )
            data_source.reader(data_source.schema())

    assert [record.getMessage() for record in caplog.records] == [
        "options without effect, since no Kafka client is involved: "
        "groupIdPrefix, kafka.bootstrap.servers"
    ]


def test_a_log_that_is_not_there_is_an_error_of_the_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no log here"):
        ranges(tmp_path / "nowhere")


def test_a_view_gives_the_latest_record_of_each_key(tmp_path: Path) -> None:
    append(tmp_path, "t", [*numbered(3), (b"k1", b"new"), (b"k2", None)])

    found = {row["key"]: row["value"] for row in read(tmp_path, view="latest")}

    assert found == {b"k0": b"v0", b"k1": b"new"}


def test_a_view_has_a_moment(tmp_path: Path) -> None:
    append(tmp_path, "t", [*numbered(3), (b"k1", b"new"), (b"k2", None)])

    found = read(tmp_path, view="latest", endingOffsets='{"t":{"0":4}}')

    assert {row["key"]: row["value"] for row in found} == {
        b"k0": b"v0",
        b"k1": b"new",
        b"k2": b"v2",
    }


def test_readers_and_their_ranges_are_sent_as_plain_data(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(2))
    data_source = pickle.loads(pickle.dumps(source(tmp_path)))
    reader = pickle.loads(pickle.dumps(data_source.reader(data_source.schema())))
    planned = pickle.loads(pickle.dumps(reader.partitions()))

    assert len(rows(reader, planned)) == 2


def test_a_committed_read_never_reaches_into_an_open_transaction(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    with DirectoryLog(tmp_path) as engine:
        engine.append_raw("t", 0, joined([at_times(1, (1, 2), 5, transactional=True), at_times(3)]))
    options = {"subscribe": "t", "endingOffsets": '{"t": {"0": 4}}'}

    with pytest.raises(InvalidInputError, match="open from offset 1 on"):
        read(tmp_path, **options)
    assert [row["offset"] for row in read(tmp_path, subscribe="t")] == [0]
    dirty = read(tmp_path, **options, **{"kafka.isolation.level": "read_uncommitted"})
    assert [row["offset"] for row in dirty] == [0, 1, 2, 3]
