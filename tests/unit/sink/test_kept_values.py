"""Values that a row lacks: a database keeps those of the row before, or refuses the row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DataType, IntegerType, StringType

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import Batch, PostgresUpsert, SQLiteUpsert
from kafkalog.sink.upsert.bad_records import Refusal
from kafkalog.sink.upsert.kept_values import KEPT
from tests.postgres_server import query as ask_postgres
from tests.unit.sink.postgres_rows import LEADING, batch
from tests.unit.sink.sqlite_rows import query as ask_sqlite

SHAPE: dict[str, DataType] = {
    "my note": StringType(),
    "region": StringType(),
    "id": IntegerType(),
    "n": IntegerType(),
}
DF: Any = object()
"""The records of a micro-batch, which only `leave_out_refused` uses."""
Row = tuple[str, int, str | None, int | None, str | None]
"""(region, id, note, n, which values it lacks)"""


class Target:
    """A table of one database, and what an upsert into it has left out."""

    def __init__(self, database: Path | str) -> None:
        self.database = database
        self.left_out: list[int] = []

    def take(self, number: int, *rows: Row, rule: str = "fail", **more: Any) -> None:
        target = self

        def leave_out(_: Any, df: Any, doing: Batch, refused: Sequence[Refusal]) -> None:
            assert all("no row before" in each.reason for each in refused)
            target.left_out = [each.offset for each in refused]

        shaped = {"schema": "n int, id int, region string", "key": ["region", "id"]}
        of_kind: type[Any] = SQLiteUpsert if isinstance(self.database, Path) else PostgresUpsert
        kind = type("Skipping", (of_kind,), {"leave_out_refused": leave_out})
        upsert = kind(self.database, "notes", on_bad_record=rule, **shaped)
        part, doing = rows_of(rows), batch(number, **more)
        if isinstance(upsert, SQLiteUpsert):
            kinds = ["TEXT", "TEXT", "INTEGER", "INTEGER"]
            upsert.apply(doing, list(SHAPE), kinds, [part], df=DF, keeps=True)
            return
        with upsert.connection() as connection:
            table, columns = upsert.prepare(connection, list(SHAPE), list(SHAPE.values()))
            upsert.merge_small(connection, table, columns, doing, [part], df=DF, keeps=True)

    def rows(self) -> list[Any]:
        text = 'SELECT region, id, "my note", n FROM notes ORDER BY region, id'
        if isinstance(self.database, Path):
            return ask_sqlite(self.database, text)
        return ask_postgres(self.database, text)


def rows_of(rows: Sequence[Row]) -> pa.RecordBatch:
    count = len(rows)
    leading = [[False] * count, ["t"] * count, [0] * count, [*range(count)], [None] * count]
    arrays = [pa.array(c, kind) for c, kind in zip(leading, LEADING.types, strict=True)]
    own = [
        pa.array([row[place] for row in rows], kind)
        for place, kind in (
            *((4, pa.string()), (2, pa.string()), (0, pa.string())),
            *((1, pa.int32()), (3, pa.int32())),
        )
    ]
    return pa.RecordBatch.from_arrays([*arrays, *own], names=[*LEADING.names, KEPT, *SHAPE])


@pytest.fixture(params=["sqlite", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "sqlite":
        return Target(tmp_path / "rows.db")
    return Target(request.getfixturevalue("postgres"))


def test_a_value_that_a_row_lacks_is_that_of_the_row_before(target: Target) -> None:
    target.take(0, ("eu", 1, "long", 1, None), ("us", 1, None, 2, None), ("us", 2, "x", 3, None))
    target.take(
        1, ("eu", 1, None, 5, "1000"), ("us", 1, "given", None, "0001"), ("us", 2, None, None, None)
    )
    assert target.rows() == [
        ("eu", 1, "long", 5),
        ("us", 1, "given", 2),
        ("us", 2, None, None),
    ]


def test_a_row_that_lacks_a_value_and_replaces_none_is_refused(target: Target) -> None:
    target.take(0, ("eu", 1, "long", 1, None))
    rows: list[Row] = [("eu", 1, None, 2, "1000"), ("us", 1, None, 3, "1000")]
    with pytest.raises(InvalidInputError, match=r"(?s)offset 1.*lacks a large value"):
        target.take(1, *rows)
    assert target.rows() == [("eu", 1, "long", 1)]
    target.take(1, *rows, rule="skip")
    assert target.rows() == [("eu", 1, "long", 2)]
    assert target.left_out == [1]


def test_replaced_rows_do_not_count_as_rows_before(target: Target) -> None:
    target.take(0, ("eu", 1, "long", 1, None))
    with pytest.raises(InvalidInputError, match="lacks a large value"):
        target.take(0, ("eu", 1, None, 2, "1000"), query_id="new", is_replacing=True)
    assert target.rows() == [("eu", 1, "long", 1)]


def test_a_row_that_the_table_refuses_is_named_and_the_others_keep_their_values(
    target: Target,
) -> None:
    target.take(0, ("eu", 1, "long", 1, None), ("us", 1, "us", 1, None))
    unique = "CREATE UNIQUE INDEX one ON notes (n)"
    (ask_sqlite if isinstance(target.database, Path) else ask_postgres)(
        target.database,  # type: ignore[arg-type]  # each asks its own
        unique.replace("(n)", "((n / 2)) WHERE n > 5"),
    )
    clash: list[Row] = [("eu", 1, None, 6, "1000"), ("us", 1, None, 7, "1000")]
    with pytest.raises(InvalidInputError, match="t-0 offset 1"):
        target.take(1, *clash)
