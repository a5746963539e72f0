"""DeltaUpsert: a Delta Lake table that follows a log, one commit per micro-batch.

Invariants:

- One commit of the table holds rows and position. The position is a set of Delta's application
  transactions, see `log`.
- A commit builds on exactly the version whose position was read. If another commit comes between,
  the attempt starts again, so two runs of one query never apply a micro-batch twice.
- A commit that replaces all rows resets the positions of all other queries.
- A micro-batch that changes no row makes an empty commit, which carries the position.
"""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING

from kafkalog.errors import CommitConflictError, InvalidInputError, KafkaLogError, StorageError
from kafkalog.sink.upsert.delta.columns import DeltaColumns, delta_type, table_schema
from kafkalog.sink.upsert.delta.log import (
    ApplicationTransaction,
    application_transactions,
    ends_of,
    positions_of,
    transactions_of_batch,
)
from kafkalog.sink.upsert.delta.rows import KEY_COUNT, FittingRows, RepeatableRows
from kafkalog.sink.upsert.driver_batches import in_driver_batches, parts_for
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.rows import DELETED, RECORD, UpsertRows
from kafkalog.sink.upsert.upsert import Batch, Upsert

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

__all__ = ["DeltaUpsert"]

_ATTEMPTS = 12
_PAUSE_S, _PAUSE_MAX_S = 0.05, 5.0
_SOURCE, _TARGET = "kl_source", "kl_target"
_turns: dict[str, threading.Lock] = {}
"""Per table: upserts of one process take turns, since a commit makes the attempts beside it void.
"""


