"""Decodes framed values of a broker's directory, in a process whose Spark has the Avro package.

Arguments: the package's jar, the directory, the topic, and a file for the rows. Each line of the
input is a registry, as the arguments of `kafkalog.SchemaRegistry` in JSON. The rows by offset are
written, and a line.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import kafkalog

OPTIONS = {"recursiveFieldMaxDepth": "3"}


def main(jar: str, path: str, topic: str, output: str) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.jars", jar)
    builder = builder.config(
        map={
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
    )
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    kafkalog.register(spark)
    for line in sys.stdin:
        registry = kafkalog.SchemaRegistry(**json.loads(line))
        frame: Any = spark.read.format("kafkalog").options(path=path, subscribe=topic).load()
        frame = frame.select("key", "value", "offset", "topic")
        rows = kafkalog.value_columns(
            frame, avro=registry, key_avro=registry, bad_column="bad", options=OPTIONS
        )
        found = {row["offset"]: row.asDict(recursive=True) for row in rows.collect()}
        Path(output).write_bytes(pickle.dumps(found))
        print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
