"""SQLiteUpsert in a query that is started again and again: keys, bad records, new columns."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kafkalog.sink.upsert import SQLiteUpsert
from tests.spark.sink.test_spark_postgres_upsert import Follower
from tests.spark.sink.test_spark_writes import error_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def follower(spark: Any, tmp_path: Path) -> Follower:
    return Follower(spark, tmp_path)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "follow.db"


def query(database: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(statement).fetchall()


def key(region: str, number: int) -> str:
    return json.dumps({"region": region, "id": number})


def test_records_that_do_not_fit_become_dead_letters_and_the_others_rows(
    follower: Follower, database: Path
) -> None:
    query(
        database,
        "CREATE TABLE orders (region TEXT, id INTEGER, n INTEGER CHECK (n < 100), "
        "UNIQUE (id, region))",
    )

    def run() -> SQLiteUpsert:
        """Let a new upsert go on, as after a restart."""
        upsert = SQLiteUpsert(
            database,
            "orders",
            schema="region string, id int, n int",
            key=["region", "id"],
            on_bad_record="deadletter:bad",
            path=follower.path,
        )
        follower.run(upsert)
        return upsert

    follower.append(**{key("eu", 1): {"n": 1}, key("eu", 2): {"n": 2}, key("us", 1): {"n": 100}})
    run()
    follower.append(**{key("eu", 1): {"n": 101}, key("eu", 2): None, "no document": {"n": 3}})
    follower.append(**{key("us", 1): {"n": 4}, key("us", 2): {"n": 5}})
    follower.append(**{key("us", 1): {"n": 105}, key("us", 2): {"n": 6}})
    run()
    (position,) = run().positions().values()
    found = query(database, "SELECT region, id, n FROM orders ORDER BY region, id")
    assert found == [("eu", 1, 1), ("us", 1, 4), ("us", 2, 6)]
    assert (position.bad_records, position.end_offsets) == (4, follower.ends())
    letters = sorted(follower.letters("bad"))
    assert [(k, v) for k, v, _ in letters] == sorted(
        [
            (key("us", 1).encode(), b'{"n": 100}'),
            (b"no document", b'{"n": 3}'),
            (key("eu", 1).encode(), b'{"n": 101}'),
            (key("us", 1).encode(), b'{"n": 105}'),
        ]
    )
    reasons = [reason.partition(":")[0] for k, _, reason in letters if k != b"no document"]
    assert reasons == ["CHECK constraint failed"] * 3


def test_a_restored_checkpoint_neither_loses_nor_repeats_dead_letters(
    follower: Follower, database: Path, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"

    def run(**more: Any) -> int:
        upsert = SQLiteUpsert(
            database,
            "orders",
            schema="n int",
            on_bad_record="deadletter:bad",
            path=follower.path,
            **more,
        )
        follower.run(upsert)
        [position] = upsert.positions().values()
        return position.bad_records

    follower.append(a={"n": 1}, b="bad")
    assert run() == 1
    shutil.copytree(follower.checkpoint, backup)
    follower.append(c="worse")
    assert run() == 2
    shutil.rmtree(follower.checkpoint)
    shutil.copytree(backup, follower.checkpoint)
    follower.append(d="late")
    assert run() == 3  # the last micro-batch comes again and reaches further
    follower.append(e="later")
    assert run() == 4
    shutil.rmtree(follower.checkpoint)
    shutil.copytree(backup, follower.checkpoint)
    follower.append(f="last")
    assert run(reset_writer=True) == 5
    values = [value for _, value, _ in follower.letters("bad")]
    assert values == [b"bad", b"worse", b"late", b"later", b"last"]
    assert query(database, "SELECT CAST(key AS TEXT), n FROM orders") == [("a", 1)]


def test_a_new_column_fails_the_query_until_it_may_be_added(
    follower: Follower, database: Path
) -> None:
    def run(schema: str, **more: str) -> None:
        follower.run(SQLiteUpsert(database, "stock", schema=schema, key_type="string", **more))

    follower.append(a={"n": 1})
    run("n int")
    follower.append(b={"n": 2, "shelf": "left"})
    words = error_of(lambda: run("n int, shelf string"))
    assert 'Run ALTER TABLE "stock" ADD COLUMN "shelf" TEXT' in words
    assert query(database, "SELECT * FROM stock") == [("a", 1)]
    run("n int, shelf string", on_new_column="add")
    follower.append(c={"n": 3})
    run("n int, shelf string")
    found = query(database, "SELECT * FROM stock ORDER BY key")
    assert found == [("a", 1, None), ("b", 2, "left"), ("c", 3, None)]
