"""KTableView: a topic as a table of a database, kept by a streaming query.

If the table and the checkpoint do not fit together, a new generation of the query rebuilds the view
from the beginning of the log. Invariants:

- The first micro-batch of a generation replaces all rows in one transaction, so readers see the old
  rows or the new ones.
- A generation is removed only after a later one has reached the table.
- One process at a time runs a view.
- No micro-batch begins if the topic was created again since the generation began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.plain_errors import plain_in_batch
from kafkalog.sink.query import MicroBatch, end_offsets_of_checkpoint
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.upsert import Upsert
from kafkalog.sink.views.generations import Generations
from kafkalog.sink.views.live_keys import has_live_keys
from kafkalog.sink.views.view_fitness import (
    check_owned,
    is_emptied,
    position_of,
    reason_to_rebuild,
    recreation,
)
from kafkalog.sink.views.view_progress import PartitionProgress, ViewProgress
from kafkalog.storage_engine.fs import clock, files
from kafkalog.storage_engine.log.readable_log import ReadableLog
from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
from kafkalog.storage_engine.place import opened_for_spark, spark_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_log = logging.getLogger("kafkalog.sink")
_OURS = {
    *("path", "view", "subscribe", "subscribepattern", "assign", "startingtimestamp"),
    *("startingoffsets", "startingoffsetsbytimestamp"),
}
"""Options of the source that the view sets itself: it reads the whole topic from the beginning."""
_DIVIDING = {"minpartitions", "maxrecordsperpartition"}
"""Options of the source that divide a changelog among tasks; `view=latest` refuses them."""
_POLL_S = 0.1
_running: dict[Path, KTableView] = {}
"""The view that holds the lock of each checkpoint in this process."""
_turn = threading.Lock()
"""Held while such a lock is taken or released."""


class RefreshedTable(Protocol):
    """A materialized table that a view keeps fresh (`KTable.materialize`)."""

    def refresh_if_due(self, spark: SparkSession, /) -> None:
        """Take what has changed into the table's files if that is much, in a session."""


