"""A table that follows a stream: kafkalog beside Delta Lake.

    python -m bench.peers [NAME ...] [--quick] [--json] [--path DIR] [--batches N] [--keys N]

The names are `delta` and `delta_dv` (deletion vectors and change feed). Each peer has a process
with the Spark that it is published for, and kafkalog runs in the same process: both take turns at
the same seeded micro-batches. A batch has 50,000 draws of 200,000 keys by a power law with exponent
1.0, each key once, because MERGE wants that; 2 % are deletions. It has the fields of a row for the
peers, and the same row as 100 bytes of JSON for the log, so neither converts.

Our figure includes all that keeps a table fresh: one turn of the cleaner after each micro-batch,
and every 10 micro-batches a refresh of a materialized table. The peers do no maintenance. Figures
are processor time of all processes. The first 10 of 30 micro-batches warm up. Each round of ten
that counts has one refresh. In the end both tables must have the same rows. Then come bytes and
files on disk, and the sum of a field: once when our table has just been refreshed, and once a
micro-batch later.

It is run by hand: the page of benchmarks does not have it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import kafkalog
from bench import Claim, compare_figures, in_turn, leave_out, program, report
from bench.answering_process import AnsweringProcess
from bench.materialized import processor_seconds
from bench.spark import session
from tests import delta_spark, spark_peers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REFRESHES: Final = 10
"""Micro-batches from one refresh to the next."""
READS: Final = 8
"""Reads of a table, of which the first half warms up."""
FIELDS: Final = "n int, name string, city string"
COLUMNS: Final = "key string, n int, name string, city string"
MERGE: Final = """
    MERGE INTO {table} AS t USING {changes} AS c ON t.key = c.key
    WHEN MATCHED AND c.deleted THEN DELETE
    WHEN MATCHED THEN UPDATE SET t.n = c.n, t.name = c.name, t.city = c.city
    WHEN NOT MATCHED AND NOT c.deleted
        THEN INSERT (key, n, name, city) VALUES (c.key, c.n, c.name, c.city)
"""
NAMES: Final = {
    "delta": "Delta Lake",
    "delta_dv": "Delta Lake with deletion vectors and change feed",
}
RELEASES: Final = {"delta": "4.2", "delta_dv": "4.2"}
TARGETS: Final = {"delta": "<= 0.34", "delta_dv": "<= 0.34"}


class Table(Protocol):
    """A table that follows the micro-batches."""

    root: Path

    def write(self, changes: DataFrame, number: int) -> None:
        """Take a micro-batch."""

    def df(self) -> DataFrame:
        """Return the rows as they are now."""


class Ours:
    """A compacted topic, cleaned, with a materialized table."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.root = root
        self._log = kafkalog.open(root / "log")
        self._log.create_topic("t", 2)
        kafkalog.register(spark)
        source = kafkalog.KTable(spark, root / "log", "t")
        self._table = source.materialize(root / "table", json=FIELDS)

    def write(self, changes: DataFrame, number: int) -> None:
        """Append, clean what is due, and refresh the table when its time has come."""
        writer = changes.select("key", "value").write.format("kafkalog").mode("append")
        writer.option("path", str(self.root / "log")).option("topic", "t").save()
        self._log.clean()
        if number % REFRESHES == REFRESHES - 1:
            self.refresh()

    def refresh(self) -> None:
        """Take all changes into the files."""
        self._table.refresh(grace_s=0)

    def df(self) -> DataFrame:
        """Return the rows of files and changes."""
        return self._table.df()


