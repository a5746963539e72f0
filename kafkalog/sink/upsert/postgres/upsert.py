"""PostgresUpsert: a table in PostgreSQL that follows a log, one transaction per micro-batch.

Invariants:

- One transaction holds rows and position of a micro-batch, and locks the query's position.
- One attempt counts per Spark partition: the one that Spark reports.
- PostgreSQL reduces a micro-batch to the latest record per key, from rows that the tasks copied in
  parallel. The driver copies those of a small micro-batch.
- ADBC copies the rows, as Arrow columns. psycopg runs all other statements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.extras import install_command
from kafkalog.sink.upsert.bad_records import Refusal
from kafkalog.sink.upsert.driver_batches import parts_for
from kafkalog.sink.upsert.kept_values import KEPT
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.postgres.client import (
    address,
    complete_conninfo,
    connect,
    connect_for_arrow,
    is_about_rows,
    run,
)
from kafkalog.sink.upsert.postgres.idle_connections import IdleConnections
from kafkalog.sink.upsert.postgres.merge import (
    Merge,
    SkippedRowsError,
    StagedMerge,
    UndeletableRowError,
    UnkeptRowsError,
)
from kafkalog.sink.upsert.postgres.staging import (
    PackingTask,
    StagedRows,
    StagingTask,
    remove_orphans,
    stage,
    staging_of_a_batch,
)
from kafkalog.sink.upsert.postgres.staging_table import StagingTable, pieces
from kafkalog.sink.upsert.postgres.table import (
    Column,
    MissingColumnsError,
    PostgresTable,
    check_names,
)
from kafkalog.sink.upsert.postgres.types import for_postgres
from kafkalog.sink.upsert.postgres.versions import PostgresVersions
from kafkalog.sink.upsert.rows import REMEDY, UpsertRows
from kafkalog.sink.upsert.upsert import Batch, Upsert, UpsertArguments

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

    Connection = psycopg.Connection[tuple[Any, ...]]


_SMALL = 20_000
"""A micro-batch of at most this many records passes through the driver."""
_PACKED_SIZE_MAX = 4 << 20
"""Bytes that a task hands to the driver. If a task has more, all tasks copy their rows."""
_LOGGED = (
    "SELECT set_config('synchronous_commit', 'on', true) "
    "WHERE current_setting('synchronous_commit') = 'off'"
)
"""Overrides a role or database with synchronous_commit off: Spark's checkpoint relies on the
commit."""
_TEXT_FORMS = (
    "SELECT set_config('datestyle', 'ISO', true), set_config('extra_float_digits', '1', true)"
)
"""Overrides a role's own forms: the text of a staged value must say all of the value."""
_TRIES = 3
"""Attempts at a merge that PostgreSQL ends because of a deadlock with another transaction."""


