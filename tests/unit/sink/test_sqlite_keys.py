"""SQLiteUpsert with a key of several columns, and with columns that the table lacks."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql.types import LongType, StringType

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import SQLiteUpsert
from kafkalog.sink.upsert.rows import UpsertRows
from tests.unit.sink.sqlite_rows import batch, driver_batch, query

NAMES, KINDS = ["n", "id", "region"], ["INTEGER", "INTEGER", "TEXT"]
Order = tuple[int | None, int, str]
"""(n, id, region); a deletion has no n."""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "follow.db"


def apply(database: Path, batch_id: int, *rows: Order, query_id: str = "q", **more: Any) -> bool:
    """Apply rows by a new upsert, as after a restart."""
    schema = "n int, id int, region string"
    upsert = SQLiteUpsert(database, "orders", schema=schema, key=["region", "id"])
    part = driver_batch(rows, NAMES, [n is None for n, _, _ in rows])
    return upsert.apply(batch(batch_id, query_id, **more), NAMES, KINDS, [part])


def stored(database: Path) -> list[Any]:
    return query(database, "SELECT region, id, n FROM orders ORDER BY region, id")


def test_rows_are_found_by_all_columns_of_their_key(database: Path) -> None:
    apply(database, 0, (1, 1, "eu"), (2, 2, "eu"), (3, 1, "us"))
    apply(database, 1, (4, 1, "eu"), (None, 1, "us"), (6, 2, "us"))
    apply(database, 2, (7, 2, "eu"), (None, 9, "us"))
    assert stored(database) == [("eu", 1, 4), ("eu", 2, 7), ("us", 2, 6)]
    assert not apply(database, 2, (9, 1, "eu"))
    key = query(database, "SELECT name, pk FROM pragma_table_info('orders') WHERE pk ORDER BY pk")
    assert key == [("region", 1), ("id", 2)]


def test_replacing_keeps_what_others_have_of_rows_with_all_columns_of_the_key(
    database: Path,
) -> None:
    apply(database, 0, (1, 1, "eu"), (2, 2, "eu"), (3, 1, "us"))
    query(database, "ALTER TABLE orders ADD COLUMN note")
    query(database, "UPDATE orders SET note = region || id")
    again: list[Order] = [(4, 2, "us"), (5, 1, "us"), (None, 2, "eu"), (6, 1, "EU")]
    assert apply(database, 0, *again, query_id="new", is_replacing=True)
    found = query(database, "SELECT region, id, n, note FROM orders ORDER BY region, id")
    assert found == [("EU", 1, 6, None), ("us", 1, 5, "us1"), ("us", 2, 4, None)]


@pytest.mark.parametrize(
    ("unique", "words"),
    [
        ("UNIQUE (id, region))", ""),
        ("PRIMARY KEY (id, region)) WITHOUT ROWID", ""),
        ("UNIQUE (region COLLATE BINARY, id))", ""),
        ("UNIQUE (id))", "neither the primary key nor unique"),
        ("UNIQUE (id, n))", "neither the primary key nor unique"),
        ("UNIQUE (id, region, n))", "columns region, id are neither the primary key nor unique"),
        ("PRIMARY KEY (id))", "neither the primary key nor unique"),
        ("UNIQUE (region COLLATE NOCASE, id))", "unique by the collation NOCASE"),
        ("UNIQUE (id, region), UNIQUE (id, region COLLATE RTRIM))", "by the collation RTRIM"),
    ],
)
def test_an_existing_table_needs_exactly_the_columns_of_the_key_to_be_unique_by_each_byte(
    database: Path, unique: str, words: str
) -> None:
    query(database, f"CREATE TABLE orders (region TEXT, id INTEGER, n INTEGER, {unique}")
    if words:
        with pytest.raises(InvalidInputError, match=words):
            apply(database, 0, (1, 1, "eu"))
        return
    apply(database, 0, (1, 1, "eu"), (2, 2, "eu"), (3, 1, "us"))
    apply(database, 1, (None, 1, "us"), (4, 2, "eu"))
    assert stored(database) == [("eu", 1, 1), ("eu", 2, 4)]


def test_a_table_of_another_key_is_to_be_dropped(database: Path) -> None:
    query(database, "CREATE TABLE orders (region TEXT, id INTEGER PRIMARY KEY, n INTEGER)")
    with pytest.raises(InvalidInputError, match="another key, drop the table and start the view"):
        apply(database, 0, (1, 1, "eu"), is_replacing=True)
    query(database, "DROP TABLE orders")
    apply(database, 0, (1, 1, "eu"), is_replacing=True)


def test_a_deletion_is_of_that_very_key_of_several_columns(database: Path) -> None:
    query(database, "CREATE TABLE orders (region TEXT COLLATE NOCASE, id INTEGER, n)")
    query(database, "CREATE UNIQUE INDEX one ON orders (region COLLATE BINARY, id)")
    apply(database, 0, (1, 1, "eu"), (2, 1, "EU"))
    apply(database, 1, (None, 1, "eu"))
    assert stored(database) == [("EU", 1, 2)]


def test_deletions_by_several_columns_search_the_index(database: Path) -> None:
    apply(database, 0, (1, 1, "eu"))
    plans = []
    connect = sqlite3.connect

    with pytest.MonkeyPatch.context() as patch:

        def explained(*given: Any, **more: Any) -> sqlite3.Connection:
            connection = connect(*given, **more)
            connection.set_trace_callback(plans.append)
            return connection

        patch.setattr(sqlite3, "connect", explained)
        apply(database, 1, (None, 1, "eu"))
    (statement,) = [each for each in plans if each.startswith('DELETE FROM "orders"')]
    with closing(connect(database)) as connection:
        connection.execute("ATTACH ':memory:' AS kafkalog_staged")
        connection.execute(
            "CREATE TABLE kafkalog_staged.kafkalog_rows "
            "(kl_number INTEGER PRIMARY KEY, kl_deleted, region, id)"
        )
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
    assert any("SEARCH orders USING" in row[3] for row in plan)


WIDE = ["key", "value", "100 %"]
WIDE_KINDS = ["TEXT", "TEXT", "INTEGER"]


def narrow(database: Path) -> SQLiteUpsert:
    """Return an upsert into a table without the third column, with one row."""
    upsert = SQLiteUpsert(database, "stock")
    upsert.apply(batch(0), WIDE[:2], WIDE_KINDS[:2], [driver_batch([("a", "1")], WIDE[:2])])
    return upsert


def additions(upsert: SQLiteUpsert, names: list[str]) -> list[str]:
    types = [LongType() if name == "100 %" else StringType() for name in names]
    nothing = cast("Any", None)
    return upsert.additions(nothing, UpsertRows(nothing, names, types, ["key"]))


def test_a_missing_column_is_refused_with_the_statement_that_adds_it(database: Path) -> None:
    upsert, rows = narrow(database), driver_batch([("b", "2", 7)], WIDE)
    with pytest.raises(InvalidInputError) as refused:
        upsert.apply(batch(1), WIDE, WIDE_KINDS, [rows])
    statement = 'ALTER TABLE "stock" ADD COLUMN "100 %" INTEGER'
    assert f"Run {statement}." in str(refused.value)
    assert query(database, "SELECT * FROM stock") == [("a", "1")]
    assert upsert.positions() == {"q": batch(0).position()}
    query(database, statement)
    assert SQLiteUpsert(database, "stock").apply(batch(1), WIDE, WIDE_KINDS, [rows])
    assert query(database, "SELECT * FROM stock") == [("a", "1", None), ("b", "2", 7)]


def test_a_missing_column_is_added_on_demand_in_the_transaction_of_the_rows(
    database: Path,
) -> None:
    narrow(database)
    query(
        database,
        "CREATE TRIGGER no BEFORE INSERT ON stock WHEN new.key = 'x' "
        "BEGIN SELECT RAISE(ABORT, 'no x'); END",
    )

    def upsert() -> SQLiteUpsert:
        return SQLiteUpsert(database, "stock", on_new_column="add")

    with pytest.raises(InvalidInputError, match="no x"):
        upsert().apply(batch(1), WIDE, WIDE_KINDS, [driver_batch([("x", "2", 7)], WIDE)])
    assert query(database, "SELECT * FROM stock") == [("a", "1")]
    for number in range(1, 3):
        rows = driver_batch([("b", "2", number)], WIDE)
        assert upsert().apply(batch(number), WIDE, WIDE_KINDS, [rows])
    less = driver_batch([("c", "3")], WIDE[:2])
    assert upsert().apply(batch(3), WIDE[:2], WIDE_KINDS[:2], [less])
    found = query(database, "SELECT * FROM stock")
    assert found == [("a", "1", None), ("b", "2", 2), ("c", "3", None)]


def test_the_statements_for_missing_columns_are_known_before_a_query_starts(
    database: Path,
) -> None:
    upsert = SQLiteUpsert(database, "stock")
    assert additions(upsert, WIDE) == []
    assert not database.exists()
    narrow(database)
    assert additions(upsert, WIDE) == ['ALTER TABLE "stock" ADD COLUMN "100 %" INTEGER']
    assert additions(upsert, ["KEY", "Value"]) == []


def test_a_missing_column_of_the_key_is_never_added(database: Path) -> None:
    query(database, "CREATE TABLE stock (id TEXT PRIMARY KEY, value TEXT)")
    upsert = SQLiteUpsert(database, "stock", on_new_column="add")
    words = "has the columns id, value; of its key are missing: key"
    with pytest.raises(InvalidInputError, match=words):
        upsert.apply(batch(0), WIDE[:2], WIDE_KINDS[:2], [driver_batch([("a", "1")], WIDE[:2])])
    with pytest.raises(InvalidInputError, match=words):
        additions(upsert, WIDE)