class DeltaUpsert(Upsert):
    """Keep a Delta Lake table equal to the latest records of a stream of this source.

    `table_uri` is a directory, or another address that deltalake takes, with its `storage_options`.
    A missing table is created with the types of the rows. Types that Delta lacks (intervals,
    variants) are stored as text. An existing table must have the rows' columns, in any order. A
    column's type may be wider, or narrower if every value fits. Further columns keep their values
    and are null in new rows. If all rows are replaced, as in a view's rebuild, they become null in
    all rows. `key` must be unique; Delta does not check that. A record with a date or time outside
    the years 1 to 9999 is refused, since readers could not open the table.

    Spark reduces each micro-batch to the latest record per key. The merge reads the keys of the
    whole table and rewrites the files it changes, so few large micro-batches cost less than many
    small ones. Calls of `DeltaTable.optimize.compact()` and `vacuum()` are up to you. Delta's
    RESTORE brings back the rows but not the position, so rebuild the table after it. On a local
    disk deltalake does not sync what it writes: a killed process loses nothing, but a power cut may
    take back or damage the last commits.

    `Upsert` describes the other arguments and the errors. End offsets below those of an earlier
    micro-batch are refused, like a lower batch id. The exception is the last micro-batch, which
    Spark may plan again.
    """

    def __init__(
        self,
        table_uri: str | PathLike[str],
        *,
        select: Callable[[DataFrame], DataFrame] | Sequence[str | Column] | None = None,
        schema: StructType | str | None = None,
        key_type: str = "binary",
        name: str = "",
        storage_options: Mapping[str, str] | None = None,
        reset_writer: bool = False,
        replace_first: bool = False,
    ) -> None:
        super().__init__(
            fspath(table_uri),
            select=select,
            schema=schema,
            key_type=key_type,
            name=name,
            reset_writer=reset_writer,
            replace_first=replace_first,
        )
        if importlib.util.find_spec("deltalake") is None:
            raise InvalidInputError(
                "DeltaUpsert needs the package deltalake: pip install 'kafkalog[delta]'"
            )
        self.storage_options = dict(storage_options or {})
        self._makes_keys = select is not None

    @property
    def where(self) -> str:
        """The table, as errors and warnings name it."""
        return f"Delta table {self.table}"

    def positions(self) -> dict[str, Position]:
        """Return the position of each query that has written to the table, by query id."""
        table = self._open()
        if table is None:
            return {}
        return positions_of(self._transactions(table))

    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""
        table = self._open()
        if table is None:
            return False
        # A file that another writer made without statistics counts as one with rows.
        return any(count != 0 for count in table.get_add_actions()["num_records"].to_pylist())

    def _apply(self, df: DataFrame, batch: Batch, position: Position | None) -> None:
        parts = parts_for(batch.record_count_max(position))
        rows = self.shape.rows(df, latest=True, parts=parts)
        frame, columns = _for_delta(rows, count_keys=self._makes_keys)
        self.apply(batch, columns, lambda: in_driver_batches(frame))

    def apply(
        self,
        batch: Batch,
        columns: StructType,
        driver_batches: Callable[[], Iterator[pa.RecordBatch]],
    ) -> bool:
        """Commit the rows of a micro-batch; return False if the table has them already.

        Each call of `driver_batches` returns the same rows: `kl_deleted`, the record's columns,
        those of `columns`, and perhaps `kl_count`, the number of rows with the row's key.
        """
        from deltalake.exceptions import CommitFailedError

        rows = RepeatableRows(driver_batches)
        for attempt in range(_ATTEMPTS):
            if attempt:
                pause_s = min(_PAUSE_MAX_S, _PAUSE_S * 2**attempt)
                time.sleep(pause_s * random.uniform(0.5, 1))
            # The first rows cost Spark's whole reduction, so they are read before locking.
            reading = rows.read()
            with _turns.setdefault(self.table, threading.Lock()):
                try:
                    return self._commit(batch, columns, rows, reading)
                except CommitFailedError as fault:
                    conflict = fault
        raise StorageError(
            f"{self.where}: each of {_ATTEMPTS} attempts to commit met another writer's commit, so "
            f"nothing of micro-batch {batch.batch_id} is written; let fewer streams and jobs write "
            f"to the table at once: {_one_line(conflict)}"
        )

    def _commit(
        self,
        batch: Batch,
        columns: StructType,
        rows: RepeatableRows,
        reading: Iterator[pa.RecordBatch],
    ) -> bool:
        """Make one attempt; raise CommitFailedError if the table changed meanwhile."""
        import pyarrow as pa
        from deltalake.exceptions import CommitFailedError

        table = self._open()
        known = {} if table is None else self._transactions(table)
        positions = positions_of(known)
        position = positions.get(batch.query_id)
        if not self.is_due(batch, position):
            return False
        self._check_gap(batch, position)
        # Spark may plan the last micro-batch again, with more of one partition and less of another.
        if position is not None and batch.batch_id != position.batch_id:
            self._check_offsets(batch, ends_of(known, batch.query_id))
        is_replacing = batch.is_replacing and position is None
        if table is None:
            table = self._create(columns)
            if table.version() > 0:
                raise CommitFailedError("it was created and written to meanwhile")
        schema = pa.schema(table.schema().to_arrow())
        target = DeltaColumns.of(self.where, schema, columns.names)
        source = FittingRows(target, reading)
        properties = _commit_properties(batch, replaced=positions if is_replacing else ())
        version = table.version()
        try:
            if is_replacing:
                _replace(table, source.as_table(schema), properties)
            elif not rows.are_none:
                _merge(table, source.as_changes(), target.names, properties)
            if table.version() == version:
                table.create_write_transaction(
                    [],
                    "append",
                    table.schema(),
                    partition_by=table.metadata().partition_columns,
                    commit_properties=properties,
                )
        except KafkaLogError:
            raise
        except CommitFailedError as fault:
            now = self._open()
            if now is not None and now.version() == version:
                raise StorageError(
                    f"{self.where}: the table refuses micro-batch {batch.batch_id}; nothing of it "
                    f"is written: {_one_line(fault)}"
                ) from fault
            raise
        except Exception as fault:
            if source.fault is not None:
                raise source.fault from None
            raise StorageError(
                f"{self.where}: micro-batch {batch.batch_id}: {_one_line(fault)}"
            ) from fault
        return True

    def _open(self) -> DeltaTable | None:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self.table, storage_options=self.storage_options or None)
        except TableNotFoundError:
            return None
        except Exception as fault:
            raise StorageError(f"{self.where}: {_one_line(fault)}") from fault

    def _transactions(self, table: DeltaTable) -> dict[str, ApplicationTransaction]:
        try:
            return application_transactions(table, self.storage_options)
        except Exception as fault:
            raise StorageError(f"{self.where}: its log: {_one_line(fault)}") from fault

    def _create(self, columns: StructType) -> DeltaTable:
        from deltalake import DeltaTable, Schema

        try:
            DeltaTable.create(
                self.table,
                Schema.from_json(columns.json()),
                mode="ignore",
                storage_options=self.storage_options or None,
            )
            return DeltaTable(self.table, storage_options=self.storage_options or None)
        except Exception as fault:
            raise StorageError(f"{self.where}: creating it: {_one_line(fault)}") from fault

    def _check_offsets(self, batch: Batch, known: Mapping[str, Mapping[str, int]]) -> None:
        if self.reset_writer:
            return
        for topic, partitions in batch.end_offsets.items():
            for partition, offset in partitions.items():
                reached = known.get(topic, {}).get(partition, 0)
                if offset < reached:
                    raise CommitConflictError(
                        f"{self.where}: the log of this stream is older than the table: "
                        f"{topic}-{partition} committed up to {reached}, got {offset} in "
                        f"micro-batch {batch.batch_id}. If the topic was created again, rebuild "
                        "the table. If a crash took Spark's last plan and the new one is shorter, "
                        "reset_writer=True continues with the table's rows"
                    )


