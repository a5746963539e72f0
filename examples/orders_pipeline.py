"""Orders: two topics with JSON become tables of SQLite, PostgreSQL and Delta.

`python -m examples.orders_pipeline [--path DIR] [--postgres CONNINFO] [--delta]`

An order has a key of two columns, region and id. The first release of the shop writes an item and a
number; the second one writes a note too. A broken order goes to a dead-letter topic. One order is
cancelled. Kill the program at any moment and run it again with the same DIR: each table ends equal
to the log.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kafkalog
from examples.shop import start_spark
from kafkalog.sink.upsert import DeltaUpsert, PostgresUpsert, SQLiteUpsert, Upsert

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["main", "run"]

ORDERS: Final = "orders"
CUSTOMERS: Final = "customers"
BAD: Final = "orders-bad"
FIRST: Final = "region string, id int, item string, n int"
SECOND: Final = f"{FIRST}, note string"

Change = tuple[dict[str, Any] | str, dict[str, Any] | str | None]
"""Key and value of a record; None deletes."""

FIRST_ORDERS: Final[list[Change]] = [
    ({"region": "eu", "id": 1}, {"item": "fig", "n": 2}),
    ({"region": "us", "id": 1}, {"item": "nut", "n": 5}),
    ({"region": "eu", "id": 2}, {"item": "plum", "n": 1}),
]
LATER_ORDERS: Final[list[Change]] = [
    ({"region": "eu", "id": 1}, {"item": "fig", "n": 3, "note": "ripe"}),
    ({"region": "us", "id": 1}, "no order"),
    ({"region": "eu", "id": 2}, None),
    ({"region": "us", "id": 2}, {"item": "pear", "n": 4}),
]
PEOPLE: Final[list[Change]] = [
    ("ann", {"city": "Oslo"}),
    ("bob", {"city": "Rome"}),
]


def run(spark: SparkSession, path: Path, conninfo: str = "", *, has_delta: bool = False) -> None:
    """Follow both topics into tables, before and after the second release of the shop."""
    releases = list(enumerate([(FIRST_ORDERS, FIRST), (LATER_ORDERS, SECOND)]))
    for release, (orders, schema) in releases[is_second(path) :]:
        write(spark, path, ORDERS, release, orders)
        write(spark, path, CUSTOMERS, release, PEOPLE)
        for name, upsert, arguments in targets(path, conninfo, has_delta=has_delta):
            of_orders = upsert(
                *arguments(ORDERS),
                schema=schema,
                key=["region", "id"],
                on_new_column="add",
                on_bad_record=f"deadletter:{BAD}-{name}",
            )
            of_customers = upsert(*arguments(CUSTOMERS), schema="city string", key_type="string")
            follow(spark, path, name, ORDERS, of_orders)
            follow(spark, path, name, CUSTOMERS, of_customers)


def is_second(path: Path) -> bool:
    """Return whether the second release has written; the first one would drop its notes."""
    with kafkalog.open(path / "log") as log:
        if ORDERS not in log.topics():
            return False
        return sum(end for _, end in log.offsets(ORDERS).values()) > len(FIRST_ORDERS)


def targets(path: Path, conninfo: str, *, has_delta: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield each database: a name, its upsert, and the arguments that make a table's address."""
    yield "sqlite", SQLiteUpsert, lambda table: (path / "shop.db", table)
    if conninfo:
        yield "postgres", PostgresUpsert, lambda table: (conninfo, table)
    if has_delta:
        yield "delta", DeltaUpsert, lambda table: (str(path / "delta" / table),)


def write(
    spark: SparkSession, path: Path, topic: str, number: int, changes: Sequence[Change]
) -> None:
    """Write changes once: the log skips a write that it has."""
    rows = [(_text(key), None if value is None else _text(value)) for key, value in changes]
    (
        spark.createDataFrame(rows, "key string, value string")
        .coalesce(1)
        .write.format("kafkalog")
        .mode("append")
        .options(path=str(path / "log"), topic=topic, numPartitions=2)
        .option("topic.cleanup.policy", "compact")
        .options(txnAppId="shop", txnVersion=number)
        .save()
    )


def _text(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def follow(spark: SparkSession, path: Path, name: str, topic: str, target: Upsert) -> None:
    """Bring a table to the end of its topic."""
    view = kafkalog.KTableView(
        spark,
        path / "log",
        topic,
        target,
        checkpoint=path / "views" / f"{name}-{topic}",
        trigger={"availableNow": True},
    )
    try:
        view.start().awaitTermination()
        print(f"{name:8} {topic:9} bad records {view.progress().bad_records}")
    finally:
        view.stop()


def rows_of_sqlite(path: Path) -> list[tuple[Any, ...]]:
    """Return the orders in SQLite."""
    with closing(sqlite3.connect(path / "shop.db")) as connection:
        return connection.execute(
            f"SELECT region, id, item, n, note FROM {ORDERS} ORDER BY region, id"
        ).fetchall()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example in a temporary directory, or in the one that is named; print its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, metavar="DIR", help="keep log and tables here")
    parser.add_argument("--postgres", default="", metavar="CONNINFO", help="libpq's connection")
    parser.add_argument("--delta", action="store_true", help="the session has Delta Lake")
    given = parser.parse_args(arguments)
    spark = start_spark()
    with tempfile.TemporaryDirectory(prefix="kafkalog-orders-") as scratch:
        path = given.path.absolute() if given.path else Path(scratch)
        run(spark, path, given.postgres, has_delta=given.delta)
        for row in rows_of_sqlite(path):
            print(*row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
