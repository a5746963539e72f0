"""A git repository as a table: its history streams into a compacted log, and tables follow the log.

`python -m examples.git_table [--repo DIR] [--path DIR] [--json]`, or `make demo`.

1. Every commit of the first-parent history becomes upserts and deletes of paths, in commit order,
   as files that `spark.readStream` reads a few at a time.
2. `writeStream.format("kafkalog")` writes them to the topic `git`: key = path, value = JSON of
   mode, blob, commit and author time, null for a deleted path. Meanwhile the background cleaner
   removes obsolete records.
3. The stream runs in stages. Between two of them other producers write to the topic in
   transactions: committed ones repeat the latest values, aborted ones write wrong values.
4. At the same time a second query reads the topic back, and `foreachBatch(SQLiteUpsert(...))`
   follows it into a database.
5. Both that table and the batch read `view=latest` are compared with `git ls-tree -r HEAD`.
6. The log stays, with its picture next to it, a page for a browser. The report names both, and
   what to try next. The last line is `identical`, or else the exit code is 1.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import logging
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kafkalog
from examples.git_feed import Feed, write_feed
from examples.git_history import Entry, GitError, head_tree
from examples.git_report import compare, report
from examples.git_transactions import Transactions
from kafkalog.cleaner import CleanerConfig
from kafkalog.cli import run as run_command
from kafkalog.errors import InvalidInputError, KafkaLogError, StorageError
from kafkalog.sink.upsert import SQLiteUpsert

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kafkalog.cleaner import PartitionStatus
    from kafkalog.log import KafkaLog

TOPIC: Final = "git"
PARTITIONS: Final = 4
FILES_PER_BATCH: Final = 2
STAGES: Final = 3
"""Starts of the writing query, with the same checkpoint; transactions follow each."""
SPARK_TASKS: Final = 2
LAG_ALLOWED_MS: Final = 3_600_000
"""Deletes stay in the log for this time; a follower that lags further would miss them."""
TOPIC_CONFIG: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": str(32 << 10),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(LAG_ALLOWED_MS),
    "file.delete.delay.ms": "1000",
}
"""Kafka's defaults suit logs of many gigabytes; a history of a few megabytes needs small steps."""
CLEANER: Final = CleanerConfig(backoff_ms=500)
JAVA_HINT: Final = "install Java 17 or newer, e.g. the package default-jre-headless"
SPARK: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": str(SPARK_TASKS),
    "spark.sql.session.timeZone": "UTC",
}


class SparkUnavailableError(Exception):
    """Spark cannot start here; the message is one line and says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if both tables equal git's, 1 on differences or errors."""
    options = parser().parse_args(arguments)
    # Messages go to stderr: with --json, stdout is one line of JSON.
    console = Console(stderr=options.json)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("py4j").setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="kafkalog-demo-") as temporary:
            scratch = Path(temporary)
            log_path = options.path.absolute() if options.path else None
            result = run(options.repo.absolute(), log_path, scratch, console)
    except (GitError, KafkaLogError, SparkUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result))
    return 0 if result["identical"] else 1


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    described = argparse.ArgumentParser(
        prog="python -m examples.git_table",
        description="Stream a git repository's history through a compacted log and compare the "
        "tables that follow it with `git ls-tree -r HEAD`.",
    )
    described.add_argument(
        "--repo",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        metavar="DIR",
        help="the repository, a work tree or a bare one (default: this project's)",
    )
    described.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        help="the log's directory; its picture is DIR.html (default: in a new temporary directory)",
    )
    described.add_argument("--json", action="store_true", help="print the figures as one JSON line")
    return described


def run(repository: Path, log_path: Path | None, scratch: Path, console: Console) -> dict[str, Any]:
    """Run the whole demo; return the figures."""
    expected = head_tree(repository)
    check_java()
    if log_path is None:
        log_path = Path(tempfile.mkdtemp(prefix="kafkalog-demo-")) / "log"
    with kafkalog.open(log_path, cleaner=CLEANER) as log, progress_bars(console) as bars:
        if TOPIC in log.topics():
            raise InvalidInputError(f"{log_path} already holds a topic {TOPIC!r}; name another")
        feed = write_feed(repository, scratch / "feed", bars)
        log.create_topic(TOPIC, partitions=PARTITIONS, config=TOPIC_CONFIG)
        spark = start_spark(scratch / "spark.log")
        try:
            streamed = stream(spark, log, feed, scratch, bars)
            cleaned = clean_rest(log)
            tables = {
                "view=latest": read_view(spark, log_path),
                "SQLite": read_database(scratch / "git.sqlite"),
            }
        finally:
            spark.stop()
        comparisons = [compare(name, table, expected) for name, table in tables.items()]
        figures = feed.figures() | streamed | cleaned
    return report(console, repository, figures, expected, comparisons)


