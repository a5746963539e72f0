"""PostgresUpsert's transaction: rows and position together; small ones and staged."""

from __future__ import annotations

from typing import Any

import pyspark.sql.types as t
import pytest
from pyspark.sql.types import IntegerType, StringType

from kafkalog.errors import CommitConflictError, InvalidInputError, StorageError
from kafkalog.sink.upsert import Position, PostgresUpsert
from kafkalog.sink.upsert.postgres.table import PostgresTable
from tests.postgres_server import query
from tests.unit.sink.postgres_rows import (
    BYTES,
    TEXT,
    Apply,
    apply_small,
    apply_staged,
    batch,
    driver_batch,
    table,
)

KEYS = {"key": StringType()}


def test_the_table_is_created_and_follows(upsert: PostgresUpsert, apply: Apply) -> None:
    assert apply(upsert, batch(0), driver_batch([("a", "1"), ("b", "2")]))
    assert apply(
        upsert, batch(1), driver_batch([("a", "3"), ("b", None), ("c", None), ("d", "")], offset=2)
    )
    assert table(upsert.conninfo) == [("a", "3"), ("d", "")]


def test_the_highest_offset_of_a_key_wins(upsert: PostgresUpsert, apply: Apply) -> None:
    later = driver_batch([("a", "2"), ("b", None), ("c", "kept")], offset=10)
    earlier = driver_batch([("a", "1"), ("b", "1"), ("c", None), ("a", "1b")], offset=0)
    assert apply(upsert, batch(0), later, earlier)
    assert table(upsert.conninfo) == [("a", "2"), ("c", "kept")]


@pytest.mark.parametrize(
    ("tasks", "rows"),
    [
        ([[("b", "1"), ("a", "2")], [("c", "3")]], [("a", "2"), ("b", "1"), ("c", "3")]),
        ([[("a", "1"), ("b", "2"), ("a", "3")]], [("a", "3"), ("b", "2")]),
        (
            [[("a", "1"), ("b", "2")], [("c", "3"), ("a", "4")]],
            [("a", "4"), ("b", "2"), ("c", "3")],
        ),
        ([[("a", "1"), ("b", "2")], [("a", None)]], [("b", "2")]),
        ([[("a", None)]], []),
    ],
    ids=["each key once", "twice in a task", "in two tasks", "a deletion", "a deletion alone"],
)
def test_a_new_table_has_the_latest_rows_and_its_primary_key(
    upsert: PostgresUpsert, tasks: list[list[tuple[str, str | None]]], rows: list[tuple[str, str]]
) -> None:
    parts = [[driver_batch(each, offset=10 * n)] for n, each in enumerate(tasks)]
    assert apply_staged(upsert, batch(0), *parts)
    assert table(upsert.conninfo) == rows
    found = query(
        upsert.conninfo,
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = 'stock'::regclass AND contype = 'p'",
    )
    assert found == [("stock_pkey", "PRIMARY KEY (key)")]


def test_a_new_table_does_not_wait_for_who_reads_it(upsert: PostgresUpsert) -> None:
    with upsert.connection() as connection, upsert.connection() as reader:
        place = PostgresTable.find(connection, "stock")
        declared = place.prepare(connection, list(TEXT), list(TEXT.values()))
        with reader.transaction():
            assert reader.execute("SELECT * FROM stock").fetchall() == []
            rows = [driver_batch([("a", "1")])]
            assert upsert.merge_small(connection, place, declared, batch(0), rows)
            assert reader.execute("SELECT * FROM stock").fetchall() == [("a", "1")]


def test_between_partitions_the_latest_records_times_decide(
    upsert: PostgresUpsert, apply: Apply
) -> None:
    assert apply(
        upsert,
        batch(0),
        driver_batch([("a", "early"), ("b", "x"), ("c", None)], offset=900, second=5),
        driver_batch([("a", "late"), ("b", None), ("c", "x")], partition=1, second=6),
    )
    assert table(upsert.conninfo) == [("a", "late"), ("c", "x")]


def test_a_repeated_batch_changes_nothing(
    upsert: PostgresUpsert, apply: Apply, caplog: pytest.LogCaptureFixture
) -> None:
    assert apply(upsert, batch(3), driver_batch([("a", "1")]))
    assert not apply(upsert, batch(3), driver_batch([("a", "other"), ("b", "2")]))
    assert table(upsert.conninfo) == [("a", "1")]
    assert "micro-batch 3 of query q was applied before" in caplog.text


def test_an_older_checkpoint_is_refused_unless_reset(upsert: PostgresUpsert, apply: Apply) -> None:
    apply(upsert, batch(57), driver_batch([("a", "1")]))
    with pytest.raises(CommitConflictError, match=r"committed 57 at .* got 3; reset_writer"):
        apply(upsert, batch(3), driver_batch([("a", "2")]))
    upsert.reset_writer = True
    assert apply(upsert, batch(3), driver_batch([("a", "2")]))
    assert upsert.positions() == {"q": batch(3).position()}


