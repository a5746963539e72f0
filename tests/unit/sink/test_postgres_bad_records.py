"""Records that PostgreSQL refuses, and that PostgresUpsert leaves out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import Batch, Position, PostgresUpsert
from kafkalog.sink.upsert.bad_records import Refusal
from tests.postgres_server import query
from tests.unit.sink.postgres_rows import Apply, batch, driver_batch, table


class Skipping(PostgresUpsert):
    """An upsert that shows what it leaves out, instead of looking for it in Spark's rows."""

    def __init__(self, conninfo: str) -> None:
        super().__init__(conninfo, "stock", select=["key", "value"], on_bad_record="skip")
        self.left_out: list[list[Refusal]] = []

    def leave_out_refused(self, df: Any, batch: Batch, refused: Sequence[Refusal]) -> None:
        self.left_out.append(list(refused))
        assert self.positions().get(batch.query_id) != batch.position(refused=len(refused))


def offsets(upsert: Skipping) -> list[int]:
    (refused,) = upsert.left_out
    assert {(each.topic, each.partition) for each in refused} == {("t", 0)}
    return sorted(each.offset for each in refused)


def numbers(count: int, **odd: str | None) -> list[tuple[str, str | None]]:
    return [(f"k{n}", odd.get(f"k{n}", str(n))) for n in range(count)]


REFUSING = [
    ("key text PRIMARY KEY, value int", "many", 'column "value": invalid input syntax for type in'),
    ("key text PRIMARY KEY, value int", "9999999999", 'column "value": value "9999999999" is out'),
    ("key text PRIMARY KEY, value varchar(4)", "five!", 'column "value": value too long for type'),
    ("key text PRIMARY KEY, value text CHECK (value <> 'x')", "x", "violates check constraint"),
    (
        "key text PRIMARY KEY, value text UNIQUE DEFERRABLE INITIALLY DEFERRED",
        "1",
        "duplicate key value violates unique constraint",
    ),
]


@pytest.mark.parametrize(("declared", "value", "reason"), REFUSING)
def test_all_refused_records_are_left_out_and_the_others_are_stored(
    postgres: str, apply: Apply, declared: str, value: str, reason: str
) -> None:
    query(postgres, f"CREATE TABLE stock ({declared})")
    upsert = Skipping(postgres)
    assert apply(upsert, batch(0), driver_batch(numbers(40, k7=value, k8=value, k31=value)))
    assert offsets(upsert) == [7, 8, 31]
    assert all(reason in each.reason for each in upsert.left_out[0])
    kept = sorted((key, v) for key, v in numbers(40) if key not in {"k7", "k8", "k31"})
    assert table(postgres, "key, value::text") == kept
    assert upsert.positions()["q"].bad_records == 3


def test_text_that_cannot_be_copied_is_left_out(postgres: str, apply: Apply) -> None:
    rows = driver_batch(numbers(9))
    binary = pa.array([b"\xff" if n in {2, 5} else b"v" for n in range(9)], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 9, binary.buffers())
    upsert = Skipping(postgres)
    assert apply(upsert, batch(0), rows.set_column(6, "value", broken))
    assert offsets(upsert) == [2, 5]
    assert {each.reason.partition(":")[0] for each in upsert.left_out[0]} == {'column "value"'}
    assert [key for key, _ in table(postgres)] == ["k0", "k1", "k3", "k4", "k6", "k7", "k8"]


def test_an_earlier_record_of_a_key_counts_if_the_latest_is_left_out(
    postgres: str, apply: Apply
) -> None:
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value text CHECK (value < 'x'))")
    upsert = Skipping(postgres)
    rows = [("a", "1"), ("a", "2"), ("a", "x3"), ("a", "x4"), ("b", "x5"), ("c", None), ("c", "y")]
    assert apply(upsert, batch(0), driver_batch(rows))
    assert table(postgres) == [("a", "2")]
    assert offsets(upsert) == [2, 3, 4, 6]


