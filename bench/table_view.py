"""How fast a materialized view is made from a log, and how it keeps up with updates.

    python -m bench.table_view [--json] [--quick] [--keys N] [--seconds S] [--rate R]
                               [--postgres CONNINFO] [--path DIR]

A compacted topic of four partitions holds `--keys` JSON documents (1,000,000; 20,000 with --quick).
A KTableView makes a table of them in a new SQLite file, or in the PostgreSQL database that is
given; the figure is rows per second, from `start` until the table holds them, with Spark's session
already there. The peer is the least that could do the same for SQLite: one process reads the newest
records, without Spark, and writes them in one transaction.

Then another process appends `--rate` updates per second (5,000) for `--seconds` (120; 10 with
--quick), ten commits a second. The figure is the rate at which the table takes them in; beside it
stand the lag in offsets as seen each second, and how long it takes until what the log holds at some
moment is in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafkalog.sink.table_view import KTableView
from kafkalog.sink.upsert import PostgresUpsert, SQLiteUpsert, Upsert
from kafkalog.storage_engine.engine import Engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC: Final = "stock"
PARTITIONS: Final = 4
STEP: Final = 250_000
SCHEMA: Final = "count bigint, name string"
CONFIG: Final = {"cleanup.policy": "compact", "compression.type": "lz4"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    options = _options(arguments)
    if options.feed:
        feed(options.path, options.keys, options.rate, options.seconds)
        return
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        log = Path(scratch) / "log"
        build(log, options.keys)
        floor_s = None if options.postgres else warm_floor(log, Path(scratch))
        spark = session(Path(scratch))
        try:
            target = target_of(options.postgres, Path(scratch) / "view.db")
            view = KTableView(spark, log, TOPIC, target, checkpoint=Path(scratch) / "checkpoint")
            started = time.perf_counter()
            view.start()
            view.wait_until()
            rebuild_s = time.perf_counter() - started
            figures = {
                "log_bytes": size_of(log),
                "table_bytes": None if options.postgres else size_of(Path(scratch) / "view.db"),
                **memory(spark),
            }
            report(options, "rebuilt from the log", options.keys, rebuild_s, floor_s, figures)
            followed_s, count, figures = follow(view, log, options)
            report(options, "kept up to date", count, followed_s, None, figures | memory(spark))
            view.stop()
        finally:
            spark.stop()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.table_view", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer keys and seconds")
    parser.add_argument("--keys", type=int, help="rows of the table")
    parser.add_argument("--seconds", type=float, help="how long updates come")
    parser.add_argument("--rate", type=int, default=5_000, help="updates per second")
    parser.add_argument("--postgres", help="what libpq connects with, for a view in PostgreSQL")
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--feed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.keys = options.keys or (20_000 if options.quick else 1_000_000)
    options.seconds = options.seconds or (10 if options.quick else 120)
    return options


def session(scratch: Path) -> SparkSession:
    """Return a Spark session of two task slots."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    made = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(scratch / "local"))
        .getOrCreate()
    )
    made.sparkContext.setLogLevel("ERROR")
    return made


def target_of(conninfo: str | None, database: Path) -> Upsert:
    """Return where the view's table is."""
    if conninfo is None:
        return SQLiteUpsert(database, TOPIC, schema=SCHEMA, key_type="string")
    return PostgresUpsert(conninfo, TOPIC, schema=SCHEMA, key_type="string")


def rows_of(numbers: np.ndarray[Any, Any], turn: int) -> pa.Table:
    """Return a document for each key's number."""
    text = pc.utf8_lpad(pc.cast(pa.array(numbers), pa.string()), 10, "0")
    value = pc.binary_join_element_wise(
        f'{{"count": {turn}, "name": "item number ', text, ' of the stock"}', ""
    )
    return pa.table({"key": text.cast(pa.binary()), "value": value.cast(pa.binary())})


def build(log: Path, keys: int) -> None:
    """Write the topic, each key once."""
    with Engine(log) as engine:
        engine.create_topic(TOPIC, PARTITIONS, CONFIG)
        for start in range(0, keys, STEP):
            numbers = np.arange(start, min(start + STEP, keys), dtype=np.int64)
            engine.append(TOPIC, rows_of(numbers, 0))


