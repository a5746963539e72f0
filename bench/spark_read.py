"""A batch read by Spark, next to Spark's Kafka connector and the fastest possible Python source.

    python -m bench.spark_read [--json] [--quick] [--path DIR] [--rounds N] [--records N]

The same records (100 bytes: a key of 10, a value of 90, half of it compressible) are read from one
partition and from four, by one task each on two cores, by three ways that take turns in one warm
session: `format("kafkalog")`; `format("kafka")` from a real broker that serves the very same files;
and a Python source whose Arrow batches of the same rows lie ready in mapped memory, which is the
floor: what Spark itself takes for rows that come from Python. Each action touches every column:

    SELECT count(*), sum(length(key)), sum(length(value)), sum(length(topic)), sum(partition),
           sum(offset), sum(unix_micros(timestamp) % 1000003), sum(timestampType)

and has to give the same row all three times, and once a sum of hashes of the whole rows. The order
turns round from round to round. The connector gets what its guide names for throughput: fetches of
up to 16 MiB, a socket buffer of 1 MiB and 10,000 records a poll; the broker is as Kafka's start
scripts run it (bench/broker.py). The floor's batches have 32,768 rows. All that is read stays in
the page cache. With --quick there is one topic. Beside the ratio stands the processor time of Spark
and its workers (the broker's is not in it), which other work on the machine disturbs less.

The first round warms up. The last one is not timed either: it is watched for memory, as watching
takes time: that of this process, Spark's JVM and its Python workers together, without the broker's.
The JVM is one for all; before each way it collects its garbage, and the workers of others are
ended.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
import pyarrow as pa

import kafkalog
from bench import MORE, compare_figures, leave_out, program, report
from bench.mounted import broker_of
from bench.ready_batches import ReadyBatches, write_ready
from bench.spark import connector_fault, driver_pid, session, watched
from tests.conformance import kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOW_MS: Final = 1_700_000_000_000
STEP: Final = 250_000
READY_ROWS: Final = 32_768
SHAPES: Final = [(1, "uncompressed"), (4, "uncompressed"), (1, "lz4"), (4, "lz4")]
"""Partitions and codecs; the last is the quick one."""
FLOOR_TARGETS: Final = {"uncompressed": ">= 0.8", "lz4": ">= 0.7"}
COLUMNS: Final = [
    "count(*)",
    "sum(length(key))",
    "sum(length(value))",
    "sum(length(topic))",
    "sum(partition)",
    "sum(offset)",
    "sum(unix_micros(timestamp) % 1000003)",
    "sum(timestampType)",
]
HASHED: Final = [
    "count(*)",
    "sum(xxhash64(key, value, topic, partition, offset, timestamp, timestampType) % 1000003)",
]
FETCHES: Final = {
    "kafka.max.partition.fetch.bytes": str(16 << 20),
    "kafka.fetch.max.bytes": str(16 << 20),
    "kafka.max.poll.records": "10000",
    "kafka.receive.buffer.bytes": str(1 << 20),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("spark_read", __doc__, quick="fewer records and rounds")
    parser.add_argument("--rounds", type=int, help="counted rounds")
    parser.add_argument("--records", type=int, help="records of each topic")
    options = parser.parse_args(arguments)
    count = options.records or (200_000 if options.quick else 4_000_000)
    shapes = SHAPES[-1:] if options.quick else SHAPES
    rounds = options.rounds or (0 if options.quick else 7)  # 0: one, for time and memory
    with contextlib.ExitStack() as opened:
        scratch = Path(
            opened.enter_context(
                tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path)
            )
        )
        root = scratch / "log"
        topics = {topic_of(*shape): shape[0] for shape in shapes}
        for partitions, codec in shapes:
            fill(root, topic_of(partitions, codec), partitions, codec, count)
        fault = kafka.fault() or connector_fault()
        broker = None
        if fault is None:
            broker = opened.enter_context(broker_of(root, topics, scratch))
        else:
            leave_out("Spark's Kafka connector", fault)
        spark = opened.enter_context(session(scratch, connector=broker is not None))
        spark.dataSource.register(ReadyBatches)
        for partitions, codec in shapes:
            ways = make_ways(spark, scratch, topic_of(partitions, codec), broker)
            found = take_turns(ways, rounds, None if broker is None else broker.pid)
            show(found, count, (partitions, codec), as_json=options.json)


def topic_of(partitions: int, codec: str) -> str:
    """Return the name of a topic."""
    return f"{codec}-{partitions}"


def fill(root: Path, topic: str, partitions: int, codec: str, count: int) -> None:
    """Write a topic of `count` records, as many in each partition."""
    dice = np.random.default_rng(1)
    words = dice.integers(97, 123, size=(4096, 15), dtype=np.uint8)
    with kafkalog.open(root) as log:
        log.create_topic(topic, partitions, {"cleanup.policy": "delete", "compression.type": codec})
        for start in range(0, count, STEP):
            size = min(STEP, count - start)
            numbers = np.arange(start, start + size)
            rows = {
                "key": fixed(digits(dice.integers(0, 1_000_000, size), 10)),
                "value": fixed(words[dice.integers(0, 4096, (size, 6))].reshape(size, 90)),
                "timestamp": pa.array(NOW_MS + numbers),
                "partition": pa.array((numbers % partitions).astype(np.int32)),
            }
            log.append(topic, pa.table(rows), now_ms=NOW_MS + start + size)


def digits(numbers: Any, width: int) -> Any:
    """Return numbers in decimal: uint8 (n, width)."""
    powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    return (48 + numbers[:, None] // powers % 10).astype(np.uint8)


def fixed(values: Any) -> pa.Array:
    """Return a binary column of the rows of uint8 (n, size)."""
    count, size = values.shape
    ends = pa.py_buffer(np.arange(0, (count + 1) * size, size, dtype=np.int32))
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.binary(), count, [None, ends, data])


def make_ways(
    spark: SparkSession, scratch: Path, topic: str, broker: kafka.KafkaBroker | None
) -> dict[str, DataFrame]:
    """Return a DataFrame of a topic by each way."""
    root, ready = scratch / "log", scratch / f"ready-{topic}"
    ready.mkdir()
    with kafkalog.open(root, read_only=True) as log:
        partitions = len(log.offsets(topic))
        for number in range(partitions):
            write_ready(ready / f"{number}.arrow", log.read(topic, number), READY_ROWS)
    # One task a partition everywhere: ours would cut large ones.
    common = {"subscribe": topic, "minPartitions": str(partitions)}
    ours = spark.read.format("kafkalog").options(path=str(root), **common)
    ways = {"ours": ours.load(), "floor": spark.read.format("ready").load(str(ready))}
    if broker is not None:
        address = {"kafka.bootstrap.servers": broker.bootstrap, "startingOffsets": "earliest"}
        ways["connector"] = (
            spark.read.format("kafka").options(**common, **address, **FETCHES).load()
        )
    return ways


@dataclass
class Found:
    """The costs of a way: by round the seconds and the processor time; its peak of memory."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    mib: float = 0.0


