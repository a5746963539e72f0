"""The writes that are made with `format("kafka")` and with `format("kafkalog")`.

Each job gets a target and writes to topics of its own; what differs between the two formats is in
the target alone. What then lies in the topics is compared, record by record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tests.conformance.spark_twin_session import QUERY_SECONDS, patiently

KAFKA, OURS = "kafka", "kafkalog"
FILES = 3
"""How many micro-batches a stream has: it reads a file in each."""
ROWS = 100
"""Rows in a file."""


class Same(Enum):
    """What is the same in both."""

    ALL = "each partition, record by record"
    KEYS = "the partition of each key and the order in it: several tasks write at once"
    VALUES = "the records: a producer chooses where those without a key go"
    LAST = "the records of the last micro-batch"


class Target(NamedTuple):
    """A way to write: a format and its address; and where a stream has its files."""

    spark: Any
    format: str
    addresses: Mapping[str, dict[str, str]]
    """Of both formats."""
    directory: Path

    @property
    def address(self) -> dict[str, str]:
        return self.addresses[self.format]

    def of(self, format: str) -> Target:
        """Return the same with one of the formats."""
        return self._replace(format=format)

    def range(self, count: int, *columns: str, tasks: int = 1) -> Any:
        """Return rows made of `id`, a number from 0 on, in ascending order within each task."""
        return self.spark.range(0, count, 1, tasks).selectExpr(*columns)

    def save(self, frame: Any, **options: str) -> None:
        """Write a frame."""
        writer = frame.write.format(self.format).mode("append")
        writer = writer.options(**self.address, **options)
        patiently(writer.save)

    def files(self, *columns: str, count: int = FILES) -> Any:
        """Return a stream of rows made of `id`, from 0 on, a file of them in each micro-batch."""
        source = self.directory / "files"
        source.mkdir(exist_ok=True)
        for number in range(count):
            write_file(source, number)
        reader = self.spark.readStream.schema("id bigint").option("maxFilesPerTrigger", 1)
        return reader.json(str(source)).selectExpr(*columns)

    def write(self, frame: Any, mode: str = "append", **options: str) -> list[int]:
        """Write a stream to its end; returns how many rows each micro-batch says it has written."""
        writer = frame.writeStream.outputMode(mode)
        if mode == "update" and self.format == OURS:
            # Spark knows no such mode of sinks in Python.
            from kafkalog.sink import Append

            writer = writer.foreachBatch(Append(self.address["path"], options["topic"]))
        else:
            writer = writer.format(self.format).options(**self.address, **options)
        writer = writer.option("checkpointLocation", str(self.directory / "checkpoint"))
        return list(patiently(lambda: _finish(writer)))

    def take_back(self) -> None:
        """Leave the checkpoint as a driver that dies after the sink's commit leaves it."""
        commits = self.directory / "checkpoint" / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        for name in (str(last), f".{last}.crc"):
            (commits / name).unlink()


def _finish(writer: Any) -> list[int]:
    running = writer.trigger(availableNow=True).start()
    if not running.awaitTermination(QUERY_SECONDS):
        running.stop()
        raise AssertionError(f"{running.name} has not ended after {QUERY_SECONDS} s")
    return [json.loads(each.json)["sink"]["numOutputRows"] for each in running.recentProgress]


def write_file(directory: Path, number: int) -> None:
    """Write a file, unless it is there; a stream takes them in the order of their times."""
    path = directory / f"{number}.json"
    if not path.exists():
        ids = range(ROWS * number, ROWS * (number + 1))
        path.write_text("".join(f'{{"id":{n}}}\n' for n in ids))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


class Job(NamedTuple):
    run: Callable[[Target], list[int] | None]
    topics: Mapping[str, int]
    """Its topics, and how many partitions they have."""
    same: Same


JOBS: dict[str, Job] = {}
_Run = Callable[[Target], list[int] | None]


def writes(same: Same = Same.ALL, **topics: int) -> Callable[[_Run], _Run]:
    """A job that writes to these topics; `_` in a name stands for `-`."""

    def add(run: _Run) -> _Run:
        named = {name.replace("_", "-"): count for name, count in topics.items()}
        JOBS[run.__name__] = Job(run, named, same)
        return run

    return add


# --- batch ---------------------------------------------------------------------------------------


@writes(text=4)
def keys_and_values_that_are_texts(target: Target) -> None:
    words = "array('a', 'größer', '日本語', '\\u0000', '😀', '')"
    rows = target.range(
        300,
        f"element_at({words}, CAST(id % 6 AS int) + 1) || repeat('k', CAST(id % 11 AS int)) AS key",
        "id || 'é' AS value",
    )
    target.save(rows, topic="text")


@writes(binary=5)
def keys_and_values_that_are_bytes(target: Target) -> None:
    rows = target.range(
        400,
        # Of every length, as Kafka hashes a key's last bytes otherwise than the ones before.
        "substring(unhex(repeat(md5(cast(id AS string)), 3)), 1, cast(id % 48 as int)) AS key",
        "CASE WHEN id % 7 = 0 THEN NULL WHEN id % 7 = 1 THEN X'' ELSE unhex(md5('v' || id)) END "
        "AS value",
    )
    target.save(rows, topic="binary")


@writes(of_a_column=3, of_a_column_too=1)
def topics_of_a_column(target: Target) -> None:
    rows = target.range(
        200,
        "IF(id % 3 = 0, 'of-a-column-too', 'of-a-column') AS topic",
        "'no key' AS KEY",
        "CAST(id % 10 AS string) AS key",
        "id AS offset",
        "id % 2 = 0 AS further",
        "CAST(id AS string) AS value",
    )
    target.save(rows)


