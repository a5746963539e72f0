"""Unique values that move between rows of a micro-batch, in SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import SQLiteUpsert
from tests.unit.sink.moves import CASES, REFUSED_BESIDE, Case, end_state
from tests.unit.sink.sqlite_rows import batch, driver_batch, query
from tests.unit.sink.test_sqlite_bad_records import KINDS, NAMES, Skipping, in_order, rows_of

Rows = Sequence[tuple[str, str | None]]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "follow.db"


def apply(database: Path, number: int, rows: Rows) -> None:
    upsert = SQLiteUpsert(database, "stock")
    latest = {record[3]: record for record in in_order(*rows)}  # as Spark reduces them
    assert upsert.apply(batch(number), NAMES, KINDS, [rows_of(*latest.values())])


TABLES = [
    "key TEXT PRIMARY KEY, value TEXT UNIQUE, note TEXT",
    "key TEXT PRIMARY KEY, value TEXT NOT NULL UNIQUE, note TEXT",
    "key TEXT PRIMARY KEY, value TEXT, note TEXT, n DEFAULT 1, UNIQUE (value, n)",
    "key TEXT PRIMARY KEY, value TEXT UNIQUE COLLATE NOCASE, note TEXT",
    "key TEXT, value TEXT CHECK (value LIKE 'v%') NOT NULL UNIQUE, note TEXT, UNIQUE (key)",
    "key TEXT PRIMARY KEY, value TEXT NOT NULL UNIQUE CHECK (value GLOB 'v[1-9xy]'), note TEXT",
    "key TEXT PRIMARY KEY, value TEXT NOT NULL UNIQUE CHECK (json_valid('\"' || value || '\"') AND "
    "value IN ('v1', 'v2', 'v3', 'v4', 'v5', 'v6', 'v9', 'vx', 'vy')), note TEXT",
    "key TEXT, value TEXT, note TEXT, n AS (substr(value, 1, 1)), UNIQUE (key), UNIQUE (value)",
]
INDEXES = [
    "CREATE UNIQUE INDEX one ON stock (lower(value) DESC)",
    "CREATE UNIQUE INDEX one ON stock (value) WHERE value <> 'x' AND note IS NOT ''",
    "CREATE UNIQUE INDEX one ON stock (value) WHERE stock.value <> 'x' AND \"stock\".key > ''",
    """CREATE UNIQUE INDEX one ON stock (json_extract('["' || value || '"]', '$[0]'))""",
    """CREATE UNIQUE INDEX "o(n)e" ON stock ( (value || ')' /* , */ ) COLLATE NOCASE, key > '') """,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("declared", [*TABLES, *INDEXES])
def test_a_valid_end_state_is_written(database: Path, declared: str, case: Case) -> None:
    is_index = declared.startswith("CREATE")
    query(
        database,
        f"CREATE TABLE stock ({TABLES[0].replace(' UNIQUE', '') if is_index else declared})",
    )
    if is_index:
        query(database, declared)
    apply(database, 0, case.before)
    query(database, "UPDATE stock SET note = 'of ' || key")
    apply(database, 1, case.batch)
    found = dict(query(database, "SELECT key, value FROM stock"))
    assert found == end_state(case)
    kept = {key for key, _ in case.before} & found.keys()
    notes = dict(query(database, "SELECT key, note FROM stock WHERE note IS NOT NULL"))
    assert notes == {key: f"of {key}" for key in kept}


def test_several_unique_columns_move_at_once(database: Path) -> None:
    names, kinds = ["key", "a", "b"], ["TEXT", "INTEGER", "INTEGER"]
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, a INTEGER UNIQUE, b INTEGER UNIQUE)")
    upsert = SQLiteUpsert(database, "stock")
    for number, step in enumerate([0, 1, 3, -2]):
        rows = [(f"k{n}", (n + step) % 7, (n - step) % 7) for n in range(7)]
        assert upsert.apply(batch(number), names, kinds, [driver_batch(rows, names)])
        assert query(database, "SELECT * FROM stock ORDER BY key") == rows


def test_a_chain_of_thousands_moves(database: Path) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT UNIQUE)")
    keys = [f"{n * 7919 % 5000:05}" for n in range(5000)]
    apply(database, 0, [(key, str(n)) for n, key in enumerate(keys)])
    apply(database, 1, [(key, str(n + 1)) for n, key in enumerate(keys)])
    found = query(database, "SELECT key, CAST(value AS INTEGER) FROM stock ORDER BY 2")
    assert found == [(key, n + 1) for n, key in enumerate(keys)]


@pytest.mark.parametrize(
    ("before", "rows", "bad"),
    [
        ([("a", "1"), ("b", "2")], [("a", "7"), ("b", "7")], [1]),
        ([("a", "1"), ("b", "2")], [("b", "7"), ("c", "8"), ("a", "7")], [2]),
        ([("a", "1"), ("b", "2"), ("c", "3")], [("a", "2"), ("b", "1"), ("x", "3")], [2]),
        ([("a", "1"), ("b", "2"), ("z", "9")], [("a", "2"), ("b", "9")], [0, 1]),
        ([("z", "9"), ("b", "2")], [("b", "3"), ("a", "2"), ("b", "9")], [2]),
        ([("b", "2")], [("b", "2"), ("a", "2")], [1]),
        ([("b", "2")], [("a", "2"), ("b", "2")], [0]),
    ],
)
def test_the_fewest_records_are_left_out_and_each_is_named(
    database: Path, before: Rows, rows: Rows, bad: list[int]
) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT UNIQUE)")
    apply(database, 0, before)
    with pytest.raises(InvalidInputError, match=rf"t-0 offset ({'|'.join(map(str, bad))}) does"):
        apply(database, 1, rows)
    upsert = Skipping(database)
    assert upsert.take_rows(batch(1), *in_order(*rows))
    assert sorted(each.offset for each in upsert.left_out[-1]) == bad
    kept = [row for n, row in enumerate(rows) if n not in bad]
    expected = end_state(Case("", before, kept))
    assert dict(query(database, "SELECT * FROM stock")) == expected


@pytest.mark.parametrize("rows", REFUSED_BESIDE.values(), ids=REFUSED_BESIDE)
def test_a_record_that_is_refused_keeps_no_good_one_out(database: Path, rows: Rows) -> None:
    """Earlier records of the refused one's key count, so that the end state is valid."""
    query(
        database,
        "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT UNIQUE CHECK (value <> 'x'))",
    )
    before = [("a", "1"), ("b", "2"), ("c", "3")]
    apply(database, 0, before)
    upsert = Skipping(database)
    assert upsert.take_rows(batch(1), *in_order(*rows))
    left_out = {each.offset for each in upsert.left_out[-1]}
    assert left_out == {n for n, (_, value) in enumerate(rows) if value == "x"}
    good = [row for row in rows if row[1] != "x"]
    assert dict(query(database, "SELECT * FROM stock")) == end_state(Case("", before, good))


