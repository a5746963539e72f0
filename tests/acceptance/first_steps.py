"""What README shows, and each kind of table: `python first_steps.py README DIRECTORY CONNINFO`.

Run by a Python that has kafkalog as README installs it, and nothing else of this checkout.
"""

from __future__ import annotations

import json
import re
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

import psycopg
import pyspark
from pyspark.sql import SparkSession

import kafkalog
from kafkalog.sink.upsert import DeltaUpsert, PostgresUpsert, SQLiteUpsert
from kafkalog.spark_release import avro_package, delta_package

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
SCHEMA = "n int"
AVRO = '{"type": "record", "name": "r", "fields": [{"name": "x", "type": "double"}]}'


def session() -> SparkSession:
    """Return a session with the packages that `kafkalog doctor` names."""
    packages = (delta_package(pyspark.__version__)[1], avro_package(pyspark.__version__))
    catalog = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.jars.packages", ",".join(packages))
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", catalog)
        .getOrCreate()
    )


def tables(spark: SparkSession, scratch: Path, conninfo: str) -> dict[str, Any]:
    """Let a table of each kind follow a topic; return their rows."""
    path = str(scratch / "log")
    with kafkalog.open(path) as log:
        log.create_topic("t")
        log.create_topic("avro")
        log.append("t", [("a", '{"n": 1}'), ("b", '{"n": 2}'), ("a", None)])
        log.append("avro", [("a", struct.pack("<d", 1.5))])
    changes = spark.readStream.format("kafkalog").options(path=path, subscribe="t")
    given = {"schema": SCHEMA, "key_type": "string"}
    for name, upsert in {
        "sqlite": SQLiteUpsert(scratch / "t.db", "t", **given),
        "postgres": PostgresUpsert(conninfo, "t", **given),
        "delta": DeltaUpsert(scratch / "delta", **given),
    }.items():
        rows = changes.option("startingOffsets", "earliest").load()
        writer = rows.writeStream.option("checkpointLocation", str(scratch / f"checkpoint-{name}"))
        writer.foreachBatch(upsert).trigger(availableNow=True).start().awaitTermination()
    with psycopg.connect(conninfo) as connection:
        postgres = connection.execute("SELECT key, n FROM t").fetchall()
    table = kafkalog.KTable(spark, path, "avro").df(avro=AVRO)
    return {
        "sqlite": sqlite3.connect(scratch / "t.db").execute("SELECT key, n FROM t").fetchall(),
        "postgres": postgres,
        "delta": [tuple(row) for row in spark.table(f"delta.`{scratch}/delta`").collect()],
        "avro": [row.x for row in table.collect()],
    }


def main() -> None:
    """Print what was found as a line of JSON, after what README's example prints."""
    readme, scratch, conninfo = sys.argv[1:]
    spark = session()
    exec("\n".join(BLOCK.findall(Path(readme).read_text())), {"spark": spark})
    found = tables(spark, Path(scratch), conninfo)
    spark.stop()
    print(json.dumps({"pyspark": pyspark.__version__, "kafkalog": kafkalog.__file__, **found}))


if __name__ == "__main__":
    main()
