"""CDC: Debezium's change events become a compacted topic of rows, and that a database table.

`python -m examples.cdc_upserts [--path DIR]`

An event holds a row before and after a change (`before`, `after`) and the kind of the change
(`op`): created (c), updated (u), deleted (d), or read by a snapshot (r). Its key is the primary
key. One query turns events into the latest state of each row: an upsert, or a tombstone. A view
follows that topic into SQLite; PostgreSQL or a Delta table would work too.

Nothing is shuffled between the two topics, so the events of a key keep their order.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kafkalog
from examples.shop import main
from kafkalog.sink.upsert import SQLiteUpsert

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kafkalog.log import KafkaLog

__all__ = ["keyed_changes", "run"]

EVENTS: Final = "shop.public.customers"
"""Debezium's name: connector, schema, table."""
CUSTOMERS: Final = "customers"
FIELDS: Final = "id int, name string, city string"
SECONDS: Final = 120

Row = dict[str, Any]
Event = tuple[str, str | None]
"""Key and value of a record."""


def run(spark: SparkSession, path: Path) -> list[str]:
    """Follow the changes of a table; return its first and last rows in SQLite."""
    with kafkalog.open(path / "log") as log:
        log.create_topic(EVENTS, partitions=2, config={"cleanup.policy": "delete"})
        log.create_topic(CUSTOMERS, partitions=2, config={"cleanup.policy": "compact"})
        view = kafkalog.KTableView(
            spark,
            path / "log",
            CUSTOMERS,
            SQLiteUpsert(path / "shop.db", CUSTOMERS, schema=FIELDS, key_type="string"),
            checkpoint=path / "view",
        )
        capture(log, snapshot(("ann", "Oslo"), ("bob", "Rome"), ("cem", "Oslo")))
        follow(spark, path).awaitTermination()
        view.start()
        try:
            view.wait_until(timeout_s=SECONDS)
            lines = ["at first", *table(path / "shop.db")]
            capture(log, later_changes())
            follow(spark, path).awaitTermination()
            view.wait_until(timeout_s=SECONDS)
        finally:
            view.stop()
    return [*lines, "at last", *table(path / "shop.db")]


def follow(spark: SparkSession, path: Path) -> StreamingQuery:
    """Start the query that turns events into rows; it continues from its checkpoint."""
    events = (
        spark.readStream.format("kafkalog")
        .option("path", str(path / "log"))
        .option("subscribe", EVENTS)
        .option("startingOffsets", "earliest")
        .load()
    )
    return (
        keyed_changes(events)
        .writeStream.format("kafkalog")
        .option("path", str(path / "log"))
        .option("topic", CUSTOMERS)
        .option("checkpointLocation", str(path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


def keyed_changes(events: DataFrame) -> DataFrame:
    """Return key and value of each change: the row as JSON, or null if it is deleted.

    `events` are records of a source. Debezium's JSON converter may wrap them with their schema:
    {"schema": ..., "payload": ...}. A document counts as wrapped if it has exactly these two
    members, and the schema is null or has a type; a primary key may therefore have a column named
    `schema`. Debezium's tombstone after a deletion stays a tombstone. An event of another kind,
    such as a TRUNCATE, which has no key, fails the query: skipping it would make the table wrong.

    Spark's `get_json_object` parses and writes numbers: one with a point or an exponent becomes the
    nearest double, and a long decimal loses digits. Set `decimal.handling.mode=string` in Debezium.
    """
    found = events.selectExpr(
        f"{_payload('key')} AS key",
        f"{_payload('value')} AS event",
        "concat(topic, '-', partition, ' offset ', offset) AS place",
    ).selectExpr(
        "*", "get_json_object(event, '$.op') AS op", "get_json_object(event, '$.after') AS after"
    )
    return found.selectExpr(
        "key",
        "CASE WHEN event IS NULL OR op = 'd' THEN NULL "
        "WHEN op IN ('c', 'u', 'r') AND after IS NOT NULL THEN after "
        "ELSE raise_error(concat(place, ': no event of a row: ', left(event, 200))) END AS value",
    )


def _payload(column: str) -> str:
    text = f"string({column})"
    schema, kind, payload = (
        f"get_json_object({text}, '$.{path}')" for path in ("schema", "schema.type", "payload")
    )
    has_both = f"array_sort(json_object_keys({text})) = array('payload', 'schema')"
    is_envelope = f"{has_both} AND ({schema} IS NULL OR {kind} IS NOT NULL)"
    return f"IF({is_envelope}, {payload}, {text})"


def table(database: Path) -> list[str]:
    """Return the rows of the table."""
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(f"SELECT id, name, city FROM {CUSTOMERS} ORDER BY id").fetchall()
    return [" ".join(map(str, row)) for row in rows]


# --- Debezium's events ---------------------------------------------------------------------------


def capture(log: KafkaLog, events: Iterable[Event]) -> None:
    """Append events to their topic."""
    log.append(EVENTS, list(events))


def snapshot(*customers: tuple[str, str]) -> Iterable[Event]:
    """Yield the events of the rows that exist when the capture begins."""
    for number, (name, city) in enumerate(customers, 1):
        yield event("r", None, customer(number, name, city))


def later_changes() -> Iterable[Event]:
    """Ann moves twice, Bob leaves, Cem gets another primary key, Dag comes."""
    ann = [customer(1, "ann", city) for city in ("Oslo", "Bern", "Kiel")]
    cem = customer(3, "cem", "Oslo")
    yield event("u", ann[0], ann[1])
    yield event("c", None, customer(4, "dag", "Rome"))
    yield from deletion(customer(2, "bob", "Rome"))
    yield event("u", ann[1], ann[2])
    yield from deletion(cem)
    yield event("c", None, {**cem, "id": 5})


def customer(number: int, name: str, city: str) -> Row:
    """Return a row."""
    return {"id": number, "name": name, "city": city}


def deletion(row: Row) -> Iterable[Event]:
    """Yield the event, and the tombstone that lets a compacted topic drop the key."""
    yield event("d", row, None)
    yield _key(row), None


def event(op: str, before: Row | None, after: Row | None) -> Event:
    """Return an event as JSON without its schema."""
    row = after or before
    assert row is not None
    told = {"before": before, "after": after, "source": {"table": CUSTOMERS}, "op": op}
    return _key(row), json.dumps(told)


def _key(row: Row) -> str:
    return json.dumps({"id": row["id"]})


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
