"""The same Spark jobs on a log directory and on a log in an object store give the same."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kafkalog.datasource.ktable import KTable
from kafkalog.sink import Append
from kafkalog.sink.upsert import SQLiteUpsert
from kafkalog.sink.views.table_view import KTableView
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.place import open_log
from tests.object_store_proxy import StoreProxy

pytestmark = [pytest.mark.spark, pytest.mark.slow]
FIELDS = ("topic", "partition", "offset", "key", "value", "headers")


@dataclass(frozen=True)
class Place:
    """A log, as jobs name it."""

    path: str
    options: Mapping[str, str]

    def log(self) -> Log:
        """Open it; it is created if it is missing."""
        return open_log(self.path, options=self.options)

    def rows(self, spark: Any, topic: str = "t", **options: str) -> list[tuple[Any, ...]]:
        """Return what a batch read gives."""
        reader = spark.read.format("kafkalog").options(**self.options, **options)
        frame = reader.option("includeHeaders", "true").load(self.path, subscribe=topic)
        return sorted(tuple(row[name] for name in FIELDS) for row in frame.collect())


@pytest.fixture
def places(tmp_path: Path, s3_address: StoreAddress) -> tuple[Place, Place]:
    """Return a directory and a prefix of a bucket."""
    store = Place(
        str(s3_address),
        {
            "store.endpoint": str(s3_address.endpoint),
            "store.region": str(s3_address.region),
            "store.allow_http": "true",
        },
    )
    return Place(str(tmp_path / "log"), {}), store


def finish(writer: Any) -> None:
    """Run a stream over all there is, and raise what it fails with."""
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def changes(spark: Any, count: int = 300) -> Any:
    return spark.range(count).selectExpr(
        "CAST(id % 40 AS STRING) AS key",
        "IF(id % 11 = 0, NULL, CAST(id AS STRING)) AS value",
        "array(named_struct('key', 'h', 'value', CAST(CAST(id AS STRING) AS BINARY))) AS headers",
        "CAST(id % 3 AS INT) AS partition",
    )


def test_a_batch_write_gives_the_same_rows(spark: Any, places: tuple[Place, Place]) -> None:
    found = []
    for place in places:
        writer = changes(spark).coalesce(1).write.format("kafkalog").mode("append")
        writer.options(topic="t", numPartitions=3, **place.options).save(place.path)
        found.append(place.rows(spark))
    assert found[0] == found[1]
    assert len(found[0]) == 300


def test_a_batch_write_with_a_version_is_there_once(
    spark: Any, places: tuple[Place, Place]
) -> None:
    for place in places:
        for _ in range(2):
            writer = changes(spark, 30).write.format("kafkalog").mode("append")
            writer = writer.options(
                topic="t", numPartitions=3, txnAppId="job", txnVersion=1, **place.options
            )
            writer.save(place.path)
        assert len(place.rows(spark)) == 30


def test_a_task_sends_one_put_and_the_commit_one_put_and_one_get(
    spark: Any, places: tuple[Place, Place], store_proxy: StoreProxy
) -> None:
    place = places[1]
    place.log().create_topic("t", 3)
    writer = changes(spark).repartition(4).write.format("kafkalog").mode("append")
    writer = writer.options(topic="t", **place.options)
    writer.save(place.path)  # each process of Spark has opened the log
    store_proxy.reset()
    writer.save(place.path)
    assert store_proxy.counts["PUT"] == 4 + 1


def test_a_stream_goes_on_where_it_ended_and_a_repeated_micro_batch_is_there_once(
    spark: Any, places: tuple[Place, Place], tmp_path: Path
) -> None:
    found = []
    for number, place in enumerate(places):
        checkpoint = tmp_path / f"checkpoint{number}"
        with place.log() as log:
            log.create_topic("in", 2)
            log.create_topic("out", 2)
            for batch in range(3):
                log.append("in", [(f"k{n % 7}", f"{batch}/{n}") for n in range(50)], now_ms=1000)
                reader = spark.readStream.format("kafkalog").options(**place.options)
                rows = reader.option("startingOffsets", "earliest").load(place.path, subscribe="in")
                writer = rows.select("key", "value", "partition").writeStream.format("kafkalog")
                writer = writer.options(topic="out", path=place.path, **place.options)
                writer = writer.option("checkpointLocation", str(checkpoint))
                finish(writer)
                if batch == 1:  # Spark forgets that the micro-batch has ended
                    for name in ("1", ".1.crc"):
                        (checkpoint / "commits" / name).unlink()
                    finish(writer)
        found.append(place.rows(spark, "out"))
    assert [row[1:] for row in found[0]] == [row[1:] for row in found[1]]
    assert len(found[0]) == 150


def test_views_tables_and_appends_give_the_same(
    spark: Any, places: tuple[Place, Place], tmp_path: Path
) -> None:
    found = []
    for number, place in enumerate(places):
        with place.log() as log:
            log.create_topic("t", 3)
            log.create_topic("copy", 3)
            for batch in range(3):
                log.append(
                    "t", [(f"k{n}", None if n == batch else f'{{"n": {batch}}}') for n in range(9)]
                )
        latest = place.rows(spark, view="latest")
        table = KTable(spark, place.path, "t", options=place.options)
        values = sorted(table.df(json="n int").select("key", "n").collect())
        looked_up = [table.lookup(f"k{n}") for n in range(9)]
        database = tmp_path / f"{number}.db"
        upsert = SQLiteUpsert(database, "t", key_type="string", schema="n int")
        checkpoint = tmp_path / f"view{number}"
        view = KTableView(
            spark, place.path, "t", upsert, checkpoint=checkpoint, options=place.options
        )
        view.start()
        view.wait_until(timeout_s=120)
        view.stop()
        with closing(sqlite3.connect(database)) as connection:
            stored = sorted(connection.execute("SELECT key, n FROM t").fetchall())
        stream = spark.readStream.format("kafkalog").options(**place.options)
        rows = stream.option("startingOffsets", "earliest").load(place.path, subscribe="t")
        append = Append(place.path, "copy", options=place.options)
        copied = rows.select("key", "value", "partition").writeStream.foreachBatch(append)
        finish(copied.option("checkpointLocation", str(tmp_path / f"copy{number}")))
        copies = place.rows(spark, "copy")
        found.append(
            (
                [row[1:5] for row in latest],
                values,
                [record and (record.offset, record.value) for record in looked_up],
                stored,
                [row[1:5] for row in copies],
            )
        )
    assert found[0] == found[1]
    assert len(found[0][0]) == 8 and len(found[0][4]) == 27
