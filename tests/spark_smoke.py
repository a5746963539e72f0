"""A little of everything that Spark does with a log: `python tests/spark_smoke.py DIRECTORY`.

It prints what it found as a line of JSON. Run by whatever Python has kafkalog and a pyspark.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

import kafkalog
from kafkalog.sink.upsert import SQLiteUpsert

ROCKS_DB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def main(scratch: Path) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.streaming.stateStore.providerClass", ROCKS_DB)
        .getOrCreate()
    )
    path = str(scratch / "log")
    with kafkalog.open(path) as log:
        log.create_topic("t", partitions=2)
        log.append("t", [("a", "1"), ("b", "2"), ("a", "3")])
        log.append("t", [("b", None)])
    reader = spark.read.format("kafkalog").option("path", path)
    stream = spark.readStream.format("kafkalog").option("startingOffsets", "earliest")

    def writer(changes: Any, name: str) -> Any:
        """Return what writes a stream, up to what is there when it begins."""
        written = changes.writeStream.trigger(availableNow=True)
        return written.option("checkpointLocation", str(scratch / f"checkpoint-{name}"))

    def copied() -> int:
        changes = stream.options(path=path, subscribe="t").load()
        copy = writer(changes, "copy").format("kafkalog").options(path=path, topic="copy")
        copy.start().awaitTermination()
        return reader.option("subscribe", "copy").load().count()

    found: dict[str, Any] = {"pyspark": pyspark.__version__, "kafkalog": kafkalog.__file__}
    found["batch"] = reader.option("subscribe", "t").load().count()
    found["copied"] = [copied()]
    more = spark.createDataFrame([("c", "4")], "key string, value string")
    more.write.format("kafkalog").mode("append").options(path=path, topic="t").save()
    found["copied"] += [copied(), copied()]
    table = kafkalog.KTable(spark, path, "t")
    found["table"] = sorted((row.key.decode(), row.value.decode()) for row in table.df().collect())
    record = table.lookup("a")
    found["lookup"] = record and record.value.decode()

    previous: list[Any] = []

    def collect(rows: Any, _: int) -> None:
        changed = rows.where("key = 'a'").selectExpr("string(previous)").collect()
        previous.extend(value for (value,) in changed)

    updates = writer(table.updates(previous=True), "previous")
    updates.foreachBatch(collect).start().awaitTermination()
    found["previous"] = previous

    database = str(scratch / "table.db")
    upsert = SQLiteUpsert(database, "t", key_type="string")
    changes = stream.options(path=path, subscribe="t").load()
    writer(changes, "tables").foreachBatch(upsert).start().awaitTermination()
    rows = sqlite3.connect(database).execute("SELECT key, value FROM t ORDER BY key").fetchall()
    found["sqlite"] = [(key, value.decode()) for key, value in rows]
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
