"""Rules of Spark's KafkaMicroBatchSourceSuite that only a running query shows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.cli import run
from kafkalog.storage_engine.place import open_log
from tests.log_place import log_in
from tests.unit.datasource.logs import append, append_to, numbered

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def stream(spark: Any, root: Path, **options: str) -> Any:
    given = {"subscribe": "t", "startingOffsets": "earliest", **options}
    return spark.readStream.format("kafkalog").options(**given).load(str(root))


def finish(query: Any) -> None:
    assert query.awaitTermination(300)
    assert query.exception() is None


def kafka_checkpoint(directory: Path, offsets: str) -> None:
    """Write what a query with Spark's Kafka source leaves after its first batch."""
    conf = {"spark.sql.shuffle.partitions": "2"}
    metadata = {"batchWatermarkMs": 0, "batchTimestampMs": 1502872590006, "conf": conf}
    files = {
        "metadata": '{"id":"3c4ad4b5-4a2a-4f4b-8a39-c0ffee000001"}',
        "offsets/0": f"v1\n{json.dumps(metadata, separators=(',', ':'))}\n{offsets}",
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
        "sources/0/0": '\0v1\n{"t":{"0":0}}',
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def test_a_checkpoint_of_format_kafka_goes_on_and_its_lag_is_told(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    root, checkpoint = log_in(tmp_path), tmp_path / "checkpoint"
    append_to(root, "t", {0: 9, 1: 4})
    kafka_checkpoint(checkpoint, '{"t":{"1":1,"0":4}}')
    listener = kafkalog.LagListener()
    spark.streams.addListener(listener)
    read: list[tuple[int, int]] = []
    try:
        with caplog.at_level(logging.INFO):
            query = (
                stream(spark, root, maxOffsetsPerTrigger="6")
                .writeStream.foreachBatch(
                    lambda frame, _: read.extend((r.partition, r.offset) for r in frame.collect())
                )
                .option("checkpointLocation", str(checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            finish(query)
    finally:
        spark.streams.removeListener(listener)

    assert sorted(read) == [*((0, n) for n in range(4, 9)), *((1, n) for n in range(1, 4))]
    progress = [one for one in query.recentProgress if one["numInputRows"]]
    behind = [kafkalog.offsets_behind_latest(one)[0] for one in progress]
    assert [one["maxOffsetsBehindLatest"] for one in behind] == ["2", "0"]
    assert [one["avgOffsetsBehindLatest"] for one in behind] == ["1.5", "0.0"]
    assert sum(one["numInputRows"] for one in progress) == 8
    assert (checkpoint / "offsets" / "2").read_text().splitlines()[2] == '{"t": {"0": 9, "1": 4}}'
    assert run(["status", str(root), "--checkpoint", str(checkpoint), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert [(row["nextOffset"], row["lag"]) for row in rows] == [(9, 0), (4, 0)]


def test_a_stream_joined_with_itself_has_one_offset_and_windows_know_its_timestamps(
    spark: Any, tmp_path: Path
) -> None:
    from pyspark.sql import functions

    root, checkpoint = log_in(tmp_path), tmp_path / "checkpoint"
    append(root, "t", numbered(2))
    frame = stream(spark, root)
    both = frame.selectExpr("key", "timestamp").union(frame.selectExpr("key", "timestamp"))
    counted = (
        both.withWatermark("timestamp", "10 seconds")
        .groupBy(functions.window("timestamp", "5 seconds"))
        .count()
        .selectExpr("unix_millis(window.start) as start", "count")
    )
    query = (
        counted.writeStream.format("memory")
        .queryName("windows")
        .outputMode("complete")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)

    assert [tuple(row) for row in spark.table("windows").collect()] == [(1_700_000_000_000, 4)]
    assert len(query.recentProgress[0]["sources"]) == 1
    assert query.recentProgress[0]["numInputRows"] == 4


def test_a_topic_made_anew_under_a_query_stops_it_or_not(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    append_to(root, "t", {0: 15, 4: 0})
    batches: list[int] = []

    def replace(frame: Any, number: int) -> None:
        batches.append(frame.count())
        if number == 0:
            with open_log(root) as engine:
                engine.delete_topic("t")
            append_to(root, "t", {0: 15, 2: 0})

    def run_query(name: str, **trigger: Any) -> Any:
        return (
            stream(spark, root, maxOffsetsPerTrigger="5", failOnDataLoss="false")
            .writeStream.foreachBatch(replace)
            .option("checkpointLocation", str(tmp_path / name))
            .trigger(**trigger)
            .start()
        )

    with pytest.raises(Exception, match="LOST_TOPIC_PARTITIONS_IN_END_OFFSET_WITH_TRIGGER_AVAIL"):
        run_query("available-now", availableNow=True).awaitTermination(300)

    query = run_query("processing-time", processingTime="50 milliseconds")
    try:
        query.processAllAvailable()
        assert query.exception() is None
    finally:
        query.stop()
    assert batches[1] == 5


def test_two_sources_of_a_query_are_limited_each_and_over_a_restart(
    spark: Any, tmp_path: Path
) -> None:
    append_to(log_in(tmp_path), "small", {0: 7})
    append_to(log_in(tmp_path), "large", {0: 20})
    frames = [
        stream(spark, log_in(tmp_path), subscribe=topic, maxOffsetsPerTrigger="5")
        for topic in ("small", "large")
    ]
    taken: list[dict[str, int]] = []

    def count(frame: Any, _: int) -> None:
        taken.append({row.topic: row["count"] for row in frame.groupBy("topic").count().collect()})
        if len(taken) == 2:
            raise ValueError("the sink fails")

    def run_query() -> Any:
        return (
            frames[0]
            .union(frames[1])
            .writeStream.foreachBatch(count)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )

    with pytest.raises(Exception, match="the sink fails"):
        run_query().awaitTermination(300)
    finish(run_query())

    assert taken[1:3] == [{"small": 2, "large": 5}] * 2
    assert [taken[0], *taken[3:]] == [{"small": 5, "large": 5}, {"large": 5}, {"large": 5}]