class Merged:
    """A table of Delta Lake, which MERGE changes."""

    def __init__(self, spark: SparkSession, root: Path, name: str) -> None:
        self.root = root
        self._spark = spark
        self._table = f"delta.`{root}/t`"
        is_dv = "true" if name == "delta_dv" else "false"
        features = ("enableDeletionVectors", "enableChangeDataFeed")
        given = ", ".join(f"'delta.{each}' = '{is_dv}'" for each in features)
        spark.sql(f"CREATE TABLE {self._table} ({COLUMNS}) USING delta TBLPROPERTIES ({given})")

    def write(self, changes: DataFrame, number: int) -> None:
        """Merge the changes."""
        changes.createOrReplaceTempView("changes")
        self._spark.sql(MERGE.format(table=self._table, changes="changes")).collect()

    def df(self) -> DataFrame:
        """Return the rows."""
        return self._spark.table(self._table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("peers", __doc__, quick="few keys and micro-batches")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--batches", type=int, help="micro-batches")
    parser.add_argument("--keys", type=int, help="keys; a micro-batch has a quarter of them drawn")
    options = parser.parse_args(arguments)
    keys = options.keys or (2_000 if options.quick else 200_000)
    batches = options.batches or (3 if options.quick else 30)
    for name in options.names or NAMES:
        if not jars(name) or not spark_peers.package(RELEASES[name]).is_dir():
            leave_out(NAMES[name], "`make peers` fetches it")
            continue
        with TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
            found = PeerProcess(name, Path(directory), keys, batches).found()
        for claim in claims(name, found, f"{keys:,} keys"):
            report(claim, as_json=options.json)


def claims(name: str, found: Mapping[str, Any], keys: str) -> list[Claim]:
    """Return what a process has found as claims."""
    texts = {
        "write": (f"a micro-batch of a table with {keys}", "s of processor time", TARGETS[name]),
        "fresh": (f"sum of a field, {keys}, just refreshed", "s of processor time", ""),
        "behind": (f"sum of a field, {keys}, a micro-batch later", "s of processor time", ""),
        "size": (f"bytes on disk, {keys}", "MiB", ""),
        "files": (f"files on disk, {keys}", "files", ""),
    }
    return [
        compare_figures(
            text,
            found["ours"][what],
            found["peer"][what],
            unit=unit,
            peer_name=NAMES[name],
            ratio_is="of its " + unit.rpartition(" ")[2].replace("MiB", "bytes"),
            target=target,
        )
        for what, (text, unit, target) in texts.items()
    ]


def jars(name: str) -> str:
    """Return the class path of a peer; "" if it is not there."""
    return spark_peers.jars(RELEASES[name], "delta")


class PeerProcess(AnsweringProcess):
    """The process of a peer, as its parent sees it."""

    def __init__(self, name: str, scratch: Path, keys: int, batches: int) -> None:
        kept = dict(os.environ)
        os.environ.update(spark_peers.environment(RELEASES[name]))
        os.environ.pop("SPARK_HOME", None)
        given = ("--process", name, str(scratch), str(keys), str(batches))
        try:
            super().__init__("bench.peers", *given, errors=scratch / "errors")
        finally:
            os.environ.clear()
            os.environ.update(kept)

    def found(self) -> Mapping[str, Any]:
        """Return the figures, by side and name."""
        with self:
            figures: Mapping[str, Any] = self.ask("measure")
        return figures


def answer(name: str, scratch: Path, keys: int, batches: int) -> None:
    """Be the process of a peer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print would be taken for an answer
    with session(scratch, conf=delta_spark.settings_of(jars(name))) as spark:
        for side in ("ours", "peer"):
            (scratch / side).mkdir()
        peer, ours = Merged(spark, scratch / "peer", name), Ours(spark, scratch / "ours")
        for _ in sys.stdin:
            print(json.dumps(measured(spark, ours, peer, scratch, keys, batches)), file=answers)


def measured(
    spark: SparkSession, ours: Ours, peer: Merged, scratch: Path, keys: int, batches: int
) -> dict[str, dict[str, list[float]]]:
    """Let both tables follow the same micro-batches; return the figures of each."""
    tables: dict[str, Table] = {"ours": ours, "peer": peer}
    found = {side: dict[str, list[float]]() for side in tables}
    dice = np.random.default_rng(11)
    seconds: dict[str, list[float]] = {side: [] for side in tables}

    def take(number: int) -> None:
        path = scratch / f"batch-{number}.parquet"
        pq.write_table(batch(dice, keys, number), path)
        for side in in_turn(number, [*tables]):
            changes = spark.read.parquet(str(path))
            took = seconds_of(partial(tables[side].write, changes, number))
            seconds[side].append(took)

    for number in range(batches):
        take(number)
    check(tables)
    for side, each in seconds.items():
        counted = each[batches // 3 :]
        rounds = [counted[at : at + REFRESHES] for at in range(0, len(counted), REFRESHES)]
        found[side]["write"] = [sum(some) / len(some) for some in rounds]
        files = [path for path in tables[side].root.rglob("*") if path.is_file()]
        found[side]["size"] = [sum(path.stat().st_size for path in files) / (1 << 20)]
        found[side]["files"] = [float(len(files))]
    ours.refresh()
    read(tables, "fresh", found)
    take(batches + REFRESHES - batches % REFRESHES)  # a number that refreshes nothing
    check(tables)
    read(tables, "behind", found)
    return found


def total(table: Table) -> None:
    """Sum the field of a table."""
    table.df().agg({"n": "sum"}).collect()


def read(
    tables: Mapping[str, Table], name: str, found: Mapping[str, dict[str, list[float]]]
) -> None:
    """Sum a field of each table, in turn."""
    for turn in range(READS):
        for side in in_turn(turn, [*tables]):
            took = seconds_of(partial(total, tables[side]))
            if turn >= READS // 2:
                found[side].setdefault(name, []).append(took)


def check(tables: Mapping[str, Table]) -> None:
    """End the program unless all tables have the same rows."""
    row = "xxhash64(cast(key AS string), n, name, city)"
    sums = {
        side: table.df().selectExpr("count(*)", f"sum(cast({row} AS decimal(38, 0)))").collect()
        for side, table in tables.items()
    }
    if len({tuple(each[0]) for each in sums.values()}) != 1:
        raise SystemExit(f"expected tables with the same rows, found {sums}")


def batch(dice: np.random.Generator, keys: int, number: int) -> pa.Table:
    """Draw a micro-batch: each key once, with fields, or deleted."""
    weights = 1 / np.arange(1, keys + 1)
    drawn = np.unique(dice.choice(keys, keys // 4, p=weights / weights.sum()))
    is_deleted = dice.random(len(drawn)) < 0.02
    rows = [
        {"n": (key + number) % 1000, "name": f"name-{key}-{number}", "city": f"city-{key % 97}"}
        for key in drawn.tolist()
    ]
    for row in rows:
        row["name"] = f"{row['name']:-<{100 - len(json.dumps(row)) + len(str(row['name']))}}"
    values = [
        None if gone else json.dumps(row).encode()
        for row, gone in zip(rows, is_deleted.tolist(), strict=True)
    ]
    fields = {
        "n": pa.array([row["n"] for row in rows], pa.int32()),
        "name": pa.array([row["name"] for row in rows]),
        "city": pa.array([row["city"] for row in rows]),
    }
    texts = [f"user-{key:08d}" for key in drawn.tolist()]
    gone = pa.array(is_deleted)
    return pa.table({"key": texts, "value": values, **fields, "deleted": gone})


def seconds_of(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    before = processor_seconds()
    call()
    return processor_seconds() - before


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        answer(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
