"""The rules of Spark's KafkaSourceSuiteBase: where streams start, by each kind of subscription.

Its suite repeats each for failOnDataLoss true and false, and so do these.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment.partition_directory import create_partition
from tests.builders.log_builder import LogBuilder
from tests.unit.datasource.logs import source
from tests.unit.datasource.streaming_query import StreamingQuery

TIME = 1_700_000_000_000
FAIL = pytest.mark.parametrize("fail", ["true", "false"])
SUBSCRIPTIONS = pytest.mark.parametrize(
    "subscription",
    [{"assign": '{"t":[0,1,2,3,4]}'}, {"subscribe": "t"}, {"subscribePattern": "^t.*"}],
    ids=["assign", "name", "pattern"],
)
BY_NAME_OR_PATTERN = pytest.mark.parametrize(
    "subscription", [{"subscribe": "t"}, {"subscribePattern": "^t.*"}], ids=["name", "pattern"]
)


def add(root: Path, values: Iterable[int], *, time: int = TIME, partitions: int = 5) -> None:
    """Append values as text to topic `t`, spread over its partitions, all at one time."""
    pairs = [("k", f"{number}") for number in values]
    numbers = [place % partitions for place in range(len(pairs))]
    log = LogBuilder(root, now_ms=TIME).topic("t", partitions, exist_ok=True)
    log.append(*pairs, partition=numbers, timestamp_ms=time).close()


def query(root: Path, fail: str, options: dict[str, str]) -> StreamingQuery:
    return StreamingQuery(root, {**options, "failOnDataLoss": fail})


def values(streaming: StreamingQuery) -> list[int]:
    return sorted(int(row["value"]) for row in streaming.drain())


def set_partitions(root: Path, topic: str, count: int) -> None:
    """Give a topic more partitions, as Kafka's tools can."""
    with DirectoryLog(root) as engine, engine.transaction() as transaction:
        known = transaction.topic(topic)
        for number in range(len(known.partitions), count):
            create_partition(root / layout.partition_directory(topic, number), known.topic_id)
        transaction._change.topic(topic, known.topic_id, count, known.config)
        transaction.publish(TIME)


def by_partition(number: int) -> str:
    return json.dumps({"t": {str(partition): number for partition in range(5)}})


@FAIL
@SUBSCRIPTIONS
def test_a_stream_starts_from_the_latest_offsets(
    tmp_path: Path, subscription: dict[str, str], fail: str
) -> None:
    add(tmp_path, [-1])
    streaming = query(tmp_path, fail, {**subscription, "startingOffsets": "latest"})
    assert values(streaming) == []

    add(tmp_path, [1, 2, 3])
    assert values(streaming) == [1, 2, 3]
    streaming.start()
    add(tmp_path, range(4, 9))
    assert values(streaming) == [4, 5, 6, 7, 8]


@FAIL
@SUBSCRIPTIONS
def test_a_stream_starts_from_the_earliest_offsets(
    tmp_path: Path, subscription: dict[str, str], fail: str
) -> None:
    add(tmp_path, [1, 2, 3])
    streaming = query(tmp_path, fail, {**subscription, "startingOffsets": "earliest"})
    assert values(streaming) == [1, 2, 3]
    streaming.start()

    add(tmp_path, [4, 5, 6])
    assert values(streaming) == [4, 5, 6]


@FAIL
@SUBSCRIPTIONS
def test_a_stream_starts_from_specific_offsets(
    tmp_path: Path, subscription: dict[str, str], fail: str
) -> None:
    add(tmp_path, [*range(-5, 0), *range(5)])  # the offsets 0 and 1 of each partition
    start = '{"t":{"0":-2,"1":-1,"2":0,"3":1,"4":2}}'
    streaming = query(tmp_path, fail, {**subscription, "startingOffsets": start})

    assert values(streaming) == [-5, -3, 0, 2, 3]
    streaming.start()
    add(tmp_path, [31, 32, 33])
    assert values(streaming) == [31, 32, 33]


