"""The tables that hold a micro-batch's rows until one transaction merges them.

The tasks copy the rows into an unlogged table, in parallel; the driver copies those of a small
micro-batch. The driver holds an advisory lock on the table. If the lock is free, the driver is dead
and the table is removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from kafkalog.sink.upsert.bad_records import Refusal
from kafkalog.sink.upsert.kept_values import KEPT
from kafkalog.sink.upsert.postgres.arrow_connection import ArrowConnection
from kafkalog.sink.upsert.postgres.client import one, run
from kafkalog.sink.upsert.postgres.plain_arrays import cell
from kafkalog.sink.upsert.postgres.staging_table import (
    ATTEMPT,
    RefusedRowsError,
    StagingTable,
    pieces,
)
from kafkalog.sink.upsert.rows import DELETED
from kafkalog.spark_results import collected

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from kafkalog.sink.upsert.postgres.table import Column, PostgresTable
    from kafkalog.sink.upsert.upsert import Batch

    Connection = psycopg.Connection[tuple[Any, ...]]


_log = logging.getLogger("kafkalog.sink")
_PREFIX = "kafkalog_staging"
_CHUNK_SIZE = 16 << 20
"""Bytes of rows in one COPY. The task keeps them, to find the row that does not fit."""
_DROP_TIMEOUT = "1s"
"""A backup locks every table for as long as it runs."""
_LOCK = "SELECT pg_advisory_lock(hashtextextended(%s, 0))"
_TRY_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtextextended(%s, 0))"
_UNSYNCED = "SET LOCAL synchronous_commit TO off"
"""The rows are of no use after a crash, nor is the table."""
_STAY = (
    "SELECT set_config('idle_session_timeout', '0', false) "
    "WHERE current_setting('server_version_num')::int >= 140000"
)
"""The connection is idle while the tasks run."""
_LEADING = (
    f"{ATTEMPT} bigint, {DELETED} boolean, kl_topic text, kl_partition integer, "
    "kl_offset bigint, kl_timestamp timestamp with time zone"
)
_OTHERS = """
SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.relation = %s AND l.mode = 'RowExclusiveLock' AND l.pid <> pg_backend_pid()
    AND a.backend_type = 'client backend' AND a.usename = current_user
"""
"""Ends attempts of tasks that still copy into a staging table nobody will read."""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _prefix(table: PostgresTable) -> str:
    return f"{_PREFIX}_{_short(table.name)}_"


def _lock_name(schema: str, name: str) -> str:
    return f"kafkalog staging {schema}.{name}"


@contextmanager
def staging_of_a_batch(
    connection: Connection,
    table: PostgresTable,
    columns: Sequence[Column],
    batch: Batch,
    *,
    keeps: bool = False,
) -> Iterator[StagingTable]:
    """Create a table for a micro-batch's rows, which may lack values, and drop it at the end."""
    from psycopg.sql import SQL, Literal

    name = f"{_prefix(table)}{_short(batch.query_id)}_{batch.batch_id}_{secrets.token_hex(4)}"
    target = StagingTable(table.schema, name, tuple(columns), table.keys, keeps)
    run(connection, _STAY)
    run(connection, _LOCK, (_lock_name(table.schema, name),))
    with connection.transaction():
        run(connection, _UNSYNCED)
        leading = [_LEADING, f"{KEPT} text"] if keeps else [_LEADING]
        declared = [*map(SQL, leading), *(column.staged_declaration() for column in columns)]
        run(
            connection,
            SQL("CREATE UNLOGGED TABLE {} ({}) WITH (autovacuum_enabled = false)").format(
                target.identifier, SQL(", ").join(declared)
            ),
        )
        text = (
            f"kafkalog: micro-batch {batch.batch_id} of query {batch.query_id}, run "
            f"{batch.run_id}, on its way into {table}; the next start removes it if its driver died"
        )
        run(
            connection,
            SQL("COMMENT ON TABLE {} IS {}").format(
                table.beside(name), Literal(text.replace("%", "%%"))
            ),
        )
    try:
        yield target
    finally:
        _drop(connection, table, name)