def test_a_batch_without_rows_advances_the_position(upsert: PostgresUpsert, apply: Apply) -> None:
    ends = {"t": {"10": 7, "2": 5}, "a": {"0": 1}}
    assert upsert.position("q") is None
    assert not upsert.has_rows()
    assert apply(upsert, batch(0, end_offsets=ends))
    assert upsert.position("q") == Position(0, ends, 1_700_000_000_000)
    assert not upsert.has_rows()
    assert apply(upsert, batch(1), driver_batch([("a", None)]))
    assert upsert.position("other") is None
    assert apply(upsert, batch(2), driver_batch([("a", "1")]))
    assert upsert.has_rows()
    assert apply(upsert, batch(3, other_ends="1-a"))
    assert upsert.position("q") == batch(3, other_ends="1-a").position()
    assert not apply(upsert, batch(3, other_ends="1-a"), driver_batch([("b", "1")]))
    assert apply(upsert, batch(3, other_ends="1-b"), driver_batch([("b", "1")]))


def test_queries_and_tables_have_positions_of_their_own(
    upsert: PostgresUpsert, apply: Apply
) -> None:
    apply(upsert, batch(5), driver_batch([("a", "1")]))
    apply(upsert, batch(0, "other"), driver_batch([("b", "1")]))
    apply(PostgresUpsert(upsert.conninfo, "second"), batch(0), driver_batch([("a", "1")]))
    assert upsert.positions() == {"q": batch(5).position(), "other": batch(0).position()}
    assert query(upsert.conninfo, "SELECT count(*) FROM kafkalog_positions") == [(3,)]


def test_positions_of_a_table_that_was_dropped_are_void(
    upsert: PostgresUpsert, apply: Apply
) -> None:
    apply(upsert, batch(5), driver_batch([("a", "1")]))
    query(upsert.conninfo, "DROP TABLE stock")
    assert upsert.position("q") is None
    assert apply(upsert, batch(0), driver_batch([("b", "1")]))
    assert table(upsert.conninfo) == [("b", "1")]


def test_replacing_leaves_exactly_the_batchs_rows(upsert: PostgresUpsert, apply: Apply) -> None:
    apply(upsert, batch(0), driver_batch([("a", "1"), ("b", "1"), ("c", "1")]))
    new = batch(0, "rebuilt", is_replacing=True)
    assert apply(upsert, new, driver_batch([("b", "2"), ("c", None), ("d", "2")]))
    assert table(upsert.conninfo) == [("b", "2"), ("d", "2")]
    assert not apply(upsert, new, driver_batch([("e", "3")]))
    assert table(upsert.conninfo) == [("b", "2"), ("d", "2")]


def test_columns_that_somebody_else_added_keep_values_and_defaults(
    upsert: PostgresUpsert, apply: Apply
) -> None:
    query(
        upsert.conninfo,
        "CREATE TABLE stock (id int GENERATED ALWAYS AS IDENTITY, note text DEFAULT 'new', "
        "value varchar, key varchar(9) UNIQUE)",
    )
    apply(upsert, batch(0), driver_batch([("a", "1")]))
    query(upsert.conninfo, "UPDATE stock SET note = 'mine'")
    apply(upsert, batch(1), driver_batch([("b", "1"), ("a", "2")]))
    assert table(upsert.conninfo, "key, value, note") == [("a", "2", "mine"), ("b", "1", "new")]


def test_text_goes_into_any_type_that_reads_it(postgres: str, apply: Apply) -> None:
    query(postgres, "CREATE DOMAIN positive AS int NOT NULL CHECK (VALUE > 0)")
    query(postgres, "CREATE TYPE mood AS ENUM ('fine', 'bad')")
    query(
        postgres,
        "CREATE TABLE stock (key uuid PRIMARY KEY, count positive, mood mood, tags jsonb, at inet)",
    )
    upsert = PostgresUpsert(postgres, "stock")
    shape = dict.fromkeys(["key", "count", "mood", "tags", "at"], StringType())
    key = "12345678-1234-5678-1234-567812345678"
    row = (key, "3", "fine", '["a\\\\b"]', "10.0.0.1")
    assert apply(upsert, batch(0), driver_batch([row], shape), shape=shape)
    assert table(postgres, "key::text, count, mood::text, tags, host(at)") == [
        (key, 3, "fine", ["a\\b"], "10.0.0.1")
    ]
    with pytest.raises(InvalidInputError, match=r'offset 9 does not fit: .*"positive_check"'):
        apply(
            upsert,
            batch(1),
            driver_batch([(key, "-3", "bad", "1", None)], shape, offset=9),
            shape=shape,
        )
    assert apply(
        upsert, batch(1), driver_batch([(key, None, None, None, None)], shape), shape=shape
    )
    assert query(postgres, "SELECT count(*) FROM stock") == [(0,)]


def test_a_key_may_be_sorted_otherwise_than_by_bytes(postgres: str, apply: Apply) -> None:
    query(
        postgres,
        "CREATE COLLATION no_case (provider = icu, locale = 'und-u-ks-level2', "
        "deterministic = false)",
    )
    query(postgres, "CREATE TABLE stock (key text COLLATE no_case PRIMARY KEY, value text)")
    upsert = PostgresUpsert(postgres, "stock")
    assert apply(upsert, batch(0), driver_batch([("A", "1"), ("b", "1"), ("a", "2"), ("B", None)]))
    assert table(postgres) == [("a", "2")] or table(postgres) == [("A", "2")]


