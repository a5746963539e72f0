"""Measures how little `spark.executor.pyspark.memory` a write and reads of a log can do with.

`python -m tests.acceptance.worker_memory [SIZE ...] [--cores N]`, for example with `512m 1g`. Each
size has a Spark of its own, which writes and reads 200 000 records in two partitions. A line tells
what has worked, in seconds, and what ended it. The first line of each says what a worker was given.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from typing import Final

SIZES: Final = ("128m", "256m", "384m", "512m", "768m", "1g")
RECORDS: Final = 200_000
SECONDS_MAX: Final = 150
"""A worker that cannot start a thread may wait for ever."""

_JOB: Final = """
import resource, sys, time
import kafkalog
from pyspark.sql import SparkSession
size, cores, path = sys.argv[1:]
spark = (SparkSession.builder.master("local[2]")
    .config("spark.executor.pyspark.memory", size).config("spark.executor.cores", cores)
    .config("spark.ui.enabled", False).config("spark.log.level", "OFF").getOrCreate())
kafkalog.register(spark)
def limit(_):
    return [resource.getrlimit(resource.RLIMIT_AS)[0] >> 20]
def told(name, work):
    began = time.monotonic()
    print(name, work(), f"in {time.monotonic() - began:.0f} s", end=", ", flush=True)
def write():
    rows = spark.range({records}).selectExpr("string(id % 50000) AS key", "string(id) AS value")
    rows.write.format("kafkalog").option("path", path).option("topic", "t").option(
        "numPartitions", 2).mode("append").save()
    return "done"
def read(**options):
    return spark.read.format("kafkalog").option("path", path).option("subscribe", "t").options(
        **options).load().selectExpr("sum(length(value))", "count(*)").first()[1]
told("limit in MiB", lambda: spark.sparkContext.parallelize([0], 1).mapPartitions(limit).first())
told("write", write)
told("read", read)
told("latest", lambda: read(view="latest"))
"""


def measure(size: str, cores: int) -> None:
    """Run the job with one size, and print what it tells."""
    print(f"{size}:", end=" ", flush=True)
    with tempfile.TemporaryDirectory(prefix="kafkalog-memory-") as directory:
        job = _JOB.replace("{records}", str(RECORDS))
        command = [sys.executable, "-c", job, size, str(cores), f"{directory}/log"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                _, errors = process.communicate(timeout=SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                print(f"no end within {SECONDS_MAX} s")
                return
    lines = [line.strip() for line in errors.splitlines() if "Error" in line]
    print("all" if process.returncode == 0 else f"then {lines[-1][:200] if lines else 'failed'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=SIZES)
    parser.add_argument("--cores", type=int, default=1, help="spark.executor.cores")
    options = parser.parse_args()
    for each in options.sizes:
        measure(each, options.cores)
