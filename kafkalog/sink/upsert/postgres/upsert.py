"""PostgresUpsert: a table in PostgreSQL that follows a log, one transaction per micro-batch.

Invariants:

- rows and position of a micro-batch are one transaction, which holds the query's position locked;
- of each Spark partition the rows of one attempt count, the one that Spark reports;
- a micro-batch is reduced to the latest record per key by PostgreSQL, from rows that the tasks have
  copied in parallel; only small micro-batches pass through the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.postgres.client import address, connect, is_about_rows, run
from kafkalog.sink.upsert.postgres.copy import CopyTarget
from kafkalog.sink.upsert.postgres.merge import Merge, Staged
from kafkalog.sink.upsert.postgres.staging import (
    PackingTask,
    StagedRows,
    StagingTask,
    create_temporary,
    remove_orphans,
    staging_of_a_batch,
)
from kafkalog.sink.upsert.postgres.table import Column, PostgresTable, check_names
from kafkalog.sink.upsert.postgres.types import for_postgres
from kafkalog.sink.upsert.rows import DELETED
from kafkalog.sink.upsert.upsert import Batch, Upsert

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    Connection = psycopg.Connection[tuple[Any, ...]]

__all__ = ["PostgresUpsert"]

_SMALL = 20_000
"""Records in a micro-batch that passes through the driver."""
_PACKED_SIZE_MAX = 4 << 20
"""Bytes that a task hands to the driver; a micro-batch with more in a task is staged."""
_LOGGED = (
    "SELECT set_config('synchronous_commit', 'on', true) "
    "WHERE current_setting('synchronous_commit') = 'off'"
)
"""A role or database may do without; but Spark's checkpoint goes on as soon as we have returned."""
_TRIES = 3
"""Of a merge that PostgreSQL has chosen to end: a deadlock with someone else's transaction."""


