"""Building a materialized view from a log, and keeping it up to date.

    python -m bench.table_view [--json] [--quick] [--keys N] [--seconds S] [--rate R]
                               [--postgres CONNINFO | --delta] [--path DIR] [--rounds N]

A compacted topic of four partitions holds `--keys` JSON documents (1,000,000; 20,000 with --quick).
A KTableView makes a table of them in a new SQLite file, in the PostgreSQL database that is given,
or in Delta Lake; the figure is rows per second, from `start` until the table holds them, with
Spark's session already there. The peer is the least that could do the same for SQLite: one process
reads the latest records, without Spark, and writes them in one transaction. They take turns, and
the first round is not counted; PostgreSQL and Delta Lake have one round, and no peer. With --delta
all of this runs on the PySpark that Delta Lake needs, which `make peers` installs.

Then another process appends `--rate` updates per second (5,000) for `--seconds` (120; 10 with
--quick), ten commits a second. The figure is the rate at which the table takes them in, from the
first append until all are in, compared with the rate of the appends, in one run; told besides
are the lag in offsets as seen each second, and how long it takes until what the log holds at some
moment is in the table.

Our memory is the sum of what each process had resident at most, Spark's JVM and its workers among
them; the peer's is the driver's Python, in which it runs. Each table is compared with what was
given: the count of its rows, and sums over each column.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

import kafkalog
from bench import Claim, compare_figures, in_turn, program, report
from bench.memory import peak_mib, reset_peak
from bench.query_process import everything, peaks
from bench.spark import session
from kafkalog.sink.upsert import DeltaUpsert, PostgresUpsert, SQLiteUpsert, Upsert
from kafkalog.sink.views.table_view import KTableView
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests import delta_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Int64s = npt.NDArray[np.int64]

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
    if options.delta and not delta_spark.settings():
        given = sys.argv[1:] if arguments is None else arguments
        command = [sys.executable, "-m", "bench.table_view", *given]
        os.execve(sys.executable, command, delta_spark.environment())
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        scratch = Path(directory)
        log = scratch / "log"
        build(log, options.keys)
        with session(scratch, memory="1g", conf=delta_spark.settings()) as spark:
            rebuilt = Rebuilding(spark, log, options)
            for number in range(options.rounds + 1):
                rebuilt.round(scratch / str(number), is_last=number == options.rounds)
            report(rebuilt.claim(), as_json=options.json)
            report(follow(rebuilt.view, log, rebuilt.database, options), as_json=options.json)
            rebuilt.view.stop()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = program("table_view", __doc__, quick="fewer keys and seconds")
    parser.add_argument("--keys", type=int, help="rows of the table")
    parser.add_argument("--seconds", type=float, help="how long updates come")
    parser.add_argument("--rate", type=int, default=5_000, help="updates per second")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--postgres", help="what libpq connects with, for a view in PostgreSQL")
    places.add_argument("--delta", action="store_true", help="a view in Delta Lake")
    parser.add_argument("--rounds", type=int, help="rounds of making the table")
    parser.add_argument("--feed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.keys = options.keys or (20_000 if options.quick else 1_000_000)
    options.seconds = options.seconds or (5 if options.quick else 120)
    options.has_peer = not options.postgres and not options.delta
    options.rounds = (options.rounds or (0 if options.quick else 3)) if options.has_peer else 0
    return options


def target_of(options: argparse.Namespace, database: Path) -> Upsert:
    """Return where the view's table is."""
    if options.delta:
        return DeltaUpsert(database, schema=SCHEMA, key_type="string")
    if options.postgres:
        return PostgresUpsert(options.postgres, TOPIC, schema=SCHEMA, key_type="string")
    return SQLiteUpsert(database, TOPIC, schema=SCHEMA, key_type="string")


