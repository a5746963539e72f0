"""PostgresUpsert with a key of several columns, and with columns that the table lacks."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.types import DataType, IntegerType, StringType

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import PostgresUpsert
from kafkalog.sink.upsert.rows import UpsertRows
from tests.postgres_server import query
from tests.unit.sink.postgres_rows import TEXT, Apply, Shape, batch, driver_batch, table

ORDERS: Shape = {"n": IntegerType(), "id": IntegerType(), "region": StringType()}
WIDE: Shape = {**TEXT, "100 %": IntegerType()}


def orders(conninfo: str, table: str = "orders") -> PostgresUpsert:
    return PostgresUpsert(
        conninfo, table, schema="n int, id int, region string", key=["region", "id"]
    )


def orders_batch(*rows: tuple[int | None, int, str], offset: int = 0) -> pa.RecordBatch:
    """Return rows (n, id, region); those without n are deletions."""
    found = driver_batch(rows, ORDERS, offset=offset)
    deleted = pa.array([n is None for n, _, _ in rows])
    return found.set_column(0, "kl_deleted", deleted)


def stored(conninfo: str) -> list[Any]:
    return query(conninfo, "SELECT region, id, n FROM orders ORDER BY region, id")


def test_rows_are_found_by_all_columns_of_their_key(postgres: str, apply: Apply) -> None:
    rows = [
        orders_batch((1, 1, "eu"), (2, 2, "eu"), (3, 1, "us")),
        orders_batch((4, 1, "eu"), (None, 1, "us"), (5, 2, "us"), (6, 2, "us"), offset=3),
        orders_batch((None, 2, "eu"), (7, 2, "eu"), (8, 9, "us"), (None, 9, "us"), offset=7),
    ]
    for number, each in enumerate(rows):
        assert apply(orders(postgres), batch(number), each, shape=ORDERS)
    assert stored(postgres) == [("eu", 1, 4), ("eu", 2, 7), ("us", 2, 6)]
    assert not apply(orders(postgres), batch(2), orders_batch((9, 1, "eu")), shape=ORDERS)
    assert query(
        postgres,
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = 'orders'::regclass AND contype = 'p'",
    ) == [("PRIMARY KEY (region, id)",)]


def test_replacing_compares_all_columns_of_the_key(postgres: str, apply: Apply) -> None:
    first = orders_batch((1, 1, "eu"), (2, 2, "eu"), (3, 1, "us"))
    apply(orders(postgres), batch(0), first, shape=ORDERS)
    again = orders_batch((4, 2, "us"), (5, 1, "us"), (None, 2, "eu"))
    assert apply(orders(postgres), batch(0, "new", is_replacing=True), again, shape=ORDERS)
    assert stored(postgres) == [("us", 1, 5), ("us", 2, 4)]


@pytest.mark.parametrize(
    ("constraint", "is_taken"),
    [
        ("UNIQUE (id, region)", True),
        ("UNIQUE (region, id) INCLUDE (n)", True),
        ("UNIQUE (id)", False),
        ("UNIQUE (id, n)", False),
        ("UNIQUE (id, region, n)", False),
        ("UNIQUE (region, id) DEFERRABLE", False),
        ("EXCLUDE USING btree (region WITH =, id WITH =)", False),
    ],
)
def test_an_existing_table_needs_exactly_the_columns_of_the_key_to_be_unique(
    postgres: str, apply: Apply, constraint: str, is_taken: bool
) -> None:
    query(postgres, f"CREATE TABLE orders (region text, id int, n int, {constraint})")
    rows = orders_batch((1, 1, "eu"), (2, 1, "eu"), (3, 1, "us"))
    if not is_taken:
        with pytest.raises(InvalidInputError, match="unique constraint of exactly the columns reg"):
            apply(orders(postgres), batch(0), rows, shape=ORDERS)
        return
    apply(orders(postgres), batch(0), rows, shape=ORDERS)
    apply(orders(postgres), batch(1), orders_batch((None, 1, "us"), offset=3), shape=ORDERS)
    assert stored(postgres) == [("eu", 1, 2)]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("region varchar(2)", r"row of key '\(eu!,1\)' does not fit: column \"region\""),
        ("region text CHECK (region <> 'eu!')", r"row of key '\(eu!,1\)' does not fit: .*check"),
    ],
)
def test_a_row_of_no_record_is_named_by_all_columns_of_its_key(
    postgres: str, apply: Apply, declared: str, words: str
) -> None:
    query(postgres, f"CREATE TABLE orders ({declared}, id int, n int, PRIMARY KEY (region, id))")
    rows = orders_batch((1, 1, "eu"), (2, 1, "eu!"))
    rows = rows.set_column(3, "kl_offset", pa.nulls(2, pa.int64()))
    with pytest.raises(InvalidInputError, match=words):
        apply(orders(postgres), batch(0), rows, shape=ORDERS)


def additions(upsert: PostgresUpsert, shape: Shape) -> list[str]:
    nothing = cast("Any", None)
    rows = UpsertRows(nothing, list(shape), cast("list[DataType]", list(shape.values())), ["key"])
    return upsert.additions(nothing, rows)


def test_a_missing_column_is_refused_with_the_statement_that_adds_it(
    postgres: str, apply: Apply
) -> None:
    apply(PostgresUpsert(postgres, "stock"), batch(0), driver_batch([("a", "1")]))
    upsert, rows = PostgresUpsert(postgres, "stock"), driver_batch([("b", "2", 7)], WIDE)
    (statement,) = additions(upsert, WIDE)
    with pytest.raises(InvalidInputError) as refused:
        apply(upsert, batch(1), rows, shape=WIDE)
    assert f"Run {statement}." in str(refused.value)
    assert table(postgres) == [("a", "1")]
    query(postgres, statement)
    assert additions(upsert, WIDE) == []
    assert apply(PostgresUpsert(postgres, "stock"), batch(1), rows, shape=WIDE)
    assert table(postgres, 'key, value, "100 %"') == [("a", "1", None), ("b", "2", 7)]


def test_a_missing_column_is_added_on_demand(postgres: str, apply: Apply) -> None:
    def upsert() -> PostgresUpsert:
        return PostgresUpsert(postgres, "stock", on_new_column="add")

    assert additions(upsert(), WIDE) == []
    apply(upsert(), batch(0), driver_batch([("a", "1")]))
    assert len(additions(upsert(), WIDE)) == 1
    for number in range(1, 3):
        row = driver_batch([("b", "2", number)], WIDE, offset=number)
        assert apply(upsert(), batch(number), row, shape=WIDE)
    apply(upsert(), batch(3), driver_batch([("c", "3")], offset=4))  # without it again
    found = table(postgres, 'key, value, "100 %"')
    assert found == [("a", "1", None), ("b", "2", 2), ("c", "3", None)]


def test_a_missing_column_of_the_key_is_never_added(postgres: str, apply: Apply) -> None:
    query(postgres, "CREATE TABLE stock (id text PRIMARY KEY, value text)")
    upsert = PostgresUpsert(postgres, "stock", on_new_column="add")
    with pytest.raises(InvalidInputError, match="id, value; of its key are missing: key"):
        apply(upsert, batch(0), driver_batch([("a", "1")]))
    with pytest.raises(InvalidInputError, match="of its key are missing: key"):
        additions(upsert, TEXT)
