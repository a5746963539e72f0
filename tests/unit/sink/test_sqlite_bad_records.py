"""Records that SQLite refuses, and that SQLiteUpsert leaves out."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import Batch, Position, SQLiteUpsert
from kafkalog.sink.upsert.bad_records import Refusal
from kafkalog.sink.upsert.sqlite.merge import SQLiteMerge
from tests.unit.sink.sqlite_rows import LEADING, batch, query

NAMES, KINDS = ["key", "value"], ["TEXT", "TEXT"]
DF: Any = object()
"""The records of a micro-batch, which only `leave_out_refused` uses."""
Record = tuple[int, int, int | None, str, str | None]
"""(partition, offset, timestamp, key, value); a deletion has no value."""


class Skipping(SQLiteUpsert):
    """An upsert that shows what it leaves out, instead of looking for it in Spark's rows."""

    def __init__(self, database: Path) -> None:
        super().__init__(database, "stock", on_bad_record="skip")
        self.left_out: list[list[Refusal]] = []

    def leave_out_refused(self, df: Any, batch: Batch, refused: Sequence[Refusal]) -> None:
        self.left_out.append(list(refused))
        assert self.positions().get(batch.query_id) != batch.position(refused=len(refused))

    def take_rows(self, doing: Batch, *records: Record) -> bool:
        return self.apply(doing, NAMES, KINDS, [rows_of(*records)], df=DF)


def rows_of(*records: Record) -> pa.RecordBatch:
    columns = [
        [value is None for *_, value in records],
        ["t"] * len(records),
        *map(list, list(zip(*records, strict=True))[:3]),
    ]
    leading = [pa.array(c, kind) for c, kind in zip(columns, LEADING.values(), strict=True)]
    own = [pa.array([r[place] for r in records], pa.string()) for place in (3, 4)]
    return pa.RecordBatch.from_arrays([*leading, *own], names=[*LEADING, *NAMES])


def in_order(*rows: tuple[str, str | None], offset: int = 0) -> list[Record]:
    """Return records of one partition."""
    return [(0, offset + n, None, key, value) for n, (key, value) in enumerate(rows)]


def offsets(upsert: Skipping) -> list[int]:
    (refused,) = upsert.left_out
    assert {(each.topic, each.partition) for each in refused} == {("t", 0)}
    return sorted(each.offset for each in refused)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "follow.db"


REFUSING = [
    ("key TEXT PRIMARY KEY, value TEXT CHECK (value <> 'x')", "x", "CHECK constraint failed"),
    ("key TEXT PRIMARY KEY, value TEXT UNIQUE", "1", "UNIQUE constraint failed: stock.value"),
    ("key TEXT PRIMARY KEY CHECK (value <> 'x'), value TEXT NOT NULL", "x", "CHECK constraint"),
]


@pytest.mark.parametrize("is_replacing", [False, True])
@pytest.mark.parametrize(("declared", "value", "reason"), REFUSING)
def test_all_refused_records_are_left_out_and_the_others_are_stored(
    database: Path, declared: str, value: str, reason: str, is_replacing: bool
) -> None:
    query(database, f"CREATE TABLE stock ({declared})")
    upsert = Skipping(database)
    rows = [(f"k{n:02}", value if n in {7, 8, 31} else str(n)) for n in range(40)]
    assert upsert.take_rows(batch(0, is_replacing=is_replacing), *in_order(*rows))
    assert offsets(upsert) == [7, 8, 31]
    assert all(reason in each.reason for each in upsert.left_out[0])
    kept = [row for n, row in enumerate(rows) if n not in {7, 8, 31}]
    assert query(database, "SELECT key, value FROM stock ORDER BY key") == kept
    assert upsert.positions()["q"].bad_records == 3


@pytest.mark.parametrize("rule", ["fail", "skip"])
def test_a_column_that_no_row_can_fill_is_a_fault_of_the_table(database: Path, rule: str) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT, extra TEXT NOT NULL)")
    upsert = SQLiteUpsert(database, "stock", on_bad_record=rule)
    rows = rows_of(*in_order(("a", "1")))
    with pytest.raises(InvalidInputError, match="column extra is NOT NULL without a default, and"):
        upsert.apply(batch(0), NAMES, KINDS, [rows], df=DF)
    assert upsert.positions() == {}


@pytest.mark.parametrize("other", ["n INTEGER PRIMARY KEY NOT NULL", "n NOT NULL DEFAULT 7", "n"])
def test_columns_that_sqlite_fills_need_no_value(database: Path, other: str) -> None:
    query(database, f"CREATE TABLE stock ({other}, key TEXT UNIQUE, value TEXT)")
    assert Skipping(database).take_rows(batch(0), *in_order(("a", "1")))
    assert query(database, "SELECT key FROM stock") == [("a",)]