@FAIL
@SUBSCRIPTIONS
@pytest.mark.parametrize("everywhere", [False, True], ids=["specific", "global"])
def test_a_stream_starts_from_timestamps(
    tmp_path: Path, subscription: dict[str, str], fail: str, everywhere: bool
) -> None:
    add(tmp_path, range(5), time=TIME)
    add(tmp_path, range(10, 15), time=TIME + 100)
    add(tmp_path, range(20, 25), time=TIME + 200)
    start = (
        {"startingTimestamp": str(TIME + 1)}
        if everywhere
        else {"startingOffsetsByTimestamp": by_partition(TIME + 1)}
    )
    streaming = query(tmp_path, fail, {**subscription, **start, "startingOffsets": "latest"})

    assert values(streaming) == [*range(10, 15), *range(20, 25)]
    streaming.start()
    add(tmp_path, [31, 32, 33], time=TIME + 50)
    assert values(streaming) == [31, 32, 33]


@FAIL
@BY_NAME_OR_PATTERN
@pytest.mark.parametrize("everywhere", [False, True], ids=["specific", "global"])
def test_a_time_that_nothing_is_as_young_as_is_refused_or_means_latest(
    tmp_path: Path, subscription: dict[str, str], fail: str, everywhere: bool
) -> None:
    add(tmp_path, range(5), time=TIME)
    name = "startingTimestamp" if everywhere else "startingOffsetsByTimestamp"
    options = {**subscription, name: str(TIME + 9) if everywhere else by_partition(TIME + 9)}
    for strategy in ({}, {"startingOffsetsByTimestampStrategy": "ERROR"}):
        with pytest.raises(InvalidInputError, match="No offset matched from request of topic-part"):
            query(tmp_path, fail, {**options, **strategy}).trigger()

    strategy = {"startingOffsetsByTimestampStrategy": "latest"}
    streaming = query(tmp_path, fail, {**options, **strategy})
    assert values(streaming) == []
    add(tmp_path, [7, 8])

    assert values(streaming) == [7, 8]


@FAIL
@BY_NAME_OR_PATTERN
@pytest.mark.parametrize("start", ["latest", "earliest", "specific", "time", "times"])
def test_partitions_that_come_while_a_stream_runs_are_read_from_their_start(
    tmp_path: Path, subscription: dict[str, str], start: str, fail: str
) -> None:
    add(tmp_path, range(5))
    options = {
        "latest": {"startingOffsets": "latest"},
        "earliest": {"startingOffsets": "earliest"},
        "specific": {"startingOffsets": by_partition(1)},
        "time": {"startingTimestamp": str(TIME)},
        "times": {"startingOffsetsByTimestamp": by_partition(TIME)},
    }[start]
    streaming = query(tmp_path, fail, {**subscription, **options})
    streaming.trigger()
    set_partitions(tmp_path, "t", 10)
    add(tmp_path, range(10, 20), partitions=10)

    assert values(streaming) == list(range(10, 20))
    streaming.start()
    add(tmp_path, range(20, 30), partitions=10)
    assert values(streaming) == list(range(20, 30))


def test_a_start_by_time_is_the_same_after_a_crash_in_the_first_batch(tmp_path: Path) -> None:
    add(tmp_path, range(5), time=TIME)
    add(tmp_path, [5, 6], time=TIME + 100)  # in partitions 0 and 1
    options = {
        "subscribe": "t",
        "startingTimestamp": str(TIME + 50),
        "startingOffsetsByTimestampStrategy": "latest",
    }
    streaming = query(tmp_path, "true", options)
    assert streaming.plan()  # and the process dies
    add(tmp_path, range(10, 15), time=TIME + 60)
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("other")

    streaming.start()
    first = sorted(int(row["value"]) for row in streaming.run_planned())

    assert first == [5, 6]
    assert values(streaming) == list(range(10, 15))


def test_a_first_batch_by_times_is_repeated_though_there_are_new_partitions(
    tmp_path: Path,
) -> None:
    add(tmp_path, range(5))
    options = {"subscribe": "t", "startingOffsetsByTimestamp": by_partition(TIME)}
    streaming = query(tmp_path, "true", options)
    assert streaming.plan()
    set_partitions(tmp_path, "t", 6)
    add(tmp_path, range(10, 16), partitions=6)

    streaming.start()

    assert values(streaming) == [*range(5), *range(10, 16)]


