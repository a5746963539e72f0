"""The time a read saves when its options choose the records.

    python -m bench.chosen [--json] [--quick] [--path DIR]

A topic of four partitions, in batches of 16 KiB (lz4), with 10,000 keys and records that rise in
time; and a compacted one, cleaned, with a key for every fourth record. They are planned and read by
the objects that Spark would drive, without Spark, so what its own filters and its way from Python
to the JVM would cost more is left out. Each claim is a choice by options: the rate of the topic, in
MiB/s of what was appended to it; the peer is the same read without them, after which Spark would
drop the rows that are not wanted. That the same rows are left then is checked. They run in one
process, whose memory is told for each. 4,000,000 records of 100 bytes; 200,000 with --quick.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import kafkalog
from bench import compare, program, report
from kafkalog.datasource.batch_reader import KafkaLogBatchReader
from kafkalog.datasource.options import SourceOptions
from kafkalog.log import KafkaLog
from kafkalog.schema import changelog_schema

PARTITIONS: Final = 4
STEP: Final = 100_000
VALUE_SIZE: Final = 100
START_MS: Final = 1_700_000_000_000
EVENTS: Final = "events"
TABLE: Final = "table"
CONFIG: Final = {"compression.type": "lz4", "segment.bytes": str(16 << 20)}
COLUMNS: Final = tuple(changelog_schema(include_headers=False).names)


@dataclass(frozen=True, slots=True)
class Choice:
    """Options of a read, those that are left of it without the choice, and what they choose."""

    options: Mapping[str, str]
    rest: Mapping[str, str]
    rows: pc.Expression


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    options = program("chosen", __doc__, quick="fewer records and rounds").parse_args(arguments)
    count = 200_000 if options.quick else 4_000_000
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        root = Path(directory)
        with kafkalog.open(root) as log:
            build(log, count)
            choices = dict(claims(log, count))
        for name, choice in choices.items():
            check(root, choice)
            claim = compare(
                name,
                partial(read, root, choice.options),
                partial(read, root, choice.rest),
                amount=count * VALUE_SIZE / (1 << 20),
                unit="MiB/s",
                rounds=3 if options.quick else 5,
                peer_name="the same without",
            )
            report(claim, as_json=options.json)


def claims(log: KafkaLog, count: int) -> Iterator[tuple[str, Choice]]:
    """Yield the choices, each with what a reader of the figures calls it."""
    every = {"subscribe": EVENTS}
    offset, time, key = pc.field("offset"), pc.field("timestamp"), pc.field("key")
    late = START_MS + count * 99 // 100
    since = pa.scalar(late, pa.timestamp("ms", "UTC"))
    ends = [state.high_watermark for state in log.describe(EVENTS).partitions]
    first = min(ends) // 100
    last = max(ends) * 99 // 100

    def offsets(bound: int) -> str:
        return json.dumps({EVENTS: {str(n): min(bound, end) for n, end in enumerate(ends)}})

    one, sent = {"keys": '["key-77"]'}, {"partitioner": "murmur2"}
    for name, options, rows in (
        (
            "assign, one partition of four",
            {"assign": json.dumps({EVENTS: [1]})},
            pc.field("partition") == 1,
        ),
        ("startingOffsets, the last 1 %", {"startingOffsets": offsets(last)}, offset >= last),
        ("startingTimestamp, the last 1 %", {"startingTimestamp": str(late)}, time >= since),
        ("endingOffsets, the first 1 %", {"endingOffsets": offsets(first)}, offset < first),
        ("keys, one of 10,000", one, key == b"key-77"),
        ("keys, one of 10,000, and partitioner", one | sent, key == b"key-77"),
    ):
        yield name, Choice(options if "assign" in options else every | options, every, rows)
    view = {"subscribe": TABLE, "view": "latest"}
    ten = [f"key-{number}" for number in range(10)]
    are_ten = pc.is_in(key, pa.array([name.encode() for name in ten], pa.binary()))
    yield (
        f"view=latest, keys, 10 of {count // 4:,}, and partitioner",
        Choice(view | sent | {"keys": json.dumps(ten)}, view, are_ten),
    )


def build(log: KafkaLog, count: int) -> None:
    """Write the topics; the time of a record is its number, in milliseconds."""
    for topic, key_count, policy in ((EVENTS, 10_000, "delete"), (TABLE, count // 4, "compact")):
        log.create_topic(topic, PARTITIONS, {**CONFIG, "cleanup.policy": policy})
        for start in range(0, count, STEP):
            numbers = np.arange(start, start + STEP, dtype=np.int64)
            keys = [b"key-%d" % (number % key_count) for number in numbers.tolist()]
            values = [b"%0100d" % number for number in numbers.tolist()]
            rows = {
                "key": pa.array(keys, pa.binary()),
                "value": pa.array(values, pa.binary()),
                "timestamp": pa.array(START_MS + numbers).cast(pa.timestamp("ms", "UTC")),
            }
            log.append(topic, pa.table(rows), now_ms=START_MS + count)
    log.clean(TABLE, force=True, now_ms=START_MS + count)


def batches(root: Path, options: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """Plan and read."""
    reader = KafkaLogBatchReader(SourceOptions.parse({"path": str(root), **options}), COLUMNS)
    for piece in reader.partitions():
        yield from reader.read(piece)


def read(root: Path, options: Mapping[str, str]) -> int:
    """Read, and return the count of rows that would leave the tasks."""
    return sum(batch.num_rows for batch in batches(root, options))


def check(root: Path, choice: Choice) -> None:
    """End the program if the options choose other rows than they are said to."""
    left = [wanted(root, options, choice.rows) for options in (choice.options, choice.rest)]
    every = read(root, choice.options)
    if left[0] != left[1] or left[0][0] != every or not every:
        raise SystemExit(f"{choice}: {every} rows; left of them {left[0]}, of all {left[1]}")


def wanted(root: Path, options: Mapping[str, str], rows: pc.Expression) -> tuple[int, int]:
    """Return the count of the rows that are wanted, and the sum of their offsets."""
    count = offsets = 0
    for batch in batches(root, options):
        left = pa.Table.from_batches([batch]).filter(rows)
        count += left.num_rows
        offsets += pc.sum(left["offset"]).as_py() or 0
    return count, offsets


if __name__ == "__main__":
    main()
