"""Mirror: copy the topics of a Kafka broker into a log, partition by partition.

A Spark query copies from a running cluster, exactly once, for as long as it runs. Each record keeps
key, value, headers, timestamp and partition. It gets a new offset, since cleaned and aborted
records leave gaps that the query does not see:

    export PYSPARK_SUBMIT_ARGS="--packages CONNECTOR pyspark-shell"
    python -m examples.mirror_kafka --bootstrap kafka:9092 --topics orders,stock --path /data/log

CONNECTOR is org.apache.spark:spark-sql-kafka-0-10_2.13:VERSION, with the version of Spark.

The second way copies bytes from the directory of a broker, running or not, or from its backup.
Offsets, transactions, producers and leader epochs stay. A further run continues where the last one
ended. The file `log.mirror.json` next to the log lists the ids of the copied topics:

    python -m examples.mirror_kafka --directory /var/kafka --topics orders,stock --path /data/log

A topic has as many partitions here as there, and cannot get more. If it gets more there, a running
query stops, and the next start refuses it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kafkalog.storage_engine.metadata.state import TopicState
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

__all__ = ["copy_directory", "main", "mirror"]

CONFIG: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "message.timestamp.after.max.ms": str((1 << 63) - 1),
    "max.message.bytes": str((1 << 31) - 1),
}
"""Configs of created topics: no copied record goes away, and any time and size is accepted."""
COMPARED: Final = 16
"""Records with offsets this far below the end of a copy are compared before it continues."""

_log = logging.getLogger("kafkalog.examples")


def mirror(
    spark: SparkSession,
    bootstrap: str,
    topics: Sequence[str],
    path: Path,
    checkpoint: Path,
    *,
    config: Mapping[str, str] = CONFIG,
    trigger: Mapping[str, Any] | None = None,
) -> StreamingQuery:
    """Start the query that copies the present and future records of the topics; return it.

    A missing topic is created with the source's number of partitions, and with `config` on top of
    `CONFIG`. An existing topic keeps its configs: a record beyond its limits of size or time stops
    the query. Aborted records are not copied. Raises InvalidInputError, before it creates anything,
    if a topic here has another number of partitions.
    """
    counts = partition_counts(spark, bootstrap, topics)
    with DirectoryLog(path) as log:
        for topic, count in counts.items():
            _check_count(log, topic, count)
        for topic, count in counts.items():
            log.create_topic(topic, count, {**CONFIG, **config}, exist_ok=True)
    records = (
        spark.readStream.format("kafka")
        .options(**_source(bootstrap, topics))
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("kafka.isolation.level", "read_committed")
        .load()
    )
    # The columns of a source are those of a sink, topic and partition too.
    writer = (
        records.writeStream.format("kafkalog")
        .option("path", str(path))
        .option("checkpointLocation", str(checkpoint))
    )
    return (writer.trigger(**trigger) if trigger else writer).start()


def partition_counts(spark: SparkSession, bootstrap: str, topics: Sequence[str]) -> dict[str, int]:
    """Return the topics' numbers of partitions: the connector's offsets name even empty ones."""
    query = (
        spark.readStream.format("kafka")
        .options(**_source(bootstrap, topics))
        .option("startingOffsets", "latest")
        .load()
        .writeStream.format("noop")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    ends = json.loads(query.recentProgress[0].json)["sources"][0]["endOffset"]
    return {topic: len(partitions) for topic, partitions in ends.items()}


def _check_count(log: DirectoryLog, topic: str, count: int) -> None:
    known = log.state().topics.get(topic)
    if known is not None and len(known.partitions) != count:
        raise InvalidInputError(
            f"{log.root}: topic {topic!r} has {len(known.partitions)} partitions, and there it has "
            f"{count}: a mirror gets no more partitions; copy it into another log"
        )


def _source(bootstrap: str, topics: Sequence[str]) -> dict[str, str]:
    return {"kafka.bootstrap.servers": bootstrap, "subscribe": ",".join(topics)}


# --- byte by byte --------------------------------------------------------------------------------


def copy_directory(
    directory: str | Path | Sequence[str | Path],
    topics: Iterable[str],
    path: Path,
    *,
    config: Mapping[str, str] = CONFIG,
) -> int:
    """Copy from a broker's directory what this log does not have; return the number of records.

    `directory` may be all `log.dirs` of the broker, as a list or separated by commas. The batches
    up to the high watermark are copied unchanged, so offsets stay. Topics are created with `config`
    on top of `CONFIG`.

    Raises InvalidInputError, before it creates or copies anything, if the directory lacks
    partitions of a topic, if the topic here has another number of them, or if the two have
    diverged. They have diverged if the topic there has another id than the copied one, if its
    partition ends before the copy, or if the last records differ. Records that the source deleted
    before they were copied are reported by a warning.
    """
    count = 0
    with DirectoryLog(directory, read_only=True) as source, DirectoryLog(path) as log:
        note = _Note(log.root.with_name(f"{log.root.name}.mirror.json"))
        wanted = [source.describe(topic) for topic in topics]
        starts = {topic.name: _starts(source, log, topic, note) for topic in wanted}
        for topic in wanted:
            partitions = len(topic.partitions)
            made = log.create_topic(topic.name, partitions, {**CONFIG, **config}, exist_ok=True)
            note.add(topic, made)
            for partition, start in enumerate(starts[topic.name]):
                count += copy_partition(source, log, topic.name, partition, start)
    return count


def copy_partition(
    source: DirectoryLog, log: DirectoryLog, topic: str, partition: int, start: int
) -> int:
    """Append the batches from `start`, this log's end; return the number of records."""
    count = 0
    with source.snapshot(topic, partition, start=start, known_end=start) as snapshot:
        first, end = snapshot.state.log_start_offset, snapshot.state.high_watermark
        for chunk in snapshot.chunks(max(first, start), end):
            batches = chunk.table
            last = batches.positions[-1] + batches.sizes[-1]
            data = memoryview(chunk.buffer)[batches.positions[0] : last]
            count += log.append_raw(topic, partition, data).rows
    if start == 0 and first > 0:  # a batch may begin below what is deleted there
        log.delete_records(topic, partition, first)
    elif start < first:
        _log.warning(
            "%s: %s-%d: the offsets %d to %d were deleted there before they were copied",
            source.root,
            topic,
            partition,
            start,
            first - 1,
        )
    return count


