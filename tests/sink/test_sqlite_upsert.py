"""SQLiteUpsert's transaction: rows, batch id and end offsets together, or nothing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import CommitConflictError, InvalidInputError, StorageError
from kafkalog.sink.upsert import SQLiteUpsert

NAMES = ["key", "value", "topic", "partition", "offset"]
TYPES = ["BLOB", "BLOB", "TEXT", "INTEGER", "INTEGER"]
Row = tuple[Any, ...]


def row(key: bytes, value: bytes | None, offset: int, partition: int = 0) -> Row:
    return (value is None, key, value, "t", partition, offset)


def portion(rows: Sequence[Row], names: Sequence[str] = NAMES) -> pa.RecordBatch:
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=["deleted", *names])


def query(database: Path, sql: str) -> list[Row]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(sql).fetchall()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "follow.db"


@pytest.fixture
def upsert(database: Path) -> SQLiteUpsert:
    return SQLiteUpsert(database, "stock", timeout_s=0.2)


def apply(upsert: SQLiteUpsert, batch_id: int, *rows: Row, query_id: str = "q") -> bool:
    return upsert.apply(query_id, batch_id, NAMES, TYPES, [portion(rows)])


def test_the_table_is_created_and_follows(upsert: SQLiteUpsert, database: Path) -> None:
    assert apply(upsert, 0, row(b"a", b"1", 0), row(b"b", b"2", 1))
    assert apply(upsert, 1, row(b"a", b"3", 2), row(b"b", None, 3), row(b"c", None, 4))
    assert query(database, "SELECT * FROM stock") == [(b"a", b"3", "t", 0, 2)]


def test_a_repeated_batch_changes_nothing(
    upsert: SQLiteUpsert, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    apply(upsert, 3, row(b"a", b"1", 0))
    assert not apply(upsert, 3, row(b"a", b"other", 0), row(b"b", b"2", 1))
    assert query(database, "SELECT key, value FROM stock") == [(b"a", b"1")]
    assert "micro-batch 3 of query q was applied before" in caplog.text


def test_an_older_checkpoint_is_refused_unless_reset(upsert: SQLiteUpsert, database: Path) -> None:
    apply(upsert, 57, row(b"a", b"1", 0))
    with pytest.raises(
        CommitConflictError,
        match=r"this checkpoint is older than the table: committed 57 at \d\d:\d\d, got 3",
    ):
        apply(upsert, 3, row(b"a", b"2", 1))
    upsert.reset_writer = True
    assert apply(upsert, 3, row(b"a", b"2", 1))
    assert query(database, "SELECT batch_id FROM kafkalog_positions") == [(3,)]


def test_queries_and_tables_have_positions_of_their_own(
    upsert: SQLiteUpsert, database: Path
) -> None:
    assert apply(upsert, 5, row(b"a", b"1", 0))
    assert apply(upsert, 0, row(b"b", b"1", 0), query_id="other")
    assert apply(SQLiteUpsert(database, "second"), 0, row(b"a", b"1", 0))
    assert len(query(database, "SELECT * FROM kafkalog_positions")) == 3


def test_end_offsets_grow_over_batches(upsert: SQLiteUpsert, database: Path) -> None:
    apply(upsert, 0, row(b"a", b"1", 7, partition=0), row(b"b", b"1", 3, partition=1))
    apply(upsert, 1, row(b"a", None, 9, partition=0))
    ((stored,),) = query(database, "SELECT end_offsets FROM kafkalog_positions")
    assert json.loads(stored) == {"t": {"0": 10, "1": 4}}


def test_end_offsets_are_the_largest_of_all_portions(upsert: SQLiteUpsert, database: Path) -> None:
    portions = [
        portion([row(b"a", b"1", 9), row(b"b", None, 5), row(b"c", b"1", 2, partition=1)]),
        portion([row(b"d", b"1", 7), row(b"e", b"1", 4, partition=1)]),
    ]
    assert upsert.apply("q", 0, NAMES, TYPES, portions)
    ((stored,),) = query(database, "SELECT end_offsets FROM kafkalog_positions")
    assert json.loads(stored) == {"t": {"0": 10, "1": 5}}


@pytest.mark.parametrize("offset", ["text", None])
def test_columns_that_are_no_positions_are_not_taken_for_them(
    upsert: SQLiteUpsert, database: Path, offset: Any
) -> None:
    rows = portion([(False, b"a", b"1", "t", 0, offset)])
    assert upsert.apply("q", 0, NAMES, ["BLOB", "BLOB", "TEXT", "INTEGER", "TEXT"], [rows])
    assert query(database, "SELECT end_offsets FROM kafkalog_positions") == [("{}",)]


def test_nan_becomes_null(database: Path) -> None:
    rows = portion([(False, "k", float("nan"))], ["key", "n"])
    SQLiteUpsert(database, "t").apply("q", 0, ["key", "n"], ["TEXT", "REAL"], [rows])
    assert query(database, "SELECT n FROM t") == [(None,)]


def test_a_batch_without_rows_is_remembered(upsert: SQLiteUpsert) -> None:
    assert upsert.apply("q", 0, NAMES, TYPES, [])
    assert not upsert.apply("q", 0, NAMES, TYPES, [])


def test_a_failure_midway_leaves_the_table_and_the_position_as_they_were(
    upsert: SQLiteUpsert, database: Path
) -> None:
    apply(upsert, 0, row(b"a", b"1", 0))

    def failing() -> Iterator[pa.RecordBatch]:
        for offset in range(3):
            yield portion([row(b"a", b"2", offset), row(b"b%d" % offset, b"2", offset)])
        raise RuntimeError("a task failed")

    with pytest.raises(RuntimeError, match="a task failed"):
        upsert.apply("q", 1, NAMES, TYPES, failing())
    assert query(database, "SELECT key, value FROM stock") == [(b"a", b"1")]
    assert query(database, "SELECT batch_id FROM kafkalog_positions") == [(0,)]


def test_names_that_need_quoting_work(database: Path) -> None:
    upsert = SQLiteUpsert(database, 'odd "name"; select')
    names = ["key", 'a "b"', "order"]
    rows = portion([(False, "k", "v", 1.0)], names)
    upsert.apply("q", 0, names, ["TEXT", "TEXT", "REAL"], [rows])
    assert query(database, 'SELECT "order" FROM "odd ""name""; select"') == [(1.0,)]


def test_a_table_of_keys_alone_works(database: Path) -> None:
    upsert = SQLiteUpsert(database, "keys")
    for batch_id in range(2):
        rows = portion([(False, b"a"), (batch_id == 1, b"b")], ["key"])
        upsert.apply("q", batch_id, ["key"], ["BLOB"], [rows])
    assert query(database, "SELECT * FROM keys") == [(b"a",)]


def test_a_table_with_other_columns_is_refused(upsert: SQLiteUpsert, database: Path) -> None:
    query(database, "CREATE TABLE stock (key BLOB PRIMARY KEY, amount INTEGER)")
    with pytest.raises(InvalidInputError, match="has the columns key, amount; missing: value"):
        apply(upsert, 0, row(b"a", b"1", 0))


def test_a_table_whose_key_is_not_unique_is_refused(upsert: SQLiteUpsert, database: Path) -> None:
    query(database, "CREATE TABLE stock (key, value, topic, partition, offset)")
    with pytest.raises(StorageError, match="ON CONFLICT"):
        apply(upsert, 0, row(b"a", b"1", 0))


def test_a_locked_database_is_one_clear_error(upsert: SQLiteUpsert, database: Path) -> None:
    with closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match=r"follow\.db: table stock: database is locked"):
            apply(upsert, 0, row(b"a", b"1", 0))


@pytest.mark.parametrize("name", ["", "sqlite_x", "kafkalog_positions"])
def test_names_that_are_not_the_users_are_refused(database: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match="no name for a table"):
        SQLiteUpsert(database, name)
