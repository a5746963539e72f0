"""Reads values of very different sizes through Spark, and looks at what its workers hold.

    python -m tests.acceptance.large_values [MiB of a large value] [driver memory]

runs it in a session of its own and prints the figures; the test beside it does the same with small
ones in the session that all tests share.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from kafkalog.storage_engine.directory.directory_log import DirectoryLog

PARTITIONS = 2
LARGE = 4
"""Large values in each partition, small ones before, between and after."""
SMALL = 2000
SMALL_SIZE = 1 << 10
CODECS = ("uncompressed", "zstd")


def large_value(size: int, seed: int) -> bytes:
    """Bytes that do not compress, and that no other seed has."""
    block = b"".join(hashlib.sha256(b"%d %d" % (seed, n)).digest() for n in range(2048))
    return (block * (size // len(block) + 1))[:size]


def build(root: Path, size: int, **config: str) -> int:
    """Write the log, and return the count of its records."""
    import pyarrow as pa

    count = 0
    with DirectoryLog(root) as engine:
        limits = {"max.message.bytes": str(2 * size), "cleanup.policy": "delete"}
        engine.create_topic("t", PARTITIONS, {**limits, **config})
        for seed in range(PARTITIONS * LARGE):
            values = [large_value(SMALL_SIZE, n) for n in range(SMALL)]
            values.insert(SMALL // 2, large_value(size, seed))
            number = pa.array([seed % PARTITIONS] * len(values), pa.int32())
            rows = {"value": pa.array(values, pa.binary()), "partition": number}
            engine.append("t", pa.table(rows), now_ms=1_700_000_000_000)
            count += len(values)
    return count


def expected(size: int) -> dict[str, int]:
    """The hashes of the values, and how often each is there."""
    found: dict[str, int] = {}
    for seed in range(PARTITIONS * LARGE):
        found[hashlib.sha256(large_value(size, seed)).hexdigest()] = 1
    for n in range(SMALL):
        name = hashlib.sha256(large_value(SMALL_SIZE, n)).hexdigest()
        found[name] = PARTITIONS * LARGE
    return found


@contextmanager
def sampled_workers() -> Iterator[dict[int, int]]:
    """Yield the largest resident memory (bytes) by process of Spark's Python workers."""
    peaks: dict[int, int] = {}
    is_done = threading.Event()

    def sample() -> None:
        while not is_done.wait(0.05):
            for process in worker_processes():
                peaks[process] = max(peaks.get(process, 0), resident(process))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        is_done.set()
        thread.join()


def worker_processes() -> list[int]:
    """This session's processes that run tasks, the one that forks them among them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            command = process.cmdline()
            if "pyspark.daemon" in command and "pyspark.worker" in command:
                found.append(process.pid)
    return found


def resident(process: int) -> int:
    """Resident bytes of a process, 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * 4096


def read(spark: Any, root: Path, **options: str) -> dict[str, int]:
    """The hashes of the values that Spark reads, and how often each is there."""
    frame = spark.read.format("kafkalog").options(subscribe="t", **options).load(str(root))
    rows = frame.selectExpr("sha2(value, 256) AS hash").groupBy("hash").count().collect()
    return {row["hash"]: row["count"] for row in rows}


def measure(spark: Any, scratch: Path, size: int, codec: str) -> dict[str, int | str]:
    """The peak memory (bytes) of a worker that reads small values only, then of all values."""
    root = scratch / codec
    build(root, size, **{"compression.type": codec})
    with sampled_workers() as small:
        ends = dict.fromkeys(map(str, range(PARTITIONS)), SMALL // 2)
        assert read(spark, root, endingOffsets=json.dumps({"t": ends}))
    with sampled_workers() as all_:
        assert read(spark, root) == expected(size)
    return {
        "codec": codec,
        "value": size,
        "peak_small": max(small.values()),
        "peak": max(all_.values()),
    }


def main(mebibytes: str = "100", memory: str = "6g") -> None:
    """Print the figures of each codec as a line of JSON."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", memory)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory(prefix="kafkalog-large-") as scratch:
        for codec in CODECS:
            print(
                json.dumps(measure(spark, Path(scratch), int(mebibytes) << 20, codec)), flush=True
            )
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
