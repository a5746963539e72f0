"""A checkpoint or a log that was restored; both formats of Spark's offset log; a wrong topic."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.sink import Append
from kafkalog.sink.upsert import SQLiteUpsert
from tests.log_place import log_in
from tests.spark.sink.test_spark_writes import changes, error_of, finish, records
from tests.spark.sink.test_spark_writes import feed as feed_file

pytestmark = [pytest.mark.spark, pytest.mark.slow]

V2 = "spark.sql.streaming.offsetLog.formatVersion"
NAMES = "spark.sql.streaming.queryEvolution.enableSourceEvolution"


@pytest.fixture(params=["v1", "v2", "named"])
def sources(spark: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Read topics, each as a source of its own, with one format of the offset log."""
    if request.param != "v1":
        if not hasattr(spark.readStream, "name") and request.param == "named":
            pytest.skip("this release of Spark names no sources")
        spark.conf.set(V2, "2")
        spark.conf.set(NAMES, str(request.param == "named").lower())

    def read(log: Any, *topics: str) -> Any:
        frames = []
        for topic in topics:
            reader = spark.readStream
            if request.param == "named":
                reader = reader.name(f"of_{topic}")
            options = {"subscribe": topic, "startingOffsets": "earliest", "path": str(log)}
            frames.append(reader.format("kafkalog").options(**options).load())
        first, *more = frames
        for frame in more:
            first = first.unionAll(frame)
        return first

    yield read
    spark.conf.unset(V2)
    spark.conf.unset(NAMES)


def feed(log: Any, topic: str, *keys: str) -> None:
    with kafkalog.open(str(log)) as opened:
        opened.create_topic(topic, exist_ok=True)
        opened.append(topic, [(key, key) for key in keys])


def test_every_way_to_write_tells_a_restored_checkpoint(
    sources: Callable[..., Any], tmp_path: Path
) -> None:
    """The sink and `Append` refuse it, and go on after a reset; the upsert goes on by itself."""
    log, database = log_in(tmp_path), tmp_path / "table.db"
    saved, checkpoints = tmp_path / "saved", tmp_path / "checkpoints"

    def run(name: str, reset: str = "false") -> None:
        frame = sources(log, "in", "more")
        if name == "upsert":
            upsert = SQLiteUpsert(f"{database}", "kept", key_type="string")
            writer = frame.writeStream.foreachBatch(upsert)
        elif name == "append":
            append = Append(log, "append", options={"resetWriter": reset})
            writer = frame.writeStream.foreachBatch(append)
        else:
            options = {"path": str(log), "topic": "sink", "resetWriter": reset}
            writer = frame.select("key", "value").writeStream.format("kafkalog").options(**options)
        finish(writer.option("checkpointLocation", str(checkpoints / name)))

    def of(topic: str) -> list[str]:
        return sorted(key.decode() for key, _ in records(log, topic))

    feed(log, "more", "z")
    for key in "ab":
        feed(log, "in", key)
        for name in ("sink", "append", "upsert"):
            run(name)
        if key == "a":
            shutil.copytree(checkpoints, saved)
    shutil.rmtree(checkpoints)
    shutil.copytree(saved, checkpoints)
    feed(log, "in", "e")
    for name in ("sink", "append"):
        assert "has another plan than the one that the log has" in error_of(partial(run, name))
        assert of(name) == ["a", "b", "z"]
        run(name, reset="true")
        run(name)
        assert of(name) == ["a", "b", "b", "e", "z"]
    run("upsert")
    with closing(sqlite3.connect(database)) as connection:
        assert sorted(connection.execute("select key from kept")) == [
            ("a",),
            ("b",),
            ("e",),
            ("z",),
        ]


