"""Each feature of docs/spark.md and docs/ktables.md as a cell: it runs in any session of Spark.

The command `python -m tests.spark.connect.cells REMOTE DIRECTORY` runs all cells in one session of
Spark Connect, and prints what each gave as a line of JSON. The postgres cell uses the server that
the variable KAFKALOG_POSTGRES names.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import kafkalog
from kafkalog.errors import InvalidInputError
from kafkalog.sink import Append
from kafkalog.sink.upsert import DeltaUpsert, PostgresUpsert, SQLiteUpsert
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.file_system import FileSystem

__all__ = [
    "AVRO",
    "CELLS",
    "IS_FULL",
    "LOCAL_CELLS",
    "PLAIN_CELLS",
    "RUNS",
    "SERVER_CELLS",
    "SETTINGS",
    "patiently",
    "run_cell",
]

RUNS = "runs"
CELLS: dict[str, Callable[[Place], str | None]] = {}
"""Per feature, as the table of docs/spark-connect.md names it: what runs it. A cell returns the
sentence of a refusal, or None if the feature runs."""
SHELF = "shelf string, left int"
STATE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
RUNTIME_SETTINGS = {"spark.sql.shuffle.partitions": "2"}
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    **RUNTIME_SETTINGS,
}
"""The server's; a session of a started one may set those of queries alone."""
Cell = Callable[["Place"], str | None]


def cell(feature: str) -> Callable[[Cell], Cell]:
    def add(function: Cell) -> Cell:
        CELLS[feature] = function
        return function

    return add


class Place:
    """A session, and a log of its own with the topics `orders` and `stock`."""

    def __init__(self, spark: Any, root: Path) -> None:
        self.spark = spark
        self.root = root
        self.path = str(root / "log")
        self.is_connect = type(spark).__module__.startswith("pyspark.sql.connect")
        with kafkalog.open(self.path) as log:
            log.create_topic("orders", partitions=2, config={"cleanup.policy": "delete"})
            log.create_topic("stock", partitions=2)
            log.append("orders", [("1", '{"item":"apple","n":2}'), ("2", '{"item":"pear","n":1}')])
        self.write(("apple", '{"shelf":"A1","left":9}'), ("pear", '{"shelf":"B4","left":5}'))

    def write(self, *records: tuple[str, str | None], topic: str = "stock") -> None:
        with kafkalog.open(self.path) as log:
            log.append(topic, list(records))

    def read(self, topic: str = "stock", **options: Any) -> Any:
        reader = self.spark.read.format("kafkalog").options(subscribe=topic, **options)
        return reader.load(self.path)

    def stream(self, topic: str = "stock", **options: Any) -> Any:
        given = {"startingOffsets": "earliest", "subscribe": topic, **options}
        reader = self.spark.readStream.format("kafkalog").options(**given)
        return reader.option("path", self.path).load()

    def finish(self, writer: Any, checkpoint: str = "checkpoint") -> Any:
        """Run a query to the end of the log; return it."""
        writer = writer.option("checkpointLocation", str(self.root / checkpoint))

        def run() -> Any:
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
            return query

        return patiently(run)

    def each(self, function: Any, checkpoint: str = "checkpoint", **options: Any) -> Any:
        return self.finish(self.stream(**options).writeStream.foreachBatch(function), checkpoint)

    def repeat_last(self, checkpoint: str = "checkpoint") -> None:
        """Take the record of the last micro-batch, as if the driver had died before it."""
        commits = self.root / checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink()

    def written(self, topic: str) -> list[tuple[str, str]]:
        rows = self.read(topic).selectExpr("string(key)", "string(value)").collect()
        return sorted(map(tuple, rows))

    def refusal(self, run: Callable[[], object], words: str) -> str:
        """Return the line of a refusal of kafkalog, which must have these words."""
        try:
            run()
        except Exception as fault:
            named = (
                line.partition("kafkalog.errors.InvalidInputError: ")[2] for line in lines(fault)
            )
            found = next(filter(None, named), str(fault).strip().partition("\n")[0])
            assert words in found, found
            return found
        raise AssertionError("it was not refused")


