"""Writes through Spark: exactly once for streams, and what a batch write promises."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.place import open_log
from tests.log_place import TEST_PATH, log_in

pytestmark = [pytest.mark.spark, pytest.mark.slow]
CHANGES = "key string, value string, seq bigint"
FIRST_S = 1_700_000_000


def feed(directory: Path, number: int, rows: list[tuple[str, str | None, int]]) -> None:
    """Add one file of changes to what a stream reads; it appears at once, under its name."""
    directory.mkdir(exist_ok=True)
    lines = [json.dumps(dict(zip(("key", "value", "seq"), row, strict=True))) for row in rows]
    temporary = directory / f".{number:05d}"
    temporary.write_text("\n".join(lines))
    os.utime(temporary, (FIRST_S + number,) * 2)  # Spark reads files in the order of their times
    temporary.rename(directory / f"{number:05d}.json")


def changes(spark: Any, directory: Path, files: int = 1) -> Any:
    reader = spark.readStream.schema(CHANGES).option("maxFilesPerTrigger", files)
    return reader.json(str(directory))


def finish(writer: Any) -> None:
    """Run a stream over all there is, and raise what it fails with."""
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def records(path: Path, topic: str = "t", columns: tuple[str, ...] = ("key", "value")) -> list[Any]:
    """Return the records of a topic, partition by partition."""
    engine = open_log(path, read_only=True)
    found = []
    for partition in engine.offsets(topic):
        batches = list(engine.read(topic, partition, columns=columns))
        if batches:
            rows = pa.Table.from_batches(batches).to_pylist()
            found += [tuple(row[name] for name in columns) for row in rows]
    return found


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        action()
    assert not isinstance(caught.value, KafkaLogError)
    return str(caught.value)


def staged_files(path: Path) -> list[str]:
    return [] if TEST_PATH else [file.name for file in path.rglob("kl-*.staged*")]


class Stream:
    """One stream of files into topic t, with its checkpoint."""

    def __init__(self, spark: Any, tmp_path: Path) -> None:
        self.spark = spark
        self.source, self.log = tmp_path / "source", log_in(tmp_path)
        self.checkpoint = tmp_path / "checkpoint"
        self.fed = 0

    def feed(self, *rows: tuple[str, str | None, int]) -> None:
        feed(self.source, self.fed, list(rows))
        self.fed += 1

    def run(self, **options: str) -> None:
        writer = changes(self.spark, self.source).writeStream.format("kafkalog")
        writer = writer.option("checkpointLocation", str(self.checkpoint)).options(**options)
        finish(writer.option("topic", "t").option("path", str(self.log)))

    def forget_commit(self, batch_id: int) -> None:
        """Leave the checkpoint as a driver that died after the sink's commit leaves it."""
        (self.checkpoint / "commits" / str(batch_id)).unlink()
        (self.checkpoint / "commits" / f".{batch_id}.crc").unlink()


@pytest.mark.chosen
def test_a_stream_is_exactly_once_and_an_older_checkpoint_is_refused(
    spark: Any, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path)
    stream.feed(("a", "1", 0), ("b", "2", 1))
    stream.run()
    shutil.copytree(stream.checkpoint, tmp_path / "older")
    stream.feed(("a", "3", 2))
    stream.feed(("b", None, 3))
    stream.run()
    expected = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"b", None)]
    assert records(stream.log) == expected

    stream.forget_commit(2)
    stream.feed(("c", "4", 4))
    stream.run()
    assert records(stream.log) == [*expected, (b"c", b"4")]
    assert staged_files(stream.log) == []

    stream.checkpoint = tmp_path / "older"
    message = error_of(stream.run)
    assert "this checkpoint is older than the log: committed 3 at " in message
    assert "got 1" in message
    assert records(stream.log) == [*expected, (b"c", b"4")]
    stream.run(resetWriter="true")
    assert records(stream.log) == [*expected, (b"c", b"4"), *expected[2:], (b"c", b"4")]


@pytest.mark.chosen
def test_batch_writes_land_each_time_unless_they_carry_a_transaction(
    spark: Any, tmp_path: Path
) -> None:
    log = log_in(tmp_path)
    frame = spark.createDataFrame([("a", "1")], "key string, value string").coalesce(1)
    writer = frame.write.format("kafkalog").mode("append").option("topic", "t")
    writer.save(str(log))
    writer.save(str(log))
    assert records(log) == [(b"a", b"1")] * 2
    for version in (0, 0, 1):
        writer.option("txnAppId", "job").option("txnVersion", version).save(str(log))
    assert records(log) == [(b"a", b"1")] * 4
    message = error_of(lambda: writer.option("txnVersion", 0).save(str(log)))
    assert "committed 1 at" in message
    assert staged_files(log) == []


