"""SQLiteUpsert: a table in an SQLite file that follows a log, one transaction per micro-batch.

Invariants:

- rows, batch id and end offsets of a micro-batch are one SQLite transaction, so a crash leaves all
  or nothing of it, and a micro-batch that Spark repeats changes nothing;
- a batch id below the last one is refused: the checkpoint is older than the table;
- rows come to the driver in bounded portions, never a micro-batch at once.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice
from os import PathLike, fspath
from typing import TYPE_CHECKING

from kafkalog.errors import CommitConflictError, InvalidInputError, StorageError
from kafkalog.sink.query import micro_batch_of_driver
from kafkalog.sink.upsert.newest import newest_per_key
from kafkalog.sink.upsert.portions import in_portions
from kafkalog.storage_engine import clock

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["SQLiteUpsert"]

_log = logging.getLogger("kafkalog.sink")
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
_DELETED = "deleted"
_RAW = ("key", "value", "topic", "partition", "offset")


class SQLiteUpsert:
    """Keep `table` of an SQLite `database` equal to the newest records of a stream of this source.

    Each micro-batch is reduced to the newest record per key; a tombstone deletes its row. Without
    `select` the table is `key BLOB PRIMARY KEY, value BLOB, topic TEXT, partition INTEGER, offset
    INTEGER`. `select` shapes it: a function from the reduced DataFrame to one that has a column
    `key` (one-to-one with the record's key, not null) and the table's other columns. A row is a
    deletion where its column `deleted` is true, which is not stored; without such a column, where
    `value` is null:

        SQLiteUpsert("stock.db", "stock", select=lambda df: df.selectExpr(
            "cast(key as string) as key", "value is null as deleted",
            "get_json_object(cast(value as string), '$.count') as count"))

    Binary becomes BLOB; whole numbers and booleans INTEGER; floats REAL, but NaN becomes NULL, as
    SQLite knows no NaN; arrays, maps and structs TEXT in JSON; anything else TEXT as Spark casts
    it. The table is created if it is missing; one that exists must have these columns, and `key`
    as its primary key or unique.

    The last batch id of each (query, table) is in the table `kafkalog_positions` of the same file,
    with the end offsets reached, as far as `select` lets `topic`, `partition` and `offset` through.
    `reset_writer` accepts a batch id below the last one: for a checkpoint that was put back on
    purpose. `timeout_s` is how long to wait for other writers of the file.

    Raises InvalidInputError, CommitConflictError, and StorageError for what SQLite refuses.
    """

    def __init__(
        self,
        database: str | PathLike[str],
        table: str,
        *,
        select: Callable[[DataFrame], DataFrame] | None = None,
        reset_writer: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        if not table or "\0" in table or table.lower().startswith(("sqlite_", "kafkalog_")):
            raise InvalidInputError(f"SQLiteUpsert: {table!r} is no name for a table")
        self.database = fspath(database)
        self.table = table
        self.select = select
        self.reset_writer = reset_writer
        self.timeout_s = timeout_s

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Apply one micro-batch; `batch_id` is Spark's."""
        query_id = micro_batch_of_driver(df, "SQLiteUpsert").query_id
        with self._transaction() as connection:
            if self._is_repeated(connection, query_id, batch_id):
                return
        newest = newest_per_key(df)
        shaped = newest.select(*_RAW) if self.select is None else self.select(newest)
        names, types, frame = _rows_for_sqlite(shaped)
        self.apply(query_id, batch_id, names, types, in_portions(frame))

    def apply(
        self,
        query_id: str,
        batch_id: int,
        names: Sequence[str],
        types: Sequence[str],
        portions: Iterable[pa.RecordBatch],
    ) -> bool:
        """Apply portions of rows in one transaction; False when the batch was there already.

        The first column says which rows are deletions, then come the columns `names`, whose SQLite
        types are `types`; `names` has a `key`.
        """
        following = iter(portions)
        # The first rows cost the whole reduction; other writers of the file need not wait for it.
        first = list(islice(following, 1))
        with self._transaction() as connection:
            if self._is_repeated(connection, query_id, batch_id):
                return False
            self._create_table(connection, names, types)
            ends = self._write(connection, names, chain(first, following))
            self._record(connection, query_id, batch_id, ends)
        return True

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection within a transaction that sees no other writer."""
        try:
            with (
                closing(
                    sqlite3.connect(self.database, timeout=self.timeout_s, isolation_level=None)
                ) as connection,
                connection,
            ):
                connection.execute("BEGIN IMMEDIATE")
                yield connection
        except sqlite3.Error as fault:
            raise StorageError(f"{self.database}: table {self.table}: {fault}") from fault

    def _is_repeated(self, connection: sqlite3.Connection, query_id: str, batch_id: int) -> bool:
        connection.execute(_POSITIONS)
        found = connection.execute(
            "SELECT batch_id, time_ms FROM kafkalog_positions "
            "WHERE query_id = ? AND target_table = ?",
            (query_id, self.table),
        ).fetchone()
        if found is None or batch_id > found[0]:
            return False
        if batch_id == found[0]:
            _log.warning(
                "table %s in %s: micro-batch %d of query %s was applied before; "
                "its repetition is skipped",
                self.table,
                self.database,
                batch_id,
                query_id,
            )
            return True
        if self.reset_writer:
            return False
        at = time.strftime("%H:%M", time.localtime(found[1] / 1000))
        raise CommitConflictError(
            f"{self.database}: table {self.table}: this checkpoint is older than the table: "
            f"committed {found[0]} at {at}, got {batch_id}; reset_writer=True accepts it"
        )

    def _create_table(
        self, connection: sqlite3.Connection, names: Sequence[str], types: Sequence[str]
    ) -> None:
        columns = ", ".join(
            f"{_quoted(name)} {kind}{' NOT NULL PRIMARY KEY' if name == 'key' else ''}"
            for name, kind in zip(names, types, strict=True)
        )
        connection.execute(f"CREATE TABLE IF NOT EXISTS {_quoted(self.table)} ({columns})")
        found = [row[1] for row in connection.execute(f"PRAGMA table_info({_quoted(self.table)})")]
        missing = [name for name in names if name.lower() not in {had.lower() for had in found}]
        if missing:
            raise InvalidInputError(
                f"{self.database}: table {self.table} has the columns {', '.join(found)}; "
                f"missing: {', '.join(missing)}"
            )

    def _write(
        self,
        connection: sqlite3.Connection,
        names: Sequence[str],
        portions: Iterable[pa.RecordBatch],
    ) -> dict[str, dict[str, int]]:
        """Upsert and delete; return the end offsets reached, {topic: {partition: offset + 1}}."""
        import pyarrow.compute as pc

        table = _quoted(self.table)
        marks = ", ".join("?" for _ in names)
        updates = ", ".join(
            f"{_quoted(name)} = excluded.{_quoted(name)}" for name in names if name != "key"
        )
        upsert = (
            f"INSERT INTO {table} ({', '.join(map(_quoted, names))}) VALUES ({marks}) "
            f'ON CONFLICT ("key") DO {"UPDATE SET " + updates if updates else "NOTHING"}'
        )
        delete = f'DELETE FROM {table} WHERE "key" = ?'
        key = names.index("key") + 1
        ends: dict[str, dict[str, int]] = {}
        for portion in portions:
            is_deleted = portion.column(0)
            deleted = portion.filter(is_deleted).column(key)
            connection.executemany(delete, zip(deleted.to_pylist(), strict=True))
            kept = portion.filter(pc.invert(is_deleted)).columns[1:]
            connection.executemany(upsert, zip(*(c.to_pylist() for c in kept), strict=True))
            _note_ends(ends, portion)
        return ends

    def _record(
        self,
        connection: sqlite3.Connection,
        query_id: str,
        batch_id: int,
        ends: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Store the batch id, and the end offsets on top of those of the batches before."""
        found = connection.execute(
            "SELECT end_offsets FROM kafkalog_positions WHERE query_id = ? AND target_table = ?",
            (query_id, self.table),
        ).fetchone()
        merged: dict[str, dict[str, int]] = json.loads(found[0]) if found else {}
        for topic, partitions in ends.items():
            merged.setdefault(topic, {}).update(partitions)
        connection.execute(
            "INSERT OR REPLACE INTO kafkalog_positions VALUES (?, ?, ?, ?, ?)",
            (query_id, self.table, batch_id, json.dumps(merged, sort_keys=True), clock.now_ms()),
        )


def _note_ends(ends: dict[str, dict[str, int]], portion: pa.RecordBatch) -> None:
    """Raise the end offsets to those of some rows: a partition's newest record is among all rows.

    Does nothing where `select` has left out, or made something else of, a column that this needs.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = ["topic", "partition", "offset"]
    names = portion.schema.names
    if any(names.count(name) != 1 for name in wanted):
        return
    rows = pa.table([portion.column(name) for name in wanted], names=wanted)
    topic, *numbers = rows.schema.types
    if not pa.types.is_string(topic) or not all(map(pa.types.is_integer, numbers)):
        return
    newest = pc.drop_null(rows).group_by(["topic", "partition"]).aggregate([("offset", "max")])
    for row in newest.to_pylist():
        partitions = ends.setdefault(row["topic"], {})
        number = str(row["partition"])
        partitions[number] = max(partitions.get(number, 0), row["offset_max"] + 1)


def _rows_for_sqlite(shaped: DataFrame) -> tuple[list[str], list[str], DataFrame]:
    """Return the table's columns, their SQLite types, and rows of (is deletion, *values)."""
    from pyspark.sql import functions as F

    fields = {field.name: field.dataType for field in shaped.schema.fields}
    if "key" not in fields:
        raise InvalidInputError(
            f"SQLiteUpsert: select gives no column 'key'; its columns are: {', '.join(fields)}"
        )
    if _DELETED in fields:
        deleted = F.coalesce(F.col(_DELETED), F.lit(False))
    elif "value" in fields:
        deleted = F.col("value").isNull()
    else:
        raise InvalidInputError(
            "SQLiteUpsert: select gives neither 'deleted' nor 'value', so deletions cannot be "
            'told; add "value is null as deleted"'
        )
    names = [name for name in fields if name != _DELETED]
    kinds, columns = [], []
    for name in names:
        kind, column = _for_sqlite(F.col("`" + name.replace("`", "``") + "`"), fields[name])
        kinds.append(kind)
        columns.append(column.alias(name))
    return names, kinds, shaped.select(deleted.alias(_DELETED), *columns)


def _for_sqlite(column: Column, data_type: DataType) -> tuple[str, Column]:
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


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
