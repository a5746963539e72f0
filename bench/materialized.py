"""A field summed over a materialized table, next to plain Parquet and next to `view=latest`.

    python -m bench.materialized [--json] [--quick] [--path DIR] [--rounds N] [--keys N]

A topic of two partitions with 1,000,000 keys (20,000 with --quick) and JSON values of some 75
bytes, not cleaned. Its materialized table is made with the columns of the values. First nothing has
changed since: the same sum over a copy of the table that Spark has written as plain Parquet is the
peer. Then 5 % of the keys get another value: `view=latest` with `from_json` is the peer. Figures
are processor time of all processes, Spark's JVM and Python workers included, in one warm session of
two cores; ways take turns, three rounds warm up, and sums have to be equal. Last the cost of a
refresh that takes those 5 % into the files, of which it writes all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import pyarrow as pa

import kafkalog
from bench import Claim, compare_figures, in_turn, program, report
from bench.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TOPIC: Final = "t"
FIELDS: Final = "n int, name string, price double, city string"
STEP: Final = 100_000
WARMING: Final = 3
CHANGED: Final = 20
"""One key of so many is changed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("materialized", __doc__, quick="fewer keys and rounds")
    parser.add_argument("--rounds", type=int, help="counted rounds")
    parser.add_argument("--keys", type=int, help="keys")
    options = parser.parse_args(arguments)
    count = options.keys or (20_000 if options.quick else 1_000_000)
    rounds = options.rounds or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        scratch = Path(directory)
        root = scratch / "log"
        with kafkalog.open(root) as log:
            log.create_topic(TOPIC, 2)
        append(root, range(count), 0)
        with session(scratch) as spark:
            topic = kafkalog.KTable(spark, root, TOPIC)
            table = topic.materialize(scratch / "table", json=FIELDS)
            table.df().write.parquet(str(scratch / "plain"))
            plain = spark.read.parquet(str(scratch / "plain"))
            ways: dict[str, Callable[[], DataFrame]] = {"ours": table.df, "peer": lambda: plain}
            title = f"sum of a field over {count:,} keys"
            show(f"{title}, nothing changed", ways, rounds, "plain Parquet", "<= 1.3", options)
            append(root, range(0, count, CHANGED), 1)
            ways["peer"] = lambda: topic.df(json=FIELDS)
            peer = "view=latest and from_json"
            claim = show(f"{title}, 5 % changed", ways, rounds, peer, "<= 0.34", options)
            before = processor_seconds()
            table.refresh()
            took = round(processor_seconds() - before, 2)
            if not options.json:
                print(f"the refresh of 5 %: {took} s of processor time; {claim.unit}")


def append(root: Path, numbers: Iterable[int], turn: int) -> None:
    """Give keys another value of the same sum."""
    given = [*numbers]
    with kafkalog.open(root) as log:
        for start in range(0, len(given), STEP):
            some = given[start : start + STEP]
            keys = [b"user-%08d" % n for n in some]
            values = [
                f'{{"n":{n % 1000},"name":"name-{n}-{turn}","price":{n / 7:.3f},'
                f'"city":"city-{n % 97}"}}'
                for n in some
            ]
            log.append(TOPIC, pa.table({"key": keys, "value": [v.encode() for v in values]}))


def show(
    title: str,
    ways: dict[str, Callable[[], DataFrame]],
    rounds: int,
    peer_name: str,
    target: str,
    options: Any,
) -> Claim:
    """Measure the ways in turn, and print the claim."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    warming = 0 if options.quick else WARMING
    for turn in range(warming + rounds):
        sums = set()
        for name in in_turn(turn, [*ways]):
            before = processor_seconds()
            sums.add(ways[name]().agg({"n": "sum"}).collect()[0][0])
            if turn >= warming:
                seconds[name].append(processor_seconds() - before)
        if len(sums) != 1:
            raise SystemExit(f"{title}: expected one sum, found {sums}")
    claim = compare_figures(
        title,
        seconds["ours"],
        seconds["peer"],
        unit="s of processor time",
        peer_name=peer_name,
        target=target,
    )
    report(claim, as_json=options.json)
    return claim


def processor_seconds() -> float:
    """Return the processor time of this process and of all below it."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            found = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += found.user + found.system + found.children_user + found.children_system
    return total


if __name__ == "__main__":
    main()