def take_turns(ways: dict[str, DataFrame], rounds: int, without: int | None) -> dict[str, Found]:
    """Return what each way took; the memory without that of a process."""
    if len({rows_of(frame, HASHED) for frame in ways.values()}) > 1:
        raise SystemExit("the ways give different rows")
    all_found = {name: Found() for name in ways}
    for turn in range(rounds + 2) if rounds else (1,):
        rows = set()
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            found, frame = all_found[name], ways[name]
            used, started = cpu_seconds(frame.sparkSession), time.perf_counter()
            if turn > rounds:
                with watched(frame.sparkSession, without=without) as peak:
                    rows.add(rows_of(frame, COLUMNS))
                found.mib = peak.mib
            else:
                rows.add(rows_of(frame, COLUMNS))
            if 0 < turn <= max(rounds, 1):
                found.seconds.append(time.perf_counter() - started)
                found.cpu.append(cpu_seconds(frame.sparkSession) - used)
        if len(rows) > 1:
            raise SystemExit(f"the ways give different rows: {rows}")
    return all_found


def cpu_seconds(spark: SparkSession) -> float:
    """Return the processor time that Spark's JVM and all below it have used."""
    total = 0.0
    jvm = psutil.Process(driver_pid(spark))
    for process in [jvm, *jvm.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def rows_of(frame: DataFrame, columns: Sequence[str]) -> tuple[Any, ...]:
    """Return the one row of an aggregate over all rows."""
    return tuple(frame.selectExpr(*columns).collect()[0])


def show(found: dict[str, Found], count: int, shape: tuple[int, str], *, as_json: bool) -> None:
    """Print what was measured of a topic."""
    partitions, codec = shape
    of = "partition" if partitions == 1 else "partitions"
    title = f"Spark batch read, {count:,} records of 100 bytes, {partitions} {of}, {codec}"
    peers = {
        "connector": ("Spark's Kafka connector", ">= 2"),
        "floor": ("a source of ready-made Arrow batches", FLOOR_TARGETS[codec]),
    }
    rates = {name: [count / 1e6 / each for each in way.seconds] for name, way in found.items()}
    for name, (peer_name, target) in peers.items():
        if name in found:
            claim = compare_figures(
                title,
                rates["ours"],
                rates[name],
                unit="million records/s",
                peer_name=peer_name,
                ratio_is=MORE,
                target=target,
                ours_mib=found["ours"].mib,
                peer_mib=found[name].mib,
            )
            used = {side: round(median(found[side].cpu), 2) for side in ("ours", name)}
            told = claim.told(cpu_s=used["ours"], cpu_s_of_the_peer=used[name])
            report(told, as_json=as_json)


if __name__ == "__main__":
    main()
