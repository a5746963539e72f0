"""Mirror: the topics of a Kafka broker in a log of ours, partition by partition.

By a query of Spark's, from a running cluster, for as long as it runs, exactly once. Each record
keeps key, value, headers, timestamp and partition; it gets an offset of its own, as what a cleaner
or an aborted transaction has taken away is not there to be copied:

    export PYSPARK_SUBMIT_ARGS="--packages CONNECTOR pyspark-shell"
    python -m examples.mirror_kafka --bootstrap kafka:9092 --topics orders,stock --path /data/log

where CONNECTOR is org.apache.spark:spark-sql-kafka-0-10_2.13:VERSION, of Spark's version.

Or byte by byte, from the directory of a broker, running or not, or from a backup of it. Offsets
stay, and so do transactions, producers and leader epochs. Called again it goes on where it ended;
beside the log, in `log.mirror.json`, it keeps which topics it has copied, by their ids:

    python -m examples.mirror_kafka --directory /var/kafka --topics orders,stock --path /data/log

Topics here have as many partitions as there, and cannot get more: a topic that does is refused at
the next start, and its new partitions stop a query that runs.
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
from kafkalog.storage_engine.engine import Engine

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
"""Of the topics that are made: nothing that was copied goes away, and what a broker has taken, of
any time and size, is taken here too."""
COMPARED: Final = 16
"""Offsets below the end of a copy whose records are compared before it goes on."""

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
    """Start the query that copies what the topics hold and what comes; return it.

    Topics that are missing are made, with as many partitions as they have there, and with `config`
    on top of `CONFIG`. One that exists keeps its configs: if it limits size or time, a record
    beyond that stops the query. What transactions have aborted is not copied. Raises
    InvalidInputError, before anything is made, where a topic here has another number of partitions.
    """
    counts = partition_counts(spark, bootstrap, topics)
    with Engine(path) as log:
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
    """Return how many partitions topics have: the connector's offsets name each, empty or not."""
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


def _check_count(log: Engine, topic: str, count: int) -> None:
    known = log.state().topics.get(topic)
    if known is not None and len(known.partitions) != count:
        raise InvalidInputError(
            f"{log.root}: topic {topic!r} has {len(known.partitions)} partitions, and there it has "
            f"{count}: topics get no more partitions here; copy it into another log"
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
    """Copy what a broker's directory holds of topics and this log does not; return the records.

    `directory` may be all `log.dirs` of the broker, as a list or with commas between them. What is
    copied are the batches up to the high watermark, as they are: a topic's offsets there are its
    offsets here. Topics are made with `config` on top of `CONFIG`.

    Raises InvalidInputError, before anything is made or copied, where partitions of a topic are not
    in the directory, or their number is not that of the topic here, and where the two have gone
    apart: a topic there is not the one that was copied (by its id), a partition there ends before
    it does here, or its records just below that end are others. What is gone there and has never
    been copied is warned of.
    """
    count = 0
    with Engine(directory, read_only=True) as source, Engine(path) as log:
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


def copy_partition(source: Engine, log: Engine, topic: str, partition: int, start: int) -> int:
    """Append the batches from `start`, this log's end, on, some at a time; return the records."""
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


def _starts(source: Engine, log: Engine, topic: TopicState, note: _Note) -> list[int]:
    """Return by partition where copying goes on; raises InvalidInputError where it must not."""
    if topic.absent:
        missing = ", ".join(f"{topic.name}-{number}" for number in sorted(topic.absent))
        raise InvalidInputError(
            f"{source.root}: of topic {topic.name!r} the partitions {missing} are missing: another "
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


def _next_offset(source: Engine, log: Engine, topic: str, partition: int, is_noted: bool) -> int:
    """Return the end of a copy, from which it may go on; raises InvalidInputError if not."""
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
            f"{where} has records, and nothing tells that they are from {source.root}, {remedy}"
        )
    return start


def _last_records(snapshot: PartitionSnapshot, end: int) -> dict[int, dict[str, Any]]:
    """Return the last records below `end` by their offsets; a cleaner may have taken some."""
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
    """Which topics were copied: a file with the id of each there and here.

    A topic that was deleted and made anew, there or here, has another id. Kafka's directories of
    before 2.8 have none; then the name has to do, and the records are compared all the same.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[str, list[str]] = json.loads(path.read_text()) if path.exists() else {}

    def check(self, source: Engine, topic: TopicState, here: TopicState) -> None:
        """Raise InvalidInputError if the topic here was copied from another one."""
        theirs, ours = self._ids.get(topic.name, ("", ""))
        if here.topic_id == ours and topic.topic_id != theirs:
            raise InvalidInputError(
                f"{self._path}: topic {topic.name!r} here is a copy of the one with the id "
                f"{theirs}, and that of {source.root} has the id {topic.topic_id}: it was made "
                "anew there, or is another cluster's; copy it into another log"
            )

    def has(self, topic: TopicState, here: TopicState) -> bool:
        """Tell whether the topic here was copied from that one."""
        return self._ids.get(topic.name) == [topic.topic_id, here.topic_id]

    def add(self, topic: TopicState, here: TopicState) -> None:
        """Note, before anything is copied, where the topic here is from."""
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
