"""A micro-batch that replaces all rows of an SQLite table, and what others have beside them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import SQLiteUpsert
from tests.unit.sink.sqlite_rows import batch, driver_batch, query


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "follow.db"


OTHERS = "id INTEGER UNIQUE, note TEXT DEFAULT 'new', kl_0 INT, double INT AS (2 * n)"


@pytest.mark.parametrize(
    "made",
    [
        "(key TEXT PRIMARY KEY, n INT UNIQUE, {})",
        "(id INTEGER PRIMARY KEY AUTOINCREMENT, {}, key varchar(9) UNIQUE, n INT UNIQUE)",
        "({}, key TEXT COLLATE NOCASE, n INT UNIQUE, UNIQUE (key COLLATE BINARY))",
        "(key PRIMARY KEY, {}, n INT UNIQUE) WITHOUT ROWID",
        "({}, n INT UNIQUE, key ANY PRIMARY KEY) STRICT",
    ],
)
def test_a_rebuild_leaves_what_others_have_of_the_rows_that_stay(database: Path, made: str) -> None:
    if "STRICT" in made and sqlite3.sqlite_version_info < (3, 37):
        pytest.skip("this SQLite has no STRICT tables")
    names, kinds = ["key", "n"], ["TEXT", "INTEGER"]
    others = OTHERS.partition(", ")[2] if "AUTOINCREMENT" in made else OTHERS
    query(database, f"CREATE TABLE stock {made.format(others)}")
    upsert = SQLiteUpsert(database, "stock")
    first = driver_batch([("a", 1), ("b", 2), ("c", 3), ("A", 4)], names)
    assert upsert.apply(batch(0), names, kinds, [first])
    query(database, "UPDATE stock SET note = key, kl_0 = 7, id = 10 * n")
    for query_id in ("new", "newer"):
        rows = [[("c", 2), ("b", 3)], [("d", 1), ("a", None)], [("A", 5), ("e", None)]]
        assert upsert.apply(
            batch(0, query_id, is_replacing=True),
            names,
            kinds,
            [driver_batch(r, names) for r in rows],
        )
        found = query(database, "SELECT key, n, note, kl_0, double FROM stock ORDER BY n, key")
        assert found == [
            ("d", 1, "new", None, 2),
            ("c", 2, "c", 7, 4),
            ("b", 3, "b", 7, 6),
            ("A", 5, "A", 7, 10),
        ]
        ids = query(database, "SELECT id FROM stock WHERE note <> 'new' ORDER BY n")
        assert ids == [(30,), (20,), (40,)]


def test_a_rebuild_of_a_table_of_keys_leaves_what_others_have(database: Path) -> None:
    query(database, "CREATE TABLE keys (key INTEGER PRIMARY KEY, note)")
    query(database, "INSERT INTO keys VALUES (1, 'one'), (2, 'two')")
    rows = driver_batch([(2,), (3,)], ["key"], [False, False])
    SQLiteUpsert(database, "keys").apply(batch(0, is_replacing=True), ["key"], ["INTEGER"], [rows])
    assert query(database, "SELECT * FROM keys") == [(2, "two"), (3, None)]


@pytest.mark.parametrize("note", ["", ", note"])
def test_a_rebuild_may_exchange_what_is_unique(database: Path, note: str) -> None:
    query(database, f"CREATE TABLE stock (key TEXT PRIMARY KEY, n INT UNIQUE{note})")
    upsert, names, kinds = SQLiteUpsert(database, "stock"), ["key", "n"], ["TEXT", "INTEGER"]
    upsert.apply(batch(0), names, kinds, [driver_batch([("a", 1), ("b", 2)], names)])
    rows = driver_batch([("a", 2), ("b", 1)], names)
    assert upsert.apply(batch(0, "new", is_replacing=True), names, kinds, [rows])
    assert query(database, "SELECT key, n FROM stock ORDER BY key") == [("a", 2), ("b", 1)]


@pytest.mark.parametrize("bad", ["b", "new"])
@pytest.mark.parametrize("note", ["", ", note"])
def test_a_rebuild_names_the_record_that_does_not_fit_and_leaves_the_old_rows(
    database: Path, note: str, bad: str
) -> None:
    query(database, f"CREATE TABLE stock (key TEXT PRIMARY KEY, n INT CHECK (n < 9){note})")
    upsert, names, kinds = SQLiteUpsert(database, "stock"), ["key", "n"], ["TEXT", "INTEGER"]
    upsert.apply(batch(0), names, kinds, [driver_batch([("a", 1), ("b", 2)], names)])
    rows = driver_batch([("a", 5), ("gone", None), ("c", 3), (bad, 9), ("d", 3)], names)
    with pytest.raises(InvalidInputError, match=r"the record at t-0 offset 3 does not fit: CHECK"):
        upsert.apply(batch(0, "new", is_replacing=True), names, kinds, [rows])
    assert query(database, "SELECT key, n FROM stock") == [("a", 1), ("b", 2)]
    assert list(upsert.positions()) == ["q"]