@writes(of_the_option=2)
def the_option_wins_over_the_column(target: Target) -> None:
    rows = target.range(50, "5 AS topic", "CAST(id AS string) AS key", "'v' AS value")
    target.save(rows, TOPIC=" of-the-option ")


@writes(partitioned=4)
def partitions_of_a_column(target: Target) -> None:
    rows = target.range(
        200,
        "IF(id % 4 = 0, NULL, CAST(id % 3 AS int)) AS partition",
        "IF(id % 8 = 1, NULL, CAST(id % 20 AS string)) AS key",
        "CAST(id AS string) AS value",
    )
    target.save(rows, topic="partitioned")


@writes(headers=2, headers_again=3)
def headers_and_rows_of_a_source(target: Target) -> None:
    rows = target.range(
        60,
        "CAST(id % 5 AS string) AS key",
        "CAST(id AS string) AS value",
        "element_at(array(NULL, array(), array(named_struct('key', 'a', 'value', X'00FF')), "
        "array(named_struct('key', 'ü', 'value', CAST(NULL AS binary)), "
        "named_struct('key', '', 'value', X'')), array(named_struct('key', 'g', 'value', "
        "CAST('h' AS binary)), named_struct('key', 'g', 'value', CAST('i' AS binary)))), "
        "CAST(id % 5 AS int) + 1) AS headers",
    )
    target.save(rows, topic="headers", includeHeaders="true")
    # What a source gives can be written as it is; the column `partition` is among it.
    reader = target.spark.read.format(target.format).options(**target.address)
    again = reader.option("subscribe", "headers").option("includeHeaders", "true").load()
    target.save(again.coalesce(1), topic="headers-again")


@writes(Same.KEYS, of_tasks=3)
def several_tasks(target: Target) -> None:
    rows = target.range(1000, "CAST(id % 50 AS string) AS key", "CAST(id AS string) AS value")
    target.save(rows.repartition(4, "key").sortWithinPartitions("value"), topic="of-tasks")


@writes(Same.VALUES, no_keys=3)
def rows_without_keys(target: Target) -> None:
    rows = target.range(3000, "repeat(CAST(id AS string), 20) AS value")
    target.save(rows, topic="no-keys", **{"kafka.batch.size": "1000"})


@writes(Same.VALUES, null_keys=3)
def null_keys_of_several_tasks(target: Target) -> None:
    rows = target.range(
        2000,
        "IF(id % 5 = 0, CAST(string(id) AS binary), NULL) AS key",
        "repeat(CAST(id AS string), 20) AS value",
        tasks=3,
    )
    target.save(rows, topic="null-keys", **{"kafka.batch.size": "1000"})


@writes(large=1)
def large_rows_through_a_small_buffer(target: Target) -> None:
    rows = target.range(1000, "repeat(chr(CAST(65 + id % 26 AS int)), 15000) AS value")
    target.save(rows, topic="large", **{"kafka.buffer.memory": "32768"})


@writes(analyzed=1)
def a_plan_that_is_analyzed(target: Target) -> None:
    target.save(target.range(999, "to_json(struct(*)) AS value"), topic="analyzed")


# --- streams -------------------------------------------------------------------------------------


@writes(streamed=3, streamed_too=2)
def a_stream_with_all_columns(target: Target) -> list[int]:
    return target.write(
        target.files(
            "IF(id % 4 = 0, 'streamed-too', 'streamed') AS topic",
            "CAST(id % 20 AS string) AS key",
            "IF(id % 9 = 0, NULL, CAST(string(id) AS binary)) AS value",
            "IF(id % 5 = 0, CAST(id % 2 AS int), NULL) AS partition",
            "IF(id % 3 = 0, NULL, array(named_struct('key', 'h', 'value', X'00'))) AS headers",
        )
    )


@writes(counted=2)
def counts_of_a_stream_in_complete_mode(target: Target) -> list[int]:
    counted = target.files("id % 7 AS key").groupBy("key").count().orderBy("key")
    return target.write(_texts(counted), "complete", topic="counted")


@writes(Same.KEYS, updated=2)
def counts_of_a_stream_in_update_mode(target: Target) -> None:
    counted = target.files("(id DIV 50) % 4 AS key").groupBy("key").count()
    target.write(_texts(counted), "update", topic="updated")


def _texts(frame: Any) -> Any:
    return frame.selectExpr("CAST(key AS string) AS key", "CAST(count AS string) AS value")


@writes(Same.LAST, repeated=1)
def a_micro_batch_that_is_repeated(target: Target) -> list[int]:
    """Once more of the connector, which writes at least once."""
    rows = target.files("CAST(id AS string) AS value")
    first = target.write(rows, topic="repeated")
    target.take_back()
    return first + target.write(rows, topic="repeated")


@writes(Same.LAST, handed_over=1, handed_over_before=1)
def a_checkpoint_of_the_connector(target: Target) -> list[int]:
    """The connector writes two micro-batches, the target the third."""
    columns = ("CAST(id % 9 AS string) AS key", "CAST(id AS string) AS value")
    before = target.of(KAFKA)
    topic = "handed-over" if target == before else "handed-over-before"
    first = before.write(before.files(*columns, count=FILES - 1), topic=topic)
    # Our log does not have the earlier micro-batches, and says so unless it is told.
    options = {} if target == before else {"resetWriter": "true"}
    return first + target.write(target.files(*columns), topic="handed-over", **options)