def patiently(start: Callable[[], Any]) -> Any:
    """Run a query, again if Spark gave up a process of Python after ten seconds."""
    for attempts_left in (3, 2, 1, 0):
        try:
            return start()
        except Exception as fault:
            if not attempts_left or "Python worker failed to connect back" not in str(fault):
                raise
    raise AssertionError


def lines(fault: Exception) -> list[str]:
    return str(fault).splitlines()


def run_cell(feature: str, spark: Any, root: Path) -> str:
    """Return `runs`, or the sentence with which the feature refuses."""
    root.mkdir(parents=True)
    return CELLS[feature](Place(spark, root)) or RUNS


def rows_of(database: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(statement).fetchall()


@cell("batch read: `subscribe`, `subscribePattern`, `assign`, offsets and times")
def batch(at: Place) -> None:
    assert at.read("orders,stock").count() == 4
    reader = at.spark.read.format("kafkalog").option("path", at.path)
    assert reader.option("subscribePattern", "^or").load().count() == 2
    reader = at.spark.read.format("kafkalog").option("path", at.path)
    orders = reader.option("assign", '{"orders":[0,1]}').load()
    assert orders.count() == 2
    at.write(("3", "{}"), topic="orders")
    assert orders.count() == 3
    ends = '{"orders":{"0":0,"1":0}}'
    assert at.read("orders", endingOffsets=ends).count() == 0
    assert at.read("orders", startingTimestamp="1").count() == 3


@cell("`keys`, `partitioner`, `includeHeaders`, `.schema(...)`")
def chosen(at: Place) -> None:
    assert at.read(keys='["apple"]', partitioner="murmur2").count() == 1
    assert "headers" in at.read(includeHeaders="true").columns
    reader = at.spark.read.format("kafkalog").options(path=at.path, subscribe="stock")
    assert reader.schema("key binary, offset bigint").load().columns == ["key", "offset"]


@cell("`view=latest`, also as a temporary view in SQL")
def latest(at: Place) -> None:
    at.spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW cell_latest USING kafkalog "
        f"OPTIONS (path '{at.path}', subscribe 'stock', view 'latest')"
    )
    total = "SELECT sum(get_json_object(string(value), '$.left')) AS n FROM cell_latest"
    assert at.spark.sql(total).first().n == 14
    at.write(("apple", '{"left":1}'), ("pear", None))
    assert at.spark.sql(total).first().n == 1


@cell("one read, one moment")
def moment(at: Place) -> None:
    path = at.path

    def write_and_pass(batches: Any) -> Any:
        with kafkalog.open(path) as log:
            log.append("orders", [("later", "{}")])
        yield from batches

    # The first stage writes what the second must not see.
    one = at.read("orders").select("offset").coalesce(1).mapInArrow(write_and_pass, "offset bigint")
    total = one.groupBy().count().crossJoin(at.read("orders").groupBy().count()).collect()
    assert [tuple(row) for row in total] == [(2, 2)]


@cell("`KTable.df()`, `lookup()` and `lookup_many()`")
def ktable(at: Place) -> None:
    with kafkalog.KTable(at.spark, at.path, "stock") as table:
        assert table.df().count() == 2
        assert table.df(options={"keys": '["apple"]'}).count() == 1
        at.write(("pear", None))
        assert table.df().count() == 1
        assert table.lookup("pear") is None
        apple = table.lookup("apple")
        assert apple is not None
        assert table.lookup_many(["pear", "apple"]) == {"pear": None, "apple": apple}


@cell("`KTable.df(json=)` and `create_view(json=)`")
def ktable_json(at: Place) -> None:
    table = kafkalog.KTable(at.spark, at.path, "stock")
    rows = table.df(json=SHELF).selectExpr("string(key)", "shelf", "left").collect()
    assert sorted(map(tuple, rows)) == [("apple", "A1", 9), ("pear", "B4", 5)]
    table.create_view("cell_stock", json=SHELF)
    at.write(("apple", '{"shelf":"A2","left":1}'))
    found = at.spark.sql("SELECT shelf FROM cell_stock ORDER BY shelf").collect()
    assert [row.shelf for row in found] == ["A2", "B4"]


