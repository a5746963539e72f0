"""A job with names, for any session: `python -m tests.spark.connect.moving REMOTE DIRECTORY`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from kafkalog.sink import Append
from kafkalog.sink.upsert import SQLiteUpsert
from tests.spark.connect.cells import SETTINGS, patiently

__all__ = ["copy_and_keep"]


def copy_and_keep(spark: Any, root: Path, append_name: str = "") -> None:
    """Bring a copy of the topic `t`, and a table, to the end of the log."""
    reader = spark.readStream.format("kafkalog").option("path", str(root / "log"))
    frame = reader.option("subscribe", "t").option("startingOffsets", "earliest").load()
    for name, sink in (
        ("copy", Append(root / "log", "copy", name=append_name)),
        ("table", SQLiteUpsert(root / "t.db", "t", key_type="string", name="table")),
    ):
        writer = frame.writeStream.option("checkpointLocation", str(root / name))
        writer = writer.foreachBatch(sink).trigger(availableNow=True)
        patiently(writer.start).awaitTermination()


def main() -> None:
    """Run the job once, with a server that this process starts."""
    from pyspark.sql import SparkSession

    remote, root = sys.argv[1:]
    builder = SparkSession.builder.remote(remote)
    builder = builder.config(map={**SETTINGS})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to set spark", UserWarning)
        spark = builder.getOrCreate()
    query = json.loads((Path(root) / "copy" / "metadata").read_text())
    copy_and_keep(spark, Path(root), query["id"])
    spark.stop()


if __name__ == "__main__":
    main()