def test_a_restored_checkpoint_in_the_directory_of_the_session_is_told(
    spark: Any, tmp_path: Path
) -> None:
    log, checkpoints, saved = log_in(tmp_path), tmp_path / "checkpoints", tmp_path / "saved"

    def run() -> None:
        options = {"subscribe": "in", "startingOffsets": "earliest", "path": str(log)}
        frame = spark.readStream.format("kafkalog").options(**options).load()
        writer = frame.select("key", "value").writeStream.format("kafkalog").queryName("copied")
        finish(writer.options(path=str(log), topic="out"))

    spark.conf.set("spark.sql.streaming.checkpointLocation", str(checkpoints))
    try:
        for key in "ab":
            feed(log, "in", key)
            run()
            if key == "a":
                shutil.copytree(checkpoints, saved)
        shutil.rmtree(checkpoints)
        shutil.copytree(saved, checkpoints)
        feed(log, "in", "e")
        assert "has another plan than the one that the log has" in error_of(run)
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")


def test_an_upsert_from_files_takes_what_a_restored_checkpoint_brings(
    spark: Any, tmp_path: Path
) -> None:
    source, database = tmp_path / "source", tmp_path / "table.db"
    checkpoint, saved = tmp_path / "checkpoint", tmp_path / "saved"

    def run() -> list[str]:
        upsert = SQLiteUpsert(database, "kept", select=["key", "false as deleted"])
        frame = changes(spark, source, 9).selectExpr(
            "key", "value", "'t' topic", "0 partition", "seq offset", "current_timestamp timestamp"
        )
        writer = frame.writeStream.foreachBatch(upsert)
        finish(writer.option("checkpointLocation", str(checkpoint)))
        with closing(sqlite3.connect(database)) as connection:
            return sorted(key for (key,) in connection.execute("select key from kept"))

    for number, key in enumerate("ab"):
        feed_file(source, number, [(key, "1", number)])
        run()
        if key == "a":
            shutil.copytree(checkpoint, saved)
    shutil.rmtree(checkpoint)
    shutil.copytree(saved, checkpoint)
    feed_file(source, 2, [("e", "1", 2)])
    assert run() == ["a", "b", "e"]


def test_an_upsert_refuses_a_table_that_was_put_back_or_is_gone_until_its_writer_is_reset(
    spark: Any, tmp_path: Path
) -> None:
    log, database = log_in(tmp_path), tmp_path / "table.db"

    def run(*, reset: bool = False) -> list[str]:
        options = {"subscribe": "in", "startingOffsets": "earliest", "path": str(log)}
        frame = spark.readStream.format("kafkalog").options(**options).load()
        upsert = SQLiteUpsert(database, "kept", key_type="string", reset_writer=reset)
        writer = frame.writeStream.foreachBatch(upsert)
        finish(writer.option("checkpointLocation", str(tmp_path / "checkpoint")))
        with closing(sqlite3.connect(database)) as connection:
            return sorted(key for (key,) in connection.execute("select key from kept"))

    for key in "ab":
        feed(log, "in", key)
        run()
        if key == "a":
            shutil.copy(database, tmp_path / "saved")
    for saved in (tmp_path / "saved", None):
        for file in tmp_path.glob("table.db*"):
            file.unlink()
        if saved is not None:
            shutil.copy(saved, database)
        feed(log, "in", "c")
        assert "lacks the changes between" in error_of(run)
    assert run(reset=True) == ["c"]
    feed(log, "in", "d")
    assert run() == ["c", "d"]


def test_a_topic_left_out_by_mistake_fails_and_the_right_query_goes_on(
    spark: Any, tmp_path: Path
) -> None:
    log, checkpoint = log_in(tmp_path), tmp_path / "checkpoint"

    def run(topics: str) -> None:
        options = {"subscribe": topics, "startingOffsets": "earliest", "path": str(log)}
        frame = spark.readStream.format("kafkalog").options(**options).load()
        writer = frame.select("key", "value").writeStream.format("kafkalog")
        writer = writer.options(path=str(log), topic="out")
        finish(writer.option("checkpointLocation", str(checkpoint)))

    feed(log, "t", "a")
    feed(log, "u", "b")
    run("t,u")
    feed(log, "t", "c")
    feed(log, "u", "d")
    assert "u-0 (read up to 1): in the query's checkpoint" in error_of(lambda: run("t"))
    run("t,u")
    assert sorted(key for key, _ in records(log, "out")) == [b"a", b"b", b"c", b"d"]
