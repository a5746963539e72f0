"""The rules that all upserts share: a micro-batch changes its table exactly once.

Invariants:

- One transaction of the target holds the rows and the position of a micro-batch.
- The target's position, never Spark's checkpoint, says whether a micro-batch is due. An equal batch
  id is a repetition and changes nothing. A lower one is refused, a higher one applied.
- An equal batch id that may reach further than the position is applied again. Spark does not sync
  its checkpoints: after a power cut it may plan the last micro-batch again, from the same start,
  with records that have come since. One that only falls short of the position is refused: the log
  has lost records that the table has.
- A micro-batch without rows advances the position too.
- A micro-batch that begins above the position is refused: the table was restored or lost, and
  would lack the records between. The transaction checks it too, since the table may vanish while
  Spark computes the rows.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Unpack

from kafkalog.errors import CommitConflictError, InvalidInputError
from kafkalog.plain_errors import plain_in_batch, refusal
from kafkalog.sink.plan import other_ends, sync_plan
from kafkalog.sink.query import (
    EndOffsets,
    MicroBatch,
    end_offsets_of_driver,
    first_of_run_of_driver,
    micro_batch_of_driver,
    start_offsets_of_driver,
)
from kafkalog.sink.upsert.bad_records import BadRecords, Refusal
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.rows import RowShape, UpsertRows
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.metadata.batch_identity import BatchIdentity, Comes
from kafkalog.values.record_form import DocumentArguments, document_arguments
from kafkalog.values.row_version import DELETE_RETENTION_MS, checked_retention

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType


_log = logging.getLogger("kafkalog.sink")
_applied: dict[tuple[str, str], tuple[str, int]] = {}
"""Per (table, query): its run, and the last micro-batch that this process applied."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batch that is being applied."""

    query_id: str
    batch_id: int
    run_id: str
    """Each start of the query has a new one."""
    end_offsets: EndOffsets
    """{topic: {partition: next offset}}."""
    now_ms: int
    is_replacing: bool = False
    """Whether the micro-batch replaces all rows of the table and the positions of all other
    queries."""
    bad_records: int = 0
    """Records that the query has left out up to this micro-batch, before the target sees rows."""

    applied: EndOffsets = field(default_factory=dict)
    """End offsets that the table has reached before, if the micro-batch was planned again."""
    other_ends: str | None = None
    """Where the sources end that are no Kafka logs, as in `Position`."""
    start_offsets: EndOffsets | None = None
    """Where the micro-batch begins, by topic and partition; None if that is not known."""
    first_of_run: int | None = None
    """The first micro-batch since the query was started; None if that is not known."""

    def position(self, *, refused: int = 0) -> Position:
        """Return the position that the target stores with the rows.

        `refused`: records that the target itself has left out.
        """
        count = self.bad_records + refused
        return Position(self.batch_id, self.end_offsets, self.now_ms, count, self.other_ends)

    def after(self, position: Position | None) -> Comes:
        """Return how the micro-batch relates to the last one that the table holds."""
        last = None
        if position is not None:
            last = BatchIdentity(position.batch_id, (position.end_offsets, position.other_ends))
        return Comes.of(BatchIdentity(self.batch_id, (self.end_offsets, self.other_ends)), last)

    def reaches_beyond(self, position: Position) -> bool:
        """Return whether the micro-batch may have records that are not in the table at `position`.

        That's not so if all of its end offsets are in the position, or below, and its sources
        other than Kafka logs end where they did.
        """
        return self.other_ends != position.other_ends or any(
            end > position.end_offsets.get(topic, {}).get(partition, -1)
            for topic, partitions in self.end_offsets.items()
            for partition, end in partitions.items()
        )

    def falls_short_of(self, position: Position) -> bool:
        """Return whether the table has records of a partition that the micro-batch ends before."""
        return any(
            end < position.end_offsets.get(topic, {}).get(partition, 0)
            for topic, partitions in self.end_offsets.items()
            for partition, end in partitions.items()
        )

    def begins_beyond(self, position: Position | None) -> bool | None:
        """Return whether offsets lie between the table's `position` and the micro-batch.

        None if its begin is not known, or the query reads no Kafka log.
        """
        if not self.start_offsets:
            return None
        known = {} if position is None else position.end_offsets
        return any(
            start > known.get(topic, {}).get(partition, 0)
            for topic, partitions in self.start_offsets.items()
            for partition, start in partitions.items()
        )

    def record_count_max(self, position: Position | None) -> int | None:
        """Return an upper bound of the number of records; None if the query reads no Kafka log.

        The bound counts offsets from the table's `position`. It counts from 0 for a partition that
        is not in it, and for all partitions if the micro-batch does not follow it.
        """
        if not self.end_offsets:
            return None
        is_next = position is not None and self.batch_id > position.batch_id
        known = position.end_offsets if position is not None and is_next else {}
        return sum(
            max(end - known.get(topic, {}).get(partition, 0), 0)
            for topic, partitions in self.end_offsets.items()
            for partition, end in partitions.items()
        )


