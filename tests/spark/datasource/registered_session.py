"""A job whose environment says nothing of the Python that has kafkalog: it calls `register`.

Arguments: a master, or `connect MASTER`, and a scratch directory. It prints what it has read.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import kafkalog
from kafkalog.errors import InvalidInputError


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what a thread of its own makes of `work`."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(work()))
    thread.start()
    thread.join()
    return made[0]


def session(master: str) -> SparkSession:
    builder = SparkSession.builder
    kind, _, rest = master.partition(" ")
    return (builder.remote(rest) if kind == "connect" else builder.master(master)).getOrCreate()


def main(master: str, scratch: str) -> None:
    path = f"{scratch}/log"
    with kafkalog.open(path) as log:
        log.create_topic("t")
        log.append("t", [("a", "1"), ("b", "2")])
    spark = session(master)
    in_thread(lambda: kafkalog.register(spark))
    kafkalog.register(spark)

    def read(topic: str, of: SparkSession = spark) -> list[str]:
        frame = of.read.format("kafkalog").option("path", path).option("subscribe", topic).load()
        return sorted(row[0] for row in frame.selectExpr("string(value)").collect())

    found = {"read": in_thread(lambda: read("t"))}
    frame = spark.createDataFrame([("c", "3")], "key string, value string")
    write = frame.write.format("kafkalog").options(path=path, topic="t").mode("append")
    in_thread(write.save)
    found["written"] = read("t")

    def stream(name: str) -> Any:
        source = spark.readStream.format("kafkalog").option("path", path).option("subscribe", "t")
        rows = source.option("startingOffsets", "earliest").load().select("key", "value")
        checkpoint = f"{scratch}/{name}"
        return rows.writeStream.option("checkpointLocation", checkpoint).trigger(availableNow=True)

    copied = stream("copy").format("kafkalog").option("path", path).option("topic", "copy")
    in_thread(lambda: copied.start().awaitTermination())
    found["streamed"] = read("copy")

    def append(rows: DataFrame, batch_id: int) -> None:
        with kafkalog.open(path) as own:
            own.append("t", [(row.key, row.value) for row in rows.collect()])

    stream("batches").foreachBatch(append).start().awaitTermination()
    found["in foreachBatch"] = read("t")
    other = spark.newSession()
    kafkalog.register(other)
    found["in another session"] = read("copy", other)
    print(json.dumps(found))


def end(master: str, scratch: str) -> None:
    """Print what is left of a call that fails, and of a session that has ended."""
    spark = session(master)
    context: Any = spark.sparkContext
    before, python = context.pythonExec, sys.executable
    sys.executable = f"{scratch}/python"
    try:
        kafkalog.register(spark)
    except InvalidInputError as error:
        found: dict[str, Any] = {"refused": "Cannot run program" in str(error)}
    sys.executable = python
    found["python"] = context.pythonExec == before
    found["variable"] = context._jvm.java.lang.System.getenv("PYSPARK_PYTHON")
    kafkalog.register(spark)
    found["active"] = in_thread(SparkSession.getActiveSession) is not None
    spark.stop()
    session(master)
    ended = weakref.ref(spark)
    del spark
    gc.collect()
    found["kept"] = ended() is not None
    print(json.dumps(found))


def serve(port: str, scratch: str) -> None:
    """Run a Spark Connect server until the standard input ends."""
    builder = SparkSession.builder.master("local[1]")
    builder = builder.config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
    builder.config("spark.connect.grpc.binding.port", port).getOrCreate()
    Path(scratch, "ready").touch()
    sys.stdin.read()


def meet(url: str, scratch: str) -> None:
    """Print what `register` says of a server that was started elsewhere."""
    try:
        kafkalog.register(SparkSession.builder.remote(url).getOrCreate())
    except kafkalog.errors.InvalidInputError as error:
        print(error)


if __name__ == "__main__":
    {"run": main, "end": end, "serve": serve, "meet": meet}[sys.argv[1]](*sys.argv[2:])