@cell("`KTable.materialize`: `df`, `create_view` and `refresh`")
def materialized(at: Place) -> None:
    source = kafkalog.KTable(at.spark, at.path, "stock")
    table = source.materialize(at.root / "table", json=SHELF)
    shown = "SELECT shelf, left FROM cell_table ORDER BY shelf"
    at.write(("apple", '{"shelf":"A2","left":1}'), ("pear", None))
    table.create_view("cell_table")
    assert [*map(tuple, at.spark.sql(shown).collect())] == [("A2", 1)]
    assert (table.refresh().lag, table.df().count()) == (0, 1)
    assert [*map(tuple, at.spark.sql(shown).collect())] == [("A2", 1)]


@cell("`KTable.df(avro=)` without Spark's package `spark-avro`")
def ktable_avro(at: Place) -> str:
    avro = '{"type": "record", "name": "r", "fields": [{"name": "id", "type": "int"}]}'
    table = kafkalog.KTable(at.spark, at.path, "stock")
    return at.refusal(lambda: table.df(avro=avro), "Avro values need Spark's Avro package")


@cell("`value_columns`, in batch and in a stream")
def columns(at: Place) -> None:
    frame = kafkalog.value_columns(at.read(), json=SHELF, options={"mode": "PERMISSIVE"})
    assert {row.left for row in frame.collect()} == {9, 5}
    found = kafkalog.value_columns(at.stream(), json=SHELF).select("shelf", "left")
    at.finish(found.writeStream.format("memory").queryName("cell_columns"))
    rows = at.spark.sql("SELECT * FROM cell_columns").collect()
    assert sorted(map(tuple, rows)) == [("A1", 9), ("B4", 5)]


PEOPLE = [
    ('{"id":1}', '{"op":"r","after":{"name":"Ann","n":"fQ=="}}'),
    ('{"id":2}', '{"op":"c","after":{"name":"Bob","n":"ew=="}}'),
    ('{"id":3}', '{"op":"t"}'),
    ('{"id":4}', '{"op":"u","after":{"name":"Cid","n":"!"}}'),
    ('{"id":2}', '{"op":"d","after":null}'),
]
PERSON: dict[str, Any] = {
    "json": "name string, n decimal(5,2) COMMENT 'org.apache.kafka.connect.data.Decimal'",
    "key_json": "id int",
    "envelope": "debezium",
}
EVENT = """{"type": "record", "name": "Envelope", "fields": [
    {"name": "op", "type": "string"},
    {"name": "after", "type": ["null", {"type": "record", "name": "Value", "fields": [
        {"name": "id", "type": "int"}, {"name": "name", "type": ["null", "string"]}]}]}]}"""


@cell("change events in JSON: `value_columns` and an upsert with `envelope=`")
def events(at: Place) -> None:
    with kafkalog.open(at.path) as log:
        log.create_topic("people")
    at.write(*PEOPLE, topic="people")
    frame = kafkalog.value_columns(at.read("people"), bad_column="bad", **PERSON)
    found = frame.selectExpr("offset", "name", "string(n)", "bad IS NOT NULL").collect()
    nothing, row = (None, None, False), ("Ann", "1.25", False)
    bad = (None, None, True)
    assert [tuple(each[1:]) for each in sorted(found)] == [
        *(row, ("Bob", "1.23", False), bad, bad, nothing),
    ]
    database = at.root / "people.db"
    upsert = SQLiteUpsert(database, "people", on_bad_record="skip", name="people", **PERSON)
    at.each(upsert, subscribe="people")
    assert rows_of(database, "SELECT id, name FROM people") == [(1, "Ann")]
    [position] = upsert.positions().values()
    assert position.bad_records == 2


AVRO = "framed values with Spark's package `spark-avro`: `value_bytes`, `avro=`, `envelope=`"


