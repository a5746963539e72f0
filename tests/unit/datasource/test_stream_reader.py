import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from kafkalog.datasource.micro_batch import check_available_now
from kafkalog.datasource.offsets import TopicPartition
from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.errors import DataLossError, InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.unit.datasource.logs import append, append_to, numbered, rows, source

ALL = ReadAllAvailable()


def stream(root: Path, **options: str) -> KafkaLogStreamReader:
    data_source = source(root, **options)
    return data_source.streamReader(data_source.schema())


def ranges(reader: KafkaLogStreamReader, start: Any, end: Any) -> list[tuple[str, int, int]]:
    planned = reader.partitions(start, end)
    return [(str(p.range.partition), p.range.start, p.range.end) for p in planned]


def test_a_stream_from_the_latest_offset_begins_where_its_first_batch_ended(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(3))
    reader = stream(tmp_path)

    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)

    assert (start, end) == ({"t": {"0": -1}}, {"t": {"0": 3}})
    assert reader.partitions(start, end) == []
    append(tmp_path, "t", numbered(2, start=3))
    assert reader.initialOffset() == start
    assert stream(tmp_path).partitions(start, end) == []
    later = reader.latestOffset(end, ALL)
    assert ranges(reader, end, later) == [("t-0", 3, 5)]


def test_a_stream_from_the_earliest_offset_reads_all(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(3))
    reader = stream(tmp_path, startingOffsets="earliest")

    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)

    assert start == {"t": {"0": -2}}
    assert [row["key"] for row in rows(reader, reader.partitions(start, end))] == [
        b"k0",
        b"k1",
        b"k2",
    ]


def test_a_stream_from_given_offsets_mixes_them(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 4, 1: 4, 2: 4})
    reader = stream(tmp_path, startingOffsets='{"t":{"0":1,"1":-1,"2":-2}}')

    start = reader.initialOffset()

    assert ranges(reader, start, reader.latestOffset(start, ALL)) == [("t-0", 1, 4), ("t-2", 0, 4)]


def test_given_offsets_must_name_all_partitions(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 1, 1: 1})

    reader = stream(tmp_path, startingOffsets='{"t":{"0":1}}')
    with pytest.raises(InvalidInputError, match=r"you must specify all TopicPartitions"):
        reader.latestOffset(reader.initialOffset(), ALL)


def test_a_first_batch_is_repeated_though_there_are_new_topics(tmp_path: Path) -> None:
    append_to(tmp_path, "t1", {0: 3})
    options = {"subscribePattern": "^t", "startingOffsets": '{"t1":{"0":1}}'}
    reader = stream(tmp_path, **options)
    end = reader.latestOffset(reader.initialOffset(), ALL)

    append_to(tmp_path, "t2", {0: 2})  # the query has crashed, and Spark repeats the batch
    again = stream(tmp_path, **options)

    assert ranges(again, again.initialOffset(), end) == [("t1-0", 1, 3)]
    assert ranges(again, end, again.latestOffset(end, ALL)) == [("t2-0", 0, 2)]


def test_an_idle_stream_answers_with_equal_text(tmp_path: Path) -> None:
    append_to(tmp_path, "t", dict.fromkeys(range(12), 1))
    reader = stream(tmp_path, startingOffsets="earliest")

    first = reader.latestOffset(reader.initialOffset(), ALL)
    second = reader.latestOffset(json.loads(json.dumps(first)), ALL)

    assert json.dumps(first) == json.dumps(second)
    assert list(first["t"]) == [str(partition) for partition in range(12)]
    assert reader.reportLatestOffset() == first


def test_a_limit_is_shared_as_spark_shares_it(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 101, 1: 11, 2: 1})
    reader = stream(tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger="10")
    limit = reader.getDefaultReadLimit()

    first = reader.latestOffset(reader.initialOffset(), limit)
    second = reader.latestOffset(first, limit)

    assert limit == ReadMaxRows(10)
    assert first == {"t": {"0": 8, "1": 1, "2": 1}}
    assert second == {"t": {"0": 17, "1": 2, "2": 1}}
    assert reader.latestOffset(first, ALL) == {"t": {"0": 101, "1": 11, "2": 1}}


def test_available_now_stops_at_what_was_there_at_its_start(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(15))
    reader = stream(tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger="6")
    reader.prepareForTriggerAvailableNow()
    ends: list[Any] = [reader.initialOffset()]

    while len(ends) < 2 or ends[-1] != ends[-2]:
        ends.append(reader.latestOffset(ends[-1], reader.getDefaultReadLimit()))
        reader.partitions(*ends[-2:])
        append(tmp_path, "t", numbered(1))

    assert [end["t"]["0"] for end in ends] == [-2, 6, 12, 15, 15]


def test_new_partitions_and_topics_are_read_from_their_beginning(tmp_path: Path) -> None:
    append(tmp_path, "t1", numbered(2))
    reader = stream(tmp_path, subscribePattern="t.")
    end = reader.latestOffset(reader.initialOffset(), ALL)
    append(tmp_path, "t2", numbered(3))

    later = reader.latestOffset(end, ALL)

    assert ranges(reader, end, later) == [("t2-0", 0, 3)]