def _drop(connection: Connection, table: PostgresTable, name: str) -> bool:
    """Drop a staging table and release its lock; if that fails, `remove_orphans` does it later."""
    import psycopg
    from psycopg.sql import SQL

    is_dropped = False
    try:
        run(connection, _OTHERS, (table.oid(connection, name),))
        try:
            with connection.transaction():
                run(connection, _UNSYNCED)
                run(connection, SQL("SET LOCAL lock_timeout = {}").format(_DROP_TIMEOUT))
                run(connection, SQL("DROP TABLE IF EXISTS {}").format(table.beside(name)))
            is_dropped = True
        finally:
            run(connection, _UNLOCK, (_lock_name(table.schema, name),))
    except psycopg.Error as fault:
        _log.warning("table %s: staging table %s stays for now: %s", table, name, fault)
    return is_dropped


def remove_orphans(connection: Connection, table: PostgresTable) -> list[str]:
    """Drop the staging tables that dead drivers left for the table; return their names."""
    prefix = _prefix(table)
    rows = run(
        connection,
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND starts_with(c.relname, %s) AND c.relkind = 'r' "
        "AND c.relpersistence = 'u' AND pg_get_userbyid(c.relowner) = current_user",
        (table.schema, prefix),
    ).fetchall()
    removed = []
    for (name,) in rows:
        if not one(connection, _TRY_LOCK, (_lock_name(table.schema, name),)):
            continue  # its driver lives
        if not _drop(connection, table, name):
            break
        removed.append(name)
    if removed:
        _log.info("table %s: staging of dead drivers removed: %s", table, ", ".join(removed))
    return removed


@dataclass(frozen=True, slots=True)
class StagedRows:
    """The rows that a task's attempt has committed to a staging table."""

    attempt: int
    rows: int = 0
    deletions: int = 0
    seems_unique: bool = True
    """Whether no key was seen twice; keys that lie far apart are not compared."""
    fault: str | None = None
    """The first row that does not fit, and why; nothing is staged then."""
    refused: Sequence[Refusal] = ()
    """The records that were left out, since they do not fit."""


