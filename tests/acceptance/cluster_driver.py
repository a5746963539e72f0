"""The driver of the cluster's jobs, a process of its own: a JSON request a line, an answer a line.

`python -m tests.acceptance.cluster_driver MASTER SCRATCH`; it ends with its standard input. The
methods of `Jobs` are what can be asked for.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.acceptance.cluster import EXECUTOR_MB, MASTER_HOST, SLOTS, SMALL_JVM, WORKER_HOSTS
from tests.acceptance.cluster_straggler import SCHEMA, straggling

NEVER = "1000"
_SPECULATION_MULTIPLIER = "spark.speculation.multiplier"


def start_session(master: str, scratch: Path) -> Any:
    """Start Spark on the cluster; tasks wait until both workers have given their slots."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(master)
        .appName("kafkalog on a cluster")
        .config("spark.driver.host", MASTER_HOST)
        .config("spark.driver.bindAddress", MASTER_HOST)
        .config("spark.driver.memory", "512m")
        .config("spark.driver.extraJavaOptions", SMALL_JVM)
        .config("spark.executor.memory", f"{EXECUTOR_MB}m")
        .config("spark.executor.cores", SLOTS)
        .config("spark.executor.extraJavaOptions", SMALL_JVM)
        .config("spark.cores.max", SLOTS * len(WORKER_HOSTS))
        .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
        .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "120s")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.local.dir", str(scratch / "local"))
        # Spark 4.3 does not begin again where it died while it wrote its first plan.
        .config("spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart", "false")
        # A copy of each task that takes much longer than others, on the other host. Not of one that
        # waits for its Python: a new executor's would be killed by the copy's success, each time.
        .config("spark.speculation", "true")
        .config("spark.speculation.interval", "100ms")
        .config("spark.speculation.quantile", "0.5")
        .config("spark.speculation.minTaskRuntime", "1s")
        .config(_SPECULATION_MULTIPLIER, NEVER)
        .config("spark.speculation.efficiency.enabled", "false")
        # Large values in small batches: the executors are small.
        .config("spark.sql.execution.arrow.maxBytesPerBatch", "4mb")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


class Jobs:
    """What the driver is asked to do."""

    def __init__(self, session: Any, scratch: Path) -> None:
        self.session = session
        self.scratch = scratch
        self.query: Any = None

    def write(
        self, log: str, topic: str, rows: int, version: int, store: Mapping[str, str] = {}
    ) -> None:
        """Write rows in four tasks, once for each version; `store` are options of a store."""
        (
            self.session.range(0, rows, 1, 4)
            .selectExpr("concat('key-', id % 97) AS key", "cast(id AS string) AS value")
            .write.format("kafkalog")
            .mode("append")
            .option("topic", topic)
            .option("numPartitions", 3)
            .option("topic.cleanup.policy", "compact")
            .option("txnAppId", "cluster")
            .option("txnVersion", version)
            .options(**store)
            .save(log)
        )

    def read(
        self, log: str, topic: str, view: str, store: Mapping[str, str] = {}
    ) -> list[list[str]]:
        """Read all keys and values; returns them sorted."""
        rows = (
            self.session.read.format("kafkalog")
            .option("subscribe", topic)
            .option("view", view)
            .options(**store)
            .load(log)
            .selectExpr("string(key)", "string(value)")
        )
        return sorted([row[0], row[1]] for row in rows.collect())

    def stream(
        self,
        log: str,
        source: str,
        topic: str,
        limit: int | None,
        meeting: str,
        store: Mapping[str, str] = {},
    ) -> None:
        """Copy a topic to another one, without an end; a `meeting` makes stragglers of tasks."""
        reader = self.session.readStream.format("kafkalog").option("subscribe", source)
        if limit is not None:
            reader = reader.option("maxOffsetsPerTrigger", limit)
        rows = reader.option("startingOffsets", "earliest").options(**store).load(log)
        if meeting:
            slow = straggling(Path(meeting), Path(log) / f"{topic}-0")
            rows = rows.select("key", "value", "partition").mapInArrow(slow, SCHEMA)
        self.query = (
            rows.writeStream.format("kafkalog")
            .option("path", log)
            .option("topic", topic)
            .option("numPartitions", 3)
            .option("topic.cleanup.policy", "delete")
            .option("checkpointLocation", str(self.scratch / topic))
            .options(**store)
            .start()
        )

    def copy_tasks(self, beyond: str) -> None:
        """Have Spark run a copy of each task that takes so many times longer than others."""
        # Spark has no public way to change it while it runs; each stage looks at it anew.
        self.session.sparkContext._jsc.sc().conf().set(_SPECULATION_MULTIPLIER, beyond)

    def drain(self) -> None:
        """Wait until the stream has processed all there is, and stop it."""
        self.query.processAllAvailable()
        self.query.stop()

    def executors(self) -> dict[str, dict[str, Any]]:
        """Return what Spark knows of its executors, by id, the dead ones too."""
        found = self.session.sparkContext._jsc.sc().statusStore().executorList(False)
        executors = [found.apply(number) for number in range(found.size())]
        return {
            each.id(): {
                "host": each.hostPort().partition(":")[0],
                "is_active": each.isActive(),
                "tasks": each.completedTasks(),
            }
            for each in executors
            if each.id() != "driver"
        }


def main() -> int:
    """Answer requests until there are no more."""
    master, scratch = sys.argv[1], Path(sys.argv[2])
    jobs = Jobs(start_session(master, scratch), scratch)
    print(json.dumps({"answer": "ready"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": getattr(jobs, request.pop("do"))(**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
