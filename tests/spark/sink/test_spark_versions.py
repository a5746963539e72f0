"""Upserts with `version=`: the row with the larger version wins, whenever it comes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import PostgresUpsert, SQLiteUpsert, Upsert
from kafkalog.sink.upsert.rows import RowShape
from tests import postgres_server
from tests.spark.sink.test_spark_upsert import frame_of
from tests.spark.sink.version_histories import SELECT, Event, drawn, in_order, take

pytestmark = [pytest.mark.spark, pytest.mark.slow]
Query = Callable[[str], list[Any]]
Target = tuple[Callable[..., Upsert], Query]


@pytest.fixture(params=["sqlite", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """Return what makes an upsert of table `kept`, and what queries its database."""
    if request.param == "sqlite":
        database = tmp_path / "versions.db"

        def query(statement: str) -> list[Any]:
            with closing(sqlite3.connect(database)) as connection:
                return connection.execute(statement).fetchall()

        return lambda **given: SQLiteUpsert(database, "kept", **given), query
    conninfo = request.getfixturevalue("postgres")
    return (
        lambda **given: PostgresUpsert(conninfo, "kept", **given),
        lambda statement: postgres_server.query(conninfo, statement),
    )


ROWS = "SELECT key, version, n FROM kept"


def test_drawn_histories_out_of_order_end_as_those_in_order(spark: Any, target: Target) -> None:
    make, query = target
    batches = drawn()
    take(spark, make(select=SELECT, version="version"), batches)
    assert sorted(query(ROWS)) == in_order(batches)


def test_a_deleted_row_stays_deleted_as_long_as_its_version_is_known(
    spark: Any, target: Target
) -> None:
    make, query = target
    upsert = make(select=SELECT, version="version", delete_retention_ms=1000)
    known = "SELECT key, kl_version FROM kafkalog_deletions_kept"
    take(spark, upsert, [[Event("a", 5, True, 0), Event("b", 1, False, 1)]])
    assert query(known) == [("a", 5)]
    take(spark, upsert, [[Event("a", 4, False, 2)]], first=1, ms=1000)
    assert query(ROWS) == [("b", 1, 1)]
    take(spark, upsert, [[Event("b", 0, True, 3)]], first=2, ms=1001)
    assert (query(ROWS), query(known)) == ([("b", 1, 1)], [])
    take(spark, upsert, [[Event("a", 4, False, 4)]], first=3, ms=1002)
    assert sorted(query(ROWS)) == [("a", 4, 4), ("b", 1, 1)]


def test_of_equal_versions_the_later_record_wins(spark: Any, target: Target) -> None:
    make, query = target
    upsert = make(select=SELECT, version="version")
    take(spark, upsert, [[Event("a", 1, False, 1), Event("a", 1, False, 2)]])
    assert query(ROWS) == [("a", 1, 2)]
    take(spark, upsert, [[Event("a", 1, True, 3)], [Event("a", 1, False, 4)]], first=1)
    assert query(ROWS) == [("a", 1, 4)]
    assert query("SELECT * FROM kafkalog_deletions_kept") == []


def test_a_row_without_a_version_is_a_bad_record(spark: Any, target: Target) -> None:
    make, query = target
    bad = [[Event("a", None, False, 1), Event("a", 1, False, 2)]]
    with pytest.raises(Exception, match="t-0 offset 0: its version version is null"):
        take(spark, make(select=SELECT, version="version"), bad)
    take(spark, make(select=SELECT, version="version", on_bad_record="skip"), bad)
    assert query(ROWS) == [("a", 1, 2)]


@pytest.mark.parametrize("kind", ["date", "timestamp", "timestamp_ntz"])
def test_a_version_in_a_year_without_four_digits_is_a_bad_record(spark: Any, kind: str) -> None:
    texts = ["0001-01-01", "9999-12-31", "+10000-01-03", "0000-12-29", "-0001-01-01"]
    frame = frame_of(spark, *[(text, text, at) for at, text in enumerate(texts)])
    select = ["string(key) AS key", f"cast(string(value) AS {kind}) AS v", "false AS deleted"]
    shape = RowShape(select=select, version="v", leaves_out_bad=True)
    assert {row.offset for row in shape.bad_records(frame).collect()} == {2, 3, 4}
    [reason] = {row.kl_reason for row in shape.bad_records(frame).collect()}
    assert reason == "its version v is not in the years 1 to 9999"


def test_a_version_is_a_column_whose_values_have_an_order(spark: Any) -> None:
    frame = frame_of(spark, ("a", "1", 0))
    for version, words in (("nobody", "no such column"), ("value", "expected a whole number")):
        with pytest.raises(InvalidInputError, match=words):
            RowShape(version=version).rows(frame, latest=True)
    with pytest.raises(InvalidInputError, match="Give select as a list"):
        RowShape(select=lambda df: df, version="offset")
    with pytest.raises(InvalidInputError, match="envelope or version, found both"):
        RowShape(json="id INT", envelope="debezium", version="id")
