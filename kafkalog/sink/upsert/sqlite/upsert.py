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
from kafkalog.sink.upsert.driver_batches import in_driver_batches, parts_for
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.rows import DELETED, RECORD, UpsertRows, column_of
from kafkalog.sink.upsert.sqlite.merge import SQLiteMerge
from kafkalog.sink.upsert.sqlite.staging_file import StagingFile, check_client
from kafkalog.sink.upsert.sqlite.table import SQLiteTable, quoted
from kafkalog.sink.upsert.upsert import Batch, Upsert, UpsertArguments
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

__all__ = ["SQLiteUpsert"]

_POSITIONS = """
CREATE TABLE IF NOT EXISTS kafkalog_positions (
    query_id TEXT NOT NULL,
    target_table TEXT NOT NULL,
    batch_id INTEGER NOT NULL,
    end_offsets TEXT NOT NULL,
    time_ms INTEGER NOT NULL,
    PRIMARY KEY (query_id, target_table)
)
"""


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
    becomes NULL. Arrays, maps and structs become TEXT in JSON; anything else TEXT as Spark casts
    it.

    A missing table is created. An existing one must declare these columns for such values, and
    `key` as its primary key or unique, by the collation BINARY. Further columns need defaults. They
    keep their values as long as the row's key stays, even if all rows are replaced; that takes room
    in SQLite's temporary directory. A record that the table refuses fails the micro-batch.

    The rows of a micro-batch wait in a staging file beside the database, which takes as much room
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

    @property
    def where(self) -> str:
        """The database and the table, as errors and warnings name them."""
        return f"{self.database}: table {self.table}"

    def positions(self) -> dict[str, Position]:
        """Return the position of each query that has written to the table, by query id."""
        if not Path(self.database).exists():
            return {}
        with self._connection() as connection:
            return self._positions(connection)

    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""
        if not Path(self.database).exists():
            return False
        with self._connection() as connection:
            if not _exists(connection, self.table):
                return False
            found = connection.execute(f"SELECT 1 FROM {quoted(self.table)} LIMIT 1").fetchone()
            return found is not None

    def additions(self, spark: SparkSession, rows: UpsertRows) -> list[str]:
        """Return the statements that add the columns which the rows have and the table lacks."""
        if not Path(self.database).exists():
            return []
        kinds, _ = _for_sqlite(rows)
        with self._connection() as connection:
            if not _exists(connection, self.table):
                return []
            return SQLiteTable(connection, self.where, self.table, rows.names, rows.keys).additions(
                kinds
            )

    def _apply(self, df: DataFrame, batch: Batch, position: Position | None) -> None:
        parts = parts_for(batch.record_count_max(position))
        kinds, rows = _for_sqlite(self.shape.rows(df, latest=True, parts=parts))
        self.apply(batch, rows.names, kinds, in_driver_batches(rows.frame))

    def apply(
        self,
        batch: Batch,
        names: Sequence[str],
        kinds: Sequence[str],
        driver_batches: Iterable[pa.RecordBatch],
    ) -> bool:
        """Apply driver batches in one transaction; return False if the table has them already.

        The rows are those of `UpsertRows`, at most one per key. `kinds` are the SQLite types of the
        columns `names`.
        """
        file = Path(self.database)
        is_new = not file.exists() or file.stat().st_size == 0
        staging = StagingFile(self.database, self.where, self.table)
        with self._connection() as connection, staging.held(self.timeout_s):
            (encoding,) = connection.execute("PRAGMA encoding").fetchone()
            # Spark computes the rows meanwhile, so the database is not locked yet.
            staging.fill(encoding, names, driver_batches)
            if is_new:
                with suppress(sqlite3.OperationalError):  # another process is doing it
                    connection.execute("PRAGMA journal_mode = WAL")
            table = SQLiteTable(connection, self.where, self.table, names)
            merge = SQLiteMerge(table, staging.path)
            connection.execute("BEGIN IMMEDIATE")
            position = self._positions(connection).get(batch.query_id)
            if not self.is_due(batch, position):
                return False
            self._check_gap(batch, position)
            is_replacing = batch.is_replacing and position is None
            if is_replacing or not _exists(connection, self.table):
                self._forget(connection)
            table.create(kinds)
            if is_replacing:
                merge.replace()
            else:
                merge.run()
            self._record(connection, batch)
            connection.commit()
        return True

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
        found = connection.execute(
            "SELECT query_id, batch_id, end_offsets, time_ms FROM kafkalog_positions "
            "WHERE target_table = ?",
            (self.table,),
        )
        return {row[0]: self._position(*row) for row in found}

    def _position(self, query_id: str, batch_id: int, ends: str, time_ms: int) -> Position:
        try:
            offsets = {
                topic: {number: int(end) for number, end in partitions.items()}
                for topic, partitions in json.loads(ends).items()
            }
        except (ValueError, TypeError, AttributeError) as fault:
            raise StorageError(
                f"{self.where}: kafkalog_positions has damaged end_offsets of query {query_id}: "
                f"expected {{topic: {{partition: offset}}}}, found {ends[:100]!r}; delete that row "
                "and make the table again"
            ) from fault
        return Position(batch_id, offsets, time_ms)

    def _forget(self, connection: sqlite3.Connection) -> None:
        connection.execute(_POSITIONS)
        connection.execute(
            "DELETE FROM kafkalog_positions WHERE target_table = ? COLLATE NOCASE", (self.table,)
        )

    def _record(self, connection: sqlite3.Connection, batch: Batch) -> None:
        position = batch.position()
        connection.execute(_POSITIONS)
        connection.execute(
            "INSERT OR REPLACE INTO kafkalog_positions VALUES (?, ?, ?, ?, ?)",
            (
                batch.query_id,
                self.table,
                position.batch_id,
                position.end_offsets_json(),
                position.time_ms,
            ),
        )


def _exists(connection: sqlite3.Connection, table: str) -> bool:
    found = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE name = ? COLLATE NOCASE", (table,)
    ).fetchone()
    return found is not None


def _for_sqlite(rows: UpsertRows) -> tuple[list[str], UpsertRows]:
    kinds, columns = [], []
    for name, data_type in zip(rows.names, rows.types, strict=True):
        kind, column = _stored(column_of(name), data_type)
        kinds.append(kind)
        columns.append(column.alias(name))
    return kinds, UpsertRows(
        rows.frame.select(DELETED, *RECORD, *columns), rows.names, rows.types, rows.keys
    )


def _stored(column: Column, data_type: DataType) -> tuple[str, Column]:
    from pyspark.sql import functions as F

    name = data_type.typeName()
    if name == "binary":
        return "BLOB", column
    if name in {"boolean", "byte", "short", "integer", "long"}:
        return "INTEGER", column
    if name in {"float", "double"}:
        return "REAL", column
    if name in {"array", "map", "struct"}:
        return "TEXT", F.to_json(column)
    return "TEXT", column.cast("string")