def test_times_must_name_all_partitions(tmp_path: Path) -> None:
    add(tmp_path, range(5))
    for times in ('{"t":{"0":1}}', json.dumps({"t": {str(n): 1 for n in range(6)}})):
        streaming = query(tmp_path, "true", {"subscribe": "t", "startingOffsetsByTimestamp": times})
        with pytest.raises(InvalidInputError, match="KAFKA_TIMESTAMP_OFFSET_DOES_NOT_MATCH_ASS"):
            streaming.trigger()


def test_no_record_falls_between_the_start_of_a_query_and_its_first_batch(tmp_path: Path) -> None:
    add(tmp_path, range(5))
    streaming = query(tmp_path, "true", {"subscribe": "t", "startingOffsets": "latest"})
    streaming.start()
    assert streaming.reader is not None
    streaming.reader.initialOffset()
    add(tmp_path, [7])

    assert values(streaming) == [7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingOffsets": "latest"}, "ending offset not valid in streaming queries"),
        ({"endingOffsetsByTimestamp": '{"t":{"0":1}}'}, "ending timestamp not valid in streaming"),
    ],
)
def test_ends_are_refused_when_a_stream_starts(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    add(tmp_path, [1])
    with pytest.raises(InvalidInputError, match=message):
        query(tmp_path, "true", {"subscribe": "t", **options}).trigger()


def test_names_of_options_count_in_any_letter_case(tmp_path: Path) -> None:
    add(tmp_path, range(3))
    options = {"StartingOffsets": "EARLIEST", "MAXOFFSETSPERTRIGGER": "3"}
    streaming = StreamingQuery(tmp_path, options)

    assert values(streaming) == [0, 1, 2]
    assert len(streaming.planned) == 1  # one record in each of three partitions


def test_a_stream_has_the_columns_of_format_kafka(tmp_path: Path) -> None:
    add(tmp_path, [1])
    found = source(tmp_path, includeHeaders="true").schema().simpleString()

    assert found == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_deeds_loses_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    """Spark's KafkaSourceStressSuite, smaller: topics come and go, partitions and records come."""
    dice = random.Random(seed)
    topics: dict[str, int] = {"stress1": 2, "stress5": 2}
    with DirectoryLog(tmp_path) as engine:
        for topic, partitions in topics.items():
            engine.create_topic(topic, partitions)
    streaming = query(
        tmp_path,
        "false",
        {
            "subscribePattern": "stress.*",
            "startingOffsets": "earliest",
            "minPartitions": str(dice.choice([1, 7])),
            "maxOffsetsPerTrigger": str(dice.choice([3, 1000])),
        },
    )
    wanted: list[bytes] = []
    read: list[bytes] = []
    for step in range(50):
        deed = dice.random()
        if deed < 0.1:
            name = f"stress{len(topics) + step + 10}"
            topics[name] = dice.randint(1, 3)
            with DirectoryLog(tmp_path) as engine:
                engine.create_topic(name, topics[name])
        elif deed < 0.2 and len(topics) > 1:
            read += [row["value"] for row in streaming.drain()]
            name = dice.choice(sorted(topics))
            del topics[name]
            with DirectoryLog(tmp_path) as engine:
                engine.delete_topic(name)
        elif deed < 0.3:
            name = dice.choice(sorted(topics))
            topics[name] += dice.randint(1, 3)
            set_partitions(tmp_path, name, topics[name])
        elif deed < 0.8:
            name = dice.choice(sorted(topics))
            records = [f"{step}-{n}".encode() for n in range(dice.randint(0, 20))]
            wanted += records
            with DirectoryLog(tmp_path) as engine:
                engine.append(name, [(record, record) for record in records], now_ms=TIME)
        elif deed < 0.9:
            streaming.start()
        else:
            read += [row["value"] for row in streaming.trigger() or []]
    read += [row["value"] for row in streaming.drain()]

    assert sorted(read) == sorted(wanted)