def test_the_count_of_bad_records_goes_on_over_restarts(postgres: str, apply: Apply) -> None:
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value int)")
    count = 0
    for number, bad in enumerate([1, 0, 2]):
        upsert = Skipping(postgres)
        rows = [*[("a", "none")] * bad, ("b", str(number))]
        doing = batch(number, bad_records=count)
        assert apply(upsert, doing, driver_batch(rows, offset=10 * number))
        count += bad
        assert Skipping(postgres).positions() == {
            "q": Position(number, doing.end_offsets, doing.now_ms, count)
        }
    repeated = Skipping(postgres)
    assert not apply(repeated, batch(2, bad_records=1), driver_batch([("a", "none")], offset=20))
    assert repeated.positions()["q"].bad_records == 3
    assert table(postgres) == [("b", 2)]


def test_the_server_waits_for_the_dead_letters(
    postgres: str, apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((schema,),) = query(postgres, "SELECT current_schema()")
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value int)")
    settings = f"-c search_path={schema} -c idle_in_transaction_session_timeout=100"
    upsert = Skipping(make_conninfo(postgres, options=settings))
    monkeypatch.setattr(upsert, "leave_out_refused", lambda *_: time.sleep(0.5))
    assert apply(upsert, batch(0), driver_batch([("a", "x"), ("b", "1")]))
    assert table(postgres) == [("b", 1)]


def test_a_micro_batch_of_refused_records_alone_advances_the_position(
    postgres: str, apply: Apply
) -> None:
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value int)")
    upsert = Skipping(postgres)
    assert apply(upsert, batch(0), driver_batch([("a", "x"), ("b", "y")]))
    assert offsets(upsert) == [0, 1]
    assert table(postgres) == []
    assert upsert.positions() == {"q": batch(0).position(refused=2)}


def test_a_deletion_that_the_table_refuses_is_left_out(postgres: str, apply: Apply) -> None:
    apply(Skipping(postgres), batch(0), driver_batch([("a", "1"), ("b", "1"), ("c", "1")]))
    query(postgres, "CREATE TABLE sold (key text REFERENCES stock)")
    query(postgres, "INSERT INTO sold VALUES ('b')")
    upsert = Skipping(postgres)
    assert apply(upsert, batch(1), driver_batch([("a", None), ("b", None), ("c", "2")], offset=7))
    assert offsets(upsert) == [8]
    assert table(postgres) == [("b", "1"), ("c", "2")]


def test_a_row_that_no_record_keeps_and_nobody_may_delete_fails_a_rebuild(
    postgres: str, apply: Apply
) -> None:
    apply(Skipping(postgres), batch(0), driver_batch([("a", "1"), ("b", "1")]))
    query(postgres, "CREATE TABLE sold (key text REFERENCES stock)")
    query(postgres, "INSERT INTO sold VALUES ('b')")
    upsert, again = Skipping(postgres), batch(0, "new", is_replacing=True)
    with pytest.raises(InvalidInputError, match="a row that no record of the micro-batch keeps"):
        apply(upsert, again, driver_batch([("a", "2")]))
    assert table(postgres) == [("a", "1"), ("b", "1")]


def test_positions_without_a_count_of_bad_records_are_read_and_get_one(
    postgres: str, apply: Apply
) -> None:
    apply(Skipping(postgres), batch(0), driver_batch([("a", "1")]))
    query(postgres, "ALTER TABLE kafkalog_positions DROP COLUMN bad_records")
    assert Skipping(postgres).positions() == {"q": batch(0).position()}
    query(postgres, "ALTER TABLE stock ADD CHECK (value <> 'x')")
    assert apply(Skipping(postgres), batch(1), driver_batch([("a", "x"), ("b", "2")], offset=1))
    assert Skipping(postgres).positions() == {"q": batch(1).position(refused=1)}