@cell(AVRO)
def framed(at: Place) -> None:
    registry = kafkalog.SchemaRegistry(schemas={7: EVENT})
    given: Any = {"avro": registry, "envelope": "debezium"}
    people = at.spark.sql(
        "SELECT string(id) AS key, 'c' AS op, named_struct('id', id, 'name', name) AS after "
        "FROM VALUES (1, 'Ann'), (2, null) AS t(id, name)"
    )
    written = kafkalog.value_bytes(people, avro=registry, subject="people-value")
    written.write.format("kafkalog").mode("append").option("topic", "people").save(at.path)
    at.write(("9", "neither framed nor Avro"), topic="people")
    table = kafkalog.KTable(at.spark, at.path, "people")
    found = table.df(bad_column="bad", **given).select("id", "name", "bad").collect()
    assert {(row.id, row.name) for row in found if row.bad is None} == {(1, "Ann"), (2, None)}
    [bad] = [row.bad for row in found if row.bad is not None]
    assert bad.startswith("the value is not framed")
    database = at.root / "people.db"
    upsert = SQLiteUpsert(database, "people", on_bad_record="skip", name="people", **given)
    at.each(upsert, subscribe="people")
    assert rows_of(database, "SELECT id, name FROM people ORDER BY 1") == [(1, "Ann"), (2, None)]


@cell("`KTable.updates()`")
def updates(at: Place) -> None:
    at.write(("pear", None))
    frame = kafkalog.KTable(at.spark, at.path, "stock").updates()
    at.finish(frame.writeStream.format("memory").queryName("cell_updates"))
    rows = at.spark.sql("SELECT string(key), deleted FROM cell_updates").collect()
    assert sorted(map(tuple, rows)) == [("apple", False), ("pear", False), ("pear", True)]


@cell("`KTable.updates(previous=True)`")
def previous(at: Place) -> None:
    conf = "spark.sql.streaming.stateStore.providerClass"
    before = at.spark.conf.get(conf)
    at.spark.conf.set(conf, STATE)
    try:
        frame = kafkalog.KTable(at.spark, at.path, "stock").updates(previous=True)
        shown = frame.selectExpr("string(key) k", "string(previous) p")
        at.finish(shown.writeStream.format("memory").queryName("cell_previous"))
    finally:
        at.spark.conf.set(conf, before)
    rows = at.spark.sql("SELECT * FROM cell_previous").collect()
    assert sorted(map(tuple, rows)) == [("apple", None), ("pear", None)]


@cell("stream read: `availableNow`, limits, a checkpoint that resumes")
def stream(at: Place) -> None:
    frame = at.stream("orders", maxOffsetsPerTrigger="1").selectExpr("string(key) k")
    out = str(at.root / "out")

    def run() -> list[str]:
        at.finish(frame.writeStream.format("parquet").option("path", out))
        return sorted(row.k for row in at.spark.read.parquet(out).collect())

    assert run() == ["1", "2"]
    at.write(("3", "{}"), topic="orders")
    assert run() == ["1", "2", "3"]


@cell("stream read of `view=latest`")
def stream_view(at: Place) -> None:
    at.write(("apple", '{"left":1}'))
    given = {"path": at.path, "subscribe": "stock", "view": "latest"}
    frame = at.spark.readStream.format("kafkalog").options(**given).load()
    at.finish(
        frame.selectExpr("string(value) v").writeStream.format("memory").queryName("cell_view")
    )
    rows = at.spark.sql("SELECT v FROM cell_view").collect()
    assert sorted(row.v for row in rows) == ['{"left":1}', '{"shelf":"B4","left":5}']


@cell("stream joined to a table, in your own `foreachBatch`")
def joined(at: Place) -> None:
    parsed = "from_json(string(value), 'item string, n int') AS o"
    orders = at.stream("orders").selectExpr(parsed).select("o.*")
    table = kafkalog.KTable(at.spark, at.path, "stock").df()
    shelves = table.selectExpr("string(key) AS item", "get_json_object(string(value), '$.shelf') s")
    out = str(at.root / "out")
    frame = orders.join(shelves, "item")
    at.finish(frame.writeStream.foreachBatch(lambda rows, _: rows.write.parquet(out)))
    rows = at.spark.read.parquet(out).collect()
    assert sorted(map(tuple, rows)) == [("apple", 2, "A1"), ("pear", 1, "B4")]


@cell("`offsets_behind_latest`")
def behind(at: Place) -> None:
    query = at.finish(at.stream().writeStream.format("noop"))
    assert kafkalog.offsets_behind_latest(query.lastProgress) == [
        {
            "minOffsetsBehindLatest": "0",
            "maxOffsetsBehindLatest": "0",
            "avgOffsetsBehindLatest": "0.0",
        }
    ]