class PostgresUpsert(Upsert):
    """Keep `table` of a PostgreSQL database equal to the latest records of a stream of this source.

    `conninfo` is libpq's connection string ("host=... dbname=...", or a URL). The tasks connect
    too, so it must work on their hosts. `table` is a name or `schema.name`, exactly as PostgreSQL
    has it. `Upsert` describes the other keywords.

        log.writeStream.foreachBatch(PostgresUpsert("dbname=shop", "stock",
            key_type="string", schema="count int, name string")).start()

    A missing table is created with these types. Binary becomes bytea, string text, byte and short
    smallint, int integer, long bigint, float real, double double precision. Boolean, date and
    decimal (numeric) stay. A timestamp becomes `timestamp with time zone`, a nested type jsonb,
    anything else text as Spark casts it.

    An existing table must have these columns, in any type that PostgreSQL reads from their text. It
    needs a primary key or unique constraint on exactly those of the key. Further columns need
    defaults. An unlogged table is refused, since a server crash empties it. A column that would
    round or truncate numbers or times is refused: timestamp into date, decimal(9,3) into
    numeric(9,2), double into real. Times outside the years 1 to 32767 are refused.

    The role needs CREATE in the schema and TEMPORARY in the database. The server must be PostgreSQL
    12 or newer. A connection pool must work per session, not per transaction. The driver keeps two
    connections from one micro-batch to the next, and a third one if another thread asks for the
    progress of a view.

    The table `kafkalog_positions` in the same schema stores positions in the same transaction. A
    position belongs to that very table: one that was created again or restored from a dump starts
    without. Rows restored one by one are not noticed. Two upserts to one table take turns. Rows are
    staged in unlogged tables `kafkalog_staging_...`; a later start removes those of dead drivers.

    Raises InvalidInputError for a row or a table that does not fit, CommitConflictError for an
    older checkpoint, and StorageError for other refusals of PostgreSQL.
    """

    def __init__(self, conninfo: str, table: str, **given: Unpack[UpsertArguments]) -> None:
        super().__init__(table, **given)
        name = table.rpartition(".")[2]
        if not name or table.startswith(".") or name.startswith("kafkalog_"):
            raise InvalidInputError(f"PostgresUpsert: {table!r} is not a table name")
        try:
            import adbc_driver_postgresql  # noqa: F401
            import psycopg  # noqa: F401
        except ImportError as fault:
            raise InvalidInputError(
                f"PostgresUpsert needs psycopg and ADBC: {install_command('postgres')} ({fault})"
            ) from fault
        check_names("PostgresUpsert", [name, table.rpartition(".")[0]])
        known = address(conninfo)
        self.conninfo = conninfo
        self._database = f"{known.get('dbname', 'PostgreSQL')}@{known.get('host', 'local')}"
        self._started: set[str] = set()
        self._connections = IdleConnections(connect, conninfo)
        self._arrow_connections = IdleConnections(connect_for_arrow, conninfo)

    @property
    def where(self) -> str:
        """The database and the table, without a password."""
        return f"{self._database}: table {self.table}"

    def positions(self) -> dict[str, Position]:
        """Return the position of each query that has written to the table, by query id."""
        with self.connection() as connection:
            return PostgresTable.find(connection, self.table).positions(connection)

    def writers(self) -> set[str]:
        """Return the ids of all queries with a position for this name, even of a dropped table."""
        with self.connection() as connection:
            return PostgresTable.find(connection, self.table).writers(connection)

    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""
        with self.connection() as connection:
            return PostgresTable.find(connection, self.table).has_rows(connection)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield a connection in autocommit; an error of PostgreSQL becomes StorageError."""
        import adbc_driver_manager
        import psycopg

        try:
            with self._connections.borrow() as connection:
                yield connection
        except adbc_driver_manager.Error as fault:
            raise StorageError(f"{self.where}: {' '.join(str(fault).split())}") from fault
        except psycopg.Error as fault:
            text = fault.diag.message_primary or " ".join(str(fault).split())
            if isinstance(fault, psycopg.errors.InsufficientPrivilege):
                text += (
                    ". Grant the role SELECT, INSERT, UPDATE and DELETE on the table, and on its "
                    "schema USAGE and CREATE, for staged rows and the positions."
                )
            raise StorageError(f"{self.where}: {text}") from fault

    def additions(self, spark: SparkSession, rows: UpsertRows) -> list[str]:
        """Return the statements that add the columns which the rows have and the table lacks."""
        with self.connection() as connection:
            table = PostgresTable.find(connection, self.table, rows.keys)
            return table.additions(connection, rows.names, rows.types)

    def prepare(
        self, connection: Connection, names: Sequence[str], types: Sequence[DataType]
    ) -> tuple[PostgresTable, list[Column]]:
        """Create or find the table; return it and its columns. Raises InvalidInputError."""
        table = PostgresTable.find(connection, self.table, self.shape.keys)
        try:
            return table, table.prepare(connection, names, types)
        except MissingColumnsError:
            additions = table.additions(connection, names, types)
            if not self.adds_columns:
                raise self.lacks_columns(additions) from None
        table.add_columns(connection, additions)
        return table, table.prepare(connection, names, types)

    def _apply(self, df: DataFrame, batch: Batch, position: Position | None) -> None:
        count_max = batch.record_count_max(position)
        parts = None if self.shape.version is None else parts_for(count_max)
        rows = self.shape.rows(df, latest=not self.shape.is_row_by_row, parts=parts)
        check_names(self.where, rows.names)
        frame = for_postgres(rows.frame, rows.names, rows.types)
        packed = None
        if count_max is not None and count_max <= _SMALL:
            packed = PackingTask(_PACKED_SIZE_MAX).collect(frame)
        with self.connection() as connection:
            table, columns = self.prepare(connection, rows.names, rows.types)
            if packed is None or batch.run_id not in self._started:
                remove_orphans(connection, table)
                self._started.add(batch.run_id)
            if packed is None:
                self._merge_staged(connection, table, columns, batch, frame, df=df)
            else:
                self.merge_small(connection, table, columns, batch, packed, df=df, keeps=rows.keeps)

    def merge_small(
        self,
        connection: Connection,
        table: PostgresTable,
        columns: Sequence[Column],
        batch: Batch,
        rows: Sequence[pa.RecordBatch],
        *,
        df: DataFrame | None = None,
        keeps: bool = False,
    ) -> bool:
        """Apply rows that are on the driver; return False if the table has them already.

        With `keeps` a row may lack values that the table keeps.
        """
        with staging_of_a_batch(connection, table, columns, batch, keeps=keeps) as target:
            staged = []
            leaves_out = self.bad_records.are_left_out
            if rows:
                with self._arrow_connections.borrow() as arrow:
                    staged = [stage(arrow, target, pieces(rows), 0, leaves_out=leaves_out)]
            return self.merge_staged(connection, table, batch, target, staged, df=df)

    def _merge_staged(
        self,
        connection: Connection,
        table: PostgresTable,
        columns: Sequence[Column],
        batch: Batch,
        frame: DataFrame,
        *,
        df: DataFrame,
    ) -> None:
        keeps = KEPT in frame.columns
        with staging_of_a_batch(connection, table, columns, batch, keeps=keeps) as target:
            conninfo = complete_conninfo(self.conninfo)
            task = StagingTask(conninfo, target, self.bad_records.are_left_out)
            self.merge_staged(connection, table, batch, target, task.collect(frame), df=df)

    def merge_staged(
        self,
        connection: Connection,
        table: PostgresTable,
        batch: Batch,
        target: StagingTable,
        results: Sequence[StagedRows],
        *,
        df: DataFrame | None = None,
    ) -> bool:
        """Apply rows that tasks have staged; return False if the table has them already.

        `df` has the records, for those that are refused and left out.
        """
        faults = [result.fault for result in results if result.fault]
        if faults:
            raise self._misfit(batch, faults[0])
        staged = StagedMerge(
            target,
            [result.attempt for result in results if result.rows],
            sum(result.rows for result in results),
            sum(result.deletions for result in results),
            all(result.seems_unique for result in results),
            [record for result in results for record in result.refused],
        )
        versions = None
        if self.shape.version is not None:
            given = connection, table, self.shape.version, target.columns
            versions = PostgresVersions.prepare(*given)
        merge = Merge(table, staged, versions)
        while True:
            try:
                return self._merge(connection, merge, batch, df)
            except _RefusedError as fault:
                refused = self._refused(connection, batch, merge, fault)
                if not refused:  # what the trigger skips, the table has
                    staged = replace(merge.staged, may_be_skipped=True)
                else:
                    staged = merge.without(connection, refused)
                merge = replace(merge, staged=staged)

    def _refused(
        self, connection: Connection, batch: Batch, merge: Merge, fault: _RefusedError
    ) -> list[Refusal]:
        """Return the records that the table refuses; raise InvalidInputError for the first one.

        It is raised unless such records are left out, or if no record of the micro-batch is it. If
        a trigger skips rows, and each alone is as the table has it, the result is empty.
        """
        if batch.is_replacing:
            merge = replace(merge, versions=None)
        try:
            with closing(merge.misfits(connection, is_replacing=batch.is_replacing)) as misfits:
                first = next(misfits, None)
                if first is not None and self.bad_records.are_left_out:
                    return [misfit.refusal() for misfit in (first, *misfits)]
        except UndeletableRowError as row:
            raise self._misfit(batch, str(row)) from fault.__cause__
        if first is None and isinstance(fault.__cause__, SkippedRowsError):
            return []
        raise self._misfit(batch, str(first or fault)) from fault.__cause__

    def _merge(
        self,
        connection: Connection,
        merge: Merge,
        batch: Batch,
        df: DataFrame | None,
    ) -> bool:
        """Run the transaction; repeat it if PostgreSQL ended it because of a deadlock."""
        import psycopg

        is_applied = False
        table, staged, versions = merge.table, merge.staged, merge.versions
        for attempt in range(_TRIES):
            try:
                with connection.transaction():
                    run(connection, _LOGGED)
                    run(connection, _TEXT_FORMS)
                    table.lock(connection)
                    position = table.lock_position(connection, batch.query_id)
                    if self.is_due(batch, position):
                        self._check_gap(batch, position)
                        is_replacing = batch.is_replacing and position is None
                        if is_replacing and versions is not None:
                            versions.forget(connection)
                            merge = replace(merge, versions=None)
                        merge.run(connection, is_replacing=is_replacing)
                        if versions is not None:
                            times = batch.now_ms, batch.now_ms - self.delete_retention_ms
                            merge.remember(connection, versions, times)
                        if is_replacing:
                            table.forget_others(connection, batch.query_id)
                        reached = batch.position(refused=len(staged.refused))
                        table.record(connection, batch.query_id, reached)
                        if staged.refused:
                            # The log takes the dead letters once: no row may be refused later.
                            run(connection, "SET CONSTRAINTS ALL IMMEDIATE")
                            # Spark writes them meanwhile.
                            run(connection, "SET LOCAL idle_in_transaction_session_timeout TO 0")
                            assert df is not None
                            self.leave_out_refused(df, batch, staged.refused)
                        is_applied = True
                break
            except UnkeptRowsError as fault:
                raise _RefusedError(str(fault)) from fault
            except psycopg.Error as fault:
                if is_about_rows(fault):
                    raise _RefusedError(fault.diag.message_primary or str(fault)) from fault
                is_victim = (fault.sqlstate or "").startswith("40")
                if not is_victim or attempt == _TRIES - 1:
                    raise
        return is_applied

    def _misfit(self, batch: Batch, text: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.where}: {text}; nothing of micro-batch {batch.batch_id} was written. {REMEDY}"
        )


class _RefusedError(Exception):
    """PostgreSQL refuses a row."""