def test_text_that_is_not_utf8_is_left_out(database: Path) -> None:
    rows = rows_of(*in_order(*[(f"k{n}", "v") for n in range(9)]))
    binary = pa.array([b"\xff" if n in {2, 5} else b"v" for n in range(9)], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 9, binary.buffers())
    upsert = Skipping(database)
    rows = rows.set_column(6, "value", broken)
    assert upsert.apply(batch(0), NAMES, KINDS, [rows], df=DF)
    assert offsets(upsert) == [2, 5]
    assert {each.reason for each in upsert.left_out[0]} == {"column value: text that is not UTF-8"}
    keys = [key for (key,) in query(database, "SELECT key FROM stock")]
    assert keys == ["k0", "k1", "k3", "k4", "k6", "k7", "k8"]


def test_an_earlier_record_of_a_key_counts_if_the_latest_is_left_out(database: Path) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value < 'x'))")
    upsert = Skipping(database)
    upsert.take_rows(batch(0), *in_order(("b", "1"), ("d", "1")))
    rows = [("a", "1"), ("a", "2"), ("a", "x3"), ("a", "x4"), ("b", "x5"), ("c", None), ("c", "y")]
    assert upsert.take_rows(batch(1), *in_order(*rows, ("d", None), ("d", "x8"), offset=2))
    assert query(database, "SELECT * FROM stock ORDER BY key") == [("a", "2"), ("b", "1")]
    assert offsets(upsert) == [4, 5, 6, 8, 10]


@pytest.mark.parametrize(
    ("records", "latest"),
    [
        # Within a partition the higher offset is newer, whatever the timestamps say.
        ([(0, 1, 100, "a", "old"), (0, 2, 5, "a", "new")], "new"),
        ([(0, 2, None, "a", "new"), (0, 1, 100, "a", "old")], "new"),
        # Between partitions the timestamps of the two latest records count.
        ([(0, 1, 100, "a", "old"), (0, 2, 5, "a", "0"), (1, 7, 50, "a", "1")], "1"),
        ([(0, 1, 100, "a", "0"), (1, 7, 50, "a", "1")], "0"),
        ([(0, 9, None, "a", "0"), (1, 7, 50, "a", "1")], "1"),
        ([(0, 9, 50, "a", "0"), (1, 7, 50, "a", "1")], "1"),
    ],
)
def test_the_latest_of_all_records_is_chosen_as_spark_would(
    database: Path, records: list[Record], latest: str
) -> None:
    assert Skipping(database).take_rows(batch(0), *records)
    assert query(database, "SELECT value FROM stock") == [(latest,)]


def test_all_refused_records_of_a_key_are_found_in_one_round(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[None] = []
    choose = SQLiteMerge._choose
    monkeypatch.setattr(SQLiteMerge, "_choose", lambda merge: (rounds.append(None), choose(merge)))
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value < 'x'))")
    upsert = Skipping(database)
    bad = [(key, f"x{n}") for n in range(30) for key in "abc"]
    assert upsert.take_rows(batch(0), *in_order(("b", "1"), ("a", "x"), ("b", "2"), *bad))
    assert query(database, "SELECT * FROM stock") == [("b", "2")]
    assert offsets(upsert) == [1, *range(3, 93)]
    assert len(rounds) == 2


def test_the_count_of_bad_records_goes_on_over_restarts(database: Path) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value <> 'x'))")
    count = 0
    for number, bad in enumerate([1, 0, 2]):
        rows = in_order(*[("a", "x")] * bad, ("b", str(number)), offset=10 * number)
        doing = batch(number, bad_records=count)
        assert Skipping(database).take_rows(doing, *rows)
        count += bad
        assert Skipping(database).positions() == {
            "q": Position(number, doing.end_offsets, doing.now_ms, count)
        }
    repeated = Skipping(database)
    assert not repeated.take_rows(batch(2, bad_records=1), *in_order(("a", "x"), offset=20))
    assert repeated.positions()["q"].bad_records == 3
    assert repeated.left_out == []
    assert query(database, "SELECT * FROM stock") == [("b", "2")]


def test_a_micro_batch_of_refused_records_alone_advances_the_position(database: Path) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value < 'x'))")
    upsert = Skipping(database)
    assert upsert.take_rows(batch(0), *in_order(("a", "x"), ("b", "y")))
    assert offsets(upsert) == [0, 1]
    assert query(database, "SELECT * FROM stock") == []
    assert upsert.positions() == {"q": batch(0).position(refused=2)}