@cell("`LagListener`")
def listener(at: Place) -> None:
    made = kafkalog.LagListener()
    at.spark.streams.addListener(made)
    checkpoint = str(at.root / "checkpoint")
    writer = at.stream().writeStream.format("noop").option("checkpointLocation", checkpoint)
    query = writer.start()
    try:
        until = time.monotonic() + 60
        while query.id not in made.latest and time.monotonic() < until:
            time.sleep(0.05)
        assert made.latest[query.id][0]["maxOffsetsBehindLatest"] == "0"
    finally:
        # Under Connect it waits forever for an event that comes meanwhile, as by `stop`.
        at.spark.streams.removeListener(made)
        query.stop()


@cell("batch write, `txnAppId` and `txnVersion`")
def write(at: Place) -> None:
    for _ in range(2):
        frame = at.spark.sql("SELECT 'apple' AS key, '0.90' AS value")
        writer = frame.write.format("kafkalog").mode("append").option("topic", "prices")
        writer.option("txnAppId", "nightly").option("txnVersion", 1).save(at.path)
    assert at.written("prices") == [("apple", "0.90")]


@cell('stream write by `writeStream.format("kafkalog")`')
def stream_write(at: Place) -> None:
    def run() -> None:
        writer = at.stream().selectExpr("key", "value").writeStream.format("kafkalog")
        at.finish(writer.option("path", at.path).option("topic", "copy"))

    run()
    at.repeat_last()
    run()
    assert [key for key, _ in at.written("copy")] == ["apple", "pear"]


@cell("`in_order` before a sink")
def ordered(at: Place) -> None:
    at.write(*[("apple", str(number)) for number in range(20)])
    frame = kafkalog.in_order(at.stream(), by="offset", key="key", partitions=2)
    writer = frame.selectExpr("key", "value").writeStream.format("kafkalog")
    at.finish(writer.option("path", at.path).option("topic", "copy"))
    rows = at.read("copy", keys='["apple"]').collect()
    values = [int(bytes(row.value)) for row in sorted(rows, key=lambda row: row.offset)[1:]]
    assert values == list(range(20))


@cell("`Append(..., name=)` in output mode `update`")
def append(at: Place) -> None:
    counts = at.stream("orders").selectExpr("get_json_object(string(value), '$.item') AS key")
    shown = counts.groupBy("key").count().selectExpr("key", "string(count) AS value")

    def run() -> list[tuple[str, str]]:
        writer = shown.writeStream.outputMode("update")
        at.finish(writer.foreachBatch(Append(at.path, "counts", name="counts")))
        return at.written("counts")

    assert run() == [("apple", "1"), ("pear", "1")]
    at.write(("4", '{"item":"pear"}'), topic="orders")
    assert run() == [("apple", "1"), ("pear", "1"), ("pear", "2")]
    at.repeat_last()
    assert run() == [("apple", "1"), ("pear", "1"), ("pear", "2")]


@cell("`Append` twice in your own function, a `name=` each")
def append_twice(at: Place) -> None:
    path = at.path

    def twice(frame: Any, batch_id: int) -> None:
        shown = frame.selectExpr("key", "value")
        for name in ("one", "two"):
            Append(path, "copy", name=name)(shown, batch_id)
        try:
            Append(path, "copy", name="two")(shown, batch_id)
        except InvalidInputError as fault:
            assert "give each its own name=" in str(fault)
        else:
            raise AssertionError

    at.each(twice)
    assert [key for key, _ in at.written("copy")] == ["apple", "apple", "pear", "pear"]


