"""SQLiteUpsert: a table in an SQLite file that follows a log, one transaction per micro-batch.

Rows come to the driver in bounded driver batches, never a micro-batch at once.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, islice
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.sink.upsert.driver_batches import in_driver_batches, parts_for
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.rows import DELETED, RECORD, UpsertRows, column_of
from kafkalog.sink.upsert.sqlite.replacement import replace_rows
from kafkalog.sink.upsert.sqlite.table import SQLiteTable, quoted
from kafkalog.sink.upsert.upsert import Batch, Upsert
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

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

    Each micro-batch is reduced by Spark to the latest record per key; a tombstone deletes its row.
    By default the table is `key BLOB PRIMARY KEY, value BLOB, topic TEXT, partition INTEGER, offset
    INTEGER`. `schema` takes the columns from JSON values, `select` makes them:

        SQLiteUpsert("stock.db", "stock", schema="count int, name string", key_type="string")
        SQLiteUpsert("stock.db", "stock", select=[
            "cast(key as string) as key", "value is null as deleted",
            "get_json_object(cast(value as string), '$.count') as count"])

    `RowShape` says more about both, and about deletions.

    Binary becomes BLOB; whole numbers and booleans INTEGER; floats REAL, but NaN becomes NULL, as
    SQLite knows no NaN; arrays, maps and structs TEXT in JSON; anything else TEXT as Spark casts
    it. The table is created if it is missing; one that exists must have these columns, declared
    for such values, and `key` as its primary key or unique, by the collation BINARY. It may have
    more, with defaults: what they hold stays as long as the row's key, also where all rows are
    replaced, which then needs room for them in SQLite's temporary directory. A record that the
    table refuses fails the micro-batch with an error that names it.

    The last micro-batch of each (query, table) is in the table `kafkalog_positions` of the same
    file, with the end offsets reached. A file that is made here is in WAL mode: its readers see the
    rows as they were until a micro-batch is committed, and do not wait for it. `timeout_s` is how
    long to wait for other writers of the file; a view's rebuild locks them out for its whole
    length, and such a writer gives up after its own. The driver holds some 100,000 rows at a time;
    with more than 10 million in a micro-batch, a hundredth of them.

    Raises InvalidInputError, CommitConflictError, and StorageError for what SQLite refuses.
    """

    def __init__(
        self,
        database: str | PathLike[str],
        table: str,
        *,
        select: Callable[[DataFrame], DataFrame] | Sequence[str | Column] | None = None,
        schema: StructType | str | None = None,
        key_type: str = "binary",
        reset_writer: bool = False,
        replace_first: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            table,
            select=select,
            schema=schema,
            key_type=key_type,
            reset_writer=reset_writer,
            replace_first=replace_first,
        )
        if table.lower().startswith(("sqlite_", "kafkalog_")):
            raise InvalidInputError(f"SQLiteUpsert: {table!r} is no name for a table")
        self.database = fspath(database)
        if self.database in {"", ":memory:"}:
            raise InvalidInputError(
                f"SQLiteUpsert: the database {self.database!r} is gone with each connection; give "
                "the path of a file"
            )
        self.timeout_s = timeout_s

    @property
    def where(self) -> str:
        """Where the table is, as errors and warnings begin."""
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
        """Apply driver_batches of rows in one transaction; False when the batch was there already.

        The rows are those of `UpsertRows`, at most one of a key; `kinds` are the SQLite types of
        the columns `names`.
        """
        following = iter(driver_batches)
        # The first rows cost the whole reduction; other writers of the file need not wait for it.
        first = list(islice(following, 1))
        file = Path(self.database)
        is_new = not file.exists() or file.stat().st_size == 0
        with self._connection() as connection:
            if is_new:
                with suppress(sqlite3.OperationalError):  # somebody else is at it
                    connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            position = self._positions(connection).get(batch.query_id)
            if not self.is_due(batch, position):
                return False
            self._check_gap(batch, position)
            is_replacing = batch.is_replacing and position is None
            if is_replacing or not _exists(connection, self.table):
                self._forget(connection)
            table = SQLiteTable(connection, self.where, self.table, names)
            table.create(kinds)
            rows = chain(first, following)
            if is_replacing:
                replace_rows(table, rows)
            else:
                for driver_batch in rows:
                    table.write(driver_batch)
            self._record(connection, batch)
        return True

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection; its transaction, if one was begun, ends as the block does."""
        try:
            with (
                closing(
                    sqlite3.connect(self.database, timeout=self.timeout_s, isolation_level=None)
                ) as connection,
                connection,
            ):
                # What was committed must outlive a power cut, as Spark's checkpoint may.
                connection.execute("PRAGMA synchronous = FULL")
                # Rows of which there are many wait on the disk, however SQLite was built.
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
        """Delete the positions of all queries: the rows that they tell of are not there."""
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
    """Return the columns' SQLite types, and the rows with values that SQLite stores as they are."""
    kinds, columns = [], []
    for name, data_type in zip(rows.names, rows.types, strict=True):
        kind, column = _stored(column_of(name), data_type)
        kinds.append(kind)
        columns.append(column.alias(name))
    return kinds, UpsertRows(rows.frame.select(DELETED, *RECORD, *columns), rows.names, rows.types)


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
