"""What runs inside foreachBatch: Append and SQLiteUpsert; and in_order before a sink."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kafkalog import in_order
from kafkalog.errors import InvalidInputError
from kafkalog.sink import Append
from kafkalog.sink.upsert import SQLiteUpsert
from tests.log_place import TEST_PATH, log_in
from tests.spark.sink.test_spark_writes import changes, error_of, feed, finish, records

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def forget_commit(checkpoint: Path, batch_id: int) -> None:
    (checkpoint / "commits" / str(batch_id)).unlink()
    (checkpoint / "commits" / f".{batch_id}.crc").unlink()


def test_append_is_exactly_once_in_update_mode(spark: Any, tmp_path: Path) -> None:
    source, checkpoint, log = tmp_path / "source", tmp_path / "checkpoint", log_in(tmp_path)
    names = []

    def run(append: Any) -> None:
        counts = changes(spark, source).groupBy("key").count()
        frame = counts.selectExpr("key", "cast(count as string) as value")
        writer = frame.writeStream.outputMode("update").foreachBatch(append)
        finish(writer.option("checkpointLocation", str(checkpoint)))

    def twice(frame: Any, batch_id: int) -> None:
        names.append(batch_id)
        # A group of one's own, as people set it to find their jobs, is no run of the query.
        frame.sparkSession.sparkContext.setJobGroup("mine", "counts")
        Append(log, "t")(frame, batch_id)
        Append(log, "t", name="again", numPartitions="1")(frame, batch_id)
        for again in (
            Append(log, "t"),
            Append(str(log) if TEST_PATH else f"file://{log}", options={"topic": "t"}),
        ):
            with pytest.raises(InvalidInputError, match="give each its own name="):
                again(frame, batch_id)

    feed(source, 0, [("a", "x", 0), ("a", "x", 1)])
    run(twice)
    feed(source, 1, [("a", "x", 2)])
    run(twice)
    assert records(log) == [(b"a", b"2")] * 2 + [(b"a", b"3")] * 2
    forget_commit(checkpoint, 1)
    run(twice)
    assert names == [0, 1, 1]
    assert records(log) == [(b"a", b"2")] * 2 + [(b"a", b"3")] * 2


def test_append_outside_foreach_batch_is_refused(spark: Any, tmp_path: Path) -> None:
    frame = spark.sql("select 'k' key, 'v' value")
    with pytest.raises(InvalidInputError, match="works inside foreachBatch only"):
        Append(log_in(tmp_path), "t")(frame, 0)


def test_in_order_gives_every_final_value_over_many_files(spark: Any, tmp_path: Path) -> None:
    source, log = tmp_path / "source", log_in(tmp_path)
    rows = [(f"k{seq % 5}", str(seq), seq) for seq in range(400)]
    shuffled = random.Random(3).sample(rows, len(rows))
    for number in range(20):
        feed(source, number, shuffled[number * 20 : number * 20 + 20])
    frame = in_order(changes(spark, source, files=20), by="seq", partitions=2)
    writer = frame.writeStream.format("kafkalog").option("topic", "t").option("numPartitions", 2)
    finish(writer.option("checkpointLocation", str(tmp_path / "c")).option("path", str(log)))
    written = records(log)
    assert len(written) == 400
    for key in range(5):
        values = [int(value) for name, value in written if name == b"k%d" % key]
        assert values == sorted(values)


def test_in_order_names_a_wrong_column(spark: Any) -> None:
    frame = spark.sql("select 'k' key, 'v' value, array(1) list")
    with pytest.raises(InvalidInputError, match="by='seq': no such column; the columns are: key"):
        in_order(frame, by="seq")
    with pytest.raises(InvalidInputError, match="key='name': no such column"):
        in_order(frame, by="value", key="name")
    with pytest.raises(InvalidInputError, match="a column of type array has no order"):
        in_order(frame, by="list")


SOURCE_COLUMNS = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
)


def table(database: Path, columns: str = "key, value") -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(f"SELECT {columns} FROM stock ORDER BY key").fetchall()


@pytest.mark.chosen
def test_sqlite_upsert_follows_exactly_once(spark: Any, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    raw, shaped = tmp_path / "raw.db", tmp_path / "shaped.db"
    upserts = [
        SQLiteUpsert(raw, "stock"),
        SQLiteUpsert(
            shaped,
            "stock",
            select=lambda df: df.selectExpr(
                "cast(key as string) key",
                "value is null as deleted",
                "cast(get_json_object(cast(value as string), '$.n') as int) n",
            ),
        ),
    ]

    def both(frame: Any, batch_id: int) -> None:
        # The seq of a change stands for its offset; files come in any order.
        frame = frame.selectExpr(
            "cast(key as binary) key",
            "cast(value as binary) value",
            "'t' topic",
            "0 partition",
            "seq offset",
            "current_timestamp() timestamp",
        )
        for upsert in upserts:
            upsert(frame, batch_id)

    def run() -> None:
        writer = changes(spark, source, files=2).writeStream.foreachBatch(both)
        finish(writer.option("checkpointLocation", str(checkpoint)))

    feed(source, 0, [("a", '{"n":3}', 2), ("b", '{"n":1}', 0)])
    feed(source, 1, [("a", '{"n":2}', 1), ("c", '{"n":4}', 3)])
    run()
    assert table(raw) == [(b"a", b'{"n":3}'), (b"b", b'{"n":1}'), (b"c", b'{"n":4}')]
    feed(source, 2, [("b", None, 5), ("c", '{"n":6}', 6)])
    run()
    expected = [(b"a", b'{"n":3}', 2), (b"c", b'{"n":6}', 6)]
    assert table(raw, "key, value, offset") == expected
    assert table(shaped, "key, n") == [("a", 3), ("c", 6)]

    forget_commit(checkpoint, 1)
    with closing(sqlite3.connect(raw)) as connection, connection:
        connection.execute("UPDATE stock SET value = 'changed' WHERE key = ?", (b"c",))
    run()
    assert table(raw)[1] == (b"c", "changed")
    with closing(sqlite3.connect(raw)) as connection:
        ((batch_id, ends),) = connection.execute(
            "SELECT batch_id, end_offsets FROM kafkalog_positions"
        )
    assert (batch_id, json.loads(ends)) == (1, {})  # files have no offsets of a log


def test_an_upsert_needs_the_sources_columns(spark: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    feed(source, 0, [("a", "1", 0)])
    writer = changes(spark, source).writeStream.foreachBatch(SQLiteUpsert(tmp_path / "x.db", "t"))
    message = error_of(lambda: finish(writer.option("checkpointLocation", str(tmp_path / "c"))))
    assert "missing: topic, partition, offset, timestamp" in message


def test_latest_per_key_is_by_offset_then_by_time_between_partitions(spark: Any) -> None:
    from kafkalog.sink.upsert.latest import latest_per_key

    frame = spark.sql(
        "select binary(key) key, binary(value) value, 't' topic, partition, offset, "
        "timestamp_seconds(second) timestamp from values "
        "('a', 'old', 0, 1L, 9), ('a', 'new', 0, 2L, 1), "
        "('b', 'early', 0, 50L, 5), ('b', 'late', 1, 3L, 6), "
        "(null, 'keyless', 0, 60L, 7), ('c', null, 0, 61L, 8) "
        "as t(key, value, partition, offset, second)"
    )
    found = {
        bytes(row.key): row.value and bytes(row.value) for row in latest_per_key(frame).collect()
    }
    assert found == {b"a": b"new", b"b": b"late", b"c": None}
