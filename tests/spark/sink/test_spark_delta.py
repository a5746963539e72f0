"""DeltaUpsert inside a streaming query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from kafkalog.sink.upsert import Batch, DeltaUpsert
from kafkalog.storage_engine.engine import Engine
from tests.spark.sink.test_spark_foreach_batch import forget_commit
from tests.spark.sink.test_spark_writes import finish

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = DeltaTable(path).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: str(row["key"]))


def test_delta_upsert_follows_exactly_once(spark: Any, tmp_path: Path) -> None:
    log, table, checkpoint = (tmp_path / name for name in ("log", "table", "checkpoint"))
    engine = Engine(log)
    engine.create_topic("t", 2)
    upsert = DeltaUpsert(table, schema="n int, at timestamp", key_type="string")

    def run() -> int:
        reader = spark.readStream.format("kafkalog").option("subscribe", "t")
        stream = reader.option("startingOffsets", "earliest").load(str(log))
        finish(
            stream.writeStream.foreachBatch(upsert).option("checkpointLocation", str(checkpoint))
        )
        return int(DeltaTable(table).version())

    def ends() -> dict[str, dict[str, int]]:
        return {"t": {str(number): end for number, (_, end) in engine.offsets("t").items()}}

    time = "2024-01-01T00:00:00Z"
    engine.append("t", [(f"k{n}", json.dumps({"n": n, "at": time})) for n in range(5)])
    engine.append("t", [("k0", '{"n": 10}'), ("k1", None)])
    run()
    assert [(row["key"], row["n"]) for row in rows_of(table)] == [
        ("k0", 10),
        ("k2", 2),
        ("k3", 3),
        ("k4", 4),
    ]
    engine.append("t", [("k2", '{"n": 22}'), ("k3", None), ("unknown", None)])
    version = run()
    (position,) = upsert.positions().values()
    assert (position.batch_id, position.end_offsets) == (1, ends())

    forget_commit(checkpoint, 1)
    engine.append("t", [("unknown", None)])
    assert run() == version + 1
    (position,) = upsert.positions().values()
    assert (position.batch_id, position.end_offsets) == (2, ends())
    assert [(row["key"], row["n"]) for row in rows_of(table)] == [("k0", 10), ("k2", 22), ("k4", 4)]


def test_what_select_makes_is_stored(spark: Any, tmp_path: Path) -> None:
    frame = spark.sql(
        "select binary(key) key, binary(value) value, 't' topic, 0 partition, offset, "
        "timestamp'2024-01-01' timestamp from values ('a', '1', 0L), ('a', '2', 1L), "
        "('b', '3', 2L), (null, '4', 3L), ('c', null, 4L) as t(key, value, offset)"
    )

    def batch(number: int) -> Batch:
        return Batch("q", number, "run", {"t": {"0": 5}}, number)

    shaped = DeltaUpsert(
        tmp_path / "shaped",
        select=[
            "cast(key as string) key",
            "value is null deleted",
            "make_dt_interval(0, cast(cast(value as string) as int)) span",
            "array(named_struct('n', cast(cast(value as string) as smallint))) nested",
        ],
    )
    for number in range(2):
        shaped._apply(frame, batch(number), None)
    assert rows_of(tmp_path / "shaped") == [
        {"key": "a", "span": "INTERVAL '0 02:00:00' DAY TO SECOND", "nested": [{"n": 2}]},
        {"key": "b", "span": "INTERVAL '0 03:00:00' DAY TO SECOND", "nested": [{"n": 3}]},
    ]
    typed = DeltaUpsert(tmp_path / "shaped", schema="span int, nested array<int>")
    wrong = frame.selectExpr("key", 'binary(\'{"span": "x"}\') value', "* except (key, value)")
    with pytest.raises(Exception, match="t-0 offset 1: the value is not a JSON document"):
        typed._apply(wrong.where("key = 'a'"), batch(2), None)
    assert DeltaTable(tmp_path / "shaped").version() == 2
    many = DeltaUpsert(tmp_path / "many", select=lambda df: df.withColumn("key", df.topic))
    with pytest.raises(Exception, match=r"t-0 offset \d: .*select makes one key of several keys"):
        many._apply(frame, batch(0), None)
    assert many.positions() == {}
