"""What an event does not give, the table keeps; `test_framed_values` runs it.

Debezium puts a placeholder for PostgreSQL's large values that did not change.
"""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.sink.query import MicroBatch
from kafkalog.sink.upsert import DeltaUpsert, PostgresUpsert, SQLiteUpsert, Upsert
from tests.postgres_server import postgres, postgres_server, query  # noqa: F401 - fixtures
from tests.spark.values.values_session import spark  # noqa: F401

TARGETS = ("sqlite", "postgres", "delta")
HERE = "__debezium_unavailable_value"
ROW = (
    "n int, note string, tags array<string>, at timestamp_ntz COMMENT 'io.debezium.time.Timestamp'"
)
COLUMNS = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
)


def change(key: str, n: int, note: str | None, tags: list[str], op: str = "u") -> Any:
    row = {"n": n, "note": note, "tags": tags, "at": n * 1000}
    return named(key), json.dumps({"op": op, "after": row}).encode()


def named(key: str) -> bytes:
    return json.dumps({"id": key}).encode()


class Follower:
    """An upsert of change events into one target, and the offsets that it has had."""

    def __init__(
        self,
        session: Any,
        target: str,
        directory: Path,
        conninfo: str,
        **more: Any,
    ) -> None:
        given = {"json": ROW, "key_json": "id string", "envelope": "debezium", "name": "q", **more}
        self._spark, self._target, self._directory = session, target, directory
        self._conninfo, self._offset, self._batch = conninfo, 0, 0
        self.upsert: Upsert
        if target == "sqlite":
            self.upsert = SQLiteUpsert(directory / "rows.db", "notes", **given)
        elif target == "postgres":
            self.upsert = PostgresUpsert(conninfo, "notes", **given)
        else:
            self.upsert = DeltaUpsert(directory / "delta", **given)

    def take(self, *records: tuple[bytes, bytes | None]) -> None:
        """Apply a micro-batch."""
        first = self._offset
        rows = [
            (bytearray(key), None if value is None else bytearray(value), "t", 0, offset, None)
            for offset, (key, value) in enumerate(records, first)
        ]
        frame = self._spark.createDataFrame(rows, COLUMNS)
        ends = {"t": {0: first + len(records)}}
        self.upsert.take(
            frame, self._batch, MicroBatch("q", self._batch, str(self._directory)), ends
        )
        self._offset, self._batch = first + len(records), self._batch + 1

    def rows(self) -> dict[str, Any]:
        """Return (n, note, tags, seconds) by key."""
        columns = 'SELECT id, n, note, tags, "at" FROM notes'
        if self._target == "postgres":
            found = query(self._conninfo, columns)
        elif self._target == "delta":
            table = self._spark.table(f"delta.`{self._directory}/delta`")
            found = table.select("id", "n", "note", "tags", "at").collect()
        else:
            with closing(sqlite3.connect(self._directory / "rows.db")) as connection:
                found = [
                    (key, n, note, None if tags is None else json.loads(tags), at)
                    for key, n, note, tags, at in connection.execute(columns)
                ]
        return {key: (n, note, tags, _seconds(at)) for key, n, note, tags, at in found}

    def left_out(self) -> int:
        [position] = self.upsert.positions().values()
        return position.bad_records


def _seconds(moment: Any) -> int | None:
    if isinstance(moment, str):
        moment = dt.datetime.fromisoformat(moment)
    return None if moment is None else round((moment - dt.datetime(1970, 1, 1)).total_seconds())


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_keeps_what_an_event_does_not_give(
    spark: Any,  # noqa: F811
    postgres: str,  # noqa: F811
    tmp_path: Path,
    target: str,
) -> None:
    follower = Follower(spark, target, tmp_path, postgres, on_bad_record="skip")
    follower.take(
        change("a", 1, "A", ["x"], "c"),
        change("b", 1, "B", ["y"], "r"),
        change("b", 2, HERE, ["z"]),
        change("b", 3, HERE, [HERE]),
        change("gone", 1, "G", [], "c"),
        change("null", 1, None, ["w"], "c"),
    )
    assert follower.rows()["b"] == (3, "B", ["z"], 3)
    follower.take(
        change("a", 4, HERE, [HERE]),
        change("b", 5, HERE, ["q"]),
        change("b", 6, "C", [HERE]),
        change("b", 7, HERE, [HERE]),
        change("null", 2, HERE, [HERE]),
        (named("gone"), None),
        change("gone", 2, HERE, []),
    )
    assert follower.rows() == {
        "a": (4, "A", ["x"], 4),
        "b": (7, "C", ["q"], 7),
        "null": (2, None, ["w"], 2),
    }
    assert follower.left_out() == 1


@pytest.mark.parametrize("target", TARGETS)
def test_an_event_that_lacks_a_value_without_a_row_before_is_bad(
    spark: Any,  # noqa: F811
    postgres: str,  # noqa: F811
    tmp_path: Path,
    target: str,
) -> None:
    follower = Follower(spark, target, tmp_path, postgres)
    with pytest.raises(InvalidInputError, match="lacks a large value") as failed:
        follower.take(change("e", 1, "E", [], "c"), change("d", 1, HERE, ["x"]))
    assert "t-0 offset 1" in str(failed.value)
    if target == "delta":
        return
    skipping = Follower(spark, target, tmp_path, postgres, on_bad_record="skip")
    skipping.take(change("e", 1, "E", [], "c"), change("d", 1, HERE, ["x"]))
    assert skipping.rows() == {"e": (1, "E", [], 1)}
    assert skipping.left_out() == 1


@pytest.mark.parametrize("target", TARGETS)
def test_replaced_rows_do_not_count_as_rows_before(
    spark: Any,  # noqa: F811
    postgres: str,  # noqa: F811
    tmp_path: Path,
    target: str,
) -> None:
    Follower(spark, target, tmp_path, postgres).take(change("a", 1, "A", [], "c"))
    again = Follower(spark, target, tmp_path, postgres, replace_first=True)
    again.upsert.name = "other"
    batch = MicroBatch("other", 0, "another run")
    key, value = change("a", 2, HERE, [])
    frame = spark.createDataFrame([(bytearray(key), bytearray(value), "t", 0, 1, None)], COLUMNS)
    with pytest.raises(InvalidInputError, match="lacks a large value"):
        again.upsert.take(frame, 0, batch, {"t": {0: 2}})
    assert again.rows() == {"a": (1, "A", [], 1)}
