"""A streaming query that is there to be killed: files of records into a topic, without an end.

`python -m tests.acceptance.killed_query DIR [--checkpoint DIR] [--to-the-end]` reads DIR/source and
writes DIR/log. It must be started in a session of its own: the JVM and its Python workers stay in
that session (the workers' daemon leaves the process group), so all of them can be killed with it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

TOPIC = "killed"
PARTITIONS = 3
FILES_PER_BATCH = 3
LIFETIME_S = 240
"""An orphan ends by itself."""


def start_session(scratch: Path) -> Any:
    """Start Spark as cheaply as it starts."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .appName("killed query")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.local.dir", str(scratch / "local"))
        # Spark 4.3 does not begin again where it died while it wrote its first plan.
        .config("spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart", "false")
        # Few old files in the checkpoint, so that killing meets their removal and compaction too.
        .config("spark.sql.streaming.minBatchesToRetain", "5")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def start_query(session: Any, root: Path, checkpoint: Path, *, to_the_end: bool) -> Any:
    """Start the query; it rolls segments often, and keeps every record."""
    records = (
        session.readStream.schema("key string, value string")
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .json(str(root / "source"))
    )
    writer = (
        records.writeStream.format("kafkalog")
        .option("path", str(root / "log"))
        .option("topic", TOPIC)
        .option("numPartitions", PARTITIONS)
        .option("topic.cleanup.policy", "delete")
        .option("topic.segment.bytes", 40_000)
        .option("checkpointLocation", str(checkpoint))
    )
    return (writer.trigger(availableNow=True) if to_the_end else writer).start()


def main() -> int:
    """Run until killed, until an error, or with `--to-the-end` over all there is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--to-the-end", action="store_true")
    options = parser.parse_args()
    root: Path = options.directory
    session = start_session(root)
    query = start_query(
        session, root, options.checkpoint or root / "checkpoint", to_the_end=options.to_the_end
    )
    is_done = query.awaitTermination(LIFETIME_S)
    return 0 if is_done else 3


if __name__ == "__main__":
    sys.exit(main())