class PostgresUpsert(Upsert):
    """Keep `table` of a PostgreSQL database equal to the latest records of a stream of this source.

    `conninfo` is what libpq connects with ("host=... dbname=...", or a URL); the tasks connect too,
    so it has to hold on their hosts. `table` is a name or `schema.name`, exactly as PostgreSQL has
    it. Further keywords are those of `Upsert`: the shape of the rows, and the writer's.

        log.writeStream.foreachBatch(PostgresUpsert("dbname=shop", "stock",
            key_type="string", schema="count int, name string")).start()

    The table is created if it is missing: binary becomes bytea, string text, byte and short
    smallint, int integer, long bigint, float real, double double precision, boolean, date,
    decimal numeric, timestamp `timestamp with time zone`, nested types jsonb, anything else text as
    Spark casts it. One that exists must have these columns, in any type that PostgreSQL reads from
    their text, and a primary key or unique constraint on `key`; it may have more columns, with
    defaults. A column that would round or cut numbers or times is refused (timestamp into date,
    decimal(9,3) into numeric(9,2), double into real), as is an unlogged table, whose rows a crash
    of the server takes; of text the column's type makes what it will. The role needs CREATE in the
    schema, and TEMPORARY in the database; between us and the server, PostgreSQL 12 or newer, may be
    a pool of sessions, not of transactions.

    Positions are in `kafkalog_positions` of the table's schema, in the same transaction. They hold
    for that very table: one made anew, or put back from a dump, has none; rows put back one by one
    are not noticed. Times outside the years 1 to 32767 are refused. Two upserts to one table take
    turns. Rows on their way are in unlogged tables `kafkalog_staging_...`, which a start removes
    where their driver has died.

    Raises InvalidInputError for a row or a table that does not fit, CommitConflictError for an
    older checkpoint, and StorageError for what else PostgreSQL refuses.
    """

    def __init__(
        self,
        conninfo: str,
        table: str,
        *,
        select: Callable[[DataFrame], DataFrame] | Sequence[str | SparkColumn] | None = None,
        schema: StructType | str | None = None,
        key_type: str = "binary",
        reset_writer: bool = False,
        replace_first: bool = False,
    ) -> None:
        super().__init__(
            table,
            select=select,
            schema=schema,
            key_type=key_type,
            reset_writer=reset_writer,
            replace_first=replace_first,
        )
        name = table.rpartition(".")[2]
        if not name or table.startswith(".") or name.startswith("kafkalog_"):
            raise InvalidInputError(f"PostgresUpsert: {table!r} is no name for a table")
        try:
            import psycopg  # noqa: F401
        except ImportError as fault:
            raise InvalidInputError(
                f"PostgresUpsert needs psycopg: pip install 'kafkalog[postgres]' ({fault})"
            ) from fault
        check_names("PostgresUpsert", [name, table.rpartition(".")[0]])
        given = address(conninfo)
        self.conninfo = conninfo
        self._database = f"{given.get('dbname', 'PostgreSQL')}@{given.get('host', 'local')}"
        self._started: set[str] = set()

    @property
    def where(self) -> str:
        """The database and the table, without a password."""
        return f"{self._database}: table {self.table}"

    def positions(self) -> dict[str, Position]:
        """Return the position of each query that has written to the table, by query id."""
        with self.connection() as connection:
            return PostgresTable.find(connection, self.table).positions(connection)

    def writers(self) -> set[str]:
        """Return the ids of all queries that positions of a table of this name tell of.

        Also of one that was dropped or put back from a dump, whose positions do not count.
        """
        with self.connection() as connection:
            return PostgresTable.find(connection, self.table).writers(connection)

    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""
        with self.connection() as connection:
            return PostgresTable.find(connection, self.table).has_rows(connection)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield a connection in autocommit; what PostgreSQL says against us is StorageError."""
        import psycopg

        try:
            with connect(self.conninfo) as connection:
                yield connection
        except psycopg.Error as fault:
            text = fault.diag.message_primary or " ".join(str(fault).split())
            raise StorageError(f"{self.where}: {text}") from fault

    def _apply(self, df: DataFrame, batch: Batch, position: Position | None) -> None:
        rows = self.shape.rows(df, latest=not self.shape.is_row_by_row)
        check_names(self.where, rows.names)
        frame = for_postgres(rows.frame, rows.names, rows.types)
        count_max = batch.record_count_max(position)
        packed = None
        if count_max is not None and count_max <= _SMALL:
            packed = PackingTask(_PACKED_SIZE_MAX).collect(frame)
        with self.connection() as connection:
            table = PostgresTable.find(connection, self.table)
            columns = table.prepare(connection, rows.names, rows.types)
            if packed is None or batch.run_id not in self._started:
                remove_orphans(connection, table)
                self._started.add(batch.run_id)
            if packed is None:
                self._merge_staged(connection, table, columns, batch, frame)
            else:
                self.merge_small(connection, table, columns, batch, packed)

    def merge_small(
        self,
        connection: Connection,
        table: PostgresTable,
        columns: Sequence[Column],
        batch: Batch,
        rows: Sequence[pa.RecordBatch],
    ) -> bool:
        """Apply rows that are here; False when the micro-batch was there already."""
        import pyarrow.compute as pc

        count = sum(driver_batch.num_rows for driver_batch in rows)
        deletions = sum(pc.sum(driver_batch.column(DELETED)).as_py() or 0 for driver_batch in rows)

        def stage() -> Staged:
            target = create_temporary(connection, columns)
            if count:
                target.copy(connection, rows, 0)
            return Staged(target, [0], count, deletions)

        try:
            return self._merge(connection, table, batch, stage)
        except _RefusedError as refused:
            with connection.transaction(force_rollback=True):
                text = create_temporary(connection, columns).describe_misfit(connection, rows)
            if not text:
                with connection.transaction(force_rollback=True):
                    text = Merge(table, stage()).describe_misfit(
                        connection, is_replacing=batch.is_replacing
                    )
            raise self._misfit(batch, text or str(refused)) from refused.__cause__

    def _merge_staged(
        self,
        connection: Connection,
        table: PostgresTable,
        columns: Sequence[Column],
        batch: Batch,
        frame: DataFrame,
    ) -> None:
        with staging_of_a_batch(connection, table, columns, batch) as target:
            results = StagingTask(self.conninfo, target).collect(frame)
            self.merge_staged(connection, table, batch, target, results)

    def merge_staged(
        self,
        connection: Connection,
        table: PostgresTable,
        batch: Batch,
        target: CopyTarget,
        results: Sequence[StagedRows],
    ) -> bool:
        """Apply what tasks have staged and reported; False when it was there already."""
        faults = [result.fault for result in results if result.fault]
        if faults:
            raise self._misfit(batch, faults[0])
        staged = Staged(
            target,
            [result.attempt for result in results if result.rows],
            sum(result.rows for result in results),
            sum(result.deletions for result in results),
        )
        try:
            return self._merge(connection, table, batch, lambda: staged)
        except _RefusedError as refused:
            text = Merge(table, staged).describe_misfit(connection, is_replacing=batch.is_replacing)
            raise self._misfit(batch, text or str(refused)) from refused.__cause__

    def _merge(
        self,
        connection: Connection,
        table: PostgresTable,
        batch: Batch,
        stage: Callable[[], Staged],
    ) -> bool:
        """Run the transaction, again when PostgreSQL chose it to end a deadlock."""
        import psycopg

        is_applied = False
        for attempt in range(_TRIES):
            try:
                with connection.transaction():
                    run(connection, _LOGGED)
                    staged = stage()
                    table.lock(connection)
                    position = table.lock_position(connection, batch.query_id)
                    if self.is_due(batch, position):
                        self._check_gap(batch, position)
                        is_replacing = batch.is_replacing and position is None
                        Merge(table, staged).run(connection, is_replacing=is_replacing)
                        if is_replacing:
                            table.forget_others(connection, batch.query_id)
                        table.record(connection, batch.query_id, batch.position())
                        is_applied = True
                break
            except psycopg.Error as fault:
                if is_about_rows(fault):
                    raise _RefusedError(fault.diag.message_primary or str(fault)) from fault
                is_victim = (fault.sqlstate or "").startswith("40")
                if not is_victim or attempt == _TRIES - 1:
                    raise
        return is_applied

    def _misfit(self, batch: Batch, text: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.where}: {text}; nothing of micro-batch {batch.batch_id} was written: shape the "
            "rows with select or schema, or change the table"
        )


class _RefusedError(Exception):
    """PostgreSQL refuses a row."""