def rows_of(numbers: Int64s, turn: int) -> pa.Table:
    """Return a document for each key's number."""
    text = pc.utf8_lpad(pc.cast(pa.array(numbers), pa.string()), 10, "0")
    value = pc.binary_join_element_wise(
        f'{{"count": {turn}, "name": "item number ', text, ' of the stock"}', ""
    )
    return pa.table({"key": text.cast(pa.binary()), "value": value.cast(pa.binary())})


def build(log: Path, keys: int) -> None:
    """Write the topic, each key once."""
    with DirectoryLog(log) as engine:
        engine.create_topic(TOPIC, PARTITIONS, CONFIG)
        for start in range(0, keys, STEP):
            numbers = np.arange(start, min(start + STEP, keys), dtype=np.int64)
            engine.append(TOPIC, rows_of(numbers, 0))


def updates(keys: int, rate: int, seconds: float) -> Iterator[Int64s]:
    """Yield the keys of each commit: ten a second, the same in every process."""
    random = np.random.default_rng(7)
    for _ in range(round(seconds * 10)):
        yield random.integers(0, keys, rate // 10, dtype=np.int64)


def feed(log: Path, keys: int, rate: int, seconds: float) -> None:
    """Append updates at a rate; print a line before, and then the seconds and MiB they took."""
    with DirectoryLog(log) as engine:
        print("ready", flush=True)
        started = time.monotonic()
        for turn, numbers in enumerate(updates(keys, rate, seconds)):
            time.sleep(max(started + turn / 10 - time.monotonic(), 0))
            engine.append(TOPIC, rows_of(numbers, turn))
        print(time.monotonic() - started, peak_mib(), flush=True)


class Rebuilding:
    """The table made from the log, by us and by the peer; `view` is the last round's, running."""

    def __init__(self, spark: SparkSession, log: Path, options: argparse.Namespace) -> None:
        self._spark = spark
        self._log = log
        self._options = options
        self._ours: list[float] = []
        self._peer: list[float] = []
        self._mib = {"ours": 0.0, "peer": 0.0}

    def round(self, scratch: Path, *, is_last: bool) -> None:
        """Let both make the table."""
        scratch.mkdir()
        self.database = scratch / "view.db"
        sides = [partial(self._by_us, scratch, is_last), partial(self._by_peer, scratch)]
        for make in in_turn(len(self._ours), sides):
            make()

    def _by_us(self, scratch: Path, is_last: bool) -> None:
        target = target_of(self._options, self.database)
        checkpoint = scratch / "checkpoint"
        self.view = KTableView(self._spark, self._log, TOPIC, target, checkpoint=checkpoint)
        reset_peaks()
        started = time.perf_counter()
        self.view.start()
        self.view.wait_until()
        seconds = time.perf_counter() - started
        self._ours.append(self._options.keys / seconds)
        self._mib["ours"] = max(self._mib["ours"], sum(peaks(everything())))
        if not is_last:
            self.view.stop()
        check(self._options, self.database, np.zeros(self._options.keys, dtype=np.int64))

    def _by_peer(self, scratch: Path) -> None:
        if not self._options.has_peer:
            return
        database = scratch / "least.db"
        reset_peak()
        self._peer.append(self._options.keys / least(self._log, database))
        self._mib["peer"] = max(self._mib["peer"], peak_mib())
        check(self._options, database, np.zeros(self._options.keys, dtype=np.int64))
        database.unlink()

    def claim(self) -> Claim:
        """Return what was measured."""
        options, figures = self._options, {"log_MiB": size_of(self._log) >> 20}
        if not options.has_peer:
            ours, peer, name = self._ours, [math.nan], "not measured"
        else:
            first = 1 if options.rounds else 0  # of several the first is not counted
            ours, peer = self._ours[first:], self._peer[first:]
            name = "one process without Spark"
            figures["table_MiB"] = size_of(self.database) >> 20
        return compare_figures(
            f"a view of {options.keys:,} rows in {place(options)} rebuilt from the log",
            ours,
            peer,
            unit="rows/s",
            peer_name=name,
            ratio_is="of its rate",
            ours_mib=self._mib["ours"],
            peer_mib=self._mib["peer"] or None,
        ).told(**figures)


def reset_peaks() -> None:
    """Let every process's peak of memory count from now on."""
    for process in everything():
        with suppress(OSError):
            reset_peak(process.pid)


def least(log: Path, database: Path) -> float:
    """Return the seconds of the same work with neither Spark nor a position."""

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


def follow(view: KTableView, log: Path, database: Path, options: argparse.Namespace) -> Claim:
    """Let updates come, and tell how the table follows."""
    command = [sys.executable, "-m", "bench.table_view", "--feed", "--path", str(log)]
    command += ["--keys", str(options.keys), "--rate", str(options.rate)]
    command += ["--seconds", str(options.seconds)]
    lags, delays = [], []
    reset_peaks()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as feeding:
        assert feeding.stdout is not None
        feeding.stdout.readline()
        started = time.perf_counter()
        while feeding.poll() is None:
            asked = time.perf_counter()
            lags.append(view.progress().lag)
            view.wait_until()
            delays.append(time.perf_counter() - asked)
            with suppress(subprocess.TimeoutExpired):
                feeding.wait(max(1 - delays[-1], 0))
        view.wait_until()
        taken_s = time.perf_counter() - started
        if feeding.returncode:
            raise SystemExit(f"the updates' process has ended with {feeding.returncode}")
        given_s, given_mib = map(float, feeding.stdout.read().split())
    mib = sum(peaks(everything()))
    turns = np.zeros(options.keys, dtype=np.int64)
    count = 0
    for turn, numbers in enumerate(updates(options.keys, options.rate, options.seconds)):
        turns[numbers] = turn
        count += len(numbers)
    check(options, database, turns)
    return compare_figures(
        f"a view of {options.keys:,} rows in {place(options)} kept up to date",
        [count / taken_s],
        [count / given_s],
        unit="rows/s",
        peer_name="the process that gives them",
        ratio_is="of its rate",
        ours_mib=mib,
        peer_mib=given_mib,
    ).told(
        lag_median=statistics.median(lags),
        lag_max=max(lags),
        delay_median_s=round(statistics.median(delays), 2),
        delay_max_s=round(max(delays), 2),
    )


def check(options: argparse.Namespace, database: Path, turns: Int64s) -> None:
    """End the program unless the table has each key with its last turn, as far as sums tell."""
    keys = np.arange(options.keys)
    expected = len(keys), turns.sum(), keys.sum(), keys.sum(), (keys * turns).sum()
    question = (
        f"SELECT count(*), sum(count), sum({_NUMBER.format('key', 1)}), "
        f"sum({_NUMBER.format('name', 13)}), sum({_NUMBER.format('key', 1)} * count) FROM {TOPIC}"
    )
    found: tuple[int, ...] | None
    if options.delta:
        from pyspark.sql import SparkSession

        table = question.replace(f"FROM {TOPIC}", f"FROM delta.`{database}`")
        found = SparkSession.active().sql(table).first()
    elif options.postgres:
        import psycopg

        with psycopg.connect(options.postgres) as connection:
            found = connection.execute(question).fetchone()
    else:
        with closing(sqlite3.connect(database)) as connection:
            found = connection.execute(question).fetchone()
    if found is None or tuple(map(int, found)) != tuple(map(int, expected)):
        raise SystemExit(f"{place(options)} has count and sums {found}, expected {expected}")


_NUMBER: Final = "cast(substr({}, {}, 10) AS bigint)"
"""The number of ten digits in a column's text."""


def place(options: argparse.Namespace) -> str:
    """Return the name of the database."""
    if options.delta:
        return "Delta Lake"
    return "PostgreSQL" if options.postgres else "SQLite"


def size_of(path: Path) -> int:
    """Return the bytes of an SQLite file with its journal, or of a log directory's segments."""
    if path.is_file():
        return sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))
    return sum(file.stat().st_size for file in path.rglob("*.log"))


if __name__ == "__main__":
    main()
