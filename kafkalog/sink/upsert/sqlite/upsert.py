"""SQLiteUpsert: a table in an SQLite file that follows a log, one transaction per micro-batch.

Rows come to the driver in bounded driver batches and wait in a staging file until one transaction
merges them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.sink.query import EndOffsets
from kafkalog.sink.upsert.driver_batches import in_driver_batches, parts_for
from kafkalog.sink.upsert.kept_values import KEPT
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.rows import DELETED, RECORD, UpsertRows, column_of
from kafkalog.sink.upsert.sqlite.merge import SQLiteMerge
from kafkalog.sink.upsert.sqlite.staging_file import StagingFile, check_client
from kafkalog.sink.upsert.sqlite.table import SQLiteTable, quoted
from kafkalog.sink.upsert.sqlite.unique_indexes import check_conflict_clauses
from kafkalog.sink.upsert.sqlite.versions import SQLiteVersions
from kafkalog.sink.upsert.upsert import Batch, Upsert, UpsertArguments
from kafkalog.sink.upsert.value_text import JSON_TYPES, document_text, instant_text
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType


_POSITIONS = """
CREATE TABLE IF NOT EXISTS kafkalog_positions (
    query_id TEXT NOT NULL,
    target_table TEXT NOT NULL,
    batch_id INTEGER NOT NULL,
    end_offsets TEXT NOT NULL,
    time_ms INTEGER NOT NULL,
    bad_records INTEGER NOT NULL DEFAULT 0,
    other_ends TEXT,
    PRIMARY KEY (query_id, target_table)
)
"""
_ADDED = {"bad_records": "INTEGER NOT NULL DEFAULT 0", "other_ends": "TEXT"}
"""The columns that earlier versions did not have."""


class SQLiteUpsert(Upsert):
    """Keep `table` of an SQLite `database` equal to the latest records of a stream of this source.

    Spark reduces each micro-batch to the latest record per key; a tombstone deletes its row. The
    default table is `key BLOB PRIMARY KEY, value BLOB, topic TEXT, partition INTEGER, offset
    INTEGER`. The arguments `schema` and `select` make other columns, see `RowShape`:

        SQLiteUpsert("stock.db", "stock", schema="count int, name string", key_type="string")
        SQLiteUpsert("stock.db", "stock", select=[
            "cast(key as string) as key", "value is null as deleted",
            "get_json_object(cast(value as string), '$.count') as count"])

    Binary becomes BLOB; whole numbers and booleans become INTEGER. Floats become REAL, and NaN
    becomes NULL. Timestamps become TEXT in UTC, as in `2024-11-03 05:30:00.000000Z`, whatever the
    session's time zone. Arrays, maps, structs and variants become TEXT in JSON, with all nulls and
    digits; anything else TEXT as Spark casts it. A column of timestamps that holds other text is
    refused, since one instant would have two texts.

    A missing table is created. An existing one must declare these columns for such values. Its
    primary key, or a unique index by the collation BINARY, must have exactly the columns of the
    key. Further columns need defaults. They keep their values as long as the row's key stays, even
    if all rows are replaced; that takes room in SQLite's temporary directory.

    With `on_bad_record` other than "fail", all records of a micro-batch pass through the driver,
    not only the latest per key. Dead letters are written while the file is locked.

    The rows of a micro-batch wait in a staging file next to the database, which takes as much room
    as they do. ADBC writes that file: the extra `sqlite`. Only Python's `sqlite3` opens the
    database, so you may read it with `sqlite3` in the same process.

    The table `kafkalog_positions` of the same file holds the last micro-batch of each (query,
    table) and its end offsets. A new file is in WAL mode: readers do not wait, and see the old rows
    until a micro-batch is committed. Other writers of the file are awaited for `timeout_s`. They
    are locked out while the rows are merged, not while Spark computes them. The driver holds about
    100,000 rows at a time, or a hundredth of a micro-batch with more than 10 million.

    Raises InvalidInputError that names a refused record, CommitConflictError, and StorageError.
    """

    def __init__(
        self,
        database: str | PathLike[str],
        table: str,
        *,
        timeout_s: float = 60.0,
        **given: Unpack[UpsertArguments],
    ) -> None:
        super().__init__(table, **given)
        if table.lower().startswith(("sqlite_", "kafkalog_")):
            raise InvalidInputError(f"SQLiteUpsert: {table!r} is not a table name")
        self.database = fspath(database)
        if self.database in {"", ":memory:"}:
            raise InvalidInputError(
                f"SQLiteUpsert: the database {self.database!r} is gone with each connection; give "
                "the path of a file"
            )
        check_client()
        self.timeout_s = timeout_s
        self._are_instants_checked = False
        """Whether the table has been found to hold no other text where rows bring instants."""

    @property
    def where(self) -> str:
        """The database and the table, as errors and warnings name them."""
        return f"{self.database}: table {self.table}"

    def positions(self) -> dict[str, Position]:
        """Return the position of each query that has written to the table, by query id."""
        if not self._has_database():
            return {}
        with self._connection() as connection:
            return self._positions(connection)

    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""
        if not self._has_database():
            return False
        with self._connection() as connection:
            if not _exists(connection, self.table):
                return False
            found = connection.execute(f"SELECT 1 FROM {quoted(self.table)} LIMIT 1").fetchone()
            return found is not None

    def additions(self, spark: SparkSession, rows: UpsertRows) -> list[str]:
        """Return the statements that add the columns which the rows have and the table lacks."""
        if not self._has_database():
            return []
        with self._connection() as connection:
            if not _exists(connection, self.table):
                return []
            return self._table(connection, rows.names).additions([_kind(t) for t in rows.types])

    def _has_database(self) -> bool:
        """Return whether the file exists; raises StorageError if its directory does not."""
        file = Path(self.database).absolute()
        if not file.parent.is_dir():
            raise StorageError(
                f"{self.where}: there is no directory {file.parent}. Create it, or give another "
                "path."
            )
        return file.exists()

    def _apply(self, df: DataFrame, batch: Batch, position: Position | None) -> None:
        parts = parts_for(batch.record_count_max(position))
        is_latest = not self.bad_records.are_left_out
        rows = self.shape.rows(df, latest=is_latest, parts=parts)
        stored = [_stored(name, kind) for name, kind in zip(rows.names, rows.types, strict=True)]
        kept = [KEPT] if rows.keeps else []
        frame = rows.frame.select(DELETED, *RECORD, *kept, *stored)
        if not is_latest:
            keys = list(map(column_of, rows.keys))
            frame = frame.repartition(*keys) if parts is None else frame.repartition(parts, *keys)
        kinds = [_kind(data_type) for data_type in rows.types]
        instants = [
            name
            for name, data_type in zip(rows.names, rows.types, strict=True)
            if data_type.typeName() == "timestamp"
        ]
        batches = in_driver_batches(frame)
        self.apply(batch, rows.names, kinds, batches, df=df, instants=instants, keeps=rows.keeps)

    def apply(
        self,
        batch: Batch,
        names: Sequence[str],
        kinds: Sequence[str],
        driver_batches: Iterable[pa.RecordBatch],
        *,
        df: DataFrame | None = None,
        instants: Sequence[str] = (),
        keeps: bool = False,
    ) -> bool:
        """Apply driver batches in one transaction; return False if the table has them already.

        The rows are those of `UpsertRows`: the latest of each key, or all if bad records are left
        out. The SQLite types of the columns `names` are `kinds`; those of `instants` have the text
        of instants. The records themselves are in `df`, for those that are refused and left out.
        With `keeps` a row may lack values that the table keeps.
        """
        file = Path(self.database)
        is_new = not file.exists() or file.stat().st_size == 0
        staging = StagingFile(self.database, self.where, self.table)
        leaves_out = self.bad_records.are_left_out
        with self._connection() as connection, staging.held(self.timeout_s):
            (encoding,) = connection.execute("PRAGMA encoding").fetchone()
            # Spark computes the rows meanwhile, so the database is not locked yet.
            staged = [KEPT, *names] if keeps else names
            refused = staging.fill(encoding, staged, driver_batches, leaves_out=leaves_out)
            if is_new:
                with suppress(sqlite3.OperationalError):  # another process is doing it
                    connection.execute("PRAGMA journal_mode = WAL")
            table = self._table(connection, names)
            merge = SQLiteMerge(table, staging.path, leaves_out=leaves_out, keeps=keeps)
            connection.execute("BEGIN IMMEDIATE")
            position = self._positions(connection).get(batch.query_id)
            if not self.is_due(batch, position):
                return False
            self._check_gap(batch, position)
            is_replacing = batch.is_replacing and position is None
            versions = self.shape.version and SQLiteVersions(table, self.shape.version)
            self._declare_positions(connection)
            if is_replacing or not _exists(connection, self.table):
                self._forget(connection)
                if versions:
                    versions.forget()
            self._prepare(table, kinds)
            if not is_replacing and not self._are_instants_checked:
                table.check_instants(instants)
            if versions:
                versions.leave_out_older(is_replacing=is_replacing)
            refused += merge.run(is_replacing=is_replacing)
            if versions:
                versions.remember(batch.now_ms, self.delete_retention_ms)
            self._record(connection, batch, len(refused))
            if refused:
                assert df is not None
                self.leave_out_refused(df, batch, refused)
            connection.commit()
        self._are_instants_checked = True
        return True

    def _table(self, connection: sqlite3.Connection, names: Sequence[str]) -> SQLiteTable:
        return SQLiteTable(connection, self.where, self.table, names, self.shape.keys)

    def _prepare(self, table: SQLiteTable, kinds: Sequence[str]) -> None:
        """Create the table, or make sure that it takes rows of these SQLite types."""
        table.create(kinds)
        additions = table.additions(kinds)
        if additions and not self.adds_columns:
            raise self.lacks_columns(additions)
        for statement in additions:
            table.connection.execute(statement)
        table.check(kinds)
        check_conflict_clauses(table)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection; a transaction that was begun ends with the block."""
        try:
            with (
                closing(
                    sqlite3.connect(self.database, timeout=self.timeout_s, isolation_level=None)
                ) as connection,
                connection,
            ):
                # A commit must outlive a power cut, as Spark's checkpoint may.
                connection.execute("PRAGMA synchronous = FULL")
                # Many waiting rows belong on the disk, however SQLite was built.
                connection.execute("PRAGMA temp_store = FILE")
                yield connection
        except sqlite3.Error as fault:
            raise StorageError(f"{self.where}: {fault}{self._advice(fault)}") from fault

    def _advice(self, fault: sqlite3.Error) -> str:
        text = str(fault)
        if "locked" in text:
            return f"; another writer held it for longer than timeout_s={self.timeout_s:g}"
        if "unable to open" in text:
            return "; its directory must exist, and be writable"
        if "not a database" in text:
            return "; it is a file of something else: give another path"
        if "disk I/O" in text:  # also where its shared memory finds no room on a full disk
            with suppress(OSError):
                free = files.free_space(Path(self.database).absolute().parent)
                return f"; {free} bytes are free on its disk"
        return ""

    def _positions(self, connection: sqlite3.Connection) -> dict[str, Position]:
        if not all(_exists(connection, name) for name in (self.table, "kafkalog_positions")):
            return {}
        # Columns may be missing until the next micro-batch.
        missing = _missing_columns(connection)
        count = "0" if "bad_records" in missing else "bad_records"
        others = "NULL" if "other_ends" in missing else "other_ends"
        found = connection.execute(
            f"SELECT query_id, batch_id, end_offsets, time_ms, {count}, {others} "
            "FROM kafkalog_positions WHERE target_table = ?",
            (self.table,),
        )
        return {
            query_id: Position(batch_id, self._end_offsets(query_id, ends), *more)
            for query_id, batch_id, ends, *more in found
        }

    def _end_offsets(self, query_id: str, ends: str) -> EndOffsets:
        try:
            return {
                topic: {number: int(end) for number, end in partitions.items()}
                for topic, partitions in json.loads(ends).items()
            }
        except (ValueError, TypeError, AttributeError) as fault:
            raise StorageError(
                f"{self.where}: kafkalog_positions has damaged end_offsets of query {query_id}: "
                f"expected {{topic: {{partition: offset}}}}, found {ends[:100]!r}; delete that row "
                "and make the table again"
            ) from fault

    def _declare_positions(self, connection: sqlite3.Connection) -> None:
        connection.execute(_POSITIONS)
        for name, kind in _missing_columns(connection).items():
            connection.execute(f"ALTER TABLE kafkalog_positions ADD COLUMN {name} {kind}")

    def _forget(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "DELETE FROM kafkalog_positions WHERE target_table = ? COLLATE NOCASE", (self.table,)
        )

    def _record(self, connection: sqlite3.Connection, batch: Batch, refused: int) -> None:
        position = batch.position(refused=refused)
        connection.execute(
            "INSERT OR REPLACE INTO kafkalog_positions "
            "(query_id, target_table, batch_id, end_offsets, time_ms, bad_records, other_ends) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                batch.query_id,
                self.table,
                position.batch_id,
                position.end_offsets_json(),
                position.time_ms,
                position.bad_records,
                position.other_ends,
            ),
        )


def _missing_columns(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the columns, with their types, that the table of positions lacks."""
    found = {row[1] for row in connection.execute("PRAGMA table_info(kafkalog_positions)")}
    return {name: kind for name, kind in _ADDED.items() if name not in found}


def _exists(connection: sqlite3.Connection, table: str) -> bool:
    found = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE name = ? COLLATE NOCASE", (table,)
    ).fetchone()
    return found is not None


def _kind(data_type: DataType) -> str:
    """Return SQLite's type for the values of Spark's."""
    name = data_type.typeName()
    if name == "binary":
        return "BLOB"
    if name in {"boolean", "byte", "short", "integer", "long"}:
        return "INTEGER"
    return "REAL" if name in {"float", "double"} else "TEXT"


def _stored(name: str, data_type: DataType) -> Column:
    """Return the column `name` as SQLite stores it."""
    column = column_of(name)
    if data_type.typeName() in JSON_TYPES:
        column = document_text(column, data_type)
    elif data_type.typeName() == "timestamp":
        column = instant_text(column)
    elif _kind(data_type) == "TEXT":
        column = column.cast("string")
    return column.alias(name)
