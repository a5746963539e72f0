"""The writers without a JVM: what tasks stage, what the driver publishes, what a retry does."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import types as spark_types
from pyspark.sql.types import StructType

from kafkalog.errors import (
    CommitConflictError,
    InvalidInputError,
    LockedByBrokerError,
    UnknownTopicError,
)
from kafkalog.sink import writer as sink_writer
from kafkalog.sink.writer import SinkMessage, batch_writer, stream_writer
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.place import open_log
from tests.unit.sink.spark_write import SparkWrite
from tests.unit.storage_engine.store_log import memory_address

QUERY = "11111111-2222-3333-4444-555555555555"
ROW = {"key": b"a", "value": b"1"}
KEYED = ["key", "value"]


def schema(*names: str) -> StructType:
    struct = StructType()
    for name in names:
        kind = spark_types.IntegerType() if name == "partition" else spark_types.StringType()
        struct = struct.add(name, kind)
    return struct


def rows(*values: tuple[Any, ...], names: list[str] = KEYED) -> Iterator[pa.RecordBatch]:
    """Yield each row in a batch of its own, as Spark may."""
    types = [pa.int32() if name == "partition" else pa.string() for name in names]
    for row in values:
        columns = [pa.array([value], kind) for value, kind in zip(row, types, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, names=names)


@contextmanager
def task(partition: int = 0, query: str | None = None, batch_id: int = 0) -> Iterator[None]:
    """Be a task of Spark."""
    context = TaskContext()
    context._partitionId = partition
    context._taskAttemptId = 7
    properties = {
        "sql.streaming.queryId": query,
        "streaming.sql.batchId": str(batch_id),
        "spark.jobGroup.id": "00000000-0000-0000-0000-000000000001",
    }
    context._localProperties = properties if query else {}
    TaskContext._setTaskContext(context)
    try:
        yield
    finally:
        TaskContext._taskContext = None


@contextmanager
def broker_running_on(root: Path) -> Iterator[None]:
    """Hold the root's lock as a broker does: in another process, exclusively."""
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'r+'); fcntl.lockf(lock, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(root / layout.ROOT_LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            broker.terminate()


class Sink:
    """A log, and the writers Spark would make for it; each call makes a new one, as Spark does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.columns = KEYED
        self.options: dict[str, str] = {"topic": "t"}

    def stream(self) -> Any:
        return stream_writer({"path": str(self.root), **self.options}, schema(*self.columns), False)

    def batch(self, **options: str) -> Any:
        given = {"path": str(self.root), **self.options, **options}
        return batch_writer(given, schema(*self.columns), False)

    def stage(
        self, batch_id: int, *values: tuple[Any, ...], partition: int = 0, query: str = QUERY
    ) -> SinkMessage:
        with task(partition, query, batch_id):
            written = self.stream().write(rows(*values, names=self.columns))
        return pickle.loads(pickle.dumps(written))

    def values(self, topic: str = "t") -> list[bytes | None]:
        engine = DirectoryLog(self.root, read_only=True)
        return [
            value
            for partition in engine.offsets(topic)
            for batch in engine.read(topic, partition, columns=["value"])
            for value in batch.column("value").to_pylist()
        ]

    def staged(self) -> list[str]:
        return [file.name for file in self.root.rglob("kl-*.staged*")]


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    return Sink(tmp_path / "log")


def test_nothing_is_visible_before_the_commit_and_all_is_after(sink: Sink) -> None:
    messages = [
        sink.stage(0, ("a", "1"), ("b", "2"), partition=0),
        sink.stage(0, ("a", "3"), partition=1),
    ]
    assert sink.values() == []
    sink.stream().commit(messages, 0)
    assert sink.values() == [b"1", b"2", b"3"]
    assert sink.staged() == []


def test_tasks_are_appended_in_the_order_of_sparks_partitions(sink: Sink) -> None:
    late, early = (sink.stage(0, ("a", str(n)), partition=n) for n in (1, 0))
    sink.stream().commit([late, early], 0)
    assert sink.values() == [b"0", b"1"]


def test_a_repeated_micro_batch_is_skipped_with_a_warning(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink.stream()
    caplog.clear()
    for _ in range(2):
        sink.stream().commit([sink.stage(4, ("a", "1"))], 4)
    assert sink.values() == [b"1"]
    assert sink.staged() == []
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert QUERY in record.getMessage()


def test_an_older_micro_batch_is_refused_and_leaves_nothing(sink: Sink) -> None:
    sink.stream().commit([sink.stage(57, ("a", "1"))], 57)
    messages = [sink.stage(3, ("a", "2"))]
    with pytest.raises(CommitConflictError, match=r"committed 57 at \d\d:\d\d, got 3"):
        sink.stream().commit(messages, 3)
    sink.stream().abort(messages, 3)
    assert sink.values() == [b"1"]
    assert sink.staged() == []


def test_reset_writer_accepts_an_older_micro_batch(sink: Sink) -> None:
    sink.stream().commit([sink.stage(57, ("a", "1"))], 57)
    sink.options["resetWriter"] = "true"
    sink.stream().commit([sink.stage(3, ("a", "2"))], 3)
    assert sink.values() == [b"1", b"2"]


def test_queries_do_not_skip_each_others_batches(sink: Sink) -> None:
    for query in (QUERY, "other"):
        sink.stream().commit([sink.stage(0, ("a", "1"), query=query)], 0)
    assert sink.values() == [b"1", b"1"]


def test_an_abort_after_the_commit_undoes_nothing(sink: Sink) -> None:
    messages = [sink.stage(0, ("a", "1"))]
    sink.stream().commit(messages, 0)
    sink.stream().abort(messages, 0)
    assert sink.values() == [b"1"]


def test_an_abort_that_fails_does_not_hide_why_spark_aborts(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [sink.stage(0, ("a", "1"))]
    writer = sink.stream()
    caplog.clear()
    with broker_running_on(sink.root):
        with pytest.raises(LockedByBrokerError, match="stop the broker"):
            writer.commit(messages, 0)
        writer.abort(messages, 0)
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "stop the broker" in record.getMessage()
    assert len(sink.staged()) == 1


def test_an_abort_removes_what_failed_attempts_have_staged(sink: Sink) -> None:
    message = sink.stage(0, ("a", "1"))
    sink.stage(0, ("a", "1"), partition=1)  # its message never reached the driver
    assert len(sink.staged()) == 2
    sink.stream().abort([message, None], 0)
    assert sink.staged() == []


def test_a_commit_takes_only_the_attempt_it_was_told_of(sink: Sink) -> None:
    sink.stage(0, ("a", "lost"))
    sink.stream().commit([sink.stage(0, ("a", "1"))], 0)
    assert sink.values() == [b"1"]
    assert sink.staged() == []


def test_a_failing_task_removes_what_it_staged(sink: Sink) -> None:
    sink.columns = ["key", "value", "partition"]
    with pytest.raises(InvalidInputError, match="partitions 0 to 0"):
        sink.stage(0, ("a", "1", 0), ("a", "2", 5))
    with pytest.raises(InvalidInputError, match="-1 is out of range"):
        sink.stage(0, ("a", "2", -1))
    assert sink.staged() == []


def test_a_null_key_on_a_compacted_topic_names_the_other_policy(sink: Sink) -> None:
    with pytest.raises(InvalidInputError, match=r"topic\.cleanup\.policy=delete"):
        sink.stage(0, (None, "1"))
    sink.columns = ["value"]
    with pytest.raises(InvalidInputError, match=r"topic\.cleanup\.policy=delete"):
        sink.stream()


def test_a_keyless_topic_of_policy_delete_takes_rows_without_key(sink: Sink) -> None:
    sink.columns = ["value"]
    sink.options["topic.cleanup.policy"] = "delete"
    sink.stream().commit([sink.stage(0, ("1",))], 0)
    assert sink.values() == [b"1"]


def test_rows_that_name_their_topics_create_them_at_the_commit(sink: Sink) -> None:
    sink.columns, sink.options = ["topic", "key", "value"], {"numPartitions": "2"}
    messages = [sink.stage(0, ("x", "a", "1"), ("y", "a", "2"), ("x", "a", "3"))]
    assert DirectoryLog(sink.root).topics() == []
    sink.stream().commit(messages, 0)
    assert sink.values("x") == [b"1", b"3"]
    assert sink.values("y") == [b"2"]
    assert len(DirectoryLog(sink.root).describe("x").partitions) == 2
    sink.stream().commit([sink.stage(0, ("x", "a", "1"))], 0)
    assert sink.values("x") == [b"1", b"3"]


def test_a_topic_name_that_kafka_forbids_is_refused(sink: Sink) -> None:
    sink.columns, sink.options = ["topic", "key", "value"], {}
    with pytest.raises(InvalidInputError, match="topic name 'a/b' is not allowed"):
        sink.stage(0, ("a/b", "a", "1"))


def test_the_topic_is_created_before_any_task_runs(sink: Sink) -> None:
    sink.options |= {"numPartitions": "3", "topic.segment.bytes": "1048576"}
    sink.stream()
    topic = DirectoryLog(sink.root).describe("t")
    assert len(topic.partitions) == 3
    assert dict(topic.config) == {"cleanup.policy": "compact", "segment.bytes": "1048576"}


def test_a_micro_batch_without_rows_writes_nothing(sink: Sink) -> None:
    message = sink.stage(0)
    assert message.staged is None
    sink.stream().commit([message], 0)
    sink.stream().commit([], 1)
    assert sink.values() == []


def test_a_stream_takes_no_transaction_options(sink: Sink) -> None:
    sink.options |= {"txnAppId": "a", "txnVersion": "1"}
    with pytest.raises(InvalidInputError, match=r"are for df\.write"):
        sink.stream()


def test_a_batch_write_is_pickled_and_lands_every_time(sink: Sink) -> None:
    for _ in range(2):
        writer = pickle.loads(pickle.dumps(sink.batch()))
        with task():
            message = writer.write(rows(("a", "1")))
        writer.commit([message])
    assert sink.values() == [b"1", b"1"]


def test_a_repeated_transaction_lands_once(sink: Sink) -> None:
    for version in ("5", "5", "6"):
        writer = sink.batch(txnAppId="job", txnVersion=version)
        with task():
            message = writer.write(rows(("a", version)))
        writer.commit([message])
    assert sink.values() == [b"5", b"6"]


def test_an_older_transaction_is_refused_in_its_own_words(sink: Sink) -> None:
    def write(version: str, query: str | None, app_id: str) -> None:
        writer = sink.batch(txnAppId=app_id, txnVersion=version)
        with task(query=query, batch_id=int(version)):
            message = writer.write(rows(("a", version)))
        writer.commit([message])

    write("57", None, "job")
    with pytest.raises(
        CommitConflictError,
        match=r"^this txnVersion is older than the log: committed 57 at \d\d:\d\d, got 3 .*"
        "give a higher txnVersion, or set option resetWriter",
    ):
        write("3", None, "job")
    write("57", QUERY, f"{QUERY}/name")  # as Append does
    with pytest.raises(CommitConflictError, match=r"this checkpoint .*, got 3 .* newer checkpoint"):
        write("3", QUERY, f"{QUERY}/name")


def test_an_aborted_batch_write_leaves_nothing(sink: Sink) -> None:
    writer = sink.batch()
    with task():
        message = writer.write(rows(("a", "1")))
        writer.write(rows(("a", "1")))
    writer.abort([message, None])
    assert sink.staged() == []
    assert sink.values() == []


def test_overwrite_is_for_streams_only(sink: Sink) -> None:
    options = {"path": str(sink.root), "topic": "t"}
    refused = r'Save mode Overwrite not allowed for Kafka.*\.mode\("append"\)'
    with pytest.raises(InvalidInputError, match=refused):
        batch_writer(options, schema(*KEYED), True)
    stream_writer(options, schema(*KEYED), True)


def test_a_plain_write_inside_a_stream_warns_once_that_it_is_at_least_once(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink_writer._warned.clear()
    for batch_id in range(2):
        writer = sink.batch()
        with task(query=QUERY, batch_id=batch_id):
            message = writer.write(rows(("a", "1")))
        writer.commit([message])
    assert caplog.text.count("at-least-once") == 1
    assert "kafkalog.sink.Append" in caplog.text


def test_ignored_client_options_are_named_once(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink_writer._warned.clear()
    sink.options["kafka.bootstrap.servers"] = "h:9092"
    for batch_id in range(2):
        sink.stream().commit([sink.stage(batch_id, ("a", "1"))], batch_id)
    assert caplog.text.count("kafka.bootstrap.servers") == 1


def test_options_that_ask_for_another_topic_than_there_is_are_named_once(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink_writer._warned.clear()
    config = {"segment.bytes": "1000", "cleanup.policy": "compact"}
    DirectoryLog(sink.root).create_topic("t", 2, config)
    sink.options |= {
        "numPartitions": "3",
        "topic.segment.bytes": "2000",
        "topic.cleanup.policy": "compact",
        "topic.index.interval.bytes": "100",
    }
    for batch_id in range(2):
        sink.stream().commit([sink.stage(batch_id, ("a", "1"))], batch_id)
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert (
        "numPartitions=3 (it has 2), topic.index.interval.bytes=100 (it has 4096), "
        "topic.segment.bytes=2000 (it has 1000);"
    ) in record.getMessage()


def test_options_that_made_the_topic_are_not_warned_of(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    sink_writer._warned.clear()
    given = {"numPartitions": "3", "topic.segment.bytes": "2000"}
    sink.options |= given
    sink.stream().commit([sink.stage(0, ("a", "1"))], 0)
    sink.columns, sink.options = ["topic", "key", "value"], given
    sink.stream().commit([sink.stage(1, ("u", "a", "1"), ("t", "a", "1"))], 1)
    assert "no effect" not in caplog.text


@pytest.fixture(params=["directory", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return tmp_path / "log" if request.param == "directory" else str(memory_address())


def test_a_topic_that_a_write_makes_is_warned_of_once(
    place: Path | str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        SparkWrite(place, {"topic": "t"}, plain=True).micro_batch([[ROW]])
        SparkWrite(place, {}, ("topic", "key", "value"), plain=True).micro_batch(
            [[{"topic": name, **ROW} for name in "ut"], [{"topic": "u", **ROW}]]
        )
    assert [each.getMessage() for each in caplog.records] == [
        f"{place}: topic {name!r} is new, with 1 partition (the topics before: {before}). To let a "
        "write create no topic and no log, set create=false."
        for name, before in (("t", "none"), ("u", "t"))
    ]


def test_a_write_that_may_create_nothing_refuses_a_missing_log_and_a_missing_topic(
    place: Path | str,
) -> None:
    by_rows = {"create": "false"}, ("topic", "key", "value")
    by_option = {"create": "false", "topic": "t"}, ("key", "value")
    for options, names in (by_rows, by_option):
        with pytest.raises(InvalidInputError, match=r"option path: .* no log") as error:
            SparkWrite(place, options, names, plain=True).micro_batch([[]])
        assert "by writing to it" not in str(error.value)  # because create=false forbids it
        with pytest.raises(InvalidInputError, match="no log"):
            open_log(place, create=False)
    with open_log(place) as log:
        log.create_topic("other", 1, {})
        for options, names in (by_rows, by_option):
            with pytest.raises(UnknownTopicError, match=r"'t' does not exist; .*: other"):
                SparkWrite(place, options, names, plain=True).micro_batch([[{"topic": "t", **ROW}]])
        assert log.topics() == ["other"]
        log.create_topic("t", 1, {})
        for options, names in (by_rows, by_option):
            SparkWrite(place, options, names, plain=True).micro_batch([[{"topic": "t", **ROW}]])
        assert log.offsets("t") == {0: (0, 2)}


def test_a_topic_that_vanished_is_an_error_in_the_task(sink: Sink) -> None:
    writer = sink.stream()
    writer.options = sink_writer.SinkOptions.parse({"path": str(sink.root), "topic": "gone"})
    with task(query=QUERY), pytest.raises(UnknownTopicError, match="topics of this log are: t"):
        writer.write(rows(("a", "1")))


def test_a_compressed_write_is_read_back(sink: Sink) -> None:
    sink.options |= {"kafka.compression.type": "zstd", "batch.size": "1000"}
    values = [("k", f"{n:050d}") for n in range(200)]
    sink.stream().commit([sink.stage(0, *values)], 0)
    assert sink.values() == [value.encode() for _, value in values]