def test_a_pattern_without_topics_waits(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    reader = stream(tmp_path, subscribePattern="z")

    assert reader.latestOffset(reader.initialOffset(), ALL) == {}


def test_a_missing_topic_is_an_error_when_the_stream_starts(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))

    for strategy in ({"subscribe": "other"}, {"assign": '{"other":[0]}'}):
        reader = stream(tmp_path, **strategy)
        with pytest.raises(UnknownTopicError, match=rf"^{next(iter(strategy))}: .*other.*: t"):
            reader.latestOffset(reader.initialOffset(), ALL)


def test_deleted_partitions_are_data_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(tmp_path, "t", numbered(1))
    start, end = {"gone": {"0": 5}, "t": {"0": 0}}, {"t": {"0": 1}}

    with pytest.raises(DataLossError, match=r"KAFKA_DATA_LOSS\.PARTITIONS_DELETED\] gone-0"):
        stream(tmp_path).partitions(start, end)
    with caplog.at_level(logging.WARNING):
        assert ranges(stream(tmp_path, failOnDataLoss="false"), start, end) == [("t-0", 0, 1)]
    assert "PARTITIONS_DELETED" in caplog.text


def test_a_topic_made_anew_is_data_loss(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    start, end = {"t": {"0": 2}}, {"t": {"0": 1}}

    with pytest.raises(DataLossError, match=r"PARTITION_OFFSET_CHANGED.* was changed from 2 to 1"):
        stream(tmp_path).partitions(start, end)
    assert ranges(stream(tmp_path, failOnDataLoss="false"), start, end) == []


def test_a_partition_that_vanished_before_its_first_read_is_data_loss(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))

    with pytest.raises(DataLossError, match=r"INITIAL_OFFSET_NOT_FOUND_FOR_PARTITIONS.* t-7 "):
        stream(tmp_path).partitions({"t": {"0": 0}}, {"t": {"0": 1, "7": 3}})


def test_a_missing_topic_is_skipped_by_a_stream_that_accepts_data_loss(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(2))
    reader = stream(tmp_path, subscribe="t,gone", failOnDataLoss="false")

    assert reader.latestOffset({"t": {"0": 0}, "gone": {"0": 4}}, ALL) == {"t": {"0": 2}}


T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.mark.parametrize(
    ("end", "target", "latest", "name"),
    [
        ({T0: 1}, {T0: 1, T1: 1}, {}, "MISMATCHED_TOPIC_PARTITIONS_BETWEEN_END_OFFSET"),
        ({T0: 2}, {T0: 1}, {T0: 5}, "FOR_TOPIC_PARTITION_THAN_PREFETCHED"),
        ({T0: 1}, {T0: 1}, {}, "LOST_TOPIC_PARTITIONS_IN_END_OFFSET_WITH_TRIGGER_AVAILABLENOW"),
        ({T0: 2}, {T0: 2}, {T0: 1}, "THAN_LATEST_WITH_TRIGGER_AVAILABLENOW"),
    ],
)
def test_available_now_refuses_a_log_that_shrank(
    end: Any, target: Any, latest: Any, name: str
) -> None:
    with pytest.raises(DataLossError, match=name):
        check_available_now(end, target, latest)


def test_available_now_finds_a_log_that_was_replaced(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(5))
    reader = stream(tmp_path, startingOffsets="earliest", failOnDataLoss="false")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    reader.stop()
    shutil.rmtree(tmp_path)
    append(tmp_path, "t", numbered(2))

    with pytest.raises(DataLossError, match=r"THAN_LATEST_WITH_TRIGGER_AVAILABLENOW.* t-0"):
        reader.partitions(start, end)


def test_large_ranges_are_split_among_tasks(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(9))
    reader = stream(tmp_path, startingOffsets="earliest", minPartitions="3")

    assert ranges(reader, {"t": {"0": -2}}, {"t": {"0": 9}}) == [
        ("t-0", 0, 3),
        ("t-0", 3, 6),
        ("t-0", 6, 9),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingOffsets": "latest"}, r"ending offset not valid in streaming queries"),
    ],
)
def test_options_of_a_batch_are_refused_at_the_first_call(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    reader = stream(tmp_path, **options)

    for call in (reader.initialOffset, reader.getDefaultReadLimit):
        with pytest.raises(InvalidInputError, match=message):
            call()


def test_a_reader_in_use_is_sent_as_plain_data(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(3))
    reader = stream(tmp_path, startingOffsets="earliest")
    end = reader.latestOffset(reader.initialOffset(), ALL)

    copy = pickle.loads(pickle.dumps(reader))

    assert len(rows(copy, copy.partitions(reader.initialOffset(), end))) == 3


def test_an_end_is_one_point_of_the_journal(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 1, 1: 1})
    reader = stream(tmp_path, startingOffsets="earliest")
    with DirectoryLog(tmp_path) as engine:
        before = reader.latestOffset(reader.initialOffset(), ALL)
        state = engine.state()

    assert before == {
        "t": {str(p): held.high_watermark for p, held in enumerate(state.topic("t").partitions)}
    }
