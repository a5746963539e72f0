"""The columns of a table in PostgreSQL: those that would change or lose rows are refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pyspark.sql.types as t
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import PostgresUpsert
from kafkalog.sink.upsert.postgres.types import changes_values
from tests.postgres_server import query
from tests.unit.sink.postgres_rows import apply_small, batch, by_tasks, driver_batch, table

AT = dt.datetime(2024, 5, 1, 23, 59, 59, 700_001, tzinfo=dt.UTC)
NTZ = AT.replace(tzinfo=None)


@pytest.mark.parametrize(
    "collation", ['"POSIX"', '"C"', '"en-x-icu"', '"ucs_basic"', '"default"', "own"]
)
def test_rows_of_a_key_of_any_collation_are_deleted_and_rebuilt(
    upsert: PostgresUpsert, collation: str
) -> None:
    query(upsert.conninfo, "CREATE COLLATION own (provider = icu, locale = 'de')")
    query(
        upsert.conninfo,
        f"CREATE TABLE stock (key text COLLATE {collation} PRIMARY KEY, "
        f"value varchar COLLATE {collation})",
    )
    for number, apply in enumerate([apply_small, by_tasks]):
        start = batch(0, f"q{number}", is_replacing=True)
        assert apply(upsert, start, driver_batch([("a", "1"), ("B", "1"), ("c", "1")]))
        assert apply(
            upsert, batch(1, f"q{number}"), driver_batch([("a", None), ("B", "2")], offset=3)
        )
        assert sorted(table(upsert.conninfo)) == [("B", "2"), ("c", "1")]
        rebuilt = batch(0, f"rebuilt{number}", is_replacing=True)
        assert apply(upsert, rebuilt, driver_batch([("B", "3"), ("d", "1")]))
        assert sorted(table(upsert.conninfo)) == [("B", "3"), ("d", "1")]


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        ("date", t.TimestampType()),
        ("date", t.TimestampNTZType()),
        ("time", t.TimestampNTZType()),
        ("timestamp(0) with time zone", t.TimestampType()),
        ("timestamp(5)", t.TimestampNTZType()),
        ("numeric(10,2)", t.DecimalType(20, 6)),
        ("numeric(10,0)", t.DecimalType(3, 1)),
        ("numeric(10)", t.DoubleType()),
        ("numeric(30,15)", t.FloatType()),
        ("coarse", t.DecimalType(9, 3)),
        ("real", t.DoubleType()),
        ("real", t.IntegerType()),
        ("real", t.DecimalType(7, 3)),
        ("double precision", t.LongType()),
        ("double precision", t.DecimalType(16, 2)),
    ],
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_column_that_would_round_or_cut_the_values_is_refused(
    upsert: PostgresUpsert, name: str, declared: str, given: t.DataType
) -> None:
    query(upsert.conninfo, "CREATE DOMAIN coarse AS numeric(9,2)")
    shape: dict[str, t.DataType] = {"key": t.StringType(), "value": t.StringType(), name: given}
    columns = {"key": "text", "value": "text", name: declared}
    query(
        upsert.conninfo,
        f"CREATE TABLE stock (key {columns['key']} PRIMARY KEY, value {columns['value']})",
    )
    message = (
        rf'table \S+\.stock: column "{name}" is .*, which would round or truncate the rows\' .*cast'
    )
    with pytest.raises(InvalidInputError, match=message):
        apply_small(upsert, batch(0), shape=shape)
    assert upsert.positions() == {}


def test_a_column_that_rounds_to_thousands_would_change_whole_numbers() -> None:
    """PostgreSQL 15 has such columns, older ones do not."""
    assert changes_values(t.LongType(), "numeric(9,-3)")
    assert not changes_values(t.LongType(), "numeric(9,0)")


@pytest.mark.parametrize(
    ("declared", "given", "arrow", "value", "kept"),
    [
        ("timestamp(6) with time zone", t.TimestampType(), pa.timestamp("us", "UTC"), AT, AT),
        ("timestamp with time zone", t.TimestampType(), pa.timestamp("us", "UTC"), AT, AT),
        ("timestamp", t.TimestampNTZType(), pa.timestamp("us"), NTZ, NTZ),
        ("timestamp(0)", t.DateType(), pa.date32(), AT.date(), dt.datetime(2024, 5, 1)),
        ("text", t.DoubleType(), pa.float64(), 0.1, "0.1"),
        ("numeric", t.DoubleType(), pa.float64(), 0.1, Decimal("0.1")),
        (
            "numeric(9,3)",
            t.DecimalType(20, 3),
            pa.decimal128(20, 3),
            Decimal("1.239"),
            Decimal("1.239"),
        ),
        ("numeric(10)", t.LongType(), pa.int64(), 2**33 - 1, 2**33 - 1),
        ("double precision", t.IntegerType(), pa.int32(), 2**31 - 1, 2**31 - 1),
        (
            "double precision",
            t.DecimalType(15, 2),
            pa.decimal128(15, 2),
            Decimal("9999999999999.99"),
            9999999999999.99,
        ),
        ("double precision", t.FloatType(), pa.float32(), 0.5, 0.5),
        ("real", t.ShortType(), pa.int16(), 32767, 32767),
        ("real", t.DecimalType(6, 3), pa.decimal128(6, 3), Decimal("123.457"), 123.457),
    ],
)
def test_a_column_that_keeps_each_value_is_used(
    upsert: PostgresUpsert,
    declared: str,
    given: t.DataType,
    arrow: pa.DataType,
    value: object,
    kept: object,
) -> None:
    query(upsert.conninfo, f"CREATE TABLE stock (key text PRIMARY KEY, value {declared})")
    rows = driver_batch([("a", "x")])
    rows = rows.set_column(rows.num_columns - 1, "value", pa.array([value], arrow))
    assert apply_small(upsert, batch(0), rows, shape={"key": t.StringType(), "value": given})
    assert table(upsert.conninfo) == [("a", kept)]


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (["CREATE UNLOGGED TABLE stock (key text PRIMARY KEY, value text)"], "stock"),
        (
            [
                "CREATE TABLE stock (key text PRIMARY KEY, value text) PARTITION BY HASH (key)",
                "CREATE UNLOGGED TABLE part PARTITION OF stock "
                "FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
            ],
            "part",
        ),
    ],
)
def test_a_table_whose_rows_a_crash_of_the_server_takes_is_refused(
    upsert: PostgresUpsert, made: list[str], named: str
) -> None:
    for statement in made:
        query(upsert.conninfo, statement)
    message = rf"table \S+\.stock: {named} is unlogged .* ALTER TABLE {named} SET LOGGED"
    with pytest.raises(InvalidInputError, match=message):
        apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    assert table(upsert.conninfo) == []
    query(upsert.conninfo, f"ALTER TABLE {named} SET LOGGED")
    assert apply_small(upsert, batch(0), driver_batch([("a", "1")]))


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(
    "how", ["text GENERATED ALWAYS AS (more) STORED", "int GENERATED ALWAYS AS IDENTITY"]
)
def test_a_column_that_postgresql_generates_is_refused(
    upsert: PostgresUpsert, name: str, how: str
) -> None:
    columns = {"key": "text", "value": "text", "more": "text", name: how}
    declared = ", ".join(" ".join(column) for column in columns.items())
    query(upsert.conninfo, f"CREATE TABLE stock ({declared}, UNIQUE (key))")
    with pytest.raises(
        InvalidInputError, match=f'column "{name}" is generated by PostgreSQL, the rows bring it to'
    ):
        apply_small(upsert, batch(0), driver_batch([("1", "1")]))


def test_an_identity_that_takes_given_numbers_is_used(upsert: PostgresUpsert) -> None:
    query(
        upsert.conninfo,
        "CREATE TABLE stock (key int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, value text)",
    )
    assert apply_small(upsert, batch(0), driver_batch([("7", "1")]))
    assert table(upsert.conninfo) == [(7, "1")]


def test_the_text_of_a_value_does_not_depend_on_the_roles_settings(postgres: str) -> None:
    settings = {"datestyle": "German", "extra_float_digits": 0, "timezone": "Asia/Tokyo"}
    options = " -c ".join(
        [conninfo_to_dict(postgres)["options"], *(f"{k}={v}" for k, v in settings.items())]
    )
    upsert = PostgresUpsert(make_conninfo(postgres, options=options), "stock")
    names = ("a", "b", "c", "d")
    query(
        upsert.conninfo,
        f"CREATE TABLE stock (key text PRIMARY KEY, {' text, '.join(names)} text)",
    )
    rows = driver_batch([("k", "x")]).drop_columns(["value"])
    for name, (_, column) in zip(names, TYPED.values(), strict=True):
        rows = rows.append_column(name, column)
    kinds = [data_type for data_type, _ in TYPED.values()]
    shape = {"key": t.StringType(), **dict(zip(names, kinds, strict=True))}
    assert apply_small(upsert, batch(0), rows, shape=shape)
    assert table(upsert.conninfo, "*") == [("k", *TYPED)]


TYPED: dict[str, tuple[t.DataType, pa.Array]] = {
    "0.30000000000000004": (t.DoubleType(), pa.array([0.1 + 0.2])),
    "2024-05-01": (t.DateType(), pa.array([AT.date()])),
    "2024-05-01 23:59:59.700001Z": (
        t.TimestampType(),
        pa.array([AT], pa.timestamp("us", "UTC")),
    ),
    "2024-05-01 23:59:59.700001": (t.TimestampNTZType(), pa.array([NTZ], pa.timestamp("us"))),
}
"""The text of values, by which other types of columns read them."""
