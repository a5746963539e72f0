"""The cost of `KTable.updates(previous=True)`, next to the plain stream of changes.

    python -m bench.previous_value [--json] [--quick] [--path DIR] [--rounds N]

One topic of two partitions, 40,000 changes of 10,000 keys with values of 100 bytes (4,000 of 1,000
in two micro-batches with --quick), is read by a query of each kind in one Spark session (local[2],
two shuffle partitions, RocksDB as state store), in micro-batches of an eighth of the log
(`availableNow`), one query after the other, and who begins changes from round to round. The rate is
that of the micro-batches after the first, in which Spark starts its workers. The peer keeps no
state: the ratio is the price of it. Memory is that of all processes, which both share. Every change
that either has written is checked.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

import kafkalog
from bench import compare_figures, in_turn, program, report
from bench.memory import peak_of_tree
from bench.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TOPIC: Final = "t"
NOW_MS: Final = 1_700_000_000_000
BATCHES: Final = 8
TURNS: Final = 4
"""How often each key is written."""
_WRONG: Final = (
    "int(parts[0]) != coalesce(int(before[0]), -1) + 1 OR parts[1] != coalesce(before[1], parts[1])"
)
STATE_STORE: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("previous_value", __doc__, quick="fewer keys and changes")
    parser.add_argument("--rounds", type=int, help="rounds")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 3)
    key_count = 1_000 if options.quick else 10_000
    batches = 2 if options.quick else BATCHES
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        root = Path(directory, "log")
        count = build(root, key_count)
        rates: dict[str, list[float]] = {"plain": [], "previous": []}
        mib = dict.fromkeys(rates, 0.0)
        with session(Path(directory), conf=STATE_STORE) as spark:
            table = kafkalog.KTable(spark, root, TOPIC)
            limits = {"maxOffsetsPerTrigger": str(count // batches)}
            for turn in range(rounds):
                for name in in_turn(turn, list(rates)):
                    place = Path(directory, f"{name}-{turn}")
                    changes = table.updates(previous=name == "previous", options=limits)
                    with peak_of_tree() as seen:
                        rates[name].append(rate(changes, place))
                    mib[name] = max(mib[name], seen.mib)
                    rows = spark.read.parquet(str(place / "rows"))
                    check(rows, count, key_count, has_previous=name == "previous")
    claim = compare_figures(
        f"{count:,} changes of 100 bytes, each with the value before",
        rates["previous"],
        rates["plain"],
        unit="changes/s",
        peer_name="the stream without it",
        ratio_is="of its rate",
        target=">= 0.5",
        ours_mib=mib["previous"],
        peer_mib=mib["plain"],
    )
    report(claim, as_json=options.json)


def build(root: Path, key_count: int) -> int:
    """Write each key four times, in another order each time; return the count of records."""
    dice = np.random.default_rng(5)
    with kafkalog.open(root) as log:
        log.create_topic(TOPIC, 2, {"cleanup.policy": "compact"})
        for turn in range(TURNS):
            order = dice.permutation(key_count).tolist()
            keys = pa.array([f"user-{number}" for number in order])
            values = pa.array([f"{turn}-{number}".ljust(100, ".") for number in order])
            log.append(TOPIC, pa.table({"key": keys, "value": values}), now_ms=NOW_MS)
    return TURNS * key_count


def rate(changes: DataFrame, directory: Path) -> float:
    """Run the stream to the log's end; return changes per second."""
    writer = changes.writeStream.format("parquet").option("path", str(directory / "rows"))
    writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    batches: list[dict[str, Any]] = [json.loads(progress.json) for progress in query.recentProgress]
    later = [batch for batch in batches if batch["numInputRows"]][1:]
    rows: int = sum(batch["numInputRows"] for batch in later)
    took_ms: int = sum(batch["durationMs"]["triggerExecution"] for batch in later)
    return 1000 * rows / took_ms


def check(rows: DataFrame, count: int, key_count: int, *, has_previous: bool) -> None:
    """Raise SystemExit unless each change is there once, with the value of the turn before."""
    parts = rows.selectExpr(
        "split(string(value), '[-.]') parts",
        "split(string(previous), '[-.]') before" if has_previous else "NULL before",
        "string(key) key",
    )
    found = parts.selectExpr(
        "count(DISTINCT key, parts[0])",
        "count(*)",
        "sum(int(parts[0]))",
        "count_if(key != concat('user-', parts[1]))",
        f"count_if({_WRONG})" if has_previous else "0",
    ).first()
    expected = (count, count, key_count * sum(range(TURNS)), 0, 0)
    if found is None or tuple(found) != expected:
        raise SystemExit(f"expected changes {expected}, found {found}")


if __name__ == "__main__":
    main()