def test_a_deletion_that_the_table_refuses_is_left_out(database: Path) -> None:
    Skipping(database).take_rows(batch(0), *in_order(("a", "1"), ("b", "1"), ("c", "1")))
    query(
        database,
        "CREATE TRIGGER kept BEFORE DELETE ON stock WHEN old.key = 'b' "
        "BEGIN SELECT RAISE(ABORT, 'b stays'); END",
    )
    upsert = Skipping(database)
    assert upsert.take_rows(batch(1), *in_order(("a", None), ("b", None), ("c", "2"), offset=7))
    assert offsets(upsert) == [8]
    assert query(database, "SELECT * FROM stock") == [("b", "1"), ("c", "2")]


def test_what_others_have_stays_with_a_row_whose_latest_record_is_left_out(
    database: Path,
) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value <> 'x'), n)")
    Skipping(database).take_rows(batch(0), *in_order(("a", "1"), ("b", "1")))
    query(database, "UPDATE stock SET n = 7")
    rows = in_order(("a", "2"), ("a", "x"), ("b", "x"), ("c", "3"))
    assert Skipping(database).take_rows(batch(0, "new", is_replacing=True), *rows)
    assert query(database, "SELECT * FROM stock ORDER BY key") == [("a", "2", 7), ("c", "3", None)]


def test_a_trigger_that_ends_the_transaction_fails_a_micro_batch_that_leaves_out_records(
    database: Path,
) -> None:
    Skipping(database).take_rows(batch(0), *in_order(("a", "1")))
    query(
        database,
        "CREATE TRIGGER ended BEFORE INSERT ON stock WHEN new.key = 'c' "
        "BEGIN SELECT RAISE(ROLLBACK, 'no c'); END",
    )
    upsert = Skipping(database)
    with pytest.raises(InvalidInputError, match="table stock: no c"):
        upsert.take_rows(batch(1), *in_order(("b", "1"), ("c", "1"), offset=1))
    assert query(database, "SELECT key FROM stock") == [("a",)]
    assert upsert.positions() == {"q": batch(0).position()}
    assert upsert.left_out == []


def test_nothing_is_stored_if_the_dead_letters_cannot_be_written(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value <> 'x'))")
    upsert = Skipping(database)
    monkeypatch.setattr(upsert, "leave_out_refused", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        upsert.take_rows(batch(0), *in_order(("a", "1"), ("b", "x")))
    assert query(database, "SELECT * FROM stock") == []
    assert upsert.positions() == {}


@pytest.mark.skipif(sqlite3.sqlite_version_info < (3, 35), reason="it cannot drop a column")
def test_positions_without_a_count_of_bad_records_are_read_and_get_one(database: Path) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value <> 'x'))")
    Skipping(database).take_rows(batch(0), *in_order(("a", "1")))
    for column in ("bad_records", "other_ends"):
        query(database, f"ALTER TABLE kafkalog_positions DROP COLUMN {column}")
    assert Skipping(database).positions() == {"q": batch(0).position()}
    Skipping(database).take_rows(batch(1), *in_order(("a", "x"), ("b", "2"), offset=1))
    assert Skipping(database).positions() == {"q": batch(1).position(refused=1)}


LOWERED = "AFTER INSERT ON stock BEGIN UPDATE stock SET key = lower(key) WHERE key = new.key; END"
CHANGING = {
    "a key that a trigger changes": (LOWERED, [("A", "1"), ("a", "2"), ("b", "3"), ("C", "4")]),
    "the same in the other order": (LOWERED, [("a", "2"), ("b", "3"), ("A", "1"), ("C", "4")]),
    "a row that a trigger skips": (
        "BEFORE INSERT ON stock WHEN new.key < 'a' BEGIN SELECT RAISE(IGNORE); END",
        [("A", "1"), ("a", "2"), ("b", "3"), ("C", "4")],
    ),
    "a row that a trigger deletes": (
        "AFTER INSERT ON stock WHEN new.key < 'a' BEGIN DELETE FROM stock WHERE key = new.key; END",
        [("a", "2"), ("A", "1"), ("b", "3"), ("C", "4")],
    ),
}


