"""How fast Spark writes rows of 100 bytes.

    python -m bench.spark_write [--json] [--quick] [--path DIR] [--rounds N]

Rows of a key of 10 and a value of 90 bytes (text as of JSON, a sixth of it random), from
`spark.range` and cached, so that they cost the same and little, are written by `df.write`: by our
sink, by Spark's Kafka sink to a broker of its own on the loopback, and by a Python sink that only
counts (bench/floor.py). A stream writes large micro-batches of such rows, which Spark makes from
the numbers in small files; the time is Spark's own `triggerExecution`, so listing those files, some
hundredths of a second, is in it for all. Topics are new in each round; all take turns, the first of
one round being the last of the next, and the disk is given time (`sync`) between them. Spark has
two task slots.

The broker is as Kafka's start scripts run it (bench/broker.py). The connector writes to it twice.
One topic is as by default, and the broker leaves its writes to the page cache. The other has
`flush.messages=1`: the broker syncs each batch before it acknowledges it, so what is acknowledged
is durable, as ours is. The producer: acks=all, as is the default; linger.ms=5, the default since
Kafka 4.0, and batch.size=262144, sixteen times the default, as a producer of much data has it
(other settings have not been tried). Our log is synced, and a staged file if it becomes a segment.
After each write the topic is read, and has to have as many rows as were written, of the same sum of
hashes; of the sink that only counts it is the count.

The first round warms up. The last one is not timed either: it is watched for memory, as watching
takes time: that of this process, Spark's JVM and its Python workers together during a write,
without the broker's. The JVM is one for all; before each write it collects its garbage, and the
workers of others are ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import kafkalog
from bench import MORE, Claim, compare_figures, leave_out, program, report
from bench.broker import full_size
from bench.floor import FORMAT, Floor, counted_rows
from bench.spark import KEY, VALUE, connector_fault, session, watched
from bench.spark_read import FETCHES
from tests.conformance import kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OURS: Final = "kafkalog"
FLOOR: Final = "a Python sink that only counts"
CONNECTOR: Final = "Spark's Kafka connector to a broker that does not sync"
SYNCED: Final = "Spark's Kafka connector to a broker that syncs as we do"
BATCH_TARGETS: Final = {FLOOR: ">= 0.75", SYNCED: ">= 2", CONNECTOR: ">= 1.5"}
STREAM_TARGETS: Final = {FLOOR: ">= 0.85", SYNCED: ">= 1", CONNECTOR: ">= 1"}
BROKERS: Final[dict[str, dict[str, str]]] = {CONNECTOR: {}, SYNCED: {"flush.messages": "1"}}
"""The connector's peers, with the configs of their topics."""
PRODUCER: Final = {"kafka.linger.ms": "5", "kafka.batch.size": "262144"}

