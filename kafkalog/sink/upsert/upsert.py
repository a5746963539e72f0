"""What all upserts have in common: a micro-batch changes its table exactly once.

Invariants:

- rows and position of a micro-batch are one transaction of the target, so a crash leaves all or
  nothing of it;
- the target's position, never Spark's checkpoint, says whether a micro-batch is due: equal to the
  last is a repetition and changes nothing, below it is refused, above it is applied;
- a repetition that reaches further than the position is none: Spark does not sync its checkpoints,
  and after a power cut may plan the last micro-batch anew, with what has come since. It begins
  where it began, so it is applied again;
- a micro-batch without rows advances the position too;
- a gap is looked for inside the transaction too: a table may go while Spark works out the rows.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.errors import CommitConflictError, InvalidInputError
from kafkalog.sink.query import EndOffsets, MicroBatch, end_offsets_of_driver, micro_batch_of_driver
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.rows import RowShape
from kafkalog.storage_engine.fs import clock

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

__all__ = ["Batch", "Upsert"]

_log = logging.getLogger("kafkalog.sink")
_applied: dict[tuple[str, str], tuple[str, int]] = {}
"""By place and query: its run and the last micro-batch that this process has brought there."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batch that is being applied."""

    query_id: str
    batch_id: int
    run_id: str
    """New at every start of the query."""
    end_offsets: EndOffsets
    """{topic: {partition: next offset}}."""
    now_ms: int
    is_replacing: bool = False
    """The table's rows become exactly this micro-batch's, in the same transaction, in which the
    positions of all other queries go: their rows are no longer there."""

    def position(self) -> Position:
        """Return the position that the target stores with the rows."""
        return Position(self.batch_id, self.end_offsets, self.now_ms)

    def reaches_beyond(self, position: Position) -> bool:
        """Return whether an end offset is above the position's, or of a partition not in it."""
        if not position.end_offsets:
            return False
        return any(
            end > position.end_offsets.get(topic, {}).get(partition, -1)
            for topic, partitions in self.end_offsets.items()
            for partition, end in partitions.items()
        )

    def record_count_max(self, position: Position | None) -> int | None:
        """Return at most how many records this is, `position` being the table's.

        They are counted in offsets: from the position, or from 0 where it does not know a partition
        and where the micro-batch does not follow it. None when the query reads no Kafka log.
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


class Upsert(ABC):
    """A `foreachBatch` callable that keeps `table` equal to the latest records of a stream.

    `select` and `schema` shape the rows, see `RowShape`; `key_type` "string" makes the column `key`
    text where `select` does not make it. `reset_writer` accepts a batch id below the last one: for
    a checkpoint that was put back on purpose. `replace_first` makes the first micro-batch of a
    query this table does not know replace all its rows: for a stream that begins at the beginning.
    One query has one upsert to a table: unite the frames that go there.

    A call raises InvalidInputError, also for a record that does not fit into the table, which it
    names; CommitConflictError; and StorageError for what else the target refuses. The table and its
    position are then as before.
    """

    refuses_gaps = False
    """Whether a micro-batch that does not follow the table's last one is refused; else it is warned
    of. A `KTableView` sets it."""

    def __init__(
        self,
        table: str,
        *,
        select: Callable[[DataFrame], DataFrame] | Sequence[str | Column] | None = None,
        schema: StructType | str | None = None,
        key_type: str = "binary",
        reset_writer: bool = False,
        replace_first: bool = False,
    ) -> None:
        if not table or "\0" in table:
            raise InvalidInputError(f"{type(self).__name__}: {table!r} is no name for a table")
        self.table = table
        self.shape = RowShape(select=select, schema=schema, key_type=key_type)
        self.reset_writer = reset_writer
        self.replace_first = replace_first

    @property
    def where(self) -> str:
        """Where the table is, as errors and warnings begin."""
        return f"table {self.table}"

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Apply one micro-batch; `batch_id` is Spark's."""
        running = micro_batch_of_driver(df, type(self).__name__)
        self._take(df, batch_id, running, end_offsets_of_driver(df, running))

    def _take(
        self, df: DataFrame, batch_id: int, running: MicroBatch, end_offsets: EndOffsets
    ) -> None:
        place, turn = (self.where, running.query_id), (running.run_id, batch_id)
        if _applied.get(place) == turn:
            raise InvalidInputError(
                f"{self.where}: a second upsert of micro-batch {batch_id} of one query: its rows "
                "would be taken for a repetition; unite the frames, and call one upsert"
            )
        position = self.position(running.query_id)
        batch = Batch(
            query_id=running.query_id,
            batch_id=batch_id,
            run_id=running.run_id,
            end_offsets=end_offsets,
            now_ms=clock.now_ms(),
            is_replacing=self.replace_first and position is None and batch_id == 0,
        )
        if self.is_due(batch, position):
            if self.refuses_gaps:  # at once; a warning comes once, from the transaction
                self._check_gap(batch, position)
            self._apply(df, batch, position)
        _applied[place] = turn

    def position(self, query_id: str) -> Position | None:
        """Return how far the query has brought the table.

        None when it never did, and where the table itself or the table of positions is missing.
        """
        return self.positions().get(query_id)

    @abstractmethod
    def positions(self) -> dict[str, Position]:
        """Return the position of each query that has written to the table, by query id."""

    def writers(self) -> set[str]:
        """Return the ids of all queries that left a trace of having written to the table."""
        return set(self.positions())

    @abstractmethod
    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""

    @abstractmethod
    def _apply(self, df: DataFrame, batch: Batch, position: Position | None) -> None:
        """Bring rows and position into the table, in one transaction.

        Inside it the position is read again, as another run of the query may have been faster, and
        the table may have gone or come back from a backup. With it `is_due` is asked again, and
        then `_check_gap`; rows are replaced only if the micro-batch `is_replacing` and there is
        still no position. Then the positions of all other queries are deleted too. A table that
        has to be created keeps no position of any query. `position` is what it was before.
        """

    def is_due(self, batch: Batch, position: Position | None) -> bool:
        """Return whether the micro-batch is still to be applied, `position` being the table's.

        A repetition is logged at WARNING. Raises CommitConflictError for a batch id below the last.
        """
        if position is None or batch.batch_id > position.batch_id:
            return True
        if batch.batch_id == position.batch_id:
            if batch.reaches_beyond(position):
                _log.warning(
                    "%s: micro-batch %d of query %s comes again and reaches further: the "
                    "checkpoint had lost it; it is applied again",
                    self.where,
                    batch.batch_id,
                    batch.query_id,
                )
                return True
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
        """Say that the table has not seen all micro-batches of the query."""
        last = -1 if position is None else position.batch_id
        if batch.batch_id <= last + 1:
            return
        words = (
            f"{self.where}: its last micro-batch of query {batch.query_id} is "
            f"{'none' if position is None else last}, the next is {batch.batch_id}: the changes "
            "between are missing in a table that was put back from a backup, or made anew"
        )
        if self.refuses_gaps:
            raise CommitConflictError(f"{words}; start the view again, it will be rebuilt")
        _log.warning(words)
