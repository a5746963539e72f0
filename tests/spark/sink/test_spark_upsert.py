"""Upserts in Spark: how records become rows, and what the position says."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import SQLiteUpsert
from kafkalog.sink.upsert.bad_records import BadRecords
from kafkalog.sink.upsert.rows import RowShape, UpsertRows
from kafkalog.storage_engine.place import open_log
from tests.log_place import log_in
from tests.spark.sink.test_spark_writes import error_of, finish

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Change = tuple[str | None, str | None, int]


def frame_of(spark: Any, *changes: Change) -> Any:
    """Return records as the source gives them: (key, value, offset)."""

    def text(value: str | None) -> str:
        return "null" if value is None else f"'{value}'"

    rows = ", ".join(f"({text(key)}, {text(value)}, {at}L)" for key, value, at in changes)
    return spark.sql(
        "select binary(key) key, binary(value) value, 't' topic, 0 partition, offset, "
        "timestamp_seconds(offset) timestamp, 0 timestampType "
        f"from values {rows} as t(key, value, offset)"
    )


def collected(rows: UpsertRows) -> list[tuple[Any, ...]]:
    """Return (is deletion, offset, *the table's columns) of rows, sorted by offset."""
    found = rows.frame.drop("kl_topic", "kl_partition", "kl_timestamp").collect()
    plain = [tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in found]
    return sorted(plain, key=lambda row: row[1])


DOCUMENTS: list[Change] = [
    ("a", '{"n": 1, "name": "x"}', 1),
    ("b", '{"n": 2, "more": [1]}', 2),
    ("c", None, 3),
    (None, '{"n": 9}', 4),
    ("a", '{"n": 5, "name": null}', 5),
]


def test_a_schema_takes_the_columns_from_json_values(spark: Any) -> None:
    shape = RowShape(schema="n int, name string", key_type="string")
    rows = shape.rows(frame_of(spark, *DOCUMENTS), latest=True, parts=1)
    assert rows.names == ["key", "n", "name"]
    assert [kind.simpleString() for kind in rows.types] == ["string", "int", "string"]
    expected = [(False, 2, "b", 2, None), (True, 3, "c", None, None), (False, 5, "a", 5, None)]
    assert collected(rows) == expected
    every = shape.rows(frame_of(spark, *DOCUMENTS), latest=False)
    assert collected(every) == [(False, 1, "a", 1, "x"), *expected]


@pytest.mark.parametrize(
    "value", ['{"n": "text"}', '{"n": 3000000000}', '{"n": 1', "", "[1]", '{"n": 1.5}']
)
def test_a_value_that_is_not_such_a_document_fails_and_names_the_record(
    spark: Any, value: str
) -> None:
    frame = frame_of(spark, ("a", '{"n": 1}', 6), ("b", value, 7))
    message = error_of(RowShape(schema="n int").rows(frame, latest=False).frame.collect)
    words = f"t-0 offset 7: the value is not a JSON document of struct<n:int>; found '{value}'"
    assert words in message


def test_a_document_that_is_not_utf8_is_bad(spark: Any) -> None:
    shape = RowShape(schema="name string", leaves_out_bad=True)
    frame = frame_of(spark, ("a", '{"name": "x"}', 1), ("b", '{"name": "x"}', 2)).selectExpr(
        "key", "if(offset = 2, unhex('7b226e616d65223a2022ff227d'), value) value",
        "topic", "partition", "offset", "timestamp",
    )  # fmt: skip
    assert [row[1] for row in collected(shape.rows(frame, latest=True))] == [1]
    [bad] = shape.bad_records(frame).collect()
    assert bad.offset == 2
    assert bad.kl_reason.endswith("""found '{"name": "\ufffd"}'""")


@pytest.mark.parametrize("schema", ["n intt", "", "binary"])
def test_a_text_that_is_not_a_schema_is_refused_in_one_line(spark: Any, schema: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^schema(=| names|: expected)[^\n]*$"):
        RowShape(schema=schema).rows(frame_of(spark, *DOCUMENTS), latest=True)


def test_a_list_may_make_other_keys_than_the_records_have_and_the_latest_of_those_counts(
    spark: Any,
) -> None:
    first = frame_of(spark, ("a", "1", 1), ("b", "2", 2), ("c", "3", 3))
    other = frame_of(spark, ("a", "4", 4)).selectExpr(
        "key", "value", "'u' topic", "partition", "offset", "timestamp", "timestampType"
    )
    records = first.union(other)

    apart = RowShape(select=["concat(topic, '/', string(key)) as key", "string(value) as n"])
    rows = apart.rows(records, latest=True)
    assert [row[2:] for row in collected(rows)] == [
        ("t/a", "1"),
        ("t/b", "2"),
        ("t/c", "3"),
        ("u/a", "4"),
    ]
    together = RowShape(select=["if(string(key) < 'c', 'low', 'high') as key", "string(value) n"])
    rows = together.rows(records, latest=True)
    assert [row[2:] for row in collected(rows)] == [("high", "3"), ("low", "4")]


def test_a_list_of_expressions_is_worked_out_record_by_record(spark: Any) -> None:
    from pyspark.sql import functions as F

    shape = RowShape(
        select=[
            "cast(key as string) as key",
            F.get_json_object(F.col("value").cast("string"), "$.n").cast("int").alias("n"),
            "offset",
        ]
    )
    rows = shape.rows(frame_of(spark, *DOCUMENTS), latest=True)
    assert rows.names == ["key", "n", "offset"]
    expected = [(False, 2, "b", 2, 2), (True, 3, "c", None, 3), (False, 5, "a", 5, 5)]
    assert collected(rows) == expected
    marked = RowShape(select=["key", "value", "offset = 2 as deleted"])
    found = marked.rows(frame_of(spark, *DOCUMENTS), latest=False)
    assert found.names == ["key", "value"]
    assert [row[0] for row in collected(found)] == [False, True, False, False]


def test_a_function_is_given_the_latest_rows(spark: Any) -> None:
    shape = RowShape(select=lambda df: df.selectExpr("key", "value", "offset", "'x' topic"))
    rows = shape.rows(frame_of(spark, *DOCUMENTS), latest=True)
    assert rows.names == ["key", "value", "offset", "topic"]
    assert [row[0:2] for row in collected(rows)] == [(False, 2), (True, 3), (False, 5)]
    assert {row.kl_partition for row in rows.frame.collect()} == {None}
    with pytest.raises(InvalidInputError, match="a select function"):
        shape.rows(frame_of(spark, *DOCUMENTS), latest=False)


def test_the_keys_that_select_makes_are_not_null(spark: Any) -> None:
    rows = RowShape(select=["nullif(key, binary('b')) as key", "value"]).rows(
        frame_of(spark, *DOCUMENTS), latest=True
    )
    assert "t-0 offset 2: select makes the key null" in error_of(rows.frame.collect)


ORDERS: list[Change] = [
    ('{"region": "eu", "id": 1}', '{"n": 1}', 1),
    ('{ "id": 1, "region": "eu"}', '{"n": 2}', 2),
    ('{"region": "us", "id": 1}', '{"n": 3}', 3),
    ('{"region": "us", "id": 1}', None, 4),
    ('{"region": "eu", "id": 2}', '{"n": "many"}', 5),
    ('{"region": "eu"}', '{"n": 6}', 6),
    ("no document", None, 7),
    ('{"region": "eu", "id": 1}', "broken", 8),
]


def test_a_key_of_several_columns_comes_from_json_keys(spark: Any) -> None:
    shape = RowShape(schema="n int, id int, region string", key=["region", "id"])
    rows = shape.rows(frame_of(spark, *ORDERS[:4]), latest=True)
    assert (rows.keys, rows.names) == (["region", "id"], ["n", "id", "region"])
    assert collected(rows) == [(False, 2, 2, 1, "eu"), (True, 4, None, 1, "us")]
    message = error_of(shape.rows(frame_of(spark, ORDERS[5]), latest=True).frame.collect)
    assert "t-0 offset 6: the key has no id" in message


def test_a_key_of_several_columns_comes_from_select(spark: Any) -> None:
    shape = RowShape(
        select=[
            "get_json_object(string(key), '$.region') as region",
            "cast(get_json_object(string(key), '$.id') as int) as id",
            "string(value) as text",
        ],
        key=["region", "id"],
    )
    rows = shape.rows(frame_of(spark, *ORDERS[:3]), latest=True)
    assert collected(rows) == [(False, 2, "eu", 1, '{"n": 2}'), (False, 3, "us", 1, '{"n": 3}')]
    message = error_of(shape.rows(frame_of(spark, ORDERS[5]), latest=True).frame.collect)
    assert "t-0 offset 6: select makes the key null" in message
    with pytest.raises(InvalidInputError, match="select gives no column 'id'"):
        RowShape(select=["key as region", "value"], key=["region", "id"]).rows(
            frame_of(spark, ORDERS[0]), latest=True
        )


def test_a_bad_record_that_is_left_out_lets_the_record_before_it_count(spark: Any) -> None:
    shape = RowShape(
        schema="region string, id int, n int", key=["region", "id"], leaves_out_bad=True
    )
    frame = frame_of(spark, *ORDERS)
    assert collected(shape.rows(frame, latest=True)) == [
        (False, 2, "eu", 1, 2),
        (True, 4, "us", 1, None),
    ]
    bad = shape.bad_records(frame)
    assert bad.columns == [*frame.columns, "kl_reason"]
    of_key = "the key is not a JSON document of struct<region:string,id:int>; found "
    of_value = "the value is not a JSON document of struct<n:int>; found "
    assert {row.offset: row.kl_reason for row in bad.collect()} == {
        5: of_value + """'{"n": "many"}'""",
        6: "the key has no id",
        7: of_key + "'no document'",
        8: of_value + "'broken'",
    }


def test_dead_letters_have_the_record_its_place_and_the_reason_once(
    spark: Any, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    rule = BadRecords.parse("deadletter:bad", str(log_in(tmp_path)))
    shape = RowShape(schema="n int", leaves_out_bad=True)
    own = F.expr("array(named_struct('key', 'mine', 'value', binary('1')))")
    frame = frame_of(spark, ("a", "x", 1), ("b", None, 2), ("c", "y", 3)).withColumn("headers", own)
    for _ in range(2):
        found = shape.bad_records(frame)
        assert rule.leave_out(found, "q/t", 7, {"t": {"0": 4}}, {}) == 2
    with open_log(log_in(tmp_path), read_only=True) as log:
        batches = log.read("bad", 0, 0, include_headers=True)
        [table] = [pa.Table.from_batches(batches)]
    assert table.column("key").to_pylist() == [b"a", b"c"]
    assert table.column("value").to_pylist() == [b"x", b"y"]
    assert [at.timestamp() for at in table.column("timestamp").to_pylist()] == [1, 3]
    headers = {each["key"]: each["value"] for each in table.column("headers").to_pylist()[1]}
    assert headers == {
        "mine": b"1",
        "__connect.errors.topic": b"t",
        "__connect.errors.partition": b"0",
        "__connect.errors.offset": b"3",
        "__connect.errors.exception.message": (
            b"the value is not a JSON document of struct<n:int>; found 'y'"
        ),
    }


def test_a_micro_batch_that_reaches_further_writes_the_dead_letters_beyond_the_position(
    spark: Any, tmp_path: Path
) -> None:
    rule = BadRecords.parse("deadletter:bad", str(log_in(tmp_path)))
    shape = RowShape(schema="n int", leaves_out_bad=True)
    frame = frame_of(spark, *[(f"k{n}", "x", n) for n in range(4)])

    def leave_out(batch_id: int, end: int, applied: int) -> int:
        found = shape.bad_records(frame.where(f"offset < {end}"))
        known = {"t": {"0": applied}} if applied else {}
        return rule.leave_out(found, "q/t", batch_id, {"t": {"0": end}}, known)

    assert leave_out(1, 2, 0) == 2
    assert leave_out(1, 3, 2) == 1  # reaches further
    assert leave_out(0, 4, 3) == 1  # from an older checkpoint
    assert leave_out(0, 4, 3) == 1
    with open_log(log_in(tmp_path), read_only=True) as log:
        keys = [row["key"] for rows in log.read("bad", 0, 0) for row in rows.to_pylist()]
        assert log.describe("bad").config["cleanup.policy"] == "delete"
    assert keys == [b"k0", b"k1", b"k2", b"k3"]


@pytest.mark.parametrize(
    ("select", "words"),
    [
        (["value"], "select gives no column 'key'"),
        (["key", "1 as deleted"], "a column 'deleted' of type int"),
        (["key", "1 as n", "2 as N"], "need different names: n"),
        (["key", "1 as kl_offset"], "begin with kl_ are taken: kl_offset"),
        (lambda df: df.select("key"), "select gives neither 'deleted' nor 'value'"),
    ],
)
def test_rows_that_no_table_can_take_are_refused(spark: Any, select: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        RowShape(select=select).rows(frame_of(spark, ("a", "1", 0)), latest=True)


def append(log: Path, keys: list[str], values: list[str | None], partitions: list[int]) -> None:
    columns = {
        "key": pa.array([key.encode() for key in keys]),
        "value": pa.array([v and v.encode() for v in values], pa.binary()),
        "partition": pa.array(partitions, pa.int32()),
    }
    with open_log(log) as engine:
        engine.append("t", pa.table(columns))


def table(database: Path) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT * FROM stock ORDER BY key").fetchall()


def test_the_position_is_what_the_offset_log_says(spark: Any, tmp_path: Path) -> None:
    log, database = log_in(tmp_path), tmp_path / "stock.db"
    with open_log(log) as engine:
        engine.create_topic("t", partitions=3, config={"cleanup.policy": "compact"})
    upserts = [
        SQLiteUpsert(database, "stock", schema="n int", key_type="string"),
        SQLiteUpsert(database, "second", select=lambda df: df.select("key", "value")),
    ]

    def both(frame: Any, batch_id: int) -> None:
        for upsert in upserts:
            upsert(frame, batch_id)

    def run() -> None:
        reader = spark.readStream.format("kafkalog").option("path", str(log))
        reader = reader.option("subscribe", "t").option("startingOffsets", "earliest")
        writer = reader.load().writeStream.foreachBatch(both)
        finish(writer.option("checkpointLocation", str(tmp_path / "checkpoint")))

    run()
    (position,) = upserts[0].positions().values()
    assert (position.batch_id, position.end_offsets) == (0, {"t": {"0": 0, "1": 0, "2": 0}})
    append(log, ["a", "b", "a"], ['{"n":1}', '{"n":2}', '{"n":3}'], [0, 2, 0])
    run()
    assert table(database) == [("a", 3), ("b", 2)]
    append(log, ["b", "c"], [None, '{"n":4}'], [2, 1])
    run()
    assert table(database) == [("a", 3), ("c", 4)]
    for upsert in upserts:
        (position,) = upsert.positions().values()
        assert (position.batch_id, position.end_offsets) == (2, {"t": {"0": 2, "1": 1, "2": 2}})

    append(log, ["d", "e"], ['{"n":5}', '{"n":"?"}'], [1, 1])
    assert "t-1 offset 2: the value is not a JSON document" in error_of(run)
    assert table(database) == [("a", 3), ("c", 4)]
    assert [next(iter(upsert.positions().values())).batch_id for upsert in upserts] == [2, 2]
