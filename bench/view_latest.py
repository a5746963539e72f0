"""The latest record of each key in Spark, next to the usual queries without `view=latest`.

    python -m bench.view_latest [--json] [--quick] [--path DIR] [--rounds N] [--records N]

A topic of one partition and 100-byte records (lz4), ten to a key, in random order (10,000,000
records of 1,000,000 keys; a fiftieth with --quick). Four ways to its table take turns in one warm
session of two cores, each followed by the same aggregate over keys and values, which has to come
out the same, with as many rows as there are keys: `view=latest`; the query that a user of Spark's
Kafka connector writes,

    row_number() OVER (PARTITION BY key ORDER BY offset DESC) = 1,

over the connector (a real broker, as Kafka's start scripts run it, serves the very same files; with
the fetches of bench/spark_read.py and `minPartitions` of 2, so that both cores read) and over our
own changelog; and `max_by(value, offset) ... GROUP BY key`, the fastest way to say it in SQL that
we know, over our changelog: told, and no target. After that the topic is cleaned, and all four are
measured again; the broker has a copy of the cleaned files. The order turns round from round to
round. A rate counts the records that were ever written before the cleaning, and those that the log
still has after it.

Beside the ratios the rate itself has a bound, 1.3 million records/s. That is a number that was set
for what an application reaches that restores a table from a changelog topic, as Kafka Streams does;
no restore is run here. Such an application uses no Spark, so the rate of `KafkaLog.latest` in this
process stands next to the same number.

The first round warms up. The last one is not timed either: it is watched for memory, as watching
takes time: that of this process, Spark's JVM and its Python workers together, without the broker's.
The JVM is one for all; before each way it collects its garbage, and the workers of others are
ended. Of `KafkaLog.latest` it is this process alone, which
has pyspark loaded.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

import kafkalog
from bench import MORE, Claim, compare_figures, leave_out, program, report
from bench.memory import peak_mib, reset_peak
from bench.mounted import broker_of
from bench.spark import connector_fault, session, watched
from bench.spark_read import FETCHES, digits, fixed
from tests.conformance import kafka

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TOPIC: Final = "t"
NOW_MS: Final = 1_700_000_000_000
STEP: Final = 250_000
TIMES: Final = 10
RESTORE_RATE: Final = 1.3
"""Million records a second; a number, which nothing here measures."""
READERS: Final = "2"
"""Tasks of the connector's read: it would have one for the one partition, and a core idle."""
WINDOW: Final = "row_number() OVER (PARTITION BY key ORDER BY offset DESC) AS place"
TABLE: Final = [
    "count(*)",
    "sum(length(value))",
    "sum(xxhash64(key, value) % 1000003)",
]
PEERS: Final = {
    "connector": ("the connector and a window", {"before": ">= 5", "after": ">= 5"}),
    "changelog": ("our changelog and a window", {"before": ">= 5", "after": ">= 4"}),
    "max_by": ("our changelog and max_by", {"before": "", "after": ""}),
}
"""The name of each, and its target before and after a cleaning."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("view_latest", __doc__, quick="fewer records and rounds")
    parser.add_argument("--rounds", type=int, help="counted rounds")
    parser.add_argument("--records", type=int, help="records before the cleaning")
    options = parser.parse_args(arguments)
    count = options.records or (200_000 if options.quick else 10_000_000)
    rounds = options.rounds or (0 if options.quick else 2)  # 0: one, for time and memory
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        scratch = Path(directory)
        root = scratch / "log"
        fill(root, count)
        fault = kafka.fault() or connector_fault()
        if fault is not None:
            leave_out("Spark's Kafka connector", fault)
        conf = {"spark.sql.shuffle.partitions": "8"}
        with session(scratch, memory="3g", connector=fault is None, conf=conf) as spark:
            left, keys = count, count // TIMES
            for state in ("before", "after"):
                if state == "after":
                    left = clean(root)
                place = scratch / state
                place.mkdir()
                one_is_enough = "quick" if options.quick and state == "after" else None
                with served(root, place, fault or one_is_enough) as broker:
                    without = None if broker is None else broker.pid
                    found = take_turns(make_ways(spark, root, broker), rounds, keys, without)
                title = f"view=latest of {count:,} records, {keys:,} keys, {state} cleaning"
                show(title, left, found, state, as_json=options.json)
                restored = restore(root, keys, rounds)
                claim = at_rate(f"{title}, without Spark", left, restored)
                report(claim, as_json=options.json)


def fill(root: Path, count: int) -> None:
    """Write every key ten times, in random order."""
    dice = np.random.default_rng(1)
    order = dice.permutation(np.arange(count) % (count // TIMES))
    words = dice.integers(97, 123, size=(4096, 15), dtype=np.uint8)
    with kafkalog.open(root) as log:
        log.create_topic(TOPIC, 1, {"compression.type": "lz4", "segment.bytes": str(128 << 20)})
        for start in range(0, count, STEP):
            keys = order[start : start + STEP]
            rows = {
                "key": fixed(digits(keys, 10)),
                "value": fixed(words[dice.integers(0, 4096, (len(keys), 6))].reshape(-1, 90)),
                "timestamp": pa.array(np.full(len(keys), NOW_MS)),
            }
            log.append(TOPIC, pa.table(rows), now_ms=NOW_MS)


def clean(root: Path) -> int:
    """Clean the topic; returns how many records it still has."""
    with kafkalog.open(root) as log:
        (stats,) = log.clean(TOPIC, force=True, now_ms=NOW_MS)
        if stats.error is not None:
            raise SystemExit(stats.error)
        return sum(batch.num_rows for batch in log.read(TOPIC, 0))


@contextlib.contextmanager
def served(root: Path, scratch: Path, fault: str | None) -> Iterator[kafka.KafkaBroker | None]:
    """Run a broker on a copy of the log, where there is one to be had."""
    if fault is not None:
        yield None
        return
    with broker_of(root, {TOPIC: 1}, scratch) as broker:
        yield broker


def make_ways(
    spark: SparkSession, root: Path, broker: kafka.KafkaBroker | None
) -> dict[str, DataFrame]:
    """Return the table, key and value, by each way."""
    ours = spark.read.format("kafkalog").options(path=str(root), subscribe=TOPIC)
    changelog = ours.load()
    ways = {
        "ours": ours.option("view", "latest").load(),
        "changelog": windowed(changelog),
        "max_by": changelog.groupBy("key").agg(latest()),
    }
    if broker is not None:
        address = {"kafka.bootstrap.servers": broker.bootstrap, "startingOffsets": "earliest"}
        connector = spark.read.format("kafka").options(subscribe=TOPIC, minPartitions=READERS)
        connector = connector.options(**address, **FETCHES)
        ways["connector"] = windowed(connector.load())
    return ways


def latest() -> Column:
    """Return the value of the highest offset, as a column of an aggregate."""
    from pyspark.sql import functions

    return functions.max_by("value", "offset").alias("value")


def windowed(frame: DataFrame) -> DataFrame:
    """Return the latest record of each key by a window."""
    return frame.selectExpr("key", "value", WINDOW).where("place = 1 AND value IS NOT NULL")


@dataclass
class Found:
    """The costs of a way: the seconds by round, and its peak of memory."""

    seconds: list[float] = field(default_factory=list)
    mib: float = 0.0

    def rates(self, count: int) -> list[float]:
        """Return millions of records a second."""
        return [count / 1e6 / each for each in self.seconds]


def take_turns(
    ways: dict[str, DataFrame], rounds: int, keys: int, without: int | None
) -> dict[str, Found]:
    """Return what each way took; the memory without that of a process."""
    all_found = {name: Found() for name in ways}
    for turn in range(rounds + 2) if rounds else (1,):
        tables = set()
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            found, table = all_found[name], ways[name].selectExpr(*TABLE)
            started = time.perf_counter()
            if turn > rounds:
                with watched(table.sparkSession, without=without) as peak:
                    tables.add(tuple(table.collect()[0]))
                found.mib = peak.mib
            else:
                tables.add(tuple(table.collect()[0]))
            if 0 < turn <= max(rounds, 1):
                found.seconds.append(time.perf_counter() - started)
        if len(tables) > 1 or next(iter(tables))[0] != keys:
            raise SystemExit(f"expected one table of {keys:,} keys, found {tables}")
    return all_found


def show(title: str, count: int, found: dict[str, Found], state: str, *, as_json: bool) -> None:
    """Print what was measured of one state of the log, which has `count` records."""
    ours = found["ours"].rates(count)
    for name, (peer_name, targets) in PEERS.items():
        if name in found:
            claim = compare_figures(
                title,
                ours,
                found[name].rates(count),
                unit="million records/s",
                peer_name=peer_name,
                ratio_is=MORE,
                target=targets[state],
                ours_mib=found["ours"].mib,
                peer_mib=found[name].mib,
            )
            report(claim, as_json=as_json)
    claim = at_rate(f"{title}, {count:,} records read", count, found["ours"])
    report(claim, as_json=as_json)


def restore(root: Path, keys: int, rounds: int) -> Found:
    """Return what `KafkaLog.latest` took in this process."""
    found = Found()
    for turn in range(rounds + 1):
        reset_peak()
        started = time.perf_counter()
        with kafkalog.open(root, read_only=True) as log:
            rows = sum(batch.num_rows for batch in log.latest(TOPIC))
        seconds = time.perf_counter() - started
        if rows != keys:
            raise SystemExit(f"the table has {rows:,} rows of {keys:,} keys")
        if turn or not rounds:
            found.seconds.append(seconds)
            found.mib = max(found.mib, peak_mib())
    return found


def at_rate(title: str, count: int, found: Found) -> Claim:
    """Return a claim of rates next to that of a restore."""
    rates = found.rates(count)
    return compare_figures(
        title,
        rates,
        [RESTORE_RATE] * len(rates),
        unit="million records/s",
        peer_name="a restore as Kafka Streams does it, a number and not run",
        ratio_is=MORE,
        target=">= 1",
        ours_mib=found.mib,
    )


if __name__ == "__main__":
    main()
