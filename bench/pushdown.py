"""What a read saves when Spark pushes its filters down to it.

    python -m bench.pushdown [--json] [--quick]

A log of four partitions, in batches of 16 KiB (lz4), whose records rise in time; it is planned and
read by the objects that Spark would drive, without Spark, so what its own filters and its way from
Python to the JVM would cost more is left out. Each claim is a filter: the rate of the log, in MiB/s
of values, with it pushed; the peer is the same read with push-down off, after which Spark would
drop the rows that are not wanted. 4,000,000 records of 100 bytes; 200,000 with --quick.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, LessThan

from bench import compare, report
from kafkalog.datasource.batch_reader import KafkaLogBatchReader, PushDownBatchReader
from kafkalog.datasource.options import SourceOptions
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.engine import Engine

PARTITIONS: Final = 4
STEP: Final = 100_000
VALUE_SIZE: Final = 100
START_MS: Final = 1_700_000_000_000
TOPIC: Final = "t"
CONFIG: Final = {
    "cleanup.policy": "delete",
    "compression.type": "lz4",
    "segment.bytes": str(16 << 20),
}
COLUMNS: Final = tuple(changelog_schema(include_headers=False).names)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.pushdown", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer records and rounds")
    options = parser.parse_args(arguments)
    count = 200_000 if options.quick else 4_000_000
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as directory:
        build(Path(directory), count)
        for name, filters in claims(count).items():
            claim = compare(
                f"a read with {name}, pushed down",
                partial(read, Path(directory), filters),
                lambda: read(Path(directory), []),
                amount=count * VALUE_SIZE / (1 << 20),
                unit="MiB/s",
                rounds=3 if options.quick else 5,
            )
            report(claim, as_json=options.json)


def claims(count: int) -> dict[str, list[Filter]]:
    """The filters, by what a reader of the figures calls them."""
    late = datetime.fromtimestamp(START_MS / 1000, UTC) + timedelta(milliseconds=count * 99 // 100)
    last = count // PARTITIONS * 99 // 100
    return {
        "one partition of four": [EqualTo(("partition",), 1)],
        "the last 1 % by offset": [GreaterThanOrEqual(("offset",), last)],
        "the last 1 % by time": [GreaterThan(("timestamp",), late)],
        "the first 1 % by offset": [LessThan(("offset",), count // PARTITIONS // 100)],
        "one key": [EqualTo(("key",), b"key-77")],
    }


def build(root: Path, count: int) -> None:
    """Write the log; the time of a record is its number, in milliseconds."""
    with Engine(root) as engine:
        engine.create_topic(TOPIC, PARTITIONS, CONFIG)
        for start in range(0, count, STEP):
            numbers = np.arange(start, start + STEP, dtype=np.int64)
            keys = pa.array([b"key-%d" % (number % 10_000) for number in numbers.tolist()])
            values = pa.array([b"%0100d" % number for number in numbers.tolist()], pa.binary())
            rows = {
                "key": keys.cast(pa.binary()),
                "value": values,
                "partition": pa.array((numbers % PARTITIONS).astype(np.int32)),
                "timestamp": pa.array(START_MS + numbers).cast(pa.timestamp("ms", "UTC")),
            }
            engine.append(TOPIC, pa.table(rows), now_ms=START_MS)


def read(root: Path, filters: list[Filter]) -> int:
    """Plan and read, and return the count of rows that would leave the tasks."""
    options = SourceOptions.parse({"path": str(root), "subscribe": TOPIC})
    reader = KafkaLogBatchReader(options, COLUMNS)
    if filters:
        reader = PushDownBatchReader(options, COLUMNS)
        reader.pushFilters(filters)
    return sum(batch.num_rows for piece in reader.partitions() for batch in reader.read(piece))


if __name__ == "__main__":
    main()