def check_java() -> None:
    """Raise SparkUnavailableError if Spark would not find Java; Spark's own error is long."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    if shutil.which(java) is None:
        place = f"JAVA_HOME={home}" if home else "the PATH"
        raise SparkUnavailableError(f"no Java in {place}, and Spark needs it: {JAVA_HINT}")


def start_spark(messages: Path) -> SparkSession:
    """Start Spark for two cores; its workers use this interpreter.

    Spark's messages go to the file `messages`. Raises SparkUnavailableError, and prints the
    messages, if its Java ends at once.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{SPARK_TASKS}]").appName("git-table")
    builder = builder.config(map={**SPARK})
    try:
        with stderr_to(messages):
            return builder.getOrCreate()
    except PySparkRuntimeError as error:
        sys.stderr.write(messages.read_text(errors="replace"))
        reason = str(error).partition("\n")[0]
        raise SparkUnavailableError(f"Spark did not start: {reason} {JAVA_HINT}") from error


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Let what starts meanwhile write its standard error to a file, for as long as it lives."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def stream(
    spark: SparkSession, log: KafkaLog, feed: Feed, scratch: Path, bars: Progress
) -> dict[str, Any]:
    """Run both queries until the second one has followed all records."""
    started = time.monotonic()
    follower = (
        spark.readStream.format("kafkalog")
        .option("path", str(log.root))
        .option("subscribe", TOPIC)
        .option("startingOffsets", "earliest")
        .load()
        .writeStream.foreachBatch(SQLiteUpsert(scratch / "git.sqlite", "git"))
        .option("checkpointLocation", str(scratch / "follower"))
        .trigger(processingTime="500 milliseconds")
        .start()
    )
    transactions = Transactions(log, TOPIC)
    watcher = Watcher(log, follower, transactions, feed.changes, bars)
    arrived = scratch / "arrived"
    arrived.mkdir()
    batches = 0
    try:
        stages = stages_of(sorted(feed.directory.glob("*.parquet")))
        for number, paths in enumerate(stages, 1):
            for path in paths:
                path.rename(arrived / path.name)
            batches += write_stage(spark, log, arrived, scratch / "writer", watcher)
            transactions.run(is_last=number == len(stages))
        follower.processAllAvailable()
    finally:
        follower.stop()
    return {
        "records_written": watcher.written(),
        "batches": batches,
        "transactions": transactions.figures(),
        "seconds": round(time.monotonic() - started, 1),
    }


