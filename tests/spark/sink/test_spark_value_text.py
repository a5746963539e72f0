"""Instants and nested values in a table: whatever the session's zone, nothing of them is lost."""

from __future__ import annotations

import datetime as dt
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.sink.query import MicroBatch
from kafkalog.sink.upsert import PostgresUpsert, SQLiteUpsert, Upsert
from tests.postgres_server import query as query_postgres
from tests.spark.sink.test_spark_upsert import frame_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]

INSTANTS = [
    *("2024-11-03T05:30:00Z", "2024-11-03T06:30:00Z"),  # one hour that New York's clocks repeat
    *("2024-11-03T05:30:00.000001Z", "2024-11-03T05:30:00.1Z", "2024-03-10T07:30:00Z"),
    *("1883-11-18T16:59:59.5Z", "1883-11-18T17:00:00Z"),  # before and after it had a zone
    *("1582-10-10T00:00:00Z", "1500-02-28T23:59:59.999999Z", "1969-12-31T23:59:59.999999Z"),
]
LATE = "+12345-01-01T00:00:00.123456Z"


@pytest.fixture(
    params=[
        pytest.param("America/New_York", marks=pytest.mark.chosen),
        "Europe/Lisbon",
        "UTC",
    ]
)
def zoned(spark: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield spark
    spark.conf.set("spark.sql.session.timeZone", "UTC")


def take(upsert: Upsert, *frames: Any) -> None:
    """Apply micro-batches as a query does."""
    run = secrets.token_hex(4)
    for number, frame in enumerate(frames):
        running = MicroBatch("q", number, run)
        upsert.take(frame, number, running, {"t": {"0": number + 1}})


def query(database: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection, connection:
        return connection.execute(statement).fetchall()


def records(spark: Any, *instants: str) -> Any:
    """Return a record for each instant, which is its key."""
    return frame_of(spark, *[(text, "1", n) for n, text in enumerate(instants)])


def test_an_instant_is_one_key_of_sqlite(zoned: Any, tmp_path: Path) -> None:
    select = ["cast(cast(key as string) as timestamp) as at", "value is null as deleted"]
    upsert = SQLiteUpsert(tmp_path / "s.db", "stock", select=select, key="at")
    take(upsert, records(zoned, *INSTANTS, LATE), records(zoned, *INSTANTS[:3]))
    found = [at for (at,) in query(tmp_path / "s.db", "SELECT at FROM stock ORDER BY at")]
    assert found.pop(0) == LATE.replace("T", " ")
    assert [dt.datetime.fromisoformat(at) for at in found] == sorted(
        map(dt.datetime.fromisoformat, INSTANTS)
    )


def test_an_instant_is_one_value_of_postgres(zoned: Any, postgres: str) -> None:
    nested = "named_struct('at', at, 'all', array(at), 'by', map(at, at))"
    upsert = PostgresUpsert(
        postgres,
        "stock",
        select=lambda df: df.selectExpr(
            "cast(cast(key as string) as timestamp) as at", "value"
        ).selectExpr("at", "value is null as deleted", "at as value", f"{nested} as doc"),
        key="at",
    )
    take(upsert, records(zoned, *INSTANTS))
    found = query_postgres(postgres, "SELECT at, value, doc FROM stock ORDER BY at")
    assert [at for at, _, _ in found] == sorted(map(dt.datetime.fromisoformat, INSTANTS))
    for at, value, doc in found:
        texts = [doc["at"], *doc["all"], *[text for pair in doc["by"].items() for text in pair]]
        assert {value, *map(dt.datetime.fromisoformat, texts)} == {at}


NESTED = {
    "null members": ("struct<a:int,b:string>", "named_struct('a', 1, 'b', null)"),
    "a struct of nulls": ("struct<a:int>", "named_struct('a', null)"),
    "an instant": ("struct<t:timestamp>", "named_struct('t', timestamp_micros(1730612096123456))"),
    "a local time": ("array<timestamp_ntz>", "array(timestamp_ntz'2024-03-10T02:30:00.000001')"),
    "a key of a map": ("map<timestamp,int>", "map(timestamp_micros(1730612096123456), null)"),
    "keys of bytes": ("map<binary,int>", "map(X'00ff', 1, X'', 2)"),
    "numbers": ("array<decimal(38,18)>", "array(12345678901234567890.123456789012345678BD)"),
    "a long": ("array<bigint>", "array(9223372036854775807L, null)"),
    "no numbers": ("array<double>", "array(double('NaN'), double('-Infinity'), 1e300D, 0.1D)"),
    "bytes": ("array<binary>", "array(X'00ff80')"),
}
EXPECTED = {
    "null members": '{"a":1,"b":null}',
    "a struct of nulls": '{"a":null}',
    "an instant": '{"t":"2024-11-03T05:34:56.123456Z"}',
    "a local time": '["2024-03-10T02:30:00.000001"]',
    "a key of a map": '{"2024-11-03T05:34:56.123456Z":null}',
    "keys of bytes": '{"AP8=":1,"":2}',
    "numbers": "[12345678901234567890.123456789012345678]",
    "a long": "[9223372036854775807,null]",
    "no numbers": '["NaN","-Infinity",1.0E300,0.1]',
    "bytes": '["AP+A"]',
}


def test_nested_values_keep_each_null_and_digit(zoned: Any, tmp_path: Path, postgres: str) -> None:
    def shaped(df: Any) -> Any:
        columns = [
            f"cast({expression} as {kind}) as `{name}`"
            for name, (kind, expression) in NESTED.items()
        ]
        return df.selectExpr("cast(key as string) key", "false deleted", *columns)

    database = tmp_path / "s.db"
    take(SQLiteUpsert(database, "stock", select=shaped), frame_of(zoned, ("a", "1", 0)))
    take(PostgresUpsert(postgres, "stock", select=shaped), frame_of(zoned, ("a", "1", 0)))
    [(_, *texts)] = query(database, "SELECT * FROM stock")
    assert dict(zip(NESTED, texts, strict=True)) == EXPECTED
    for name, text in EXPECTED.items():
        # jsonb, which knows all digits, compares documents as values.
        found = f'SELECT "{name}" = %s::jsonb FROM stock'
        assert query_postgres(postgres, found, text) == [(True,)], name


def test_nested_text_that_is_not_utf8_is_refused_with_its_record(
    zoned: Any, tmp_path: Path, postgres: str
) -> None:
    select = ["cast(key as string) key", "array(map('k', cast(value as string))) doc"]
    for upsert in (
        SQLiteUpsert(tmp_path / "s.db", "stock", select=[*select, "false deleted"]),
        PostgresUpsert(postgres, "stock", select=[*select, "false deleted"]),
    ):
        frame = frame_of(zoned, ("a", "1", 0), ("b", "2", 1)).selectExpr(
            "key", "if(offset = 1, X'ff', value) value", "topic", "partition", "offset", "timestamp"
        )
        with pytest.raises(InvalidInputError, match=r"t-0 offset 1 does not fit: column .?doc"):
            take(upsert, frame)


@pytest.mark.parametrize("old", ["2024-11-03 01:30:00", "2024-11-03 05:30:00.5", "soon"])
def test_a_table_of_local_times_is_refused_until_they_are_instants(
    zoned: Any, tmp_path: Path, old: str
) -> None:
    select = ["cast(cast(key as string) as timestamp) as at", "1 as n", "false as deleted"]

    def upsert() -> SQLiteUpsert:
        return SQLiteUpsert(tmp_path / "s.db", "stock", select=select, key="at")

    query(tmp_path / "s.db", "CREATE TABLE stock (at TEXT PRIMARY KEY, n INTEGER)")
    query(tmp_path / "s.db", f"INSERT INTO stock VALUES ('{old}', 0)")
    frame = records(zoned, "2024-11-03T05:30:00.5Z")
    with pytest.raises(InvalidInputError, match=f"at holds other text .* found '{old}'") as fault:
        take(upsert(), frame)
    assert query(tmp_path / "s.db", "SELECT * FROM stock") == [(old, 0)]
    if old.endswith(".5"):
        statement = str(fault.value).partition("run ")[2].partition(". Else")[0]
        query(tmp_path / "s.db", statement)
        take(upsert(), frame)
        assert query(tmp_path / "s.db", "SELECT * FROM stock") == [
            ("2024-11-03 05:30:00.500000Z", 1)
        ]
