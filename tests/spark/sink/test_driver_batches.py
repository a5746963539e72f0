"""The rows of a DataFrame on the driver, inside foreachBatch: one driver batch at a time."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kafkalog.sink.upsert.driver_batches import in_driver_batches
from kafkalog.spark_release import arrow_schema
from kafkalog.spark_results import messages_from_socket
from tests.spark.sink.test_spark_writes import changes, feed, finish

pytestmark = [pytest.mark.spark, pytest.mark.slow]
PARTS = 20
ROW_SIZE = 12 << 20
LOOKS, LOOKS_MAX = 8, 80


def at_rest(runtime: Any, enough: int = 0) -> int:
    """Return what the JVM holds, in bytes, when it had time to let go of what was used.

    Of a job's results it does so a second or more later, by threads of py4j and of Spark. On a busy
    machine that takes longer, so it looks until no more than `enough` is held.
    """
    held: list[int] = []
    while len(held) < LOOKS or (min(held) > enough > 0 and len(held) < LOOKS_MAX):
        time.sleep(0.5)
        runtime.gc()
        held.append(runtime.totalMemory() - runtime.freeMemory())
    return min(held)


def test_a_portion_that_was_used_is_not_kept(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "source", 0, [("a", "x", 0)])
    runtime = spark.sparkContext._jvm.java.lang.Runtime.getRuntime()
    used: list[int] = []
    rows: list[int] = []

    def take(frame: Any, batch_id: int) -> None:
        session = frame.sparkSession
        large = session.range(PARTS, numPartitions=PARTS).selectExpr(
            "id", f"cast(repeat(cast(id % 10 as string), {ROW_SIZE}) as binary) value"
        )
        for driver_batch in in_driver_batches(large):
            rows.extend(driver_batch.column("id").to_pylist())
            if len(rows) == 3:
                used.append(at_rest(runtime))
            elif len(rows) == PARTS:
                used.append(at_rest(runtime, used[0] + PARTS * ROW_SIZE // 2))

    gc.disable()  # nothing may wait for Python's collector of cycles
    try:
        finish(
            changes(spark, tmp_path / "source")
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
        )
    finally:
        gc.enable()
    assert sorted(rows) == list(range(PARTS))
    # Kept, they would be PARTS - 3 rows; what else the JVM comes to hold is far less.
    assert used[1] - used[0] < PARTS * ROW_SIZE / 2, used


def test_rows_that_the_jvm_fails_to_send_are_an_error(spark: Any) -> None:
    """PySpark takes the end of the socket for the end of the rows."""
    jvm = spark.sparkContext._jvm
    for sent in ([b"a", b"b"], [b"a", b"b", jvm.java.lang.Object()]):
        items = jvm.java.util.ArrayList()
        for item in sent:
            items.add(item)
        scala = jvm.scala.jdk.javaapi.CollectionConverters.asScala(items.iterator())
        address = jvm.PythonRDD.serveIterator(scala, "rows")
        if len(sent) == 2:
            assert messages_from_socket(address, spark.sparkContext._gateway) == sent
        else:
            with pytest.raises(Exception, match="Unexpected element type"):
                messages_from_socket(address, spark.sparkContext._gateway)


DYING = """
import os, signal, sys
from pyspark.sql import SparkSession
from kafkalog.spark_results import collected

spark = SparkSession.builder.config("spark.ui.enabled", "false").getOrCreate()
frame = spark.range(3)
assert len(collected(frame)) == 3
class Dying(type(frame)):
    def collect(self):
        os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
        spark.sparkContext._gateway.proc.wait()
        return []
frame.__class__ = Dying
try:
    print("rows", len(collected(frame)))
except Exception as fault:
    print("error", type(fault).__name__)
"""


def test_rows_of_a_jvm_that_died_are_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "error", done.stdout


def test_the_schema_is_that_of_spark_s_own_arrow(spark: Any) -> None:
    frame = spark.sql(
        "select cast(1 as int) i, 'a' s, X'00' b, timestamp'2020-01-01' t, "
        "timestamp_ntz'2020-01-01' n, array(named_struct('f', 1.5D)) a, "
        "map('k', date'2020-01-01') m, cast(1 as decimal(9, 2)) d, interval '1' day v, "
        "parse_json('{}') j where false"
    )
    for is_large in ("false", "true"):
        spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", is_large)
        try:
            known = arrow_schema(frame.schema, has_large_types=is_large == "true")
            assert known == frame.toArrow().schema
        finally:
            spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