@cell("`Append(..., checkpoint=)` syncs Spark's plan")
def append_checkpoint(at: Place) -> None:
    path, root = at.path, at.root
    at.each(lambda frame, batch_id: None, "other")

    def write(frame: Any, batch_id: int) -> None:
        class Noted(FileSystem):
            def fsync(self, fd: int) -> None:
                synced.add(os.readlink(f"/proc/self/fd/{fd}"))
                super().fsync(fd)

        synced: set[str] = set()
        shown = frame.selectExpr("key", "value")
        for wrong in ("nowhere", "other") if not at_connect else ("nowhere",):
            try:
                Append(path, "copy", checkpoint=root / wrong)(shown, batch_id)
            except InvalidInputError as fault:
                assert "Give checkpoint= the " in str(fault)
            else:
                raise AssertionError
        with file_system.replaced(Noted()):
            Append(path, "copy", checkpoint=root / "checkpoint")(shown, batch_id)
        assert str(root / "checkpoint" / "offsets" / str(batch_id)) in synced

    at_connect = at.is_connect
    for _ in range(2):
        at.each(write)
        assert [key for key, _ in at.written("copy")] == ["apple", "pear"]
        at.repeat_last()


@cell("`Append` without `name=`")
def append_nameless(at: Place) -> str | None:
    frame = at.stream().selectExpr("key", "value")

    def run() -> None:
        at.finish(frame.writeStream.foreachBatch(Append(at.path, "copy")))

    if at.is_connect:
        return at.refusal(run, "or a name= that no other")
    run()
    return None


def follow(at: Place, upsert: Any, table: Callable[[], list[Any]]) -> None:
    """Keep a table by an upsert: changes and deletions come, repetitions do not."""
    at.write(("fig", '{"shelf":"C2","left":3}'))
    at.each(upsert)
    assert table() == [("apple", "A1", 9), ("fig", "C2", 3), ("pear", "B4", 5)]
    # The other partition has no new rows, and keeps its end.
    at.write(("apple", '{"shelf":"A2","left":1}'), ("pear", None))
    at.each(upsert)
    assert table() == [("apple", "A2", 1), ("fig", "C2", 3)]
    position = upsert.positions()["stock"]
    assert (position.batch_id, position.end_offsets) == (1, {"stock": {"0": 1, "1": 4}})
    at.repeat_last()
    at.each(upsert)
    assert table() == [("apple", "A2", 1), ("fig", "C2", 3)]
    assert upsert.positions() == {"stock": position}


@cell("`SQLiteUpsert(..., name=)`")
def sqlite(at: Place) -> None:
    database = at.root / "stock.db"
    upsert = SQLiteUpsert(database, "stock", schema=SHELF, key_type="string", name="stock")
    follow(at, upsert, lambda: rows_of(database, 'SELECT key, shelf, "left" FROM stock ORDER BY 1'))


@cell("an upsert with `select=`, as expressions and as a function")
def selects(at: Place) -> None:
    database = at.root / "stock.db"
    shelf = "get_json_object(string(value), '$.shelf') AS shelf"
    wanted = ["string(key) AS key", "value IS NULL AS deleted", shelf]
    at.each(SQLiteUpsert(database, "one", select=wanted, name="one"), "one")
    at.each(
        SQLiteUpsert(database, "two", select=lambda df: df.selectExpr(*wanted), name="two"), "two"
    )
    for table in ("one", "two"):
        found = rows_of(database, f"SELECT key, shelf FROM {table} ORDER BY 1")
        assert found == [("apple", "A1"), ("pear", "B4")]


@cell("an upsert with `checkpoint=` takes the end offsets from there")
def upsert_checkpoint(at: Place) -> None:
    database = at.root / "stock.db"
    upsert = SQLiteUpsert(database, "stock", checkpoint=at.root / "checkpoint")

    def run(wanted: str) -> tuple[list[Any], Any]:
        at.finish(at.stream().where(wanted).writeStream.foreachBatch(upsert))
        (position,) = upsert.positions().values()
        return rows_of(database, "SELECT key FROM stock"), position.end_offsets

    assert run("false") == ([], {"stock": {"0": 0, "1": 2}})
    at.write(("apple", None), ("pear", None), ("fig", "{}"))
    assert run("key = 'fig'") == ([(b"fig",)], {"stock": {"0": 1, "1": 4}})
    at.repeat_last()
    assert run("false") == ([(b"fig",)], {"stock": {"0": 1, "1": 4}})


@cell("an upsert without `name=`")
def upsert_nameless(at: Place) -> str | None:
    upsert = SQLiteUpsert(at.root / "stock.db", "stock")
    if at.is_connect:
        return at.refusal(lambda: at.each(upsert), "or a name= that no other")
    at.each(upsert)
    return None


