"""The rules of Spark's KafkaMicroBatchSourceSuite, by its own numbers, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kafkalog.errors import DataLossError, InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import ABORT, COMMIT, at_times, joined, marker
from tests.builders.log_builder import LogBuilder
from tests.unit.datasource.logs import append, append_to, numbered, source
from tests.unit.datasource.streaming_query import Row, StreamingQuery


def query(root: Path, **options: str) -> StreamingQuery:
    return StreamingQuery(root, {"startingOffsets": "earliest", **options})


def counts(batch: list[Row] | None) -> dict[int, int]:
    """Records by partition."""
    assert batch is not None
    found: dict[int, int] = {}
    for row in batch:
        found[row["partition"]] = found.get(row["partition"], 0) + 1
    return found


def delete(root: Path, topic: str) -> None:
    with DirectoryLog(root) as engine:
        engine.delete_topic(topic)


def made_anew(root: Path, topic: str, records: dict[int, int]) -> None:
    delete(root, topic)
    append_to(root, topic, records)


def test_available_now_runs_batches_of_the_limit_and_stops(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 15, 4: 0})
    streaming = query(tmp_path, maxOffsetsPerTrigger="5")
    streaming.start(available_now=True)

    batches = 0
    while streaming.trigger() is not None:
        batches += 1
        append_to(tmp_path, "t", {0: 1})
    assert batches == 3


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({0: 15, 2: 0}, r"LOST_TOPIC_PARTITIONS_IN_END_OFFSET_WITH_TRIGGER_AVAILABLENOW.*t-3, t-4"),
        ({0: 8, 4: 0}, r"FOR_TOPIC_PARTITION_THAN_LATEST_WITH_TRIGGER_AVAILABLENOW.*t-0"),
    ],
    ids=["partitions", "offsets"],
)
@pytest.mark.parametrize("fail", ["true", "false"])
def test_available_now_fails_when_what_it_aimed_at_is_gone(
    tmp_path: Path, records: dict[int, int], message: str, fail: str
) -> None:
    append_to(tmp_path, "t", {0: 15, 4: 0})
    streaming = query(tmp_path, maxOffsetsPerTrigger="5", failOnDataLoss=fail)
    streaming.start(available_now=True)
    streaming.trigger()
    made_anew(tmp_path, "t", records)

    with pytest.raises(DataLossError, match=message):
        streaming.drain()


def test_an_uncommitted_batch_is_repeated_by_available_now_with_new_partitions(
    tmp_path: Path,
) -> None:
    append_to(tmp_path, "t1", {0: 3})
    streaming = query(tmp_path, subscribePattern="t.")
    streaming.start(available_now=True)
    assert streaming.plan()  # and the process dies
    append_to(tmp_path, "t2", {0: 2})

    streaming.start(available_now=True)

    assert [row["topic"] for row in streaming.trigger() or []] == ["t1"] * 3
    assert [row["topic"] for row in streaming.drain()] == ["t2"] * 2


def test_a_query_stopped_before_its_first_record_starts_where_it_meant_to(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 3, 4: 1})
    streaming = query(tmp_path, startingOffsets="latest")
    streaming.start()
    assert streaming.trigger() == []
    streaming.start()
    append_to(tmp_path, "t", {0: 2})

    assert [row["offset"] for row in streaming.drain()] == [3, 4]


def test_the_largest_limit_does_not_overflow(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 5})
    start = '{"t":{"0":5}}'
    streaming = query(tmp_path, startingOffsets=start, maxOffsetsPerTrigger=str(2**63 - 1))
    streaming.trigger()
    append_to(tmp_path, "t", {0: 5})

    assert [row["offset"] for row in streaming.drain()] == [5, 6, 7, 8, 9]


def test_the_limit_is_shared_in_proportion_and_over_a_restart(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 101, 1: 11, 2: 1})
    streaming = query(tmp_path, maxOffsetsPerTrigger="10")

    assert counts(streaming.trigger()) == {0: 8, 1: 1, 2: 1}
    assert counts(streaming.trigger()) == {0: 9, 1: 1}
    streaming.start()
    assert counts(streaming.trigger()) == {0: 9, 1: 1}
    assert counts(streaming.trigger()) == {0: 9, 1: 1}


@pytest.mark.parametrize(
    "options",
    [
        {"maxOffsetsPerTrigger": "10"},
        {"minOffsetsPerTrigger": "15", "maxTriggerDelay": "5s"},
        {"minOffsetsPerTrigger": "15", "maxTriggerDelay": "5s", "maxOffsetsPerTrigger": "20"},
    ],
    ids=["most", "least", "both"],
)
def test_once_takes_all_there_is(tmp_path: Path, options: dict[str, str]) -> None:
    append_to(tmp_path, "t", {0: 101, 1: 11, 2: 1})
    streaming = query(tmp_path, **options)
    assert counts(streaming.trigger(once=True)) == {0: 101, 1: 11, 2: 1}
    append_to(tmp_path, "t", {1: 11})

    assert counts(streaming.trigger(once=True)) == {1: 11}


def test_a_batch_waits_for_enough_records_or_long_enough(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 10, 1: 5, 2: 1})
    streaming = query(tmp_path, minOffsetsPerTrigger="15", maxTriggerDelay="5s")

    assert counts(streaming.trigger()) == {0: 10, 1: 5, 2: 1}
    append_to(tmp_path, "t", {1: 6})
    streaming.now_ms += 100
    assert streaming.trigger() is None
    append_to(tmp_path, "t", {0: 11, 2: 1})
    streaming.now_ms += 100
    assert counts(streaming.trigger()) == {0: 11, 1: 6, 2: 1}
    append_to(tmp_path, "t", {0: 5, 1: 5})
    streaming.now_ms += 100
    assert streaming.trigger() is None
    streaming.now_ms += 5_000
    assert counts(streaming.trigger()) == {0: 5, 1: 5}


def test_a_triggers_minimum_maximum_and_delay_work_together(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 21, 1: 11, 2: 1})
    streaming = query(
        tmp_path, minOffsetsPerTrigger="15", maxTriggerDelay="5s", maxOffsetsPerTrigger="20"
    )

    assert counts(streaming.trigger()) == {0: 12, 1: 6, 2: 1}
    streaming.now_ms += 100
    assert streaming.trigger() is None  # 14 are waiting
    append_to(tmp_path, "t", {0: 8, 1: 10, 2: 1})
    streaming.now_ms += 100
    assert counts(streaming.trigger()) == {0: 10, 1: 9, 2: 1}
    streaming.now_ms += 100
    assert streaming.trigger() is None  # 13
    streaming.now_ms += 5_000
    assert counts(streaming.trigger()) == {0: 7, 1: 6}


def test_what_waits_is_left_by_available_now_as_spark_leaves_it(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 25})
    streaming = query(tmp_path, minOffsetsPerTrigger="15", maxOffsetsPerTrigger="20")
    streaming.start(available_now=True)
    assert len(streaming.drain()) == 20

    streaming.start(available_now=True)

    assert len(streaming.drain()) == 5


def test_a_first_batch_that_waits_records_no_place_to_be_looked_up(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 20, 1: 2})
    streaming = query(
        tmp_path,
        minOffsetsPerTrigger="50",
        maxTriggerDelay="100000d",
        startingOffsets='{"t":{"0":-1,"1":-2}}',
    )

    assert streaming.trigger() == []

    assert json.loads(streaming.planned[0]) == {"t": {"0": 20, "1": 0}}
    append_to(tmp_path, "t", {0: 30, 1: 20})
    assert counts(streaming.trigger()) == {0: 30, 1: 22}


def test_a_pattern_suffers_that_its_topics_go_and_others_come(tmp_path: Path) -> None:
    append_to(tmp_path, "a-seems", {0: 1, 4: 0})
    streaming = query(
        tmp_path, subscribePattern="a-.*", failOnDataLoss="false", startingOffsets="latest"
    )
    streaming.trigger()
    append_to(tmp_path, "a-seems", {0: 3})
    assert counts(streaming.trigger()) == {0: 3}
    delete(tmp_path, "a-seems")
    append_to(tmp_path, "a-bad", {1: 3, 4: 0})

    assert [row["topic"] for row in streaming.drain()] == ["a-bad"] * 3


def test_no_partitions_are_never_recorded_as_an_end(tmp_path: Path) -> None:
    append_to(tmp_path, "a-good", {0: 1, 4: 0})
    append_to(tmp_path, "other", {0: 1})
    streaming = query(tmp_path, subscribePattern="a-.*", failOnDataLoss="false")
    streaming.drain()
    delete(tmp_path, "a-good")

    assert streaming.trigger() is None
    streaming.start(available_now=True)
    assert streaming.trigger() is None
    assert "{}" not in streaming.planned


def test_a_topic_made_anew_between_batches_is_told(tmp_path: Path) -> None:
    append_to(tmp_path, "a-good", {0: 2})
    append_to(tmp_path, "a-bad", {0: 2})
    streaming = query(tmp_path, subscribePattern="a-.*")
    assert len(streaming.drain()) == 4
    made_anew(tmp_path, "a-bad", {0: 1})
    streaming.start()

    with pytest.raises(DataLossError, match=r"a-bad-0.* was changed from 2 to 1.*\[0, 1\)"):
        streaming.drain()


def test_topic_level_offsets_suffer_a_topic_that_comes_later(tmp_path: Path) -> None:
    append_to(tmp_path, "p-a", {0: 1})
    streaming = query(tmp_path, subscribePattern="p-.*", startingOffsets='{"p-a":"earliest"}')
    assert len(streaming.drain()) == 1
    append_to(tmp_path, "p-b", {0: 1})

    assert [row["topic"] for row in streaming.drain()] == ["p-b"]


def test_a_topic_deleted_under_a_batch_is_not_a_failure_where_loss_is_accepted(
    tmp_path: Path,
) -> None:
    append_to(tmp_path, "t", {0: 10})
    streaming = query(tmp_path, failOnDataLoss="false")
    streaming.start()
    assert streaming.plan()
    made_anew(tmp_path, "t", {0: 0})

    assert streaming.run_planned() == []
    assert streaming.drain() == []


def test_a_topic_subscribed_to_by_name_and_deleted_is_told(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 3})
    append_to(tmp_path, "other", {0: 3})
    streaming = query(tmp_path, subscribe="t,other")
    streaming.drain()
    delete(tmp_path, "t")

    with pytest.raises(DataLossError, match=r"PARTITIONS_DELETED\] t-0 \(wanted from 3\): gone"):
        streaming.trigger()


@pytest.mark.parametrize("value", ["a", "1.0", "0", "-1"])
def test_min_partitions_is_a_positive_integer(tmp_path: Path, value: str) -> None:
    append_to(tmp_path, "t", {0: 1})
    with pytest.raises(InvalidInputError, match="minPartitions must be"):
        source(tmp_path, minPartitions=value)


def test_min_partitions_gives_that_many_tasks_and_all_records(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 30, 1: 1})
    streaming = query(tmp_path, minPartitions="6")
    streaming.plan()
    assert streaming.reader is not None
    start, end = streaming.reader.initialOffset(), json.loads(streaming.planned[0])
    assert len(streaming.reader.partitions(start, end)) >= 6

    assert counts(streaming.run_planned()) == {0: 30, 1: 1}


def test_offsets_of_a_task_are_limited(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 9})
    streaming = query(tmp_path, maxRecordsPerPartition="4")
    streaming.start()
    assert streaming.reader is not None

    planned = streaming.reader.partitions({"t": {"0": -2}}, {"t": {"0": 9}})

    assert [(p.range.start, p.range.end) for p in planned] == [(0, 3), (3, 6), (6, 9)]


def test_missing_keys_and_values_are_null(tmp_path: Path) -> None:
    append(tmp_path, "t", [(b"k", None), (None, b"v"), (None, None)])

    read = [(row["key"], row["value"]) for row in query(tmp_path).drain()]

    assert read == [(b"k", None), (None, b"v"), (None, None)]


def transactions(root: Path) -> None:
    """Two plain records, three aborted with their marker, two committed with theirs, one open."""
    append(root, "t", numbered(2))
    batches = [
        at_times(2, (1, 2, 3), 7, transactional=True),
        marker(5, ABORT, 7),
        at_times(6, (4, 5), 8, transactional=True),
        marker(8, COMMIT, 8),
        at_times(9, (6,), 9, transactional=True),
    ]
    LogBuilder(root).append_raw(*batches).close()


def test_a_committed_stream_passes_over_offsets_without_records(tmp_path: Path) -> None:
    transactions(tmp_path)
    streaming = query(tmp_path, maxOffsetsPerTrigger="3")

    batches = []
    while (batch := streaming.trigger()) is not None:
        batches.append([row["offset"] for row in batch])

    assert batches == [[0, 1], [], [6, 7]]
    with DirectoryLog(tmp_path) as engine:
        engine.append_raw("t", 0, joined([marker(10, COMMIT, 9)]))
    assert [row["offset"] for row in streaming.drain()] == [9]


def test_an_uncommitted_stream_reads_all_but_markers(tmp_path: Path) -> None:
    transactions(tmp_path)
    streaming = query(tmp_path, **{"kafka.isolation.level": "read_uncommitted"})

    assert [row["offset"] for row in streaming.drain()] == [0, 1, 2, 3, 4, 6, 7, 9]


def test_a_query_goes_on_from_the_offsets_that_spark_wrote_for_kafka(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 5, 1: 5, 2: 5})
    streaming = query(tmp_path, startingOffsets="latest")
    streaming.planned, streaming.committed = ['{"t":{"2":5,"1":2,"0":4}}'], 1

    assert [(row["partition"], row["offset"]) for row in streaming.drain()] == [
        *[(0, 4), (1, 2), (1, 3), (1, 4)],
    ]


def test_two_sources_of_a_query_are_limited_each(tmp_path: Path) -> None:
    append_to(tmp_path, "small", {0: 10})
    append_to(tmp_path, "large", {0: 100})
    both = [
        query(tmp_path, subscribe=topic, maxOffsetsPerTrigger="5") for topic in ("small", "large")
    ]

    taken = [[len(streaming.trigger() or []) for streaming in both] for _ in range(4)]

    assert taken == [[5, 5], [5, 5], [0, 5], [0, 5]]