def _merge(
    table: DeltaTable,
    source: pa.RecordBatchReader,
    names: Sequence[str],
    properties: CommitProperties,
) -> None:
    quoted = [_quoted(name) for name in names]
    key = quoted[[name.lower() for name in names].index("key")]
    values = {name: f"{_SOURCE}.{name}" for name in quoted}
    merger = table.merge(
        source,
        f"{_TARGET}.{key} = {_SOURCE}.{key}",
        source_alias=_SOURCE,
        target_alias=_TARGET,
        commit_properties=properties,
    )
    deleted = f"{_SOURCE}.{DELETED}"
    merger.when_matched_delete(deleted).when_matched_update(values).when_not_matched_insert(
        values, f"NOT {deleted}"
    ).execute()


def _replace(table: DeltaTable, rows: pa.RecordBatchReader, properties: CommitProperties) -> None:
    from deltalake import write_deltalake

    write_deltalake(table, rows, mode="overwrite", commit_properties=properties)


def _commit_properties(batch: Batch, replaced: Iterable[str]) -> CommitProperties:
    from deltalake import CommitProperties

    text = f"kafkalog: micro-batch {batch.batch_id} of query {batch.query_id}"
    return CommitProperties(
        custom_metadata={"userMetadata": text},
        # Never commit on a version whose position was not read.
        max_commit_retries=0,
        app_transactions=transactions_of_batch(batch, replaced),
    )


def _for_delta(rows: UpsertRows, *, count_keys: bool) -> tuple[DataFrame, StructType]:
    from pyspark.sql import Window
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType

    kinds = [delta_type(kind) for kind in rows.types]
    columns = [F.col("`" + name.replace("`", "``") + "`") for name in rows.names]
    stored = [
        column if kind is not None else column.cast("string").alias(name)
        for name, kind, column in zip(rows.names, kinds, columns, strict=True)
    ]
    count = [F.count("*").over(Window.partitionBy("key")).alias(KEY_COUNT)] if count_keys else []
    frame = rows.frame.select(DELETED, *RECORD, *stored, *count)
    return frame, table_schema(rows.names, [kind or StringType() for kind in kinds])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _one_line(fault: Exception) -> str:
    return " ".join(str(fault).split())[:500]