class KTableView:
    """A table of `target` that follows the latest records of `topic` of the log at `path`.

        stock = KTableView(spark, "/data/log", "stock",
                           SQLiteUpsert("/data/stock.db", "stock", schema="count int"),
                           checkpoint="/data/views/stock")
        stock.start()
        stock.wait_until(timeout_s=60)

    Args:
        spark: may be None if you call only `progress` and `wait_until`, in any process.
        target: an upsert that belongs to this view alone.
        checkpoint: a directory on a local file system that belongs to this view alone.
        options: further options of the source.
        name: the query's name.
        trigger: the arguments of `DataStreamWriter.trigger`, as in {"availableNow": True}.
        tables: materialized tables of the same topic. After a micro-batch, each is refreshed whose
            files lack a tenth of its rows, or that the log can no longer complete.

    A deletion reaches the table only while its tombstone is in the log. Kafka's cleaner keeps a
    tombstone for `delete.retention.ms` (a day by default) after it first met it. A table that lags
    further behind may keep deleted keys. `start` rebuilds a table whose last micro-batch is that
    old and which the cleaner has overtaken. It does not notice a running query that lags so far:
    `progress` shows the lag, `rebuild` repairs the table.

    The first micro-batch has the latest record of each key, and `maxOffsetsPerTrigger` does not cut
    it. All records are read instead if `select` is a list or if `on_bad_record` leaves records out.
    The options `minPartitions`, `maxRecordsPerPartition` and `read_uncommitted` have the same
    effect. With `maxOffsetsPerTrigger` a rebuilt table is then incomplete until the query reaches
    the log's end.

    Spark itself needs no database to query a topic's latest values: use `KTable(...).create_view`
    or the option `view=latest`.

    Raises InvalidInputError, UnknownTopicError.
    """

    def __init__(
        self,
        spark: SparkSession | None,
        path: str | PathLike[str],
        topic: str,
        target: Upsert,
        *,
        checkpoint: str | PathLike[str],
        options: Mapping[str, str] | None = None,
        name: str | None = None,
        trigger: Mapping[str, Any] | None = None,
        tables: Sequence[RefreshedTable] = (),
    ) -> None:
        self.path = spark_path(path)
        self.topic = topic
        self.target = target
        self.options = {key: str(value) for key, value in (options or {}).items()}
        self.name = name
        self.trigger = dict(trigger or {})
        self._tables = tuple(tables)
        self._spark = spark
        self._generations = Generations(_local(fspath(checkpoint)))
        self._query: StreamingQuery | None = None
        self._was_stopped = False
        self._held = ExitStack()
        self._mutex = threading.RLock()
        taken = sorted(key for key in self.options if key.lower() in _OURS)
        if target.name or target.checkpoint is not None:
            raise InvalidInputError(
                f"{target.where}: a view knows its query by its own checkpoint (expected an upsert "
                f"without name= and checkpoint=, found {target.name or target.checkpoint!r}). "
                "Leave them out."
            )
        if taken:
            raise InvalidInputError(
                f"a view reads its whole topic from the beginning: it sets {', '.join(taken)} "
                "itself; leave them out"
            )
        target.bad_records = target.bad_records.beside(self.path, topic, self.options)
        self._topic_state()

    def start(self, *, rebuild: bool = False) -> StreamingQuery:
        """Start the query that keeps the table, and return it; return a query that already runs.

        The table is rebuilt from the beginning of the log, with a WARNING, if it was lost, emptied
        or restored from a backup. A log that was created again, or has moved past the table, has
        the same effect. Single rows that somebody changed are not noticed. A table with rows that
        no view kept from this checkpoint is refused; `rebuild` allows their replacement. A table
        that lacks columns of the rows is refused, or gets them if the upsert has
        on_new_column="add". Then old rows hold null, until `rebuild` fills them.

        Raises InvalidInputError, and StorageError if this view runs here or in another process.
        """
        if self._spark is None:
            raise InvalidInputError(
                "this view was made without a Spark session, so it cannot start: "
                "KTableView(spark, ...)"
            )
        with self._mutex:
            query = self._query
            if query is not None and query.isActive and not (rebuild or self._recreation()):
                return query
            self._end_query()
            self._lock()
            try:
                self.target.bad_records.check({})
                changes = self._changes(self._spark)
                if not rebuild or not self.target.adds_columns:
                    self.target.check_columns(changes, [self.topic])
                self._query = self._start(changes, self._generation(rebuild))
            except BaseException:
                self._release()
                raise
            self._was_stopped = False
            return self._query

    def rebuild(self) -> StreamingQuery:
        """Build the table again from the log; its readers see the old rows until then."""
        return self.start(rebuild=True)

    def stop(self) -> None:
        """Stop the query, if this object runs it, and release the view for others."""
        with self._mutex:
            self._was_stopped = self._was_stopped or self._query is not None
            self._end_query()

    def _end_query(self) -> None:
        try:
            if self._query is not None:
                self._query.stop()
        finally:
            self._query = None
            self._release()

    def progress(self) -> ViewProgress:
        """Return how far the table is, and how far it lags behind the log."""
        query_id, position = self._position()
        applied = {} if position is None else position.end_offsets.get(self.topic, {})
        return ViewProgress(
            query_id,
            None if position is None else position.batch_id,
            None if position is None else position.time_ms,
            0 if position is None else position.bad_records,
            {
                number: PartitionProgress(
                    applied.get(str(number), 0), state.log_start_offset, self._end(state)
                )
                for number, state in self._topic_state().present()
            },
        )

    def wait_until(
        self, offsets: Mapping[int, int] | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Return when the table holds everything below `offsets`, {partition: offset}.

        The default is the current end of the log. Raises the query's own exception if it dies,
        StorageError if it was stopped, and TimeoutError after `timeout_s`; the last two say what is
        missing. Raises StorageError also if this object runs the query and the topic was created
        again.
        """
        ends = {number: self._end(state) for number, state in self._topic_state().present()}
        offsets = ends if offsets is None else offsets
        if unknown := sorted(offsets.keys() - ends.keys()):
            raise InvalidInputError(
                f"topic {self.topic} has the partitions {sorted(ends)}, not {unknown}"
            )
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            query = self._query
            # Ask first: the query may finish while we look.
            is_over = self._was_stopped or (query is not None and not query.isActive)
            looks = time.monotonic()
            position = self._position()[1]
            missing = self._missing(offsets, position)
            looked_s = time.monotonic() - looks
            if not missing:
                return
            where = f"the view of {self.topic} in {self.target.where}"
            if is_over:
                fault = None if query is None else query.exception()
                if fault is not None:
                    raise fault
                raise StorageError(f"{where}: its query has stopped; still missing: {missing}")
            if query is not None and position is None and (reason := self._recreation()):
                # The query does not notice it itself if the new topic is shorter.
                raise StorageError(f"{where}: {reason}. Start the view again.")
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(
                    f"{where}: after {timeout_s} s there is still missing: {missing}"
                )
            time.sleep(max(_POLL_S, looked_s))  # a look at Delta's history takes Spark's cores

    def _missing(self, offsets: Mapping[int, int], position: Position | None) -> str:
        applied = {} if position is None else position.end_offsets.get(self.topic, {})
        return ", ".join(
            f"{self.topic}-{number} from {applied.get(str(number), 0)} to {offset}"
            for number, offset in sorted(offsets.items())
            if applied.get(str(number), 0) < offset or position is None
        )

    def _position(self) -> tuple[str | None, Position | None]:
        """Return the query's id and position; no position if the topic was created again."""
        query_id, position = position_of(self.target, self._generations)
        number = self._generations.current()
        if recreation(self._generations, number, self._topic_state()):
            return query_id, None
        return query_id, position

    def _topic_state(self) -> TopicState:
        with self._log() as log:
            return log.describe(self.topic)

    def _recreation(self) -> str | None:
        with self._log() as log:
            topic = log.state().topics.get(self.topic)
        return recreation(self._generations, self._generations.current(), topic)

    def _log(self) -> ReadableLog:
        return opened_for_spark(self._log_options)

    @property
    def _log_options(self) -> Mapping[str, str]:
        return {**self.options, "path": self.path}

    def _end(self, state: PartitionState) -> int:
        return state.high_watermark if self._reads_uncommitted else state.last_stable_offset

    @property
    def _reads_uncommitted(self) -> bool:
        levels = [v for k, v in self.options.items() if k.lower() == "kafka.isolation.level"]
        return [level.strip().lower() for level in levels[-1:]] == ["read_uncommitted"]

    def _has_live_keys(self, position: Position) -> bool:
        ends = position.end_offsets.get(self.topic, {})
        is_committed = not self._reads_uncommitted
        left_out = position.bad_records  # each of their keys may have no row
        with self._log() as log:
            return has_live_keys(
                log, self.topic, ends, read_committed=is_committed, more_than=left_out
            )

    @property
    def _has_ended(self) -> bool:
        query = self._query
        return query is not None and not query.isActive

    def _lock(self) -> None:
        root = self._generations.root
        if root.exists() and not root.is_dir():
            raise InvalidInputError(f"{root}: a view's checkpoint is a directory, this is a file")
        files.make_directories(root)
        with _turn:
            other = _running.get(root)
            if other is not None and other._has_ended:  # nobody has called its `stop`
                other._held.close()
            if not self._held.enter_context(self._generations.lock().exclusive(wait=False)):
                self._held.close()
                raise StorageError(
                    f"{root}: the view is running already, here or in another process; stop it "
                    "first"
                )
            _running[root] = self
            self._held.callback(_running.pop, root, None)

    def _release(self) -> None:
        with _turn:
            self._held.close()

    def _generation(self, is_wanted: bool) -> int:
        """Return the generation to run: the current one, or a new one that rebuilds the table."""
        topic = self._topic_state()
        number = self._generations.current()
        was_emptied = False
        if number is not None and self._generations.topic(number)[0] != self.topic:
            raise InvalidInputError(
                f"{self._generations.root}: the checkpoint of a view of topic "
                f"{self._generations.topic(number)[0]}, not {self.topic}; give each view its own"
            )
        if not is_wanted:
            check_owned(self.target, self._generations)
            if number is not None:
                reason = reason_to_rebuild(self.target, self._generations, topic, clock.now_ms())
                if reason is None:
                    was_emptied = is_emptied(self.target, self._generations, self._has_live_keys)
                    if not was_emptied:
                        return number
                    reason = "the table is empty, though the log has rows"
                _log.warning(
                    "%s: the view of %s is rebuilt from the log: %s",
                    self.target.where,
                    self.topic,
                    reason,
                )
        return self._generations.add(self.topic, topic.topic_id, was_emptied=was_emptied)

    def _changes(self, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.format("kafkalog")
        if self.target.bad_records.topic:  # whose dead letters have the record's headers
            reader = reader.options(includeHeaders="true")
        reader = reader.options(**self.options)
        view = "latest" if self._needs_latest_alone else "changelog"
        reader = reader.options(path=self.path, subscribe=self.topic)
        return reader.options(startingOffsets="earliest", view=view).load()

    @property
    def _needs_latest_alone(self) -> bool:
        """Whether view=latest gives the same table as the full changelog."""
        is_divided = not _DIVIDING.isdisjoint(key.lower() for key in self.options)
        return (
            self.target.shape.needs_latest_alone and not is_divided and not self._reads_uncommitted
        )

    def _start(self, changes: DataFrame, number: int) -> StreamingQuery:
        self.target.replace_first = True
        self.target.refuses_gaps = True
        self._generations.remove_cut_short_plan(number)
        run_id = str(uuid4())
        apply = _Apply(
            self.target, self._generations, number, run_id, self._log_options, self._tables
        )
        writer = changes.writeStream.foreachBatch(apply)
        writer = writer.option("checkpointLocation", f"file://{self._generations.path(number)}")
        if self.name is not None:
            writer = writer.queryName(self.name)
        if self.trigger:
            writer = writer.trigger(**self.trigger)
        return writer.start()


@dataclass(frozen=True, slots=True)
class _Apply:
    """The function of a view's query for each micro-batch; Spark Connect sends its server a copy.

    The checkpoint names the query and says how far the micro-batch reaches.
    """

    target: Upsert
    generations: Generations
    number: int
    run_id: str
    log_options: Mapping[str, str]
    tables: Sequence[RefreshedTable] = ()

    @plain_in_batch
    def __call__(self, df: DataFrame, batch_id: int) -> None:
        with opened_for_spark(self.log_options) as log:
            topic = log.state().topics.get(self.generations.topic(self.number)[0])
        if reason := recreation(self.generations, self.number, topic):
            raise StorageError(f"{self.target.where}: {reason}. Start the view again.")
        query_id = self.generations.query_id(self.number)
        assert query_id is not None, "Spark names a query before its first micro-batch"
        checkpoint = self.generations.path(self.number)
        running = MicroBatch(query_id, batch_id, self.run_id, str(checkpoint))
        self.target.take(df, batch_id, running, end_offsets_of_checkpoint(checkpoint, batch_id))
        self.generations.remove_before(self.number)
        for table in self.tables:
            table.refresh_if_due(df.sparkSession)


def _local(checkpoint: str) -> Path:
    if not checkpoint:
        raise InvalidInputError("a view's checkpoint is a directory of its own; its path is empty")
    parts = urlsplit(checkpoint)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).absolute()
    if "://" in checkpoint:
        raise InvalidInputError(
            f"a view's checkpoint is a directory on a local file system, not {checkpoint}"
        )
    return Path(checkpoint).absolute()
