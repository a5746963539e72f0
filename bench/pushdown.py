"""What a read saves when Spark pushes its filters down to it.

    python -m bench.pushdown [--json] [--quick] [--path DIR]

A log of four partitions, in batches of 16 KiB (lz4), whose records rise in time; it is planned and
read by the objects that Spark would drive, without Spark, so what its own filters and its way from
Python to the JVM would cost more is left out. Each claim is a filter: the rate of the log, in MiB/s
of values, with it pushed; the peer is the same read with push-down off, after which Spark would
drop the rows that are not wanted. That both leave the same rows then is checked. They run in one
process, whose memory is told for each. 4,000,000 records of 100 bytes; 200,000 with --quick.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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
CONDITIONS: Final[dict[type[Filter], Callable[..., Any]]] = {
    EqualTo: pc.equal,
    GreaterThan: pc.greater,
    GreaterThanOrEqual: pc.greater_equal,
    LessThan: pc.less,
}
COLUMNS: Final = tuple(changelog_schema(include_headers=False).names)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.pushdown", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer records and rounds")
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure")
    options = parser.parse_args(arguments)
    count = 200_000 if options.quick else 4_000_000
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        build(Path(directory), count)
        for name, filters in claims(count).items():
            check(Path(directory), filters)
            claim = compare(
                f"a read with {name}, pushed down",
                partial(read, Path(directory), filters),
                lambda: read(Path(directory), []),
                amount=count * VALUE_SIZE / (1 << 20),
                unit="MiB/s",
                rounds=3 if options.quick else 5,
                peer_name="the same, not pushed down",
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
            engine.append(TOPIC, pa.table(rows), now_ms=START_MS + count)


def batches(root: Path, filters: list[Filter]) -> Iterator[pa.RecordBatch]:
    """Plan and read."""
    options = SourceOptions.parse({"path": str(root), "subscribe": TOPIC})
    reader = KafkaLogBatchReader(options, COLUMNS)
    if filters:
        reader = PushDownBatchReader(options, COLUMNS)
        reader.pushFilters(filters)
    for piece in reader.partitions():
        yield from reader.read(piece)


def read(root: Path, filters: list[Filter]) -> int:
    """Read, and return the count of rows that would leave the tasks."""
    return sum(batch.num_rows for batch in batches(root, filters))


def check(root: Path, filters: list[Filter]) -> None:
    """End the program if Spark would be left with other rows when the filters are pushed."""
    found = [wanted(batches(root, pushed), filters) for pushed in (filters, [])]
    if found[0] != found[1] or not found[0][0]:
        raise SystemExit(f"{filters}: pushed {found[0]} rows and sum of offsets, not {found[1]}")


def wanted(found: Iterable[pa.RecordBatch], filters: list[Filter]) -> tuple[int, int]:
    """Return the count of the rows that pass the filters, and the sum of their offsets."""
    count = offsets = 0
    for batch in found:
        rows = batch
        for each in filters:
            compare_to, column, value = condition(each)
            rows = rows.filter(compare_to(rows[column], value))
        count += rows.num_rows
        offsets += pc.sum(rows["offset"]).as_py() or 0
    return count, offsets


def condition(wish: Filter) -> tuple[Callable[..., Any], str, object]:
    """Return a filter as an Arrow function, a column and a value."""
    assert isinstance(wish, EqualTo | GreaterThan | GreaterThanOrEqual | LessThan)
    (column,) = wish.attribute
    return CONDITIONS[type(wish)], column, wish.value


if __name__ == "__main__":
    main()