def stages_of(paths: list[Path]) -> list[list[Path]]:
    """Divide files, in order, into STAGES lists, or fewer if there are fewer files."""
    bounds = [len(paths) * stage // STAGES for stage in range(STAGES + 1)]
    return [paths[first:last] for first, last in itertools.pairwise(bounds) if first < last]


def write_stage(
    spark: SparkSession, log: KafkaLog, source: Path, checkpoint: Path, watcher: Watcher
) -> int:
    """Write the part of the feed that has arrived; return the number of micro-batches."""
    changes = (
        spark.readStream.schema("seq long, key binary, value binary")
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .parquet(str(source))
    )
    writer = (
        # Spark orders nothing across files and tasks; a key's changes must land as committed.
        kafkalog.in_order(changes, by="seq", partitions=SPARK_TASKS)
        .writeStream.format("kafkalog")
        .option("path", str(log.root))
        .option("topic", TOPIC)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        watcher.watch(writer)
    finally:
        writer.stop()
    return len([p for p in writer.recentProgress if p["numInputRows"]])


class Watcher:
    """Shows the progress of both queries."""

    def __init__(
        self,
        log: KafkaLog,
        follower: StreamingQuery,
        transactions: Transactions,
        total: int,
        bars: Progress,
    ) -> None:
        self._log, self._follower, self._transactions = log, follower, transactions
        self._total, self._bars = total, bars
        self._write_bar = bars.add_task("written to the log", total=total)
        self._follow_bar = bars.add_task("followed into SQLite", total=total)

    def watch(self, writer: StreamingQuery) -> None:
        """Show the progress until the writing query has ended."""
        while True:
            has_ended = writer.awaitTermination(1)  # raises what the query failed with
            if not self._follower.isActive:
                self._follower.awaitTermination()
            self._bars.update(self._write_bar, completed=self.written())
            come = min(followed(self._follower), self._total)  # it counts transactions too
            self._bars.update(self._follow_bar, completed=come)
            if has_ended:
                return

    def written(self) -> int:
        """Return how many records the stream has written to the topic."""
        ends = (high_watermark for _, high_watermark in self._log.offsets(TOPIC).values())
        return sum(ends) - self._transactions.offsets


def followed(query: StreamingQuery) -> int:
    """Return the sum of the query's next offsets over all partitions."""
    progress = query.lastProgress
    end = progress["sources"][0]["endOffset"] if progress else None
    offsets = json.loads(end) if isinstance(end, str) else end or {}
    return sum(max(0, offset) for offset in offsets.get(TOPIC, {}).values())


def clean_rest(log: KafkaLog) -> dict[str, Any]:
    """Clean what the background cleaner has left; return the figures of both cleanings.

    The background cleaner leaves the active segments, and deletes until `delete.retention.ms` has
    passed. The first forced cleaning rolls the active segments; the second one gets a time after
    that.
    """
    assert log.cleaner is not None
    log.cleaner.stop()
    dirty = log.status()
    before, segments_before = log_bytes(log), segments(log)
    background = {
        "cleanings": log.cleaner.cleanings,
        "failures": log.cleaner.failures,
        "records_removed": log.cleaner.records_removed,
        "bytes_removed": log.cleaner.bytes_removed,
    }
    due_ms = time.time_ns() // 1_000_000 + LAG_ALLOWED_MS + 60_000
    forced = log.clean(TOPIC, force=True) + log.clean(TOPIC, force=True, now_ms=due_ms)
    faults = [stats.error for stats in forced if stats.error]
    if faults:
        raise StorageError(faults[0])
    return {
        "background": background,
        "bytes_before": before + background["bytes_removed"],
        "bytes_after_background": before,
        "bytes_after": log_bytes(log),
        "segments_after_background": segments_before,
        "segments_after": segments(log),
        "dirty_ratio_before": dirty_ratio(dirty),
        "dirty_ratio_after": dirty_ratio(log.status()),
        "forced_cleanings": len(forced),
        "records_kept": sum(
            batch.num_rows
            for partition in range(PARTITIONS)
            for batch in log.read(TOPIC, partition, columns=["offset"])
        ),
        "log": str(log.root),
        "picture": draw(log),
    }


def draw(log: KafkaLog) -> str:
    """Write the log's picture next to it, by `kafkalog status --html`; return its path."""
    picture = f"{log.root}.html"
    said = io.StringIO()
    with redirect_stderr(said):
        status = run_command(["status", str(log.root), "--html", picture])
    if status:
        raise StorageError(said.getvalue().strip())
    return picture


def segments(log: KafkaLog) -> int:
    """Return how many segments the topic's partitions have."""
    return len(list(log.root.glob(f"{TOPIC}-*/*.log")))


def log_bytes(log: KafkaLog) -> int:
    """Return the bytes of committed batches in the topic's partitions."""
    return sum(
        partition.clean_bytes + partition.dirty_bytes + partition.uncleanable_bytes
        for partition in log.status()
        if partition.topic == TOPIC
    )


def dirty_ratio(status: list[PartitionStatus]) -> float:
    """Return the largest share of a partition that was never cleaned, with the active segment."""
    ratios = [
        (partition.dirty_bytes + partition.uncleanable_bytes) / size
        for partition in status
        if partition.topic == TOPIC
        and (size := partition.clean_bytes + partition.dirty_bytes + partition.uncleanable_bytes)
    ]
    return round(max(ratios, default=0.0), 3)


def read_view(spark: SparkSession, log_path: Path) -> dict[bytes, Entry]:
    """Return the latest value of each key, by Spark's batch read `view=latest`."""
    rows = (
        spark.read.format("kafkalog")
        .option("path", str(log_path))
        .option("subscribe", TOPIC)
        .option("view", "latest")
        .load()
        .select("key", "value")
        .toArrow()
    )
    keys, values = rows.column("key").to_pylist(), rows.column("value").to_pylist()
    return {key: entry(value) for key, value in zip(keys, values, strict=True)}


def read_database(path: Path) -> dict[bytes, Entry]:
    """Return the table that the follower kept."""
    with closing(sqlite3.connect(path)) as database:
        is_there = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'git'").fetchone()
        rows = database.execute("SELECT key, value FROM git") if is_there else []
        return {bytes(key): entry(value) for key, value in rows}


def entry(value: bytes) -> Entry:
    """Return the fields of a record's value that git lists too."""
    fields = json.loads(value)
    return Entry(fields["mode"], fields["blob"])


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Yield progress bars, which show on a terminal only and vanish at the end."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        yield bars


if __name__ == "__main__":
    sys.exit(main())