def test_names_that_need_quoting_work(postgres: str, apply: Apply) -> None:
    query(postgres, 'CREATE SCHEMA "odd ""%s"" schema"')
    upsert = PostgresUpsert(postgres, 'odd "%s" schema.Select; {}')
    shape = {"key": StringType(), 'a "b" %s {}': StringType(), "order": IntegerType()}
    try:
        assert apply(upsert, batch(0), driver_batch([("k", "v", 1)], shape), shape=shape)
        assert apply(upsert, batch(1), driver_batch([("k", "w", 2)], shape), shape=shape)
        found = query(postgres, 'SELECT * FROM "odd ""%s"" schema"."Select; {}"')
        assert found == [("k", "w", 2)]
        assert list(upsert.positions()) == ["q"]
    finally:
        query(postgres, 'DROP SCHEMA "odd ""%s"" schema" CASCADE')


def test_a_table_of_keys_alone_works(upsert: PostgresUpsert, apply: Apply) -> None:
    for number in range(2):
        rows = driver_batch([("a",), ("b",)], KEYS)
        assert apply(upsert, batch(number), rows, shape=KEYS)
    assert query(upsert.conninfo, "SELECT * FROM stock ORDER BY 1") == [("a",), ("b",)]


def test_binary_keys_and_values_are_bytes(upsert: PostgresUpsert, apply: Apply) -> None:
    rows = driver_batch([(b"\x00\\", b"\xff"), (b"", b""), (b"x", None)], BYTES)
    assert apply(upsert, batch(0), rows, shape=BYTES)
    assert table(upsert.conninfo) == [(b"", b""), (b"\x00\\", b"\xff")]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "(key text PRIMARY KEY, amount int)",
            r'Run ALTER TABLE "\w+"."stock" ADD COLUMN IF NOT EXISTS "value" text',
        ),
        ("(value text PRIMARY KEY)", "of its key are missing: key"),
        ("(key text, value text)", "neither a primary key nor a unique constraint"),
        ("(key text, value text, UNIQUE (key, value))", "neither a primary key nor a unique"),
        ("(key text UNIQUE DEFERRABLE, value text)", r"are found \(a deferrable one doesn't"),
        (
            "(key bytea PRIMARY KEY, value text)",
            r'column "key" is bytea, the rows have text: .*"cast\(key as binary\) as key"',
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    upsert: PostgresUpsert, statement: str, message: str
) -> None:
    query(upsert.conninfo, f"CREATE TABLE stock {statement}")
    with pytest.raises(InvalidInputError, match=message):
        apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    assert upsert.positions() == {}


def test_a_role_without_a_privilege_is_told_which_to_grant(
    postgres_server: Any, upsert: PostgresUpsert
) -> None:
    ((schema,),) = query(upsert.conninfo, "SELECT current_schema()")
    postgres_server.query(f"CREATE TABLE {schema}.stock (key text PRIMARY KEY, value text)")
    with pytest.raises(StorageError, match=r"permission denied .*\. Grant the role SELECT, INSERT"):
        apply_small(upsert, batch(0), driver_batch([("a", "1")]))


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", "kafkalog_positions", "s.kafkalog_x", "\0"])
def test_names_that_are_not_the_users_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="not a table name"):
        PostgresUpsert("dbname=x", name)


def test_errors_show_no_password(postgres_server: Any) -> None:
    with pytest.raises(InvalidInputError, match="conninfo"):
        PostgresUpsert("password=secret nonsense", "t")
    upsert = PostgresUpsert("host=127.0.0.1 port=1 password=secret dbname=shop", "t")
    assert upsert.where == "shop@127.0.0.1: table t"
    with pytest.raises(StorageError, match="table t: connection failed") as caught:
        upsert.positions()
    assert "secret" not in str(caught.value)


def test_the_types_of_a_new_table_are_sparks() -> None:
    from kafkalog.sink.upsert.postgres.types import column_type

    kinds = {
        t.BinaryType(): "bytea",
        t.StringType(): "text",
        t.BooleanType(): "boolean",
        t.ByteType(): "smallint",
        t.ShortType(): "smallint",
        t.IntegerType(): "integer",
        t.LongType(): "bigint",
        t.FloatType(): "real",
        t.DoubleType(): "double precision",
        t.DecimalType(12, 3): "numeric(12,3)",
        t.DateType(): "date",
        t.TimestampType(): "timestamp with time zone",
        t.TimestampNTZType(): "timestamp without time zone",
        t.ArrayType(t.IntegerType()): "jsonb",
        t.MapType(t.StringType(), t.IntegerType()): "jsonb",
        t.StructType([t.StructField("x", t.IntegerType())]): "jsonb",
        t.DayTimeIntervalType(): "text",
    }
    assert {kind: column_type(kind) for kind in kinds} == kinds