@dataclass(frozen=True, slots=True)
class StagingTask:
    """The task that stages rows of a large micro-batch: a function for `mapInArrow`.

    It returns `StagedRows`. Spark hands the driver those of one attempt per partition; rows of
    other attempts are never read. A row that does not fit is a result instead of an error, since
    Spark would only retry.
    """

    conninfo: str = field(repr=False)
    """A complete one: a task does not import psycopg."""
    target: StagingTable
    leaves_out: bool = False
    """Whether records that do not fit are left out."""

    def collect(self, frame: DataFrame) -> list[StagedRows]:
        """Run it over all rows; return the results of the attempts that count."""
        found = collected(_numbered(frame).mapInArrow(self.run, "staged binary"))
        results = [StagedRows(**json.loads(row.staged)) for row in found]
        return [
            replace(result, refused=[Refusal(*record) for record in result.refused])
            for result in results
        ]

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copy the rows of one Spark partition."""
        from pyspark import TaskContext

        context = TaskContext.get()
        named = (batch.rename_columns(self.target.names) for batch in batches)
        staged = self.stage(named, 0 if context is None else context.taskAttemptId())
        yield cell("staged", json.dumps(asdict(staged)).encode())

    def stage(self, batches: Iterable[pa.RecordBatch], attempt: int) -> StagedRows:
        """Copy rows in one transaction, on a connection of its own if there are rows."""
        small = pieces(batches)
        first = next(small, None)
        if first is None:
            return StagedRows(attempt)
        with ArrowConnection(self.conninfo) as connection:
            rows = chain([first], small)
            staged = stage(connection, self.target, rows, attempt, leaves_out=self.leaves_out)
        for _ in small:  # Spark expects all rows to be read
            pass
        return staged


def stage(
    connection: ArrowConnection,
    target: StagingTable,
    batches: Iterable[pa.RecordBatch],
    attempt: int,
    *,
    leaves_out: bool = False,
) -> StagedRows:
    """Copy rows in one transaction; each of `batches` is small."""
    import pyarrow as pa

    copying = _Copying(connection, target, attempt, leaves_out)
    try:
        with connection.transaction():
            connection.execute(_UNSYNCED)
            for chunk in _chunks(batches):
                copying.add(pa.Table.from_batches(chunk))
    except _MisfitError as refused:
        return StagedRows(attempt, fault=str(refused))
    return copying.result()


class _MisfitError(Exception):
    """A row does not fit; the message names its record and says why."""


class _Copying:
    """The rows that one transaction copies."""

    def __init__(
        self, connection: ArrowConnection, target: StagingTable, attempt: int, leaves_out: bool
    ) -> None:
        self._connection = connection
        self._target = target
        self._attempt = attempt
        self._leaves_out = leaves_out
        self._rows = 0
        self._deletions = 0
        self._seems_unique = True
        self._refused: list[Refusal] = []

    def result(self) -> StagedRows:
        """Return what was copied."""
        return StagedRows(
            self._attempt, self._rows, self._deletions, self._seems_unique, refused=self._refused
        )

    def add(self, rows: pa.Table) -> None:
        """Copy rows; if PostgreSQL refuses one, copy each half alone, until that one is found.

        Raises _MisfitError unless rows that do not fit are left out.
        """
        import pyarrow.compute as pc

        try:
            with self._connection.transaction():
                self._target.ingest(self._connection, rows.to_batches(), self._attempt)
        except RefusedRowsError as refused:
            reason = str(refused)
        else:
            self._rows += rows.num_rows
            self._deletions += pc.sum(rows.column(DELETED)).as_py() or 0
            keys = [rows.column(name) for name in self._target.keys]
            self._seems_unique = self._seems_unique and _are_distinct(keys)
            return
        if rows.num_rows > 1:
            middle = rows.num_rows // 2
            self.add(rows.slice(0, middle))
            self.add(rows.slice(middle))
            return
        misfit = self._target.misfit(self._connection, rows, reason)
        if not self._leaves_out:
            raise _MisfitError(str(misfit))
        self._refused.append(misfit.refusal())


def _are_distinct(keys: Sequence[pa.ChunkedArray]) -> bool:
    """Return whether one of the columns has no value twice."""
    import pyarrow.compute as pc

    return any(pc.count_distinct(key, mode="all").as_py() == len(key) for key in keys)


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    chunk: list[pa.RecordBatch] = []
    size = 0
    for piece in batches:
        chunk.append(piece)
        size += piece.nbytes
        if size >= _CHUNK_SIZE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _numbered(frame: DataFrame) -> DataFrame:
    """Return rows with plain column names: Spark reads a dot in a name as a path."""
    return frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))


@dataclass(frozen=True, slots=True)
class PackingTask:
    """A `mapInArrow` task that packs its rows in a cell; null if over `size_max` bytes."""

    size_max: int

    def collect(self, frame: DataFrame) -> list[pa.RecordBatch] | None:
        """Run it over all rows; return them, or None if a task has more than `size_max` bytes."""
        import pyarrow as pa

        batches: list[pa.RecordBatch] = []
        for row in collected(_numbered(frame).mapInArrow(self.run, "packed binary")):
            if row.packed is None:
                return None
            with pa.ipc.open_stream(row.packed) as reader:
                batches.extend(batch.rename_columns(frame.columns) for batch in reader)
        return batches

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pack the rows of one Spark partition."""
        import pyarrow as pa

        target = pa.BufferOutputStream()
        writer: pa.RecordBatchStreamWriter | None = None
        size = 0
        for batch in batches:
            size += batch.nbytes
            if size > self.size_max or batch.num_rows == 0:
                continue
            writer = writer or pa.ipc.new_stream(target, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
        if writer is not None or size > self.size_max:
            is_too_large = size > self.size_max
            yield cell("packed", None if is_too_large else target.getvalue().to_pybytes())
