"""A table that follows a stream: kafkalog next to Delta Lake, Iceberg and Kafka.

    python -m bench.peers [NAME ...] [--quick] [--json] [--path DIR] [--batches N] [--keys N]

The names are `delta`, `delta_dv` (deletion vectors and change feed), `iceberg` (format 3, merge on
read) and `kafka` (a compacted topic of a broker, through Spark's connector). Hudi is missing,
because Maven Central has no bundle of it for Spark 4. Each peer has a process with the Spark that
it is published for. Kafkalog runs in the same process, and both take turns at the same seeded
micro-batches. A batch has 50,000 draws of 200,000 keys by a power law with
exponent 1.0, each key once, because MERGE wants that; 2 % are deletions. It has the fields of a row
for MERGE, and the same row as 100 bytes of JSON for the logs, so neither converts.

Our figure includes all that keeps a table fresh: one turn of the cleaner after each micro-batch,
and every 10 micro-batches a refresh of a materialized table. Of the peers only the broker cleans.
Figures are processor time of all processes, the broker included. The first 10 of 30 micro-batches
warm up. Each round of ten that counts has one refresh. In the end both tables must have the same
rows. Then come bytes and files on disk, and reads: the sum of a field, once when our table has just
been refreshed and once a micro-batch later, then the number of rows, one key and 100 keys. We look
keys up without Spark, and peers with it, as each offers.

It is run by hand: the page of benchmarks does not have it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench import Claim, compare_figures, in_turn, leave_out, program, report
from bench.answering_process import AnsweringProcess
from bench.materialized import processor_seconds
from bench.peer_tables import ALL, REFRESHES, Ours, Table
from bench.spark import session
from tests import spark_peers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

READS: Final = 8
"""Reads of a table, of which the first half warms up."""
LOOKED_UP: Final = 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("peers", __doc__, quick="few keys and micro-batches")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--batches", type=int, help="micro-batches")
    parser.add_argument("--keys", type=int, help="keys; a micro-batch has a quarter of them drawn")
    options = parser.parse_args(arguments)
    keys = options.keys or (2_000 if options.quick else 200_000)
    batches = options.batches or (3 if options.quick else 30)
    for name in options.names or ALL:
        if not ALL[name].is_there():
            leave_out(ALL[name].title, "`make peers` fetches it")
            continue
        with TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
            found = PeerProcess(name, Path(directory), keys, batches).found()
        for claim in claims(name, found, f"{keys:,} keys"):
            report(claim, as_json=options.json)


def claims(name: str, found: Mapping[str, Any], keys: str) -> list[Claim]:
    """Return what a process has found as claims."""
    texts = {
        "write": (f"a micro-batch of a table with {keys}", "s of processor time", ALL[name].target),
        "fresh": (f"sum of a field, {keys}, just refreshed", "s of processor time", ""),
        "behind": (f"sum of a field, {keys}, a micro-batch later", "s of processor time", ""),
        "count": (f"rows counted, {keys}", "s of processor time", ""),
        "key": (f"one key looked up, {keys}", "s of processor time", ""),
        "keys": (f"{LOOKED_UP} keys looked up, {keys}", "s of processor time", ""),
        "size": (f"bytes on disk, {keys}", "MiB", ""),
        "files": (f"files on disk, {keys}", "files", ""),
    }
    return [
        compare_figures(
            text,
            found["ours"][what],
            found["peer"][what],
            unit=unit,
            peer_name=ALL[name].title,
            ratio_is="of its " + unit.rpartition(" ")[2].replace("MiB", "bytes"),
            target=target,
        )
        for what, (text, unit, target) in texts.items()
    ]


class PeerProcess(AnsweringProcess):
    """The process of a peer, as its parent sees it."""

    def __init__(self, name: str, scratch: Path, keys: int, batches: int) -> None:
        kept = dict(os.environ)
        os.environ.update(spark_peers.environment(ALL[name].release))
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
    for side in ("ours", "peer"):
        (scratch / side).mkdir()
    of_peer = scratch / "peer"
    with ExitStack() as opened:
        spark = opened.enter_context(session(scratch, conf=ALL[name].conf(of_peer)))
        peer = ALL[name].make(spark, of_peer, opened)
        ours = Ours(spark, scratch / "ours")
        for _ in sys.stdin:
            print(json.dumps(measured(spark, ours, peer, scratch, keys, batches)), file=answers)


def measured(
    spark: SparkSession, ours: Ours, peer: Table, scratch: Path, keys: int, batches: int
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
        files = [path for path in (scratch / side).rglob("*") if path.is_file()]
        found[side]["size"] = [sum(512 * path.stat().st_blocks for path in files) / (1 << 20)]
        found[side]["files"] = [float(len(files))]
    ours.refresh()
    read(tables, "fresh", total, found)
    take(batches + REFRESHES - batches % REFRESHES)  # a number that refreshes nothing
    check(tables)
    read(tables, "behind", total, found)
    read(tables, "count", lambda table: table.df().count(), found)
    wanted = [text_of(key) for key in range(LOOKED_UP)]
    read(tables, "key", lambda table: table.lookup(wanted[:1]), found)
    read(tables, "keys", lambda table: table.lookup(wanted), found)
    return found


def total(table: Table) -> object:
    """Return the sum of a field."""
    return table.df().agg({"n": "sum"}).collect()[0][0]


def read(
    tables: Mapping[str, Table],
    name: str,
    ask: Callable[[Table], object],
    found: Mapping[str, dict[str, list[float]]],
) -> None:
    """Ask each table in turn; end the program unless all give the same answer."""
    for turn in range(READS):
        answers = dict[str, object]()

        def note(side: str, answers: dict[str, object] = answers) -> None:
            answers[side] = ask(tables[side])

        for side in in_turn(turn, [*tables]):
            took = seconds_of(partial(note, side))
            if turn >= READS // 2:
                found[side].setdefault(name, []).append(took)
        if any(each != answers["ours"] for each in answers.values()):
            raise SystemExit(f"{name}: expected one answer, found {answers}")


def check(tables: Mapping[str, Table]) -> None:
    """End the program unless all tables have the same rows."""
    row = "xxhash64(key, n, name, city)"
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
    texts = [*map(text_of, drawn.tolist())]
    gone = pa.array(is_deleted)
    return pa.table({"key": texts, "value": values, **fields, "deleted": gone})


def text_of(key: int) -> str:
    """Return a key as the tables have it."""
    return f"user-{key:08d}"


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