@pytest.mark.parametrize(("trigger", "rows"), CHANGING.values(), ids=CHANGING)
def test_a_record_whose_row_is_not_kept_under_its_key_is_named_and_left_out(
    database: Path, trigger: str, rows: list[tuple[str, str | None]]
) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT)")
    query(database, f"CREATE TRIGGER changing {trigger}")
    bad = [n for n, (key, _) in enumerate(rows) if key.isupper()]
    with pytest.raises(InvalidInputError, match=rf"offset [{bad[0]}{bad[1]}] does not fit: "):
        plain = SQLiteUpsert(database, "stock")
        plain.apply(batch(0), NAMES, KINDS, [rows_of(*in_order(*rows))], df=DF)
    upsert = Skipping(database)
    assert upsert.take_rows(batch(0), *in_order(*rows))
    assert offsets(upsert) == bad
    found = query(database, "SELECT key, value FROM stock ORDER BY key")
    assert found == [("a", "2"), ("b", "3")]


@pytest.mark.parametrize("when", ["BEFORE INSERT", "BEFORE UPDATE"])
def test_a_change_that_a_trigger_skips_is_named_and_left_out(database: Path, when: str) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT)")
    assert Skipping(database).take_rows(batch(0), *in_order(("a", "1"), ("b", "7"), ("c", "1")))
    skip = "WHEN new.value > '5' BEGIN SELECT RAISE(IGNORE); END"
    query(database, f"CREATE TRIGGER skipping {when} ON stock {skip}")
    rows = in_order(("a", "9"), ("b", "7"), ("c", "2"), offset=3)
    with pytest.raises(InvalidInputError, match="t-0 offset 3 does not fit: a trigger skips the"):
        plain = SQLiteUpsert(database, "stock")
        plain.apply(batch(1), NAMES, KINDS, [rows_of(*rows)], df=DF)
    upsert = Skipping(database)
    assert upsert.take_rows(batch(1), *rows)
    assert offsets(upsert) == [3]
    found = query(database, "SELECT key, value FROM stock ORDER BY key")
    assert found == [("a", "1"), ("b", "7"), ("c", "2")]


def test_a_deletion_that_a_trigger_skips_is_named_and_left_out(database: Path) -> None:
    query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT)")
    query(
        database,
        "CREATE TRIGGER kept BEFORE DELETE ON stock WHEN old.key = 'b' "
        "BEGIN SELECT RAISE(IGNORE); END",
    )
    assert Skipping(database).take_rows(batch(0), *in_order(("a", "1"), ("b", "1"), ("c", "1")))
    upsert = Skipping(database)
    rows = in_order(("a", None), ("b", None), ("c", None), offset=3)
    assert upsert.take_rows(batch(1), *rows)
    assert offsets(upsert) == [4]
    assert query(database, "SELECT key FROM stock") == [("b",)]


@pytest.mark.parametrize("clause", ["on conflict replace", "ON /* */ CONFLICT\n IGNORE"])
def test_a_table_that_drops_rows_for_others_is_refused(database: Path, clause: str) -> None:
    query(database, f"CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT UNIQUE {clause})")
    with pytest.raises(InvalidInputError, match='where two have the same "value"'):
        Skipping(database).take_rows(batch(0), *in_order(("a", "1")))
    query(database, "DROP TABLE stock")
    query(database, f"CREATE TABLE stock (key TEXT PRIMARY KEY {clause}, value DEFAULT 'replace')")
    for number in range(2):
        assert Skipping(database).take_rows(batch(number), *in_order(("a", str(number))))
    assert query(database, "SELECT * FROM stock") == [("a", "1")]


def test_a_row_that_a_clause_skips_is_named(database: Path) -> None:
    declared = "key TEXT PRIMARY KEY, value TEXT, n NOT NULL ON CONFLICT IGNORE"
    query(database, f"CREATE TABLE stock ({declared})")
    rows = rows_of(*in_order(("a", "1"), ("b", "2")))
    rows = rows.append_column("n", pa.array([1, None], pa.int64()))
    upsert = SQLiteUpsert(database, "stock")
    with pytest.raises(InvalidInputError, match="t-0 offset 1 does not fit: the table has no row"):
        upsert.apply(batch(0), [*NAMES, "n"], [*KINDS, "INTEGER"], [rows])


@pytest.mark.parametrize(
    "made",
    [
        "CREATE VIEW stock AS SELECT key, value FROM kept",
        "CREATE VIRTUAL TABLE stock USING fts4(key, value)",
    ],
)
def test_a_view_or_a_virtual_table_is_refused(database: Path, made: str) -> None:
    query(database, "CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT)")
    query(database, made)
    with pytest.raises(InvalidInputError, match=r"it is a (view|virtual table) \(expected a tab"):
        Skipping(database).take_rows(batch(0), *in_order(("a", "1")))