class UpsertArguments(DocumentArguments, total=False):
    """The arguments that all upserts share; see `Upsert`."""

    select: Callable[[DataFrame], DataFrame] | Sequence[str | Column] | None
    schema: StructType | str | None
    key: str | Sequence[str]
    key_type: str
    name: str
    checkpoint: str | PathLike[str] | None
    path: str | PathLike[str]
    on_bad_record: str
    on_new_column: str
    reset_writer: bool
    replace_first: bool
    version: str | None
    delete_retention_ms: int


class Upsert(ABC):
    """A `foreachBatch` callable that keeps `table` equal to the latest records of a stream.

    Args:
        select, schema: shape the rows, see `RowShape`.
        json, avro, key_json, key_avro: so do these, see `kafkalog.value_columns`, with the schemas
            of `reader`, `subject`, `key_reader` and `key_subject`. A registry is asked for the
            schemas of each micro-batch, so new ones may come while the query runs.
        key: the column or columns of the table's key, its primary key if the upsert creates it.
        key_type: "string" makes the column `key` text, if `select` does not make it.
        name: the query, as the table's positions name it, instead of the query's id. A name belongs
            to one checkpoint: a query with a new checkpoint needs a new name. A query under Spark
            Connect needs a name or `checkpoint`, and may then move to a classic session and back.
        checkpoint: the query's `checkpointLocation`, a local directory. Spark Connect hides it. It
            has the query's id and the exact end offsets, which otherwise come from the rows. A
            classic session finds it by itself, and refuses another query's.
        on_bad_record: "fail", "skip" or "deadletter:<topic>", see `BadRecords`.
        path: the log of the dead-letter topic; a view gives its own. A query of your own without
            it fails in its first micro-batch.
        on_new_column: "add" adds a column that the rows have and the table lacks. Old rows have
            null there. "fail" refuses the micro-batch, and the error has the statement.
        reset_writer: accept a batch id below the last one, after you restored a checkpoint, and one
            that begins above the table's position, after you restored or dropped the table.
        replace_first: a query that the table does not know replaces all rows with its first
            micro-batch. The stream must start at the beginning of the log.

    A query may have one upsert per table; unite the frames that go there.

    A call raises InvalidInputError, which names a record that does not fit into the table,
    CommitConflictError, and StorageError for other refusals of the target. The table and its
    position then stay as before.
    """

    refuses_gaps = False
    """Refuse a micro-batch that does not follow the table's last one, instead of a warning. A
    `KTableView` sets it."""

    def __init__(
        self,
        table: str,
        *,
        select: Callable[[DataFrame], DataFrame] | Sequence[str | Column] | None = None,
        schema: StructType | str | None = None,
        key: str | Sequence[str] = "key",
        key_type: str = "binary",
        name: str = "",
        checkpoint: str | PathLike[str] | None = None,
        path: str | PathLike[str] = "",
        on_bad_record: str = "fail",
        on_new_column: str = "fail",
        reset_writer: bool = False,
        replace_first: bool = False,
        version: str | None = None,
        delete_retention_ms: int = DELETE_RETENTION_MS,
        **documents: Unpack[DocumentArguments],
    ) -> None:
        if not table or "\0" in table:
            raise InvalidInputError(f"{type(self).__name__}: {table!r} is not a table name")
        self.table = table
        if on_new_column not in {"fail", "add"}:
            raise InvalidInputError(f'on_new_column is "fail" or "add", not {on_new_column!r}')
        self.bad_records = BadRecords.parse(on_bad_record, fspath(path))
        given = document_arguments(documents, UpsertArguments)
        self.shape = RowShape(
            select=select,
            schema=schema,
            key_type=key_type,
            key=key,
            leaves_out_bad=self.bad_records.are_left_out,
            version=version,
            **given,
        )
        self.delete_retention_ms = checked_retention(delete_retention_ms)
        self.adds_columns = on_new_column == "add"
        self.name = name
        self.checkpoint = None if checkpoint is None else fspath(checkpoint)
        self.reset_writer = reset_writer
        self.replace_first = replace_first

    @property
    def where(self) -> str:
        """The table, as errors and warnings name it."""
        return f"table {self.table}"

    @plain_in_batch
    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Apply one micro-batch; `batch_id` is Spark's."""
        running = micro_batch_of_driver(
            df, batch_id, type(self).__name__, name=self.name, checkpoint=self.checkpoint
        )
        query_id = self.name or running.query_id
        end_offsets = end_offsets_of_driver(df, running, lambda: self._reached(query_id))
        self.take(
            df,
            batch_id,
            replace(running, query_id=query_id),
            end_offsets,
            other_ends=other_ends(running.checkpoint, batch_id),
            start_offsets=start_offsets_of_driver(df, running),
            first_of_run=first_of_run_of_driver(df, running),
        )

    def take(
        self,
        df: DataFrame,
        batch_id: int,
        running: MicroBatch,
        end_offsets: EndOffsets,
        *,
        other_ends: str | None = None,
        start_offsets: EndOffsets | None = None,
        first_of_run: int | None = None,
    ) -> None:
        """Apply one micro-batch of a query that the caller knows; the others are as in `Batch`."""
        place, turn = (self.where, running.query_id), (running.run_id, batch_id)
        if _applied.get(place) == turn:
            raise InvalidInputError(
                f"{self.where}: a second upsert of micro-batch {batch_id} of one query: its rows "
                "would be taken for a repetition; unite the frames, and call one upsert"
            )
        self.bad_records.check(end_offsets)
        position = self.position(running.query_id)
        batch = Batch(
            query_id=running.query_id,
            batch_id=batch_id,
            run_id=running.run_id,
            end_offsets=end_offsets,
            now_ms=clock.now_ms(),
            is_replacing=self.replace_first and position is None and batch_id == 0,
            bad_records=0 if position is None else position.bad_records,
            applied=(
                {} if position is None or batch_id > position.batch_id else position.end_offsets
            ),
            other_ends=other_ends,
            start_offsets=start_offsets,
            first_of_run=first_of_run,
        )
        try:
            self._take(df, batch, position, running)
        except Exception as fault:
            error = refusal(fault)
            if error is None:
                raise
            raise InvalidInputError(f"{self.where}: {error}") from fault
        _applied[place] = turn

    def _take(
        self, df: DataFrame, batch: Batch, position: Position | None, running: MicroBatch
    ) -> None:
        if self.is_due(batch, position):
            self._refuse_gap(batch, position)  # early; the transaction logs the warning
            self.shape.ask_for(df, batch.end_offsets.keys())
            if self.bad_records.are_left_out:
                # The log would drop the dead letters of another plan.
                sync_plan(running.checkpoint, batch.batch_id)
                found = self.shape.bad_records(df)
                count = self._leave_out(found, batch, "")
                batch = replace(batch, bad_records=batch.bad_records + count)
            self._apply(df, batch, position)

    def position(self, query_id: str) -> Position | None:
        """Return the query's position; None if it has not written, or a table is missing."""
        return self.positions().get(query_id)

    def _reached(self, query_id: str) -> EndOffsets:
        position = self.position(query_id)
        return {} if position is None else position.end_offsets

    @abstractmethod
    def positions(self) -> dict[str, Position]:
        """Return the position of each query that has written to the table, by query id."""

    def writers(self) -> set[str]:
        """Return the ids of all queries that are known to have written to the table."""
        return set(self.positions())

    @abstractmethod
    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""

    @abstractmethod
    def _apply(self, df: DataFrame, batch: Batch, position: Position | None) -> None:
        """Store rows and position in one transaction; `position` is what was read before.

        The transaction reads the position again, since another run of the query may be faster, and
        the table may be gone or restored. Then it calls `is_due` and `_check_gap` again. It
        replaces all rows, and deletes other queries' positions, only if the micro-batch
        `is_replacing` and there is still no position. A table that it creates keeps no position of
        any query.
        """

    @abstractmethod
    def additions(self, spark: SparkSession, rows: UpsertRows) -> list[str]:
        """Return the statements that add the columns which the rows have and the table lacks.

        The list is empty if the table is missing. Raises InvalidInputError if a column of the key
        is missing.
        """

    def check_columns(self, records: DataFrame, topics: Collection[str]) -> None:
        """Check, before a query starts, whether the table has the columns of its rows.

        `records` has the columns of the stream of `topics`; its rows do not matter. Raises
        InvalidInputError if a column is missing and the upsert does not add it.
        """
        if not self.shape.knows_columns(topics):
            return  # the first micro-batch tells
        # A stream allows no reduction of this kind, so a frame of the same columns stands in.
        empty = records.sparkSession.createDataFrame([], records.schema)
        rows = self.shape.rows(empty, latest=not self.shape.is_row_by_row)
        missing = self.additions(records.sparkSession, rows)
        if not missing:
            return
        if not self.adds_columns:
            raise self.lacks_columns(missing)
        _log.warning("%s: old rows are null in new columns: %s", self.where, "; ".join(missing))

    def lacks_columns(self, additions: Sequence[str]) -> InvalidInputError:
        """Return the error for columns that the rows have and the table lacks."""
        return InvalidInputError(
            f"{self.where}: it lacks columns of the rows. Run {'; '.join(additions)}. Or give the "
            'upsert on_new_column="add".'
        )

    def leave_out_refused(self, df: DataFrame, batch: Batch, refused: Sequence[Refusal]) -> None:
        """Leave out records that the target refuses; it calls this before it commits."""
        self._leave_out(self.bad_records.refused(df, refused), batch, "/refused")

    def _leave_out(self, found: DataFrame, batch: Batch, suffix: str) -> int:
        writer = f"{batch.query_id}/{self.where}{suffix}"
        return self.bad_records.leave_out(
            found, writer, batch.batch_id, batch.end_offsets, batch.applied
        )

    def is_due(self, batch: Batch, position: Position | None) -> bool:
        """Return whether the micro-batch must be applied to a table at `position`.

        A repetition is logged at WARNING. Raises CommitConflictError for a batch id below the last,
        and for the last one with fewer records.
        """
        comes = batch.after(position)
        if position is None or comes in {Comes.NEXT, Comes.SKIPPING}:
            return True
        if comes is not Comes.EARLIER:
            if comes is Comes.PLANNED_ANEW and batch.reaches_beyond(position):
                _log.warning(
                    "%s: micro-batch %d of query %s comes again with another plan: the checkpoint "
                    "had lost it; it is applied again",
                    self.where,
                    batch.batch_id,
                    batch.query_id,
                )
                return True
            if comes is Comes.PLANNED_ANEW and batch.falls_short_of(position):
                if self.reset_writer:
                    return True
                raise CommitConflictError(
                    f"{self.where}: micro-batch {batch.batch_id} of query {batch.query_id} comes "
                    "again with fewer records than the table has: the log was restored from an "
                    "earlier moment, or it is planned with a lower limit; reset_writer=True "
                    "accepts it"
                )
            _log.warning(
                "%s: micro-batch %d of query %s was applied before; its repetition is skipped",
                self.where,
                batch.batch_id,
                batch.query_id,
            )
            return False
        if self.reset_writer:
            return True
        at = time.strftime("%H:%M", time.localtime(position.time_ms / 1000))
        raise CommitConflictError(
            f"{self.where}: this checkpoint is older than the table: committed "
            f"{position.batch_id} at {at}, got {batch.batch_id}; reset_writer=True accepts it"
        )

    def _check_gap(self, batch: Batch, position: Position | None) -> None:
        """Warn, or raise CommitConflictError, if the table misses micro-batches of the query."""
        self._refuse_gap(batch, position)
        if batch.after(position) is Comes.SKIPPING and batch.begins_beyond(position) is not False:
            _log.warning(self._gap(batch, position))

    def _refuse_gap(self, batch: Batch, position: Position | None) -> None:
        comes = batch.after(position)
        if self.refuses_gaps and comes is Comes.SKIPPING:
            again = "start the view again, it will be rebuilt"
            raise CommitConflictError(f"{self._gap(batch, position)}; {again}")
        follows = comes in {Comes.NEXT, Comes.SKIPPING, Comes.PLANNED_ANEW}
        if not follows or self.reset_writer or not batch.begins_beyond(position):
            return
        if not self._left_out_by_function(batch, position):
            raise CommitConflictError(
                f"{self._gap(batch, position)}, or your function left micro-batches out before the "
                "query started again. Restore table and checkpoint of one moment, or fill a new "
                "table from a new checkpoint; reset_writer=True accepts the gap"
            )

    def _left_out_by_function(self, batch: Batch, position: Position | None) -> bool:
        """Return whether all micro-batches that the table lacks came in this run of the query."""
        last = -1 if position is None else position.batch_id
        run_id, applied = _applied.get((self.where, batch.query_id), ("", -1))
        if run_id == batch.run_id:
            return applied == last
        return batch.first_of_run is not None and batch.first_of_run <= last + 1

    def _gap(self, batch: Batch, position: Position | None) -> str:
        last = "none" if position is None else position.batch_id
        return (
            f"{self.where}: its last micro-batch of query {batch.query_id} is "
            f"{last}, the next is {batch.batch_id}: the table "
            "was restored from a backup or created again, and lacks the changes between"
        )