def feed(log: Path, keys: int, rate: int, seconds: float) -> None:
    """Append updates of random keys at a rate, in ten commits a second."""
    random = np.random.default_rng(7)
    with Engine(log) as engine:
        started = time.monotonic()
        for turn in range(round(seconds * 10)):
            time.sleep(max(started + turn / 10 - time.monotonic(), 0))
            numbers = random.integers(0, keys, rate // 10, dtype=np.int64)
            engine.append(TOPIC, rows_of(numbers, turn))


def warm_floor(log: Path, scratch: Path) -> float:
    """Return the same as `floor`, with everything compiled."""
    build(scratch / "small", 100)
    floor(scratch / "small", scratch / "small.db")
    return floor(log, scratch / "floor.db")


def floor(log: Path, database: Path) -> float:
    """Return the seconds of the same work with neither Spark nor a position."""
    import kafkalog

    def documents() -> Iterator[tuple[str, int, str]]:
        for batch in opened.latest(TOPIC):
            keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
            for key, value in zip(keys, values, strict=True):
                document = json.loads(value)
                yield key.decode(), document["count"], document["name"]

    started = time.perf_counter()
    with (
        kafkalog.open(log, read_only=True) as opened,
        closing(sqlite3.connect(database)) as connection,
        connection,
    ):
        connection.execute(f"CREATE TABLE {TOPIC} (key TEXT PRIMARY KEY, count INTEGER, name TEXT)")
        connection.executemany(f"INSERT INTO {TOPIC} VALUES (?, ?, ?)", documents())
    return time.perf_counter() - started


def follow(
    view: KTableView, log: Path, options: argparse.Namespace
) -> tuple[float, int, dict[str, Any]]:
    """Let updates come; return the seconds until all were in, their count, and what was seen."""
    before = sum(each.log_end for each in view.progress().partitions.values())
    command = [sys.executable, "-m", "bench.table_view", "--feed", "--path", str(log)]
    command += ["--keys", str(options.keys), "--rate", str(options.rate)]
    lags, delays = [], []
    started = time.perf_counter()
    with subprocess.Popen([*command, "--seconds", str(options.seconds)]) as feeding:
        while feeding.poll() is None:
            asked = time.perf_counter()
            lags.append(view.progress().lag)
            view.wait_until()
            delays.append(time.perf_counter() - asked)
            time.sleep(max(1 - delays[-1], 0))
    view.wait_until()
    taken_s = time.perf_counter() - started
    count = sum(each.log_end for each in view.progress().partitions.values()) - before
    seen = {
        "lag_median": statistics.median(lags),
        "lag_max": max(lags),
        "delay_median_s": round(statistics.median(delays), 2),
        "delay_max_s": round(max(delays), 2),
    }
    return taken_s, count, seen


def memory(spark: SparkSession) -> dict[str, Any]:
    """Return the peaks of resident memory, in MiB, of the driver's Python and its JVM."""
    jvm: Any = spark.sparkContext._jvm
    pid = jvm.java.lang.ProcessHandle.current().pid()
    return {"driver_python_mib": _peak_mib(os.getpid()), "driver_jvm_mib": _peak_mib(pid)}


def _peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


def size_of(path: Path) -> int:
    """Return the bytes of an SQLite file with its journal, or of a log directory's segments."""
    if path.is_file():
        return sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))
    return sum(file.stat().st_size for file in path.rglob("*.log"))


def report(
    options: argparse.Namespace,
    what: str,
    count: int,
    taken_s: float,
    floor_s: float | None,
    figures: dict[str, Any],
) -> None:
    """Print a claim, with what else was seen."""
    place = "PostgreSQL" if options.postgres else "SQLite"
    line = {
        "claim": f"a view of {options.keys:,} rows in {place} {what}",
        "ours": round(count / taken_s),
        "peer": None if floor_s is None else round(count / floor_s),
        "ratio": None if floor_s is None else round(floor_s / taken_s, 2),
        "unit": "rows/s",
        **figures,
    }
    if options.json:
        print(json.dumps(line), flush=True)
        return
    shown = ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)
    print(f"{line['claim']}: {line['ours']} rows/s, floor {line['peer']}; {shown}", flush=True)


if __name__ == "__main__":
    main()