values = st.sampled_from([None, *"uvwx"])
changes = st.lists(st.tuples(st.sampled_from("abcde"), values), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(st.lists(changes, min_size=1, max_size=4))
def test_a_micro_batch_ends_as_its_records_one_by_one_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[tuple[str, str | None]]]
) -> None:
    database = tmp_path_factory.mktemp("db") / "follow.db"
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT UNIQUE)")
    rows: dict[str, str | None] = {}
    for number, records in enumerate(batches):
        end = end_state(Case("", list(rows.items()), records))
        upsert = Skipping(database)
        assert upsert.take_rows(batch(number), *in_order(*records))
        found = dict(query(database, "SELECT * FROM stock"))
        if len(set(end.values())) == len(end):
            assert found == end
            assert upsert.left_out == []
        else:
            assert upsert.left_out
        rows = found


def test_all_values_that_a_check_allows_may_go_round(database: Path) -> None:
    names, kinds = ["key", "place", "data"], ["TEXT", "INTEGER", "TEXT"]
    query(
        database,
        "CREATE TABLE stock (key TEXT PRIMARY KEY, place INTEGER NOT NULL UNIQUE "
        "CHECK (place BETWEEN 0 AND 2), data TEXT NOT NULL CHECK (json_valid(data)))",
    )
    query(database, "CREATE UNIQUE INDEX one ON stock (json_extract(data, '$.n'))")
    upsert = SQLiteUpsert(database, "stock")
    for number, step in enumerate([0, 1, 2, 4]):
        rows = [(f"k{n}", (n + step) % 3, f'{{"n":{(n - step) % 3}}}') for n in range(3)]
        assert upsert.apply(batch(number), names, kinds, [driver_batch(rows, names)])
        assert query(database, "SELECT * FROM stock ORDER BY key") == rows
    with pytest.raises(InvalidInputError, match="CHECK constraint failed"):
        rows = [("k0", 1, '{"n":9}'), ("k1", 0, '{"n":8}'), ("k2", 3, '{"n":7}')]
        upsert.apply(batch(4), names, kinds, [driver_batch(rows, names)])


def test_a_circle_changes_no_column_that_the_rows_do_not_bring(database: Path) -> None:
    query(
        database,
        "CREATE TABLE stock (key TEXT PRIMARY KEY, n INTEGER DEFAULT 1, value TEXT NOT NULL, "
        "UNIQUE (n, value))",
    )
    query(database, "CREATE UNIQUE INDEX one ON stock (lower(value)) WHERE n > 0")
    apply(database, 0, [("a", "v1"), ("b", "v2")])
    query(database, "UPDATE stock SET n = 7")
    apply(database, 1, [("a", "v2"), ("b", "v1")])
    assert query(database, "SELECT * FROM stock") == [("a", 7, "v2"), ("b", 7, "v1")]
