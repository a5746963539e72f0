"""The writers that Spark drives: tasks stage rows, the driver commits them.

Spark may run a task twice, and decides only after its `write` whether the attempt counts. Therefore
`write` publishes nothing: it leaves a staged file and returns a message that names it. `commit`
publishes all messages of a micro-batch with one journal record. Invariants:

- The writer of a stream is (query id, topic). Tasks read the query id from Spark's local
  properties, since the object that writes and the one that commits share no state.
- A micro-batch that Spark repeats is found in the journal and skipped. One that does not follow the
  last one there is refused.
- `abort` also runs after a failed `commit`, so it asks the journal first (`DirectoryLog.abort`).
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from kafkalog.errors import InvalidInputError, KafkaLogError
from kafkalog.plain_errors import plain
from kafkalog.sink.columns import SinkColumns
from kafkalog.sink.options import SinkOptions
from kafkalog.sink.plan import read_plan, sync_plan, syncing_plan
from kafkalog.sink.query import MicroBatch, checkpoint_query_id, micro_batch_of_task
from kafkalog.sink.shared_log import requests_of, seen_by_driver, shared_log, shared_readable
from kafkalog.sink.topics import options_without_effect, prepare_topic, warn_of_created
from kafkalog.spark_release import DataSourceStreamArrowWriter
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, files
from kafkalog.storage_engine.metadata.writer import CHECKPOINT, TRANSACTION, Writer, writer_slug

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafkalog.storage_engine.log.results import CommitResult
    from kafkalog.storage_engine.object_store.seen_log import SeenLog
    from kafkalog.storage_engine.writing.staged_message import StagedMessage
    from kafkalog.storage_engine.writing.staging import StagedWriter

_log = logging.getLogger("kafkalog.sink")
_warned: set[tuple[str, ...]] = set()


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> TableBatchWriter:
    """Return the writer of one `df.write`; create the topic that the option `topic` names.

    Raises InvalidInputError for options, columns and save modes that Spark's Kafka sink refuses.
    """
    if overwrite:
        raise InvalidInputError(
            'Save mode Overwrite not allowed for Kafka. Give .mode("append"), the only one that '
            "both Spark, for a sink in Python, and a log allow."
        )
    return TableBatchWriter(*_prepare(options, schema))


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """Return the writer of one micro-batch; create the topic that the option `topic` names.

    Spark sets `overwrite` for output mode `complete`; the rows are appended, as in Spark's Kafka
    sink. Raises InvalidInputError for options and columns that Spark's Kafka sink refuses.
    """
    prepared = _prepare(options, schema)
    if prepared[0].txn_app_id is not None:
        raise InvalidInputError(
            "options txnAppId and txnVersion are for df.write; "
            "a stream is exactly once by its query id and micro-batch id"
        )
    return StreamWriter(*prepared)


def _prepare(
    options: Mapping[str, str], schema: StructType
) -> tuple[SinkOptions, SinkColumns, SeenLog | None, Counter[str]]:
    """Return what a writer is made of: the last is the requests that this sent, by kind."""
    parsed = SinkOptions.parse(options)
    columns = SinkColumns.of(schema, parsed.topic)
    before = requests_of(parsed.root)
    prepare_topic(parsed, columns)
    seen = seen_by_driver(parsed.root, parsed.topic)
    return parsed, columns, seen, requests_of(parsed.root) - before


@dataclass(frozen=True, slots=True)
class SinkMessage(WriterCommitMessage):
    """The message from a task to the driver."""

    spark_partition: int
    micro_batch: MicroBatch | None
    """None in a plain batch job."""
    staged: StagedMessage | None
    """None if the task had no rows."""
    run: int = 0
    """The run of the writer that staged the file; it is part of the file's name."""
    requests: Counter[str] = field(default_factory=Counter)
    """The requests that the task sent to an object store, by kind."""
    planning: Counter[str] = field(default_factory=Counter)
    """Those that were sent to plan it."""


