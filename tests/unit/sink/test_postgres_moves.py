"""Unique values that move between rows of a micro-batch, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, StringType

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import PostgresUpsert
from tests.postgres_server import query
from tests.unit.sink.moves import CASES, REFUSED_BESIDE, Case, end_state
from tests.unit.sink.postgres_rows import Apply, apply_small, batch, driver_batch, table
from tests.unit.sink.test_postgres_bad_records import Skipping, offsets

Rows = Sequence[tuple[str, str | None]]
PLAIN = "key text PRIMARY KEY, value text, note text"
TABLES = [
    "key text PRIMARY KEY, value text UNIQUE, note text",
    "key text PRIMARY KEY, value text NOT NULL UNIQUE, note text",
    "key text PRIMARY KEY, value varchar(2) NOT NULL UNIQUE CHECK (value LIKE 'v%%'), note text",
    "key text PRIMARY KEY, value text UNIQUE DEFERRABLE INITIALLY DEFERRED, note text",
    "key text PRIMARY KEY, value text UNIQUE DEFERRABLE INITIALLY IMMEDIATE, note text",
    "key text PRIMARY KEY, value text, note text, n int DEFAULT 1, UNIQUE (value, n)",
    "key text PRIMARY KEY, value text, note text, n text GENERATED ALWAYS AS (upper(value)) STORED "
    "UNIQUE",
    "key text PRIMARY KEY, value mood NOT NULL UNIQUE, note text",
]
INDEXES = [
    "CREATE UNIQUE INDEX one ON stock (lower(value) DESC)",
    "CREATE UNIQUE INDEX one ON stock (value) WHERE value <> 'x' AND note IS DISTINCT FROM ''",
    """CREATE UNIQUE INDEX "o%ne" ON stock ((value || '%') COLLATE "C", (key > ''))""",
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "declared",
    [TABLES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in (*TABLES[1:], *INDEXES))],
)
def test_a_valid_end_state_is_written(postgres: str, declared: str, case: Case) -> None:
    query(postgres, "CREATE TYPE mood AS ENUM ('v1','v2','v3','v4','v5','v6','v9','vx','vy')")
    is_index = declared.startswith("CREATE")
    columns = PLAIN if is_index else declared.replace("%%", "%")
    query(postgres, f"CREATE TABLE stock ({columns})")
    if is_index:
        query(postgres, declared)
    upsert = PostgresUpsert(postgres, "stock")
    assert apply_small(upsert, batch(0), driver_batch(case.before))
    query(postgres, "UPDATE stock SET note = 'of ' || key")
    assert apply_small(upsert, batch(1), driver_batch(case.batch, offset=10))
    assert dict(table(postgres, "key, value::text")) == end_state(case)
    kept = {key for key, _ in case.before} & end_state(case).keys()
    notes = query(postgres, "SELECT key, note FROM stock WHERE note IS NOT NULL")
    assert dict(notes) == {key: f"of {key}" for key in kept}


def test_several_unique_columns_move_at_once(postgres: str, apply: Apply) -> None:
    shape = {"key": StringType(), "a": IntegerType(), "b": IntegerType()}
    query(
        postgres, "CREATE TABLE stock (key text PRIMARY KEY, a int UNIQUE, b int NOT NULL UNIQUE)"
    )
    upsert = PostgresUpsert(postgres, "stock")
    for number, step in enumerate([0, 1, 3, -2]):
        rows = [(f"k{n}", (n + step) % 7, (n - step) % 7) for n in range(7)]
        assert apply(upsert, batch(number), driver_batch(rows, shape), shape=shape)
        assert table(postgres, "*") == rows


def test_a_chain_of_thousands_moves(postgres: str) -> None:
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value text NOT NULL UNIQUE)")
    upsert = PostgresUpsert(postgres, "stock")
    keys = [f"{n * 7919 % 5000:05}" for n in range(5000)]
    for step in range(2):
        rows = [(key, str(n + step)) for n, key in enumerate(keys)]
        assert apply_small(upsert, batch(step), driver_batch(rows, offset=step * 5000))
    assert table(postgres) == sorted(rows)


def test_a_value_moves_when_all_rows_are_replaced(postgres: str) -> None:
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value text UNIQUE)")
    upsert = PostgresUpsert(postgres, "stock")
    assert apply_small(upsert, batch(0), driver_batch([("a", "1"), ("b", "2"), ("c", "3")]))
    new = batch(0, "new", is_replacing=True)
    assert apply_small(upsert, new, driver_batch([("a", "2"), ("b", "1"), ("d", "3")]))
    assert table(postgres) == [("a", "2"), ("b", "1"), ("d", "3")]


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
@pytest.mark.parametrize("how", ["", "DEFERRABLE INITIALLY DEFERRED"])
def test_the_fewest_records_are_left_out_and_each_is_named(
    postgres: str, how: str, before: Rows, rows: Rows, bad: list[int]
) -> None:
    query(postgres, f"CREATE TABLE stock (key text PRIMARY KEY, value text UNIQUE {how})")
    upsert = Skipping(postgres)
    assert apply_small(upsert, batch(0), driver_batch(before))
    strict = PostgresUpsert(postgres, "stock")
    with pytest.raises(InvalidInputError, match=rf"t-0 offset ({'|'.join(map(str, bad))}) does"):
        apply_small(strict, batch(1), driver_batch(rows))
    assert apply_small(upsert, batch(1), driver_batch(rows))
    assert offsets(upsert) == bad
    kept = [row for n, row in enumerate(rows) if n not in bad]
    assert dict(table(postgres)) == end_state(Case("", before, kept))


def test_a_row_may_move_to_another_row_that_it_refers_to(postgres: str) -> None:
    query(
        postgres,
        "CREATE TABLE stock (key text PRIMARY KEY, value text REFERENCES stock ON DELETE CASCADE, "
        "note text DEFAULT 'new', name text GENERATED ALWAYS AS (key) STORED UNIQUE)",
    )
    upsert = Skipping(postgres)
    assert apply_small(upsert, batch(0), driver_batch([("c", "p"), ("p", "p"), ("q", "q")]))
    query(postgres, "UPDATE stock SET note = 'old'")
    rows = [("p", None), ("c", "n"), ("d", "n"), ("n", "q"), ("e", "gone")]
    assert apply_small(upsert, batch(1), driver_batch(rows, offset=10))
    assert offsets(upsert) == [14]
    found = table(postgres, "key, value, note")
    assert found == [("c", "n", "old"), ("d", "n", "new"), ("n", "q", "new"), ("q", "q", "old")]


def test_a_circle_changes_no_column_that_the_rows_do_not_bring(postgres: str) -> None:
    query(
        postgres,
        "CREATE TABLE stock (key text PRIMARY KEY, n int DEFAULT 1, value text NOT NULL, "
        "UNIQUE (n, value))",
    )
    query(postgres, "CREATE UNIQUE INDEX one ON stock (lower(value)) WHERE n > 0")
    upsert = PostgresUpsert(postgres, "stock")
    assert apply_small(upsert, batch(0), driver_batch([("a", "v1"), ("b", "v2")]))
    query(postgres, "UPDATE stock SET n = 7")
    assert apply_small(upsert, batch(1), driver_batch([("a", "v2"), ("b", "v1")]))
    assert table(postgres, "*") == [("a", 7, "v2"), ("b", 7, "v1")]


def test_nulls_that_an_index_compares_move_too(postgres: str) -> None:
    shape = {"key": StringType(), "value": StringType(), "place": StringType()}
    unique = "UNIQUE NULLS NOT DISTINCT (place)"
    query(postgres, f"CREATE TABLE stock (key text PRIMARY KEY, value text, place text, {unique})")
    upsert = PostgresUpsert(postgres, "stock")
    for number, places in enumerate([(None, "x", "y"), ("x", None, "y"), ("y", "x", None)]):
        rows = [(f"k{n}", "1", place) for n, place in enumerate(places)]
        assert apply_small(upsert, batch(number), driver_batch(rows, shape), shape=shape)
        assert table(postgres, "*") == rows


@pytest.mark.parametrize("rows", REFUSED_BESIDE.values(), ids=REFUSED_BESIDE)
def test_a_record_that_is_refused_keeps_no_good_one_out(postgres: str, rows: Rows) -> None:
    query(
        postgres,
        "CREATE TABLE stock (key text PRIMARY KEY, value text UNIQUE CHECK (value <> 'x'))",
    )
    before = [("a", "1"), ("b", "2"), ("c", "3")]
    upsert = Skipping(postgres)
    assert apply_small(upsert, batch(0), driver_batch(before))
    assert apply_small(upsert, batch(1), driver_batch(rows))
    assert set(offsets(upsert)) == {n for n, (_, value) in enumerate(rows) if value == "x"}
    good = [row for row in rows if row[1] != "x"]
    assert dict(table(postgres)) == end_state(Case("", before, good))


values = st.sampled_from([None, *"uvwx"])
changes = st.lists(st.tuples(st.sampled_from("abcde"), values), min_size=1, max_size=8)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(changes, min_size=1, max_size=4))
def test_a_micro_batch_ends_as_its_records_one_by_one_or_is_refused(
    postgres_server, batches: list[list[tuple[str, str | None]]]
) -> None:
    postgres = postgres_server.conninfo
    query(postgres, "DROP TABLE IF EXISTS stock, kafkalog_positions")
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value text NOT NULL UNIQUE)")
    rows: dict[str, str | None] = {}
    for number, records in enumerate(batches):
        end = end_state(Case("", list(rows.items()), records))
        upsert = Skipping(postgres)
        assert apply_small(upsert, batch(number), driver_batch(records, offset=10 * number))
        found = dict(table(postgres))
        if len(set(end.values())) == len(end):
            assert found == end
            assert upsert.left_out == []
        else:
            assert upsert.left_out
        rows = found
    query(postgres, "DROP TABLE stock, kafkalog_positions")
