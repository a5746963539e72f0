"""How long a small micro-batch takes from a source to a sink.

    python -m bench.latency [--json] [--quick] [--path DIR] [--rounds N]

A micro-batch is 1,000 records of 100 bytes, copied from one topic of one partition to another by
Spark: by our source and sink; by Spark's Kafka source and sink on a broker as Kafka's start scripts
run it (bench/broker.py; the client's defaults, as they make each of these micro-batches as quick as
it can be: no linger; acks=all); and by a Python source and sink that do nothing (bench/floor.py).
The time is Spark's own `triggerExecution` of each micro-batch: finding the offsets, planning,
writing the checkpoint (on the same local disk for all), running the tasks, committing. Our sink
also syncs what it writes, and the plan in the checkpoint; Kafka's broker syncs nothing.

The three take turns, the first of one round being the last of the next: a round is a run of each
query, which goes on from its checkpoint; the first round, and the first micro-batches of each run,
in which Spark starts its processes, do not count. The ratio is the median of the rounds' ratios of
their medians (p50); the 99th percentiles are of all micro-batches that count. Each micro-batch must
have had its 1,000 records, and the target topics must have the very records of the source topics in
the end.

The memory is that of this process, Spark's JVM and its Python workers together, without the
broker's, while a query runs in a round of its own after the others: watching takes time. The JVM
is one for all three; before each it collects its garbage, and the workers of others are ended.
"""

from __future__ import annotations

import statistics
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

import kafkalog
from bench import LESS, Claim, compare_figures, leave_out, program, report
from bench.broker import full_size
from bench.floor import FORMAT, Floor
from bench.spark import connector_fault, session, watched
from tests.conformance import kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

RECORDS: Final = 1_000
"""Of a micro-batch."""
KEY_SIZE: Final = 10
VALUE_SIZE: Final = 90
LIMIT: Final = "maxOffsetsPerTrigger"
CONTENT: Final = ["count(*)", "sum(xxhash64(key, value) % 1000003)"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("latency", __doc__, quick="few micro-batches")
    parser.add_argument("--rounds", type=int, help="runs of each query that count")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (0 if options.quick else 8)  # 0: one, for time and memory
    batches, warm_up = (2, 1) if options.quick else (25, 5)
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        for claim in measure(Path(scratch), rounds, batches, warm_up):
            report(claim, as_json=options.json)


def measure(scratch: Path, rounds: int, batches: int, warm_up: int) -> list[Claim]:
    """Run the queries in turn, each time `batches` that count and before them a few that do not."""
    fault = connector_fault() or kafka.fault()
    with ExitStack() as opened:
        running = None
        if fault is None:
            running = opened.enter_context(full_size(scratch / "broker"))
        spark = opened.enter_context(session(scratch, connector=fault is None))
        spark.dataSource.register(Floor)
        queries: dict[str, Query] = {
            "ours": OurQuery(spark, scratch / "our-checkpoint", str(scratch / "log")),
            "floor": FloorQuery(spark, scratch),
        }
        if running is not None:
            queries["kafka"] = KafkaQuery(spark, scratch, running)
        found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in queries}
        mib = {}
        for turn in range(rounds + 2) if rounds else (1,):
            for name in list(queries)[:: -1 if turn % 2 else 1]:
                query = queries[name]
                query.feed(batches + warm_up)
                if turn <= rounds:
                    took = query.run(batches + warm_up)[warm_up:]
                    found[name] += [took] if turn else []
                    continue
                with watched(spark, without=None if running is None else running.pid) as peak:
                    took = query.run(batches + warm_up)[warm_up:]
                mib[name] = peak.mib
                found[name] = found[name] or [took]
        for query in queries.values():
            query.check()
    if fault is not None:
        leave_out("Spark's Kafka source and sink", fault)
    return claims(found, mib)


def claims(found: dict[str, list[list[dict[str, float]]]], mib: Mapping[str, float]) -> list[Claim]:
    """Return what the micro-batches took; their parts as medians."""
    peers = {
        "floor": ("an empty Python source and sink", "<= 1.12"),
        "kafka": ("Spark's Kafka source and sink on a broker", ""),
    }
    medians = {name: [_p50(run) for run in runs] for name, runs in found.items()}
    made = []
    for peer, (peer_name, target) in peers.items():
        if peer not in found:
            continue
        ours, theirs = ([each for run in found[name] for each in run] for name in ("ours", peer))
        p50 = compare_figures(
            f"micro-batch of {RECORDS:,} records, p50 of {len(ours)}",
            medians["ours"],
            medians[peer],
            unit="ms",
            peer_name=peer_name,
            ratio_is=LESS,
            target=target,
            ours_mib=mib["ours"],
            peer_mib=mib[peer],
        )
        made.append(
            p50.told(
                ours_p99=_percentile(ours, 0.99),
                peer_p99=_percentile(theirs, 0.99),
                ours_parts=_parts(ours),
                peer_parts=_parts(theirs),
            )
        )
    return made