class _LogWriter:
    """Common to batch and stream writers: stage rows, publish what is staged."""

    def __init__(
        self,
        options: SinkOptions,
        columns: SinkColumns,
        seen: SeenLog | None,
        planning: Counter[str],
    ) -> None:
        self.options = options
        self.columns = columns
        self.seen = seen
        self.planning = planning

    def _stage(
        self,
        iterator: Iterator[pa.RecordBatch],
        slug: str,
        batch_id: int,
        running: MicroBatch | None,
        run: int,
    ) -> SinkMessage:
        from pyspark import TaskContext

        from kafkalog.storage_engine.writing.staging import StagedWriter

        context = TaskContext.get()
        spark_partition = context.partitionId() if context is not None else 0
        before = requests_of(self.options.root)
        staging: StagedWriter | None = None
        try:
            for batch in iterator:
                if batch.num_rows == 0:
                    continue
                if staging is None:
                    log = self.seen or shared_readable(self.options.root, read_only=True)
                    staging = StagedWriter(
                        log,
                        log.state(),
                        writer_slug=slug,
                        batch_id=batch_id,
                        spark_partition=spark_partition,
                        attempt=_attempt(context, run),
                        new_topic=self.options.created,
                        batch_size=self.options.batch_size,
                        codec=self.options.codec,
                        now_ms=clock.now_ms,
                    )
                for topic, records in self._records(batch):
                    staging.append(topic, records)
            staged = staging.finish() if staging else None
            sent = requests_of(self.options.root) - before
            return SinkMessage(spark_partition, running, staged, run, sent, self.planning)
        except BaseException:
            if staging is not None:
                staging.discard()
            raise

    def _records(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self.options.topic is not None:
            return iter([(self.options.topic, self.columns.records(batch))])
        return self.columns.by_topic(batch)

    def _publish(
        self,
        messages: Sequence[SinkMessage | None],
        writer: Writer | None,
        sent: Counter[str] | None = None,
    ) -> None:
        """Commit what tasks have staged; `sent` are requests that were sent only to do so."""
        staged = [message.staged for message in messages if message and message.staged]
        created = {
            name for each in staged for name, topic_id in each.topic_ids.items() if not topic_id
        }
        before = requests_of(self.options.root)
        known = shared_log(self.options.root).state() if created else None
        result = shared_log(self.options.root).commit(
            staged,
            writer=writer,
            create=self.options.created,
            reset_writer=self.options.reset_writer,
            now_ms=clock.now_ms(),
        )
        if known is not None and not result.skipped:
            warn_of_created(self.options, created - known.topics.keys(), known)
        if self.seen is not None:
            committing = requests_of(self.options.root) - before + (sent or Counter())
            self._log_requests(messages, writer, result, committing)

    def _log_requests(
        self,
        messages: Sequence[SinkMessage | None],
        writer: Writer | None,
        result: CommitResult,
        committing: Counter[str],
    ) -> None:
        """Log how many requests a write has sent to an object store, by kind."""
        found = [message for message in messages if message]
        by_tasks = sum((message.requests for message in found), Counter[str]())
        by_driver = committing + (found[0].planning if found else self.planning)
        _log.info(
            "%s: batch %s of %s: %s; requests of the driver: %s; of %d tasks: %s",
            self.options.root,
            "-" if writer is None else writer.batch_id,
            self.options.target,
            "committed already" if result.skipped else f"{result.rows:,} rows",
            _counted(by_driver),
            len(found),
            _counted(by_tasks),
        )

    def _discard(
        self,
        messages: Sequence[SinkMessage | None],
        writer: Writer | None,
        prefix: str,
        run: int | None = None,
    ) -> None:
        """Remove what a run staged, unless the journal says that it is published.

        A failed task leaves None instead of a message; its file is found by the prefix of its name.
        If neither `run` nor a message names the run, nothing is removed, since other runs' files
        must stay. A failure is only logged: Spark would report it instead of the fault that made it
        abort.
        """
        staged = [message.staged for message in messages if message and message.staged]
        run = next((message.run for message in messages if message), run)
        if run is None:
            return
        try:
            shared_log(self.options.root).abort(staged, writer=writer, prefix=prefix, run=run)
        except (KafkaLogError, OSError) as fault:
            files.pass_on(fault)
            _log.warning(
                "%s: the files %s* that a failed write staged were not removed: %s",
                self.options.root,
                prefix,
                fault,
            )

    def _warn_of_ignored(self, messages: Sequence[SinkMessage | None], writer: str) -> None:
        """Warn once of options that had no effect; the commit has created the topics."""
        if self.options.ignored:
            _warn_once(
                (writer, "ignored"),
                f"options of Kafka's client mean nothing without a broker and are ignored: "
                f"{', '.join(self.options.ignored)}",
            )
        if not self.options.given_for_topics:
            return
        topics = shared_log(self.options.root).state().topics
        written = {name for m in messages if m and m.staged for name in m.staged.topic_ids}
        for name in sorted(written & topics.keys()):
            differing = options_without_effect(self.options, topics[name])
            if differing:
                _warn_once(
                    (writer, "topic", name),
                    f"topic {name} at {self.options.root} exists, so these options have no effect: "
                    f"{', '.join(differing)}; KafkaLog.alter_topic changes a topic's configs",
                )


@plain
class TableBatchWriter(_LogWriter, DataSourceArrowWriter):
    """The writer of one `df.write`: Spark pickles this object for its tasks and its commit."""

    def __init__(
        self,
        options: SinkOptions,
        columns: SinkColumns,
        seen: SeenLog | None,
        planning: Counter[str],
    ) -> None:
        super().__init__(options, columns, seen, planning)
        self._batch_id = options.txn_version or 0
        # A write without a name gets one for its files.
        self._slug = writer_slug(options.txn_app_id or secrets.token_hex(16), options.target)
        # Two jobs may write under one txnAppId and txnVersion: a scheduler's retry that came early.
        self._run = secrets.randbits(32)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkMessage:
        """Stage the rows of one task (runs on an executor)."""
        return self._stage(iterator, self._slug, self._batch_id, micro_batch_of_task(), self._run)

    def commit(self, messages: Sequence[Any]) -> None:
        """Publish all tasks' rows at once; raises CommitConflictError for an older txnVersion."""
        writer = self._writer(messages)
        self._publish(messages, writer)
        running = _micro_batch_of(messages)
        if running is not None and writer is None:
            _warn_once(
                (running.query_id, self.options.target, "at least once"),
                f"df.write to {self.options.target} inside a streaming query is at-least-once: "
                "a repeated micro-batch lands twice; use kafkalog.sink.Append(path, topic), or set "
                "txnAppId and txnVersion",
            )
        self._warn_of_ignored(messages, running.query_id if running else self._slug)

    def abort(self, messages: Sequence[Any]) -> None:
        """Remove what the tasks staged; Spark also calls it after a failed commit."""
        prefix = layout.staged_prefix(self._slug, self._batch_id)
        self._discard(messages, self._writer(messages), prefix, self._run)

    def _writer(self, messages: Sequence[SinkMessage | None]) -> Writer | None:
        app_id = self.options.txn_app_id
        if app_id is None:
            return None
        running = _micro_batch_of(messages)
        # `Append` passes the query and the micro-batch on as these options.
        is_stream = running is not None and app_id.split("/")[0] == running.query_id
        kind = CHECKPOINT if is_stream else TRANSACTION
        plan = None
        checkpoint = self.options.checkpoint  # `Append` gives the running query's
        if running is not None and checkpoint_query_id(checkpoint) == running.query_id:
            plan = read_plan(checkpoint, self._batch_id, is_every_one_written=False)
        return Writer(app_id, self.options.target, self._batch_id, kind, plan)


@plain
class StreamWriter(_LogWriter, DataSourceStreamArrowWriter):
    """The writer of one micro-batch; one object writes and another one commits."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkMessage:
        """Stage the rows of one task (runs on an executor)."""
        running = micro_batch_of_task(self.options.checkpoint, self.options.query_name)
        if running is None:
            raise InvalidInputError(
                "this task does not know its streaming query: Spark's local properties "
                "sql.streaming.queryId and streaming.sql.batchId are missing"
            )
        slug = writer_slug(running.query_id, self.options.target)
        run = crc32(running.run_id.encode()) if running.run_id else secrets.randbits(32)
        with syncing_plan(running.checkpoint, running.batch_id):
            return self._stage(iterator, slug, running.batch_id, running, run)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Publish the micro-batch; raises CommitConflictError if the checkpoint is older."""
        from kafkalog.sink.backlog import warn_of_backlog

        writer = self._writer(messages, batchId)
        if writer is None:
            return  # no task ran, so there is nothing to publish
        sync_plan(self._checkpoint(messages), batchId)
        self._publish(messages, writer, self.planning)  # another object has planned the tasks
        self._warn_of_ignored(messages, writer.id)
        warn_of_backlog(self.options, writer.id, clock.now_ms())

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Remove what the tasks staged; Spark also calls it after a failed commit."""
        writer = self._writer(messages, batchId)
        if writer is not None:
            slug = writer_slug(writer.id, writer.target)
            self._discard(messages, writer, layout.staged_prefix(slug, batchId))

    def _writer(self, messages: Sequence[SinkMessage | None], batch_id: int) -> Writer | None:
        """Return the writer's id and batch; None if nothing names the query."""
        running, checkpoint = _micro_batch_of(messages), self._checkpoint(messages)
        query_id = running.query_id if running else checkpoint_query_id(checkpoint)
        if query_id is None:
            return None
        plan = None
        if checkpoint_query_id(checkpoint) == query_id:
            plan = read_plan(checkpoint, batch_id, is_every_one_written=True)
        return Writer(query_id, self.options.target, batch_id, plan=plan)

    def _checkpoint(self, messages: Sequence[SinkMessage | None]) -> str | None:
        """Return the query's checkpoint: tasks know it, if it is not an option."""
        running = _micro_batch_of(messages)
        return running.checkpoint if running else self.options.checkpoint


def _counted(requests: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(requests.items())) or "none"


def _micro_batch_of(messages: Sequence[SinkMessage | None]) -> MicroBatch | None:
    return next((m.micro_batch for m in messages if m is not None and m.micro_batch), None)


def _attempt(context: Any, run: int) -> int:
    """Return a number that no other attempt of this task has.

    The upper half is Spark's attempt id, which each driver counts from 0. The lower half is the
    run, since a task of a dead driver may still write.
    """
    own = context.taskAttemptId() if context is not None else 0
    return (int(own) << 32) | run


def _warn_once(what: tuple[str, ...], text: str) -> None:
    if what not in _warned:
        _warned.add(what)
        _log.warning(text)
