"""Three streaming queries that are there to be killed: into a log, and out of it into tables.

`python -m tests.acceptance.killed_upserts DIR CONNINFO|delta [--to-the-end]` reads the files of
DIR/source. One query copies their records into the topic `SINK`; one counts them by key, in update
mode, and appends the counts to the topic `COUNTS`; one brings each topic into a table of
PostgreSQL and one of DIR/tables.db, or into one of Delta Lake below DIR/delta. A query that fails
is started again, as a supervisor would.

The executor is a JVM of its own. All processes stay in the session of this one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests import delta_spark

SINK, COUNTS = "sink", "counts"
FILES_PER_BATCH = 2
INTERVAL = "2 seconds"
"""How often the log is written to; without a pause there is little CPU left for the tables."""
LIFETIME_S = 900
"""An orphan ends by itself."""
SMALL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def start_session(scratch: Path) -> Any:
    """Start Spark with one executor, which is killed and replaced."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local-cluster[1,2,512]")
    builder = builder.config(map={**delta_spark.settings()})
    session = (
        builder.appName("killed upserts")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.driver.extraJavaOptions", SMALL_JVM)
        .config("spark.executor.memory", "512m")
        .config("spark.executor.extraJavaOptions", SMALL_JVM)
        .config("spark.deploy.maxExecutorRetries", "-1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.local.dir", str(scratch / "local"))
        # Spark 4.3 does not begin again where it died while it wrote its first plan.
        .config("spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart", "false")
        # Few old files in the checkpoint, so that killing meets their removal and compaction too.
        .config("spark.sql.streaming.minBatchesToRetain", "5")
        .config("spark.sql.streaming.stopTimeout", "60s")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


class Queries:
    """The three queries; each method starts one."""

    def __init__(self, session: Any, root: Path, target: str, *, to_the_end: bool) -> None:
        self.session = session
        self.root = root
        self.target = target
        self.to_the_end = to_the_end

    def sink(self) -> Any:
        """Copy the records into a topic."""
        writer = self._records().writeStream.format("kafkalog").option("topic", SINK)
        writer = self._paced(writer.option("path", str(self.root / "log")))
        return self._start(writer, SINK)

    def counts(self) -> Any:
        """Append the count of each key that a micro-batch has changed."""
        from kafkalog.sink import Append

        counts = self._records().groupBy("key").count()
        frame = counts.selectExpr("key", "string(count) AS value")
        writer = frame.writeStream.outputMode("update")
        writer = self._paced(writer.foreachBatch(Append(self.root / "log", COUNTS)))
        return self._start(writer, COUNTS)

    def upserts(self) -> Any:
        """Bring each topic into its tables, PostgreSQL's by way of the driver and of tasks."""
        from kafkalog.sink.upsert.postgres import upsert as postgres

        upserts = [(topic, upsert) for topic in (SINK, COUNTS) for upsert in self._targets(topic)]

        def apply(frame: Any, batch_id: int) -> None:
            postgres._SMALL = 20_000 if batch_id % 2 else 0
            for topic, upsert in upserts if batch_id % 4 < 2 else reversed(upserts):
                upsert(frame.where(frame.topic == topic), batch_id)

        frame = (
            self.session.readStream.format("kafkalog")
            .option("subscribe", f"{SINK},{COUNTS}")
            .option("startingOffsets", "earliest")
            .load(str(self.root / "log"))
        )
        return self._start(frame.writeStream.foreachBatch(apply), "upserts")

    def _targets(self, topic: str) -> list[Any]:
        from kafkalog.sink.upsert import DeltaUpsert, PostgresUpsert, SQLiteUpsert

        table = f"{topic}_table"
        if self.target == "delta":
            return [DeltaUpsert(self.root / "delta" / table, key_type="string")]
        return [
            PostgresUpsert(self.target, table, key_type="string"),
            SQLiteUpsert(self.root / "tables.db", table, key_type="string"),
        ]

    def _records(self) -> Any:
        reader = self.session.readStream.schema("key string, value string")
        if not self.to_the_end:
            reader = reader.option("maxFilesPerTrigger", FILES_PER_BATCH)
        return reader.json(str(self.root / "source"))

    def _paced(self, writer: Any) -> Any:
        return writer if self.to_the_end else writer.trigger(processingTime=INTERVAL)

    def _start(self, writer: Any, name: str) -> Any:
        writer = writer.option("checkpointLocation", str(self.root / "checkpoints" / name))
        return (writer.trigger(availableNow=True) if self.to_the_end else writer).start()


def supervise(starts: Mapping[str, Callable[[], Any]], lifetime_s: float) -> None:
    """Keep the queries running: one that has failed begins again from its checkpoint.

    Returns after `lifetime_s`, or when the process that started this one is gone.
    """
    deadline, parent = time.monotonic() + lifetime_s, os.getppid()
    running: dict[str, Any] = {}
    while time.monotonic() < deadline and os.getppid() == parent:
        for name, start in starts.items():
            query = running.get(name)
            if query is None or not query.isActive:
                if query is not None:
                    lines = str(query.exception()).strip().splitlines() or ["?"]
                    print(f"FAILED {name}: {lines[0][:300]} ... {lines[-1][:300]}", flush=True)
                running[name] = start()
        time.sleep(0.1)


def main() -> int:
    """Run until killed, or with `--to-the-end` over all there is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("target")
    parser.add_argument("--to-the-end", action="store_true")
    options = parser.parse_args()
    root: Path = options.directory
    session = start_session(root)
    queries = Queries(session, root, options.target, to_the_end=options.to_the_end)
    if not options.to_the_end:
        starts = {SINK: queries.sink, COUNTS: queries.counts, "upserts": queries.upserts}
        supervise(starts, LIFETIME_S)
        return 3
    for query in (queries.sink(), queries.counts()):
        query.awaitTermination()
    queries.upserts().awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