def _starts(source: DirectoryLog, log: DirectoryLog, topic: TopicState, note: _Note) -> list[int]:
    """Return each partition's next offset; raises InvalidInputError if it must not be copied."""
    if topic.absent:
        missing = ", ".join(f"{topic.name}-{number}" for number in sorted(topic.absent))
        raise InvalidInputError(
            f"{source.root}: the partitions {missing} of topic {topic.name!r} are missing: another "
            "broker, or another directory of its log.dirs, has them; name all log.dirs of a broker "
            "that has the whole topic, or copy it by --bootstrap"
        )
    count = len(topic.partitions)
    _check_count(log, topic.name, count)
    known = log.state().topics.get(topic.name)
    if known is None:
        return [0] * count
    note.check(source, topic, known)
    is_noted = note.has(topic, known)
    return [_next_offset(source, log, topic.name, number, is_noted) for number in range(count)]


def _next_offset(
    source: DirectoryLog, log: DirectoryLog, topic: str, partition: int, is_noted: bool
) -> int:
    """Return the end of a copy, where it continues; raises InvalidInputError if it is no copy."""
    where = f"{log.root}: {topic}-{partition}"
    remedy = "so it is no copy of it; copy into another log"
    with log.snapshot(topic, partition) as copy:
        start = copy.state.high_watermark
        if start == 0:
            return 0
        with source.snapshot(topic, partition, start=start - 1, known_end=start) as snapshot:
            end = snapshot.state.high_watermark
            if end < start:
                raise InvalidInputError(
                    f"{where} ends at offset {start}, and in {source.root} at {end}, {remedy}"
                )
            ours, theirs = _last_records(copy, start), _last_records(snapshot, start)
    common = sorted(ours.keys() & theirs.keys())
    for offset in common:
        if ours[offset] != theirs[offset]:
            raise InvalidInputError(
                f"{where} has another record at offset {offset} than {source.root}, {remedy}"
            )
    if not common and not is_noted:
        raise InvalidInputError(
            f"{where} has records, and nothing shows that they are from {source.root}, {remedy}"
        )
    return start


def _last_records(snapshot: PartitionSnapshot, end: int) -> dict[int, dict[str, Any]]:
    """Return the last records below `end`, by offset; a cleaning may have removed some."""
    start = max(end - COMPARED, snapshot.state.log_start_offset)
    if start >= end:
        return {}
    schema = changelog_schema(include_headers=True)
    found: dict[int, dict[str, Any]] = {}
    for rows in snapshot.read(start, end, schema=schema, read_committed=False):
        place = rows.schema.get_field_index("timestamp")
        times = rows.column(place).cast("int64")  # datetime ends with the year 9999
        for row in rows.set_column(place, "timestamp", times).to_pylist():
            found[row["offset"]] = row
    return found


class _Note:
    """A file with the copied topics: the id of each there and here.

    A topic that was deleted and created again has another id. Kafka's directories before 2.8 have
    no ids: then only the names and the last records are compared.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[str, list[str]] = json.loads(path.read_text()) if path.exists() else {}

    def check(self, source: DirectoryLog, topic: TopicState, here: TopicState) -> None:
        """Raise InvalidInputError if the topic here was copied from another one."""
        theirs, ours = self._ids.get(topic.name, ("", ""))
        if here.topic_id == ours and topic.topic_id != theirs:
            raise InvalidInputError(
                f"{self._path}: topic {topic.name!r} here is a copy of the one with the id "
                f"{theirs}, and that of {source.root} has the id {topic.topic_id}: it was created "
                "again there, or is another cluster's; copy it into another log"
            )

    def has(self, topic: TopicState, here: TopicState) -> bool:
        """Return whether the topic here was copied from that one."""
        return self._ids.get(topic.name) == [topic.topic_id, here.topic_id]

    def add(self, topic: TopicState, here: TopicState) -> None:
        """Store where the topic here is from, before anything is copied."""
        if self.has(topic, here):
            return
        self._ids[topic.name] = [topic.topic_id, here.topic_id]
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        with temporary.open("w") as file:
            json.dump(self._ids, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Mirror topics, in one of the two ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topics", required=True, help="their names, with commas between them")
    parser.add_argument("--path", type=Path, required=True, metavar="DIR", help="our log")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--bootstrap", metavar="HOST:PORT", help="a running cluster")
    source.add_argument(
        "--directory", metavar="DIR", help="the log.dirs of a broker, with commas between them"
    )
    given = parser.parse_args(arguments)
    topics, path = given.topics.split(","), given.path.absolute()
    if given.directory is not None:
        print(copy_directory(given.directory, topics, path), "records copied")
        return 0
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("mirror").getOrCreate()
    checkpoint = path.with_name(f"{path.name}.checkpoint")
    mirror(spark, given.bootstrap, topics, path, checkpoint).awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