class Query(ABC):
    """A streaming query that copies what it is fed, in micro-batches of 1,000 records."""

    records = RECORDS
    """Of a micro-batch, as Spark counts them."""

    def __init__(self, spark: SparkSession, checkpoint: Path) -> None:
        self.spark = spark
        self.checkpoint = checkpoint
        self.fed = 0
        """Micro-batches."""

    @abstractmethod
    def feed(self, batches: int) -> None:
        """Give the source that many micro-batches more."""

    @abstractmethod
    def start(self) -> StreamingQuery:
        """Start the query, from its checkpoint if there is one."""

    @abstractmethod
    def content(self, topic: str) -> DataFrame | None:
        """Return the records of a topic; None without the topic."""

    def run(self, batches: int) -> list[dict[str, float]]:
        """Run the query until it has all; return Spark's times in ms of its micro-batches.

        Ends the program if they are not `batches`, each of all its records.
        """
        query = self.start()
        try:
            query.processAllAvailable()
            progress: list[Any] = list(query.recentProgress)
        finally:
            query.stop()
        done = [each for each in progress if "addBatch" in each["durationMs"]]
        sizes = [each["numInputRows"] for each in done]
        if sizes != [self.records] * batches:
            raise SystemExit(f"wrong: expected {batches} of {self.records} rows, found {sizes}")
        return [dict(each["durationMs"]) for each in done]

    def check(self) -> None:
        """End the program unless the target has what the source has."""
        source, target = (
            None if frame is None else tuple(frame.selectExpr(*CONTENT).collect()[0])
            for frame in map(self.content, ("source", "target"))
        )
        if source != target or (source is not None and source[0] != self.fed * RECORDS):
            raise SystemExit(f"wrong: {self.fed * RECORDS} records fed, {source} became {target}")


class OurQuery(Query):
    """From our source to our sink."""

    def __init__(
        self,
        spark: SparkSession,
        checkpoint: Path,
        path: str,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """`options` are those named `store.*`, of a log in an object store."""
        super().__init__(spark, checkpoint)
        self.place = {"path": path, **(options or {})}
        self.log = kafkalog.open(path, options=options)
        for topic in ("source", "target"):
            self.log.create_topic(topic, config={"cleanup.policy": "delete"})

    def feed(self, batches: int) -> None:
        """Append to the log."""
        self.log.append("source", rows(self.fed, batches))
        self.fed += batches

    def start(self) -> StreamingQuery:
        """Start the query."""
        source = self.spark.readStream.format("kafkalog").options(**self.place)
        source = source.option("subscribe", "source").option("startingOffsets", "earliest")
        frame = source.option(LIMIT, RECORDS).load().select("key", "value")
        sink = frame.writeStream.format("kafkalog").options(**self.place)
        sink = sink.option("topic", "target").option("checkpointLocation", str(self.checkpoint))
        return sink.start()

    def content(self, topic: str) -> DataFrame:
        """Read the topic."""
        reader = self.spark.read.format("kafkalog").options(**self.place)
        return reader.option("subscribe", topic).load()

    def check(self) -> None:
        """Compare, and close the log."""
        super().check()
        self.log.close()


class FloorQuery(Query):
    """From nothing to nothing."""

    records = 0

    def __init__(self, spark: SparkSession, scratch: Path) -> None:
        super().__init__(spark, scratch / "floor-checkpoint")

    def feed(self, batches: int) -> None:
        """Let the source have more offsets."""
        self.fed += batches

    def start(self) -> StreamingQuery:
        """Start the query."""
        frame = self.spark.readStream.format(FORMAT).option("microBatches", self.fed).load()
        sink = frame.writeStream.format(FORMAT)
        return sink.option("checkpointLocation", str(self.checkpoint)).start()

    def content(self, topic: str) -> None:
        """There are no topics."""


class KafkaQuery(Query):
    """From a broker to the same broker."""

    def __init__(self, spark: SparkSession, scratch: Path, running: kafka.KafkaBroker) -> None:
        super().__init__(spark, scratch / "kafka-checkpoint")
        self.broker = running
        for topic in ("source", "target"):
            running.create_topic(topic)

    def feed(self, batches: int) -> None:
        """Send to the broker."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.broker.bootstrap, "linger.ms": 50})
        columns = rows(self.fed, batches)
        keys, values = (columns[name].to_pylist() for name in ("key", "value"))
        for key, value in zip(keys, values, strict=True):
            producer.produce("source", value, key)
            producer.poll(0)
        producer.flush()
        self.fed += batches

    def start(self) -> StreamingQuery:
        """Start the query."""
        server = ("kafka.bootstrap.servers", self.broker.bootstrap)
        source = self.spark.readStream.format("kafka").option(*server)
        source = source.option("subscribe", "source").option("startingOffsets", "earliest")
        frame = source.option(LIMIT, RECORDS).load().select("key", "value")
        sink = frame.writeStream.format("kafka").option(*server).option("topic", "target")
        return sink.option("checkpointLocation", str(self.checkpoint)).start()

    def content(self, topic: str) -> DataFrame:
        """Read the topic."""
        reader = self.spark.read.format("kafka").option("subscribe", topic)
        return reader.option("kafka.bootstrap.servers", self.broker.bootstrap).load()


def rows(first: int, batches: int) -> pa.Table:
    """Return the records of so many micro-batches, from that one on: no two are the same."""
    numbers = range(first * RECORDS, (first + batches) * RECORDS)
    return pa.table(
        {
            "key": pa.array([b"%0*d" % (KEY_SIZE, number) for number in numbers], pa.binary()),
            "value": pa.array([b"x" * VALUE_SIZE] * len(numbers), pa.binary()),
        }
    )


def _p50(run: Sequence[dict[str, float]]) -> float:
    return statistics.median(each["triggerExecution"] for each in run)


def _percentile(run: Sequence[dict[str, float]], share: float) -> float:
    ordered = sorted(each["triggerExecution"] for each in run)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _parts(run: Sequence[dict[str, float]]) -> str:
    names = ("latestOffset", "walCommit", "queryPlanning", "addBatch", "commitOffsets")
    part: Callable[[str], float] = lambda name: statistics.median(  # noqa: E731 - short
        each.get(name, 0) for each in run
    )
    return ", ".join(f"{name} {part(name):.0f}" for name in names)


if __name__ == "__main__":
    main()