@cell("a record that does not fit, named by the error")
def misfit(at: Place) -> None:
    at.write(("fig", "no document"))
    upsert = SQLiteUpsert(at.root / "stock.db", "stock", schema=SHELF, name="stock")
    try:
        at.each(upsert)
    except Exception as fault:
        assert "the value is not a JSON document" in str(fault)
        assert "offset" in str(fault)
        return
    raise AssertionError


@cell("`PostgresUpsert(..., name=)`")
def postgres(at: Place) -> None:
    import psycopg

    conninfo = os.environ["KAFKALOG_POSTGRES"]
    table = f"cell_{time.time_ns()}"
    upsert = PostgresUpsert(conninfo, table, schema=SHELF, key_type="string", name="stock")

    def rows() -> list[Any]:
        with psycopg.connect(conninfo) as connection:
            query = f'SELECT key, shelf, "left" FROM {table} ORDER BY 1'
            return connection.execute(query.encode()).fetchall()

    follow(at, upsert, rows)


@cell("`DeltaUpsert` in a session without Delta Lake")
def delta(at: Place) -> str | None:
    upsert = DeltaUpsert("stock", name="stock")
    words = "needs a classic Spark session" if at.is_connect else "has no Delta Lake"
    return at.refusal(upsert.positions, words)


@cell("`KTableView`: start, wait, progress, rebuild, stop")
def view(at: Place) -> None:
    database = at.root / "view.db"
    target = SQLiteUpsert(database, "stock", schema=SHELF, key_type="string")
    kept = kafkalog.KTableView(at.spark, at.path, "stock", target, checkpoint=at.root / "views")
    shelves = "SELECT key, shelf FROM stock ORDER BY 1"
    try:
        query_id = patiently(kept.start).id
        kept.wait_until(timeout_s=120)
        assert rows_of(database, shelves) == [("apple", "A1"), ("pear", "B4")]
        at.write(("fig", '{"shelf":"C2","left":3}'), ("pear", None))
        kept.wait_until(timeout_s=120)
        assert rows_of(database, shelves) == [("apple", "A1"), ("fig", "C2")]
        assert (kept.progress().lag, kept.progress().query_id) == (0, query_id)
        kept.stop()
        database.unlink()
        assert patiently(kept.start).id != query_id
        kept.wait_until(timeout_s=120)
        assert rows_of(database, shelves) == [("apple", "A1"), ("fig", "C2")]
        patiently(kept.rebuild)
        kept.wait_until(timeout_s=120)
        assert rows_of(database, shelves) == [("apple", "A1"), ("fig", "C2")]
    finally:
        kept.stop()


IS_FULL = os.environ.get("KAFKALOG_CONNECT") == "full"
_STEP = 1 if IS_FULL else 2
PLAIN_CELLS = [feature for feature in CELLS if feature != AVRO]
"""What runs in a session without Spark's Avro package."""
LOCAL_CELLS = PLAIN_CELLS[::_STEP]
"""What runs on a server that the client's process starts: every other cell, or all."""
SERVER_CELLS = PLAIN_CELLS[_STEP - 1 :: _STEP]
"""What runs on a server that was started before: the cells between, or all."""


def main() -> None:
    """Run all cells, or those that the arguments name."""
    from pyspark.sql import SparkSession

    remote, directory, *words = sys.argv[1:]
    builder = SparkSession.builder.remote(remote)
    settings = SETTINGS if remote.startswith("local") else RUNTIME_SETTINGS
    builder = builder.config(map={**settings})
    with warnings.catch_warnings():
        # Spark sets the settings of the server once more, in the session, which refuses that.
        warnings.filterwarnings("ignore", "Failed to set spark", UserWarning)
        spark = builder.getOrCreate()
    for number, feature in enumerate(CELLS):
        if words and not any(word in feature for word in words):
            continue
        begin = time.monotonic()
        try:
            outcome = run_cell(feature, spark, Path(directory) / str(number))
        except Exception:
            outcome = traceback.format_exc()
        line = {"feature": feature, "outcome": outcome, "seconds": time.monotonic() - begin}
        print(json.dumps(line), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