def test_all_columns_of_a_record_arrive(spark: Any, tmp_path: Path) -> None:
    log = log_in(tmp_path)
    frame = spark.sql(
        "select 'k' key, 'v' value, 't2' topic, 2 partition, 7L offset, "
        "timestamp'2024-01-02 03:04:05.678' timestamp, "
        "array(named_struct('key', 'h', 'value', binary('x'))) headers "
        "union all select 'k', null, 't1', null, 7L, null, null"
    ).coalesce(1)
    writer = frame.write.format("kafkalog").mode("append").option("numPartitions", 3)
    writer.option("topic.segment.bytes", "1048576").save(str(log))
    columns = ("key", "value", "partition", "timestamp", "headers")
    ((key, value, partition, timestamp, headers),) = records(log, "t2", columns)
    assert (key, value, partition) == (b"k", b"v", 2)
    assert timestamp.isoformat() == "2024-01-02T03:04:05.678000+00:00"
    assert headers == [{"key": "h", "value": b"x"}]
    ((key, value, partition, timestamp, headers),) = records(log, "t1", columns)
    assert (key, value, headers) == (b"k", None, None)
    assert timestamp.year > 2024
    config = open_log(log, read_only=True).describe("t1").config
    assert dict(config) == {"cleanup.policy": "compact", "segment.bytes": "1048576"}


def test_wrong_writes_are_refused_with_nothing_written(spark: Any, tmp_path: Path) -> None:
    log = log_in(tmp_path)

    def refused(sql: str, mode: str = "append", **options: str) -> str:
        writer = spark.sql(sql).coalesce(1).write.format("kafkalog").mode(mode)
        return error_of(lambda: writer.options(**options).save(str(log)))

    good = "select 'k' key, 'v' value"
    assert "topic option required when no 'topic' attribute is present" in refused(good)
    assert "Save mode Overwrite not allowed for Kafka" in refused(good, "overwrite", topic="t")
    assert "did you mean txnVersion" in refused(good, topic="t", txnVersoin="1")
    null_key = "select 'k' key, 'v' value union all select null, 'v'"
    assert "topic.cleanup.policy=delete" in refused(null_key, topic="t")
    assert records(log) == []
    assert staged_files(log) == []


@pytest.mark.chosen
def test_sql_writes_through_a_view_that_is_read_and_through_a_table_without_options(
    spark: Any, tmp_path: Path
) -> None:
    path = log_in(tmp_path)
    with open_log(path) as log:
        log.create_topic("t")
        log.append("t", [("a", "1")])
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW both (key BINARY, value BINARY) USING kafkalog "
        f"OPTIONS (path '{path}', subscribe 't', topic 't', view 'latest')"
    )
    spark.sql("INSERT INTO both VALUES (binary('b'), binary('2'))")
    spark.sql("INSERT INTO both SELECT key, binary('3') AS value FROM both WHERE key = binary('a')")
    assert records(path) == [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]
    seen = spark.sql("SELECT string(key) AS key, string(value) AS value FROM both").collect()
    assert sorted((row.key, row.value) for row in seen) == [("a", "3"), ("b", "2")]
    spark.sql("DROP TABLE IF EXISTS target")
    spark.sql("CREATE TABLE target (key STRING, value STRING) USING kafkalog")
    try:
        options = f"'path' = '{path}', 'topic' = 'u'"
        spark.sql(f"INSERT INTO target WITH ({options}) VALUES ('c', '4')")
        spark.sql(f"INSERT INTO target WITH ({options}, 'create' = 'false') SELECT 'd', '5'")
    finally:
        spark.sql("DROP TABLE target")
    assert records(path, "u") == [(b"c", b"4"), (b"d", b"5")]


def test_to_table_follows_into_a_topic(spark: Any, tmp_path: Path) -> None:
    path = log_in(tmp_path)
    feed(tmp_path / "in", 0, [("a", "1", 0)])
    writer = changes(spark, tmp_path / "in").select("key", "value").writeStream.format("kafkalog")
    writer.options(path=path, topic="t", checkpointLocation=str(tmp_path / "checkpoint"))
    for number in (1, 2):
        query = writer.trigger(availableNow=True).toTable("followed")
        query.awaitTermination()
        feed(tmp_path / "in", number, [("b", str(number), number)])
    spark.sql("DROP TABLE followed")
    assert records(path) == [(b"a", b"1"), (b"b", b"1")]
