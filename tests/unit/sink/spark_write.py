"""Drives the sink's writers as Spark does, without Spark: its order of calls, and what it retries.

Spark makes one writer per micro-batch and pickles it for the tasks; what commits is another copy.
Each attempt of a task runs its whole `write` before Spark asks whether it counts; of several
attempts of one partition the message of one reaches the commit. A commit that raises is followed
by an abort with the same messages (spark-kafka.md, B7).
"""

from __future__ import annotations

import itertools
import pickle
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as spark_types
from pyspark.sql.types import StructType

from kafkalog.sink.writer import SinkMessage, batch_writer, stream_writer
from kafkalog.storage_engine.format import layout

__all__ = ["Row", "SparkWrite", "schema_of", "staged_names", "task"]

Row = Mapping[str, Any]
ARROW = {"partition": pa.int32(), "topic": pa.string()}
SPARK = {"partition": spark_types.IntegerType(), "topic": spark_types.StringType()}
_attempts = itertools.count()


def schema_of(names: Sequence[str]) -> StructType:
    struct = StructType()
    for name in names:
        struct = struct.add(name, SPARK.get(name, spark_types.BinaryType()))
    return struct


def batches(rows: Sequence[Row], names: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
    """Cut rows into batches of `size`, as Spark does by its own settings."""
    schema = pa.schema([(name, ARROW.get(name, pa.binary())) for name in names])
    for start in range(0, len(rows), size):
        yield pa.RecordBatch.from_pylist(list(rows[start : start + size]), schema=schema)


@contextmanager
def task(partition: int, properties: Mapping[str, str]) -> Iterator[None]:
    """Be one attempt of a task."""
    context = TaskContext()
    context._partitionId = partition
    context._taskAttemptId = next(_attempts)
    context._localProperties = dict(properties)
    TaskContext._setTaskContext(context)
    try:
        yield
    finally:
        TaskContext._taskContext = None


@dataclass
class SparkWrite:
    """A streaming query that writes to a log, at a directory or a URL; a new one is a new driver.

    `version` makes it a batch write by txnAppId and txnVersion; `plain` one without either.
    """

    root: Path | str
    options: dict[str, str] = field(default_factory=lambda: {"topic": "t"})
    names: Sequence[str] = ("key", "value")
    query: str = "query-1"
    run: str = "run-1"
    batch_rows: int = 100
    plain: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    """The session's settings, which tasks have as properties."""

    def writer(self) -> Any:
        given = {"path": str(self.root), **self.options}
        if self.plain or "txnAppId" in self.options:
            return batch_writer(given, schema_of(self.names), False)
        return stream_writer(given, schema_of(self.names), False)

    def attempt(
        self, rows: Sequence[Row], *, partition: int = 0, batch_id: int = 0, writer: Any = None
    ) -> SinkMessage:
        """Run one attempt of a task to its end; whether it counts is told by the commit."""
        properties = {
            **self.settings,
            "sql.streaming.queryId": self.query,
            "streaming.sql.batchId": str(batch_id),
            "spark.jobGroup.id": str(uuid.uuid5(uuid.NAMESPACE_OID, self.run)),
        }
        sent = pickle.loads(pickle.dumps(writer or self.writer()))
        with task(partition, {} if self.plain else properties):
            message = sent.write(batches(rows, self.names, self.batch_rows))
        received: SinkMessage = pickle.loads(pickle.dumps(message))
        return received

    def commit(self, messages: Sequence[SinkMessage | None], batch_id: int = 0) -> None:
        """Commit as the driver does; abort, and raise, when that fails."""
        numbers = [] if self.plain or "txnAppId" in self.options else [batch_id]
        try:
            self.writer().commit(list(messages), *numbers)
        except Exception:
            self.abort(messages, batch_id)
            raise

    def abort(self, messages: Sequence[SinkMessage | None], batch_id: int = 0) -> None:
        numbers = [] if self.plain or "txnAppId" in self.options else [batch_id]
        self.writer().abort(list(messages), *numbers)

    def micro_batch(self, parts: Sequence[Sequence[Row]], batch_id: int = 0) -> None:
        """Write one partition per list of rows, with nothing going wrong."""
        messages = [
            self.attempt(rows, partition=number, batch_id=batch_id)
            for number, rows in enumerate(parts)
        ]
        self.commit(messages, batch_id)


def staged_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob(f"{layout.OURS}*{layout.STAGED}*"))
