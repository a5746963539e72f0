"""What `KTable.updates(previous=True)` costs beside the plain stream of changes.

    python -m bench.previous_value [--json] [--quick]

One topic of two partitions, 40,000 changes of 10,000 keys (4,000 of 1,000 with --quick) with
values of 100 bytes, is read by a query of each kind in one Spark session (local[2], two shuffle
partitions, RocksDB as state store), in micro-batches of an eighth of the log (`availableNow`). The
rate is that of the micro-batches after the first, in which Spark starts its workers. Every change's
previous value is checked in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

import kafkalog
from bench import Claim, report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC: Final = "t"
NOW_MS: Final = 1_700_000_000_000
BATCHES: Final = 8
STORE: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.previous_value", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer keys and changes")
    options = parser.parse_args(arguments)
    key_count = 1_000 if options.quick else 10_000
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as directory:
        root = Path(directory, "log")
        count = build(root, key_count)
        spark = session(Path(directory))
        try:
            table = kafkalog.KTable(spark, root, TOPIC)
            limits = {"maxOffsetsPerTrigger": str(count // BATCHES)}
            peer = rate(table.updates(options=limits), Path(directory, "plain"))
            changes = table.updates(previous=True, options=limits)
            ours = rate(changes, Path(directory, "previous"))
            check(spark.read.parquet(str(Path(directory, "previous", "rows"))), count)
        finally:
            spark.stop()
    claim = "changes with the value before; peer: the stream without it"
    report(
        Claim(claim, round(ours, 1), round(peer, 1), round(ours / peer, 3), "changes/s"),
        as_json=options.json,
    )


def build(root: Path, key_count: int) -> int:
    """Write each key four times, in another order each time; return the count of records."""
    dice = np.random.default_rng(5)
    with kafkalog.open(root) as log:
        log.create_topic(TOPIC, 2, {"cleanup.policy": "compact"})
        for turn in range(4):
            order = dice.permutation(key_count).tolist()
            keys = pa.array([f"user-{number}" for number in order])
            values = pa.array([f"{turn}-{number}".ljust(100, ".") for number in order])
            log.append(TOPIC, pa.table({"key": keys, "value": values}), now_ms=NOW_MS)
    return 4 * key_count


def session(directory: Path) -> SparkSession:
    """Start Spark with what `updates(previous=True)` asks for."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    builder = builder.config("spark.sql.streaming.stateStore.providerClass", STORE)
    return builder.config("spark.sql.warehouse.dir", str(directory / "warehouse")).getOrCreate()


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


def check(rows: DataFrame, count: int) -> None:
    """Raise SystemExit unless all changes are there, each with the value of the turn before."""
    rows = rows.selectExpr("string(value) value", "string(previous) previous")
    wrong = rows.where(
        "int(split_part(value, '-', 1)) != coalesce(int(split_part(previous, '-', 1)), -1) + 1"
    )
    found = rows.count(), wrong.count()
    if found != (count, 0):
        raise SystemExit(f"expected {count} changes and 0 wrong ones, found {found}")


if __name__ == "__main__":
    main()
