"""A table from a dead Kafka's disk: Debezium's Avro events, with the schemas that the disk has.

`python -m examples.rescued_registry [--path DIR]`; Spark needs its Avro package on the class path.

Neither the broker nor the schema registry runs. The registry kept its schemas in the topic
`_schemas`, so they are on the disk too. `rescue` is the whole job; the rest makes such a disk.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kafkalog
from examples.shop import main
from kafkalog.sink.upsert import SQLiteUpsert

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["make_disk", "rescue", "run"]

TOPIC: Final = "shop.public.customers"
VALUE: Final = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {
            "name": "since",
            "type": {"type": "int", "connect.version": 1, "connect.name": "io.debezium.time.Date"},
        },
    ],
}
EVENT: Final = {
    "type": "record",
    "name": "Envelope",
    "namespace": "shop.public.customers",
    "fields": [
        {"name": "before", "type": ["null", VALUE], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "op", "type": "string"},
    ],
}
KEY: Final = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "int"}]}


def rescue(spark: SparkSession, disk: Path, database: Path, checkpoint: Path) -> None:
    """Bring the present rows of the table into SQLite; again: what came since."""
    registry = kafkalog.SchemaRegistry(path=disk)
    customers = SQLiteUpsert(
        str(database),
        "customers",
        avro=registry,
        key_avro=registry,
        envelope="debezium",
        checkpoint=str(checkpoint),
    )
    stream = spark.readStream.format("kafkalog").options(path=str(disk), subscribe=TOPIC)
    events = stream.option("startingOffsets", "earliest").load()
    writer = events.writeStream.foreachBatch(customers).trigger(availableNow=True)
    writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()


def make_disk(spark: SparkSession, disk: Path) -> None:
    """Write what the broker of a connector would have: events, and the topic of the registry."""
    schemas = {1: json.dumps(KEY), 2: json.dumps(EVENT)}
    with kafkalog.open(disk) as log:
        log.create_topic("_schemas")
        log.create_topic(TOPIC)
        for number, subject in ((1, f"{TOPIC}-key"), (2, f"{TOPIC}-value")):
            key = {"keytype": "SCHEMA", "subject": subject, "version": 1, "magic": 1}
            value = {"subject": subject, "version": 1, "id": number, "schema": schemas[number]}
            log.append("_schemas", [(json.dumps(key), json.dumps(value | {"deleted": False}))])
    rows = "struct<id: int, name: string, since: int>"
    events = spark.createDataFrame(
        [
            (1, None, (1, "Ann", 17337), "r"),
            (2, None, (2, "Bob", 17338), "c"),
            (1, (1, "Ann", 17337), (1, "Anna", 17337), "u"),
            (2, (2, "Bob", 17338), None, "d"),
        ],
        f"id int, before {rows}, after {rows}, op string",
    ).coalesce(1)
    registry = kafkalog.SchemaRegistry(schemas=schemas)
    keys = kafkalog.value_bytes(
        events, avro=registry, subject=f"{TOPIC}-key", schema=1, columns=["id"]
    ).withColumnRenamed("value", "key")
    values = kafkalog.value_bytes(keys, avro=registry, subject=f"{TOPIC}-value", schema=2)
    write = values.write.format("kafkalog").options(path=str(disk), topic=TOPIC)
    write.mode("append").save()


def run(spark: SparkSession, path: Path) -> list[str]:
    """Make a disk, rescue its table, and return the rows."""
    make_disk(spark, path / "disk")
    rescue(spark, path / "disk", path / "shop.db", path / "checkpoint")
    with closing(sqlite3.connect(path / "shop.db")) as database:
        rows: list[Any] = database.execute("SELECT id, name, since FROM customers").fetchall()
    return [" ".join(map(str, row)) for row in rows]


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
