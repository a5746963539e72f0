"""view=latest in Spark: SQL, actions of several stages, a static side that is fresh, streams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

import kafkalog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.place import open_log
from tests.log_place import TEST_PATH, in_a_directory, log_in

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Table = dict[str, str]


def put(root: Path, pairs: Mapping[str, str | None], topic: str = "t", partitions: int = 2) -> None:
    with open_log(root) as engine:
        engine.create_topic(topic, partitions, exist_ok=True)
        engine.append(topic, list(pairs.items()))


def options(root: Path, topic: str = "t") -> dict[str, str]:
    return {"path": str(root), "subscribe": topic, "view": "latest"}


def table(frame: Any) -> Table:
    found = frame.selectExpr("string(key) as k", "string(value) as v").collect()
    assert len({row.k for row in found}) == len(found)
    return {row.k: row.v for row in found}


def pins(root: Path) -> int:
    return sum(path.name.startswith(layout.PIN) for path in root.iterdir())


@pytest.mark.chosen
def test_sql_sees_the_latest_records_at_every_query(spark: Any, tmp_path: Path) -> None:
    """A table of the catalog is told its options at every query."""
    put(log_in(tmp_path), {"a": "0", "b": "0"})
    sql_options = in_sql(log_in(tmp_path))
    spark.sql("DROP TABLE IF EXISTS held")
    spark.sql(f"CREATE TABLE held USING kafkalog OPTIONS ({sql_options})")
    try:

        def everywhere() -> list[Table]:
            return [
                table(spark.sql(f"SELECT * FROM held WITH ({sql_options})")),
                table(spark.read.options(**options(log_in(tmp_path))).table("held")),
            ]

        assert everywhere() == [{"a": "0", "b": "0"}] * 2
        put(log_in(tmp_path), {"a": None, "b": "1", "c": "0"})
        assert everywhere() == [{"b": "1", "c": "0"}] * 2
        with pytest.raises(Exception, match="path"):
            spark.sql("SELECT * FROM held").collect()
    finally:
        spark.sql("DROP TABLE held")


def in_sql(root: Path) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in options(root).items())


@pytest.mark.chosen
def test_a_temporary_view_keeps_its_options(spark: Any, tmp_path: Path) -> None:
    put(log_in(tmp_path), {"a": "0", "b": "0"})
    make = f"TEMPORARY VIEW seen USING kafkalog OPTIONS ({in_sql(log_in(tmp_path))})"
    spark.sql(f"CREATE OR REPLACE {make}")

    def everywhere() -> list[Table]:
        return [table(spark.sql("SELECT * FROM seen")), table(spark.read.table("seen"))]

    assert everywhere() == [{"a": "0", "b": "0"}] * 2
    put(log_in(tmp_path), {"a": None, "b": "1", "c": "0"})
    if TEST_PATH:  # as a frame of a store, it is of the moment of its plan
        spark.sql(f"CREATE OR REPLACE {make}")
    assert everywhere() == [{"b": "1", "c": "0"}] * 2
    # Fewer columns can be asked for by a schema alone: Spark prunes none.
    assert spark.sql("SELECT count(*) AS n FROM seen WHERE partition >= 0").first().n == 2


@in_a_directory("pins")
def test_views_and_dataframes_see_partitions_that_a_topic_gets_later(
    spark: Any, tmp_path: Path
) -> None:
    put(tmp_path, {"a": "1", "b": "1", "c": "1"}, partitions=1)
    spark.sql(f"create temporary view latest_t using kafkalog options ({in_sql(tmp_path)})")
    changes, chosen, begins, ends, one = (
        spark.read.format("kafkalog").options(path=str(tmp_path), **given).load()
        for given in (
            {"subscribe": "t"},
            {"subscribe": "t", "view": "latest", "keys": '["a"]', "partitioner": "murmur2"},
            {"subscribe": "t", "startingOffsets": '{"t":{"0":0}}'},
            {"subscribe": "t", "endingOffsets": '{"t":{"0":-1}}'},
            {"assign": '{"t":[0]}'},
        )
    )
    frames = (spark.table("latest_t"), changes, chosen, begins, ends, one)
    assert [frame.count() for frame in frames] == [3, 3, 1, 3, 3, 3]
    with kafkalog.open(tmp_path) as log:
        log.alter_topic("t", partitions=4, keys_may_move=True)
        log.append("t", [(key, "2") for key in "abcd"])
        moved = sum(log.offsets("t")[number][1] for number in (1, 2, 3))
    assert moved
    seen = spark.table("latest_t").selectExpr("string(key)", "string(value)").distinct()
    assert {(row[0], row[1]) for row in seen.collect()} >= {(key, "2") for key in "abcd"}
    assert changes.count() == 7
    for frame in (chosen, begins):
        with pytest.raises(PySparkException, match="has got partition 1 since this read"):
            frame.count()
    assert [frame.count() for frame in (ends, one)] == [7 - moved, 7 - moved]
    spark.catalog.dropTempView("latest_t")


@in_a_directory("pins")
def test_the_stages_of_an_action_share_its_pin(spark: Any, tmp_path: Path) -> None:
    put(log_in(tmp_path), {f"k{i}": "0" for i in range(8)})
    put(log_in(tmp_path), {"k0": "x"}, topic="u", partitions=1)
    frame = spark.read.format("kafkalog").options(**options(log_in(tmp_path))).load()
    other = spark.read.format("kafkalog").options(**options(log_in(tmp_path), "u")).load()
    joined = frame.alias("a").join(frame.alias("b"), "key").join(other, "key").union(
        frame.join(other, "key").selectExpr("*", *["null"] * 6)
    )  # fmt: skip
    broadcast = spark.conf.get("spark.sql.autoBroadcastJoinThreshold")
    try:
        for threshold in (broadcast, "-1"):
            spark.conf.set("spark.sql.autoBroadcastJoinThreshold", threshold)
            before = pins(log_in(tmp_path))
            assert joined.count() == 2
            assert pins(log_in(tmp_path)) == before + 1
    finally:
        spark.conf.set("spark.sql.autoBroadcastJoinThreshold", broadcast)
    before = pins(log_in(tmp_path))
    assert frame.rdd.count() == 8
    assert pins(log_in(tmp_path)) == before + 1


@in_a_directory("pins")
def test_a_retried_task_sees_the_moment_of_its_action(spark: Any, tmp_path: Path) -> None:
    """The first attempt of each task fails, having changed every value of the table."""
    put(log_in(tmp_path), {f"k{i}": "0" for i in range(20)})
    frame = spark.read.format("kafkalog").options(**options(log_in(tmp_path))).load()
    root = str(log_in(tmp_path))

    def fail_once(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0:
            with open_log(root) as engine:
                engine.append("t", [(f"k{i}", str(context.taskAttemptId())) for i in range(20)])
            raise ValueError("try again")

    changed = frame.select("key", "value").mapInArrow(fail_once, "key binary, value binary")

    assert set(table(changed).values()) == {"0"}
    assert "0" not in table(frame).values()


@in_a_directory("pins")
def test_a_static_side_is_fresh_in_every_micro_batch(spark: Any, tmp_path: Path) -> None:
    put(log_in(tmp_path), {"a": "old"})
    put(log_in(tmp_path), {"a": "1"}, topic="events", partitions=1)
    static = spark.read.format("kafkalog").options(**options(log_in(tmp_path))).load()
    events = (
        spark.readStream.format("kafkalog")
        .options(path=str(log_in(tmp_path)), subscribe="events", startingOffsets="earliest")
        .load()
        .selectExpr("key", "string(value) as event")
    )
    joined = events.join(static.selectExpr("key", "string(value) as name"), "key")
    seen: list[tuple[str, str]] = []
    query = joined.writeStream.foreachBatch(
        lambda frame, _: seen.extend((row.event, row.name) for row in frame.collect())
    ).start()
    try:
        query.processAllAvailable()
        put(log_in(tmp_path), {"a": "new"})
        put(log_in(tmp_path), {"a": "2"}, topic="events", partitions=1)
        query.processAllAvailable()
        put(log_in(tmp_path), {"a": None})
        put(log_in(tmp_path), {"a": "3"}, topic="events", partitions=1)
        query.processAllAvailable()
    finally:
        query.stop()
    assert seen == [("1", "old"), ("2", "new")]
    assert pins(log_in(tmp_path)) == 1


def test_a_stream_of_a_view_begins_with_it_and_follows_its_changes(
    spark: Any, tmp_path: Path
) -> None:
    root = log_in(tmp_path)
    put(root, {"a": "0", "b": "0", "c": None})
    put(root, {"a": "1"})
    batches: list[list[tuple[str, str | None]]] = []

    def run() -> None:
        query = (
            spark.readStream.format("kafkalog")
            .options(**options(root))
            .load()
            .selectExpr("string(key) as k", "string(value) as v")
            .writeStream.foreachBatch(
                lambda frame, _: batches.append(sorted((r.k, r.v) for r in frame.collect()))
            )
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    run()
    put(root, {"a": None, "b": "1"})
    put(root, {"b": "2"})
    run()
    assert batches[0] == [("a", "1"), ("b", "0"), ("c", None)]
    assert [change for batch in batches[1:] for change in batch] == [
        ("a", None),
        ("b", "1"),
        ("b", "2"),
    ]
