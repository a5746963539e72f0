"""One release of Spark visits a log: `python tests/spark/release_visit.py DIRECTORY NUMBER`.

Each visit adds records, lets every query go on from its checkpoint, cleans, and prints what it
found as a line of JSON. The next visit may be one of another release.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

import kafkalog
from kafkalog.sink.upsert import SQLiteUpsert


class Visit:
    """What a session of this release does with the log, checkpoints and tables of the others."""

    def __init__(self, scratch: Path, number: int) -> None:
        self.scratch, self.number = scratch, number
        self.path = str(scratch / "log")
        self.spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.memory", "1g")
            .config("spark.sql.shuffle.partitions", "1")
            .getOrCreate()
        )
        self.spark.sparkContext.setLogLevel("OFF")
        kafkalog.register(self.spark)

    def append(self) -> None:
        """Write a transaction twice: a key of this visit, one of all, and a deletion."""
        value = json.dumps({"n": self.number})
        rows = [(f"of {self.number}", value), ("of all", value)]
        rows += [(f"of {self.number - 1}", None)] if self.number > 1 else []
        frame = self.spark.createDataFrame(rows, "key string, value string").coalesce(1)
        writer = frame.write.format("kafkalog").mode("append").options(path=self.path, topic="t")
        for _ in range(2):
            writer.options(txnAppId="visits", txnVersion=str(self.number)).save()

    def changes(self, **options: str) -> Any:
        given = {"startingOffsets": "earliest", **options}
        reader = self.spark.readStream.format("kafkalog").options(path=self.path, subscribe="t")
        return reader.options(**given).load()

    def run(self, changes: Any, name: str) -> Any:
        """Return what writes all there is and goes on from the checkpoint of a name."""
        written = changes.writeStream.trigger(availableNow=True).queryName(name)
        return written.option("checkpointLocation", str(self.scratch / name))

    def copy(self) -> int:
        """Copy the changes, twice the last ones: a driver died before Spark knew of the commit."""
        commits = self.scratch / "copy" / "commits"
        for turn in range(3):
            sink = self.run(self.changes(), "copy").format("kafkalog")
            sink.options(path=self.path, topic="copy").start().awaitTermination()
            if turn == 0:
                last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
                (commits / str(last)).unlink()
                (commits / f".{last}.crc").unlink()
        reader = self.spark.read.format("kafkalog").options(path=self.path, subscribe="copy")
        return reader.load().count()

    def upsert(self) -> list[Any]:
        upsert = SQLiteUpsert(self.scratch / "table.db", "t", key_type="string", schema="n int")
        self.run(self.changes(), "upsert").foreachBatch(upsert).start().awaitTermination()
        return self.table("table.db")

    def view(self) -> list[Any]:
        target = SQLiteUpsert(self.scratch / "view.db", "t", key_type="string", schema="n int")
        checkpoint = self.scratch / "view"
        view = kafkalog.KTableView(self.spark, self.path, "t", target, checkpoint=checkpoint)
        view.start()
        view.wait_until(timeout_s=120)
        view.stop()
        return self.table("view.db")

    def table(self, name: str) -> list[Any]:
        with closing(sqlite3.connect(self.scratch / name)) as database:
            return [list(row) for row in database.execute("SELECT * FROM t ORDER BY key")]

    def stream_of_the_view(self) -> list[Any]:
        found: list[Any] = []

        def collect(rows: Any, _: int) -> None:
            found.extend(rows.selectExpr("string(key)", "string(value)").collect())

        changes = self.changes(startingOffsets="earliest", view="latest")
        self.run(changes, f"latest-{self.number}").foreachBatch(collect).start().awaitTermination()
        return sorted(map(list, found))

    def limited(self) -> str:
        """Return what comes of a limit: the number of micro-batches, or the refusal."""
        sizes: list[int] = []
        limited = self.run(self.changes(maxOffsetsPerTrigger="4"), f"limited-{self.number}")
        query = limited.foreachBatch(lambda rows, _: sizes.append(rows.count()))
        try:
            query.start().awaitTermination()
        except Exception as fault:
            return str(fault)
        return f"{len(sizes)} of at most {max(sizes)}"

    def clean(self) -> int:
        """Clean the log as this process can; return the records that are left."""
        with kafkalog.open(self.path) as log:
            log.clean("t", force=True)
            return sum(batch.num_rows for batch in log.read("t", 0))


def main(scratch: Path, number: int) -> None:
    if number == 1:
        with kafkalog.open(scratch / "log") as log:
            for topic in ("t", "copy"):
                log.create_topic(topic, config={"cleanup.policy": "compact"})
    visit = Visit(scratch, number)
    visit.append()
    found: dict[str, Any] = {
        "pyspark": pyspark.__version__,
        "copied": visit.copy(),
        "upserted": visit.upsert(),
        "view": visit.view(),
        "latest": visit.stream_of_the_view(),
        "limited": visit.limited(),
    }
    table = kafkalog.KTable(visit.spark, visit.path, "t").df()
    found["ktable"] = sorted([row.key.decode(), row.value.decode()] for row in table.collect())
    found["cleaned"] = visit.clean()
    visit.spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
