"""How fast Spark writes and reads a log in an object store, in batches.

    python -m bench.store_throughput [--json] [--quick] [--path DIR] [--rounds N]

Cached rows of 100 bytes (bench/spark_write.py) are written by `df.write` into a new topic of four
partitions, and read by an aggregate over each column that was written. The log is in an object
store (versitygw on the loopback, on the same disk); the peer is the same on a log directory. The
two take turns. What is read must be what was written: as many rows, of the same sum of hashes. The
directory is synced, the server's objects are not. All that is read stays in the page cache.

The first round warms up. The last one is not timed: it is watched for memory, that of this process,
Spark's JVM and its Python workers together, without the server's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import kafkalog
from bench import LESS, compare_figures, leave_out, program, report
from bench.spark import KEY, VALUE, session, watched
from bench.spark_write import content
from bench.stored import StoreServer, fault, options_at, url_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from kafkalog.log import KafkaLog

PARTITIONS: Final = 4
ACTS: Final = ("write", "read")


@dataclass
class Place:
    """A log, as Spark's options name it, and what its acts took."""

    log: KafkaLog
    options: dict[str, str]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {act: [] for act in ACTS})
    mib: dict[str, float] = field(default_factory=dict)

    def do(self, act: str, frame: DataFrame, topic: str) -> tuple[int, int] | None:
        """Write a frame into a new topic; or read it, and return its `content`."""
        if act == "write":
            self.log.create_topic(topic, PARTITIONS, {"cleanup.policy": "delete"})
            writer = frame.write.format("kafkalog").options(**self.options, topic=topic)
            writer.mode("append").save()
            return None
        reader = frame.sparkSession.read.format("kafkalog").options(**self.options)
        return content(reader.option("subscribe", topic).load())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("store_throughput", __doc__, quick="few rows")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    options = parser.parse_args(arguments)
    if reason := fault():
        leave_out("an object store", reason)
        return
    rows = 50_000 if options.quick else 1_000_000
    rounds = options.rounds or (0 if options.quick else 4)  # 0: one, for time and memory
    with ExitStack() as opened:
        name = tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path)
        scratch = Path(opened.enter_context(name))
        spark = opened.enter_context(session(scratch))
        server = opened.enter_context(StoreServer(scratch))
        url, of_store, directory = url_of("log"), options_at(server.port), str(scratch / "log")
        ours = Place(kafkalog.open(url, options=of_store), {"path": url, **of_store})
        peer = Place(kafkalog.open(directory), {"path": directory})
        key, value = (each.format("id") for each in (KEY, VALUE))
        frame = spark.range(0, rows, 1, PARTITIONS).selectExpr(key, value).cache()
        expected = content(frame)
        for turn in range(rounds + 2) if rounds else (1,):
            topic, sides = f"t{turn}", [ours, peer][:: -1 if turn % 2 else 1]
            for act in ACTS:
                for side in sides:
                    started = time.perf_counter()
                    if rounds and turn > rounds:
                        with watched(spark, without=server.pid) as peak:
                            found = side.do(act, frame, topic)
                        side.mib[act] = peak.mib
                    else:
                        found = side.do(act, frame, topic)
                        side.seconds[act] += [time.perf_counter() - started] if turn else []
                    if act == "read" and found != expected:
                        raise SystemExit(f"wrong: {side.options}: {found}, expected {expected}")
            for side in sides:
                side.log.delete_topic(topic)
            os.sync()
    for act in ACTS:
        claim = compare_figures(
            f"Spark batch {act}, {rows:,} records of 100 bytes, {PARTITIONS} partitions",
            ours.seconds[act],
            peer.seconds[act],
            unit="s",
            peer_name="the same on a log directory",
            ratio_is=LESS,
            target="<= 1.5",
            ours_mib=ours.mib.get(act),
            peer_mib=peer.mib.get(act),
        )
        report(claim, as_json=options.json)


if __name__ == "__main__":
    main()