CONTENT: Final = ["count(*)", "sum(xxhash64(key, value) % 1000003)"]
CASES: Final = [(partitions, codec) for partitions in (1, 4) for codec in ("none", "lz4")]
TASKS: Final = 4
"""Of a micro-batch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("spark_write", __doc__, quick="few rows")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    options = parser.parse_args(arguments)
    rows = 50_000 if options.quick else 1_000_000
    rounds = options.rounds or (0 if options.quick else 4)  # 0: one, for time and memory
    fault = connector_fault() or kafka.fault()
    with ExitStack() as opened:
        name = TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path)
        scratch = Path(opened.enter_context(name))
        running = None
        if fault is None:
            running = opened.enter_context(full_size(scratch / "broker"))
        # A task for each of a micro-batch's files, however small.
        conf = {"spark.sql.files.minPartitionNum": str(TASKS)}
        spark = opened.enter_context(session(scratch, connector=fault is None, conf=conf))
        spark.dataSource.register(Floor)
        writes = Writes(spark, scratch, running)
        for partitions, codec in CASES[-1:] if options.quick else CASES:
            for claim in batch(writes, rows, partitions, codec, rounds):
                report(claim, as_json=options.json)
        for claim in stream(writes, rows // 2, 2 if options.quick else 4, rounds):
            report(claim, as_json=options.json)
    if fault is not None:
        leave_out("Spark's Kafka connector", fault)


class Writes:
    """The formats that are written to, with topics of their own for each write."""

    def __init__(
        self, spark: SparkSession, scratch: Path, running: kafka.KafkaBroker | None
    ) -> None:
        self.spark = spark
        self.scratch = scratch
        self.log = kafkalog.open(scratch / "log")
        self.broker = running
        self.peers = [FLOOR, *BROKERS] if running is not None else [FLOOR]
        self._number = 0

    def new_topic(self, name: str, partitions: int) -> str:
        """Create a topic for the writer of that name, and return it."""
        self._number += 1
        topic = f"t{self._number}"
        if name in BROKERS:
            assert self.broker is not None
            self.broker.create_topic(topic, partitions, BROKERS[name])
        elif name == FLOOR:
            (self.scratch / topic).mkdir()
        else:
            self.log.create_topic(topic, partitions, {"cleanup.policy": "delete"})
        return topic

    def options(self, name: str, topic: str, codec: str) -> tuple[str, dict[str, str]]:
        """Return the format and the options by which the writer of that name is called."""
        if name == FLOOR:
            return FORMAT, {"counted": str(self.scratch / topic)}
        more = {"topic": topic, "kafka.compression.type": codec}
        if name in BROKERS:
            return "kafka", {**more, **self._server(), **PRODUCER}
        return "kafkalog", {**more, "path": str(self.log.root)}

    def check(self, name: str, topic: str, expected: tuple[int, int]) -> None:
        """End the program unless a topic has what was written, its `content`; delete it."""
        if name == FLOOR:
            found = (counted_rows(self.scratch / topic), expected[1])
        elif name in BROKERS:
            assert self.broker is not None
            reader = self.spark.read.format("kafka").options(**self._server(), **FETCHES)
            found = content(reader.option("subscribe", topic).load())
            for future in self.broker.admin.delete_topics([topic]).values():
                future.result(30)
        else:
            reader = self.spark.read.format("kafkalog").option("path", str(self.log.root))
            found = content(reader.option("subscribe", topic).load())
            self.log.delete_topic(topic)
        if found != expected:
            raise SystemExit(f"wrong: {name}: expected {expected}, found {found}")

    def _server(self) -> dict[str, str]:
        assert self.broker is not None
        return {"kafka.bootstrap.servers": self.broker.bootstrap}


def content(frame: DataFrame) -> tuple[int, int]:
    """Return how many rows there are, and the sum of their hashes."""
    count, hashes = frame.selectExpr(*CONTENT).collect()[0]
    return count, hashes


def batch(writes: Writes, rows: int, partitions: int, codec: str, rounds: int) -> list[Claim]:
    """Write a cached frame of so many partitions to topics of as many."""
    frame = _frame(writes.spark.range(0, rows, 1, partitions), "id").cache()
    expected = content(frame)

    def write(name: str, topic: str) -> float:
        format_, options = writes.options(name, topic, codec)
        started = time.perf_counter()
        frame.write.format(format_).options(**options).mode("append").save()
        return rows / (time.perf_counter() - started) / 1e6

    found = _take_turns(writes, write, expected, partitions, rounds)
    frame.unpersist(blocking=True)
    what = f"df.write of {rows:,} rows, {_case(partitions, codec)}"
    return _claims(what, found, BATCH_TARGETS)


def stream(writes: Writes, rows: int, count: int, rounds: int) -> list[Claim]:
    """Write micro-batches of so many rows, of 4 tasks; each round is a query of `count`.

    The first one of a query, in which Spark starts its processes, does not count. The source has an
    end, so a query that has written everything can be stopped while it does nothing.
    """
    starts, size = writes.scratch / "starts", rows // TASKS
    starts.mkdir()
    for number in range(count * TASKS):
        (starts / str(number)).write_text(str(number * size))
    source = writes.spark.readStream.format("text").option("maxFilesPerTrigger", TASKS)
    first = "cast(value as bigint)"
    numbers = f"explode(sequence({first}, {first} + {size - 1})) as number"
    frame = _frame(source.load(str(starts)).selectExpr(numbers), "number")

    def write(name: str, topic: str) -> float:
        format_, options = writes.options(name, topic, "none")
        checkpoint = str(writes.scratch / f"checkpoint-{topic}")
        query = frame.writeStream.format(format_).options(**options)
        running = query.option("checkpointLocation", checkpoint).start()
        try:
            running.processAllAvailable()
            progress: list[Any] = list(running.recentProgress)
        finally:
            running.stop()
        done = [each["durationMs"] for each in progress if each["numInputRows"]]
        if len(done) != count:
            raise SystemExit(f"wrong: {name}: {len(done)} micro-batches of {count}")
        took = [each["triggerExecution"] / 1000 for each in done[1:]]
        return rows * len(took) / float(sum(took)) / 1e6

    expected = content(_frame(writes.spark.range(rows * count), "id"))
    found = _take_turns(writes, write, expected, 4, rounds)
    what = f"writeStream, {rows:,} rows a micro-batch, {_case(4, 'none')}"
    return _claims(what, found, STREAM_TARGETS)


@dataclass
class Found:
    """The result of a writer: its rates by round, and the most memory that Spark had resident."""

    rates: list[float] = field(default_factory=list)
    mib: float = 0.0


def _take_turns(
    writes: Writes,
    write: Callable[[str, str], float],
    expected: tuple[int, int],
    partitions: int,
    rounds: int,
) -> dict[str, Found]:
    """Let all write in turn; return what they did, of the last round the memory alone."""
    all_found = {name: Found() for name in (OURS, *writes.peers)}
    without = None if writes.broker is None else writes.broker.pid
    for turn in range(rounds + 2) if rounds else (1,):
        for name in list(all_found)[:: -1 if turn % 2 else 1]:
            found, topic = all_found[name], writes.new_topic(name, partitions)
            os.sync()  # nobody waits for what another one has left to write
            if turn <= rounds:
                rate = write(name, topic)
                found.rates += [rate] if turn else []
            else:
                with watched(writes.spark, without=without) as peak:
                    rate = write(name, topic)
                found.mib = peak.mib
                found.rates = found.rates or [rate]
            writes.check(name, topic, expected)
    return all_found


def _claims(claim: str, found: dict[str, Found], targets: dict[str, str]) -> list[Claim]:
    return [
        compare_figures(
            claim,
            found[OURS].rates,
            found[peer].rates,
            unit="million rows/s",
            peer_name=peer,
            ratio_is=MORE,
            target=target,
            ours_mib=found[OURS].mib,
            peer_mib=found[peer].mib,
        )
        for peer, target in targets.items()
        if peer in found
    ]


def _frame(source: DataFrame, number: str) -> DataFrame:
    return source.selectExpr(KEY.format(number), VALUE.format(number))


def _case(partitions: int, codec: str) -> str:
    words = "uncompressed" if codec == "none" else codec
    return f"{partitions} partition{'s' if partitions > 1 else ''}, {words}"


if __name__ == "__main__":
    main()
