"""A Spark job that reads a log in an object store, step by step as its standard input says.

The environment of this process has the secret, and so have Spark's workers. Each line of the input
is a step, in JSON; the answer is a line that begins with `found`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tests.spark_home import make_spark_home

NAMES = ["topic", "partition", "offset", "key", "value", "timestamp", "headers"]


def session(scratch: str) -> SparkSession:
    os.environ["SPARK_HOME"] = str(make_spark_home(Path(scratch, "home")))
    made = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.local.dir", f"{scratch}/local")
        .getOrCreate()
    )
    made.sparkContext.setLogLevel("ERROR")
    return made


class Steps:
    """What the steps do; each returns something that JSON can hold."""

    def __init__(self, scratch: str) -> None:
        self.spark = session(scratch)
        self.scratch = scratch
        self.kept: DataFrame | None = None

    def rows(self, frame: DataFrame) -> list[Any]:
        """Return the rows of a frame in the order of their places."""
        names = [name for name in NAMES if name in frame.columns]
        texts = [f"string({name})" for name in names]
        found = frame.selectExpr(*texts).collect()
        return sorted([*row] for row in found)

    def read(self, options: Mapping[str, str]) -> list[Any]:
        """Read a batch."""
        return self.rows(self.spark.read.format("kafkalog").options(**options).load())

    def tasks(self, options: Mapping[str, str]) -> int:
        """Return how many tasks a batch read has."""
        frame = self.spark.read.format("kafkalog").options(**options).load()
        return frame.rdd.getNumPartitions()

    def keep(self, options: Mapping[str, str]) -> int:
        """Load a frame that later steps read again."""
        self.kept = self.spark.read.format("kafkalog").options(**options).load()
        return self.kept.count()

    def again(self, options: Mapping[str, str]) -> int:
        """Count the rows of the kept frame."""
        assert self.kept is not None
        return self.kept.count()

    def drain(self, options: Mapping[str, str]) -> list[Any]:
        """Run a stream to the end of the log; return its micro-batches."""
        batches: list[Any] = []

        def take(frame: DataFrame, number: int) -> None:
            batches.append(self.rows(frame))

        named = dict(options)
        checkpoint = f"{self.scratch}/{named.pop('name')}"
        stream = self.spark.readStream.format("kafkalog").options(**named).load()
        started = stream.writeStream.option("checkpointLocation", checkpoint)
        started.trigger(availableNow=True).foreachBatch(take).start().awaitTermination()
        return batches

    def copy(self, options: Mapping[str, str]) -> None:
        """Run a stream from one topic into another to the end of the log."""
        named = dict(options)
        checkpoint, target = f"{self.scratch}/{named.pop('name')}", named.pop("topic")
        stream = self.spark.readStream.format("kafkalog").options(**named)
        rows = stream.option("startingOffsets", "earliest").load()
        wanted = rows.selectExpr("key", "value", "partition", "timestamp")
        place = {name: text for name, text in named.items() if name != "subscribe"}
        started = wanted.writeStream.format("kafkalog").options(**place, topic=target)
        started = started.option("checkpointLocation", checkpoint).trigger(availableNow=True)
        started.start().awaitTermination()

    def write(self, options: Mapping[str, str]) -> None:
        """Append two rows by a batch write."""
        frame = self.spark.createDataFrame([("a", "1"), ("b", "2")], "key string, value string")
        frame.write.format("kafkalog").options(**options).mode("append").save()

    def fail(self, options: Mapping[str, str]) -> str:
        """Return what a read that fails says."""
        try:
            self.read(options)
        except Exception as error:
            return str(error)
        return "nothing"


def requests() -> Iterator[tuple[str, dict[str, str]]]:
    for line in sys.stdin:
        name, options = json.loads(line)
        yield name, options


def main(scratch: str) -> None:
    steps = Steps(scratch)
    print("found", json.dumps("ready"), flush=True)
    for name, options in requests():
        print("found", json.dumps(getattr(steps, name)(options)), flush=True)
    steps.spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
