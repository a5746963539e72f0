"""A topic as a table of Spark, and as a stream of changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog import KTable
from kafkalog.errors import InvalidInputError
from tests.log_place import in_a_directory, log_in
from tests.unit.datasource.logs import append_compacted

pytestmark = [pytest.mark.spark, pytest.mark.slow]
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@pytest.fixture
def state_store(spark: Any) -> Iterator[None]:
    before = spark.conf.get(PROVIDER)
    spark.conf.set(PROVIDER, ROCKSDB)
    yield
    spark.conf.set(PROVIDER, before)


def changes(table: KTable, checkpoint: Path, **arguments: Any) -> list[tuple[Any, ...]]:
    """What a run of the stream gives: key, value, deleted, offset, and previous if it is there."""
    found: list[Any] = []
    query = (
        table.updates(**arguments)
        .writeStream.foreachBatch(lambda frame, _: found.extend(frame.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(180)
    return [
        tuple(text(field) for name, field in row.asDict().items() if name != "timestamp")
        for row in sorted(found, key=lambda row: (row.partition, row.offset))
    ]


def text(field: Any) -> Any:
    return bytes(field).decode() if isinstance(field, bytearray | bytes) else field


@in_a_directory("a frame of a store is of the moment of its plan")
@pytest.mark.chosen
def test_a_table_shows_at_every_action_what_the_log_holds_then(spark: Any, tmp_path: Path) -> None:
    append_compacted(
        log_in(tmp_path), ("a", '{"id": 1, "key": "x"}'), ("b", '{"id": 2}'), ("a", '{"id": 3}')
    )
    table = KTable(spark, log_in(tmp_path), "t")
    frame = table.df(json="id int, key string")
    table.create_view("t_view", json="id int")

    assert frame.columns[:3] == ["_key", "id", "key"]
    assert sorted((text(row["_key"]), row.id) for row in frame.collect()) == [("a", 3), ("b", 2)]
    assert table.count() == frame.count() == 2
    append_compacted(log_in(tmp_path), ("a", None), ("c", "no json"), ("d", ""))
    assert table.count() == table.df().count() == 3
    append_compacted(log_in(tmp_path), ("d", None))
    rows = spark.sql("SELECT cast(key AS string) AS key, id FROM t_view ORDER BY key").collect()
    assert [(row.key, row.id) for row in rows] == [("b", 2), ("c", None)]


def test_wrong_schemas_are_refused_when_the_table_is_made(spark: Any, tmp_path: Path) -> None:
    append_compacted(log_in(tmp_path), ("a", "{}"))
    table = KTable(spark, log_in(tmp_path), "t")
    avro = '{"type": "record", "name": "r", "fields": [{"name": "id", "type": "int"}]}'
    with pytest.raises(InvalidInputError, match="give either json= "):
        table.df(json="id int", avro=avro)
    with pytest.raises(InvalidInputError, match="'id nonsense' is no schema"):
        table.df(json="id nonsense")
    with pytest.raises(InvalidInputError, match="takes the schema of a record"):
        table.df(avro='"order"')
    with pytest.raises(InvalidInputError, match="on the class path: start the session"):
        table.df(avro=avro)
    with pytest.raises(InvalidInputError, match="several columns would be called '_key'"):
        table.df(json="key int, _key int")
    with pytest.raises(InvalidInputError, match="'a' and 'A', which are the same to Spark"):
        table.df(json="a int, A int")
    with pytest.raises(InvalidInputError, match="'_key' and '_KEY', which are the same to Spark"):
        table.df(json="key int, _KEY int")
    with pytest.raises(InvalidInputError, match="there is no column value"):
        kafkalog.value_columns(table.df().drop("value"), json="id int")
    with pytest.raises(InvalidInputError, match="RocksDBStateStoreProvider before the query"):
        table.updates(previous=True)


def test_names_are_compared_as_spark_compares_them(spark: Any, tmp_path: Path) -> None:
    append_compacted(log_in(tmp_path), ("a", '{"Offset": 7, "Key": "x"}'))
    table = KTable(spark, log_in(tmp_path), "t")
    frame = table.df(json="Offset bigint, Key string")
    assert frame.columns[:3] == ["_key", "Offset", "Key"]
    assert frame.select("offset", "_offset").collect() == [(7, 0)]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        frame = table.df(json="Offset bigint, Key string, key string")
        assert frame.columns[:4] == ["_key", "Offset", "Key", "key"]
        assert frame.select("Offset", "offset", "Key", "key").collect() == [(7, 0, "x", None)]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


@pytest.mark.chosen
def test_updates_are_every_change_once(spark: Any, tmp_path: Path) -> None:
    root, checkpoint = log_in(tmp_path), tmp_path / "checkpoint"
    append_compacted(root, ("a", "1"), ("a", None))
    table = KTable(spark, root, "t")
    with kafkalog.open(root) as log:
        partition = next(number for number, (_, end) in log.offsets("t").items() if end)

    assert changes(table, checkpoint) == [
        ("a", "1", False, 0, partition),
        ("a", None, True, 1, partition),
    ]
    append_compacted(root, ("a", "2"))
    assert changes(table, checkpoint) == [("a", "2", False, 2, partition)]


@pytest.mark.usefixtures("state_store")
def test_previous_values_are_those_before_each_change(spark: Any, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="the extra `state` is not installed")
    root, checkpoint = log_in(tmp_path), tmp_path / "checkpoint"
    append_compacted(root, ("a", "1"), ("a", "2"), ("a", None), ("a", "3"))
    table = KTable(spark, root, "t")

    def values(found: list[tuple[Any, ...]]) -> list[tuple[Any, Any]]:
        return [(row[1], row[5]) for row in found]

    first = changes(table, checkpoint, previous=True)
    assert values(first) == [("1", None), ("2", "1"), (None, "2"), ("3", None)]
    append_compacted(root, ("a", "4"))
    second = changes(table, checkpoint, previous=True)
    assert values(second) == [("4", "3")]
    # A batch that was not noted as done is done again, from the state as it was before it.
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    assert changes(table, checkpoint, previous=True) == second
    append_compacted(root, ("a", None))
    append_compacted(root, ("a", "5"))
    assert values(changes(table, checkpoint, previous=True)) == [(None, "4"), ("5", None)]
