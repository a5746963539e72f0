"""SQLiteUpsert's transaction: rows, batch id and end offsets together, or nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import CommitConflictError, InvalidInputError, StorageError
from kafkalog.sink.upsert import Position, SQLiteUpsert
from tests.unit.sink.sqlite_rows import KINDS, NAMES, Row, batch, driver_batch, query, row


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "follow.db"


@pytest.fixture
def upsert(database: Path) -> SQLiteUpsert:
    return SQLiteUpsert(database, "stock", timeout_s=0.2)


def apply(upsert: SQLiteUpsert, batch_id: int, *rows: Row, query_id: str = "q") -> bool:
    return upsert.apply(batch(batch_id, query_id), NAMES, KINDS, [driver_batch(rows)])


def test_the_table_is_created_and_follows(upsert: SQLiteUpsert, database: Path) -> None:
    assert apply(upsert, 0, row(b"a", b"1", 0), row(b"b", b"2", 1))
    assert apply(upsert, 1, row(b"a", b"3", 2), row(b"b", None, 3), row(b"c", None, 4))
    assert query(database, "SELECT * FROM stock") == [(b"a", b"3", "t", 0, 2)]


def test_a_repeated_batch_changes_nothing(
    upsert: SQLiteUpsert, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    apply(upsert, 3, row(b"a", b"1", 0))
    assert not apply(upsert, 3, row(b"a", b"other", 0), row(b"b", b"2", 1))
    assert query(database, "SELECT key, value FROM stock") == [(b"a", b"1")]
    assert "micro-batch 3 of query q was applied before" in caplog.text


def test_a_missing_directory_is_reported_before_a_query_starts(tmp_path: Path) -> None:
    upsert = SQLiteUpsert(tmp_path / "away" / "stock.db", "stock")
    for ask in (upsert.positions, upsert.has_rows):
        with pytest.raises(StorageError, match=f"there is no directory {tmp_path / 'away'}. Creat"):
            ask()


def test_an_older_checkpoint_is_refused_unless_reset(upsert: SQLiteUpsert, database: Path) -> None:
    apply(upsert, 57, row(b"a", b"1", 0))
    with pytest.raises(
        CommitConflictError,
        match=r"this checkpoint is older than the table: committed 57 at \d\d:\d\d, got 3",
    ):
        apply(upsert, 3, row(b"a", b"2", 1))
    upsert.reset_writer = True
    assert apply(upsert, 3, row(b"a", b"2", 1))
    assert query(database, "SELECT batch_id FROM kafkalog_positions") == [(3,)]


def test_queries_and_tables_have_positions_of_their_own(
    upsert: SQLiteUpsert, database: Path
) -> None:
    assert apply(upsert, 5, row(b"a", b"1", 0))
    assert apply(upsert, 0, row(b"b", b"1", 0), query_id="other")
    assert apply(SQLiteUpsert(database, "second"), 0, row(b"a", b"1", 0))
    assert len(query(database, "SELECT * FROM kafkalog_positions")) == 3


def test_the_position_is_the_batchs_own(upsert: SQLiteUpsert, database: Path) -> None:
    ends = {"t": {"10": 7, "2": 5}, "a": {"0": 1}}
    assert upsert.position("q") is None
    assert upsert.apply(
        batch(3, end_offsets=ends), NAMES, KINDS, [driver_batch([row(b"a", b"1", 9)])]
    )
    assert upsert.position("q") == Position(3, ends, 1_700_000_000_000)
    assert upsert.positions() == {"q": Position(3, ends, 1_700_000_000_000)}
    assert upsert.apply(batch(4, end_offsets=ends, other_ends="1-a"), NAMES, KINDS, [])
    assert upsert.position("q") == Position(4, ends, 1_700_000_000_000, other_ends="1-a")
    ((stored,),) = query(database, "SELECT end_offsets FROM kafkalog_positions")
    assert stored == '{"a": {"0": 1}, "t": {"2": 5, "10": 7}}'


def test_asking_for_a_position_creates_nothing(upsert: SQLiteUpsert, database: Path) -> None:
    assert upsert.positions() == {}
    assert not upsert.has_rows()
    assert not database.exists()


def test_a_table_that_is_gone_has_no_position(upsert: SQLiteUpsert, database: Path) -> None:
    apply(upsert, 4, row(b"a", b"1", 0))
    assert upsert.has_rows()
    query(database, "DROP TABLE stock")
    assert upsert.position("q") is None
    assert not upsert.has_rows()
    assert apply(upsert, 4, row(b"a", b"1", 0))


def test_a_table_made_anew_has_no_position_of_any_query(
    upsert: SQLiteUpsert, database: Path
) -> None:
    for query_id in ("q", "other"):
        apply(upsert, 4, row(b"a", b"1", 0), query_id=query_id)
    apply(SQLiteUpsert(database, "second"), 1, row(b"a", b"1", 0))
    query(database, "DROP TABLE stock")
    assert apply(upsert, 5, row(b"b", b"1", 0))
    assert list(upsert.positions()) == ["q"]
    assert len(query(database, "SELECT * FROM kafkalog_positions")) == 2


def test_a_replacing_batch_ends_the_positions_of_all_other_queries(
    upsert: SQLiteUpsert, database: Path
) -> None:
    for query_id in ("q", "other"):
        apply(upsert, 4, row(b"a", b"1", 0), query_id=query_id)
    apply(SQLiteUpsert(database, "second"), 1, row(b"a", b"1", 0), query_id="q")
    upsert.apply(batch(0, "new", is_replacing=True), NAMES, KINDS, [])
    assert list(upsert.positions()) == ["new"]
    assert SQLiteUpsert(database, "second").position("q") is not None


def test_a_table_that_goes_while_rows_are_worked_out_is_not_made_from_them(
    upsert: SQLiteUpsert, database: Path
) -> None:
    apply(upsert, 4, row(b"a", b"1", 0))

    def driver_batches() -> Iterator[pa.RecordBatch]:
        query(database, "DROP TABLE stock")
        yield driver_batch([row(b"b", b"2", 1)])

    upsert.refuses_gaps = True
    with pytest.raises(CommitConflictError, match="start the view again, it will be rebuilt"):
        upsert.apply(batch(5), NAMES, KINDS, driver_batches())
    assert not upsert.has_rows()


def test_rows_are_not_replaced_where_another_run_has_landed(
    upsert: SQLiteUpsert, database: Path
) -> None:
    apply(upsert, 0, row(b"a", b"1", 0))
    later = batch(0, end_offsets={"t": {"0": 9}}, is_replacing=True)
    assert upsert.apply(later, NAMES, KINDS, [driver_batch([row(b"b", b"2", 5)])])
    assert query(database, "SELECT key FROM stock") == [(b"a",), (b"b",)]


def test_a_replacing_batch_leaves_its_own_rows_alone(upsert: SQLiteUpsert, database: Path) -> None:
    apply(upsert, 4, row(b"a", b"1", 0), row(b"b", b"1", 1))
    replacing = batch(0, "new", is_replacing=True)
    assert upsert.apply(replacing, NAMES, KINDS, [driver_batch([row(b"c", b"2", 2)])])
    assert query(database, "SELECT key FROM stock") == [(b"c",)]


def test_a_replacing_batch_that_fails_leaves_the_old_rows(
    upsert: SQLiteUpsert, database: Path
) -> None:
    apply(upsert, 4, row(b"a", b"1", 0))
    with pytest.raises(ZeroDivisionError):
        upsert.apply(batch(0, "new", is_replacing=True), NAMES, KINDS, (1 // 0 for _ in range(1)))
    assert query(database, "SELECT key FROM stock") == [(b"a",)]
    assert upsert.position("new") is None


def test_a_batch_that_comes_again_and_reaches_further_is_applied(
    upsert: SQLiteUpsert, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for end, value in ((5, b"1"), (6, b"2"), (6, b"3")):
        rows = driver_batch([row(b"a", value, end)])
        upsert.apply(batch(3, end_offsets={"t": {"0": end}}), NAMES, KINDS, [rows])
    assert query(database, "SELECT value FROM stock") == [(b"2",)]
    assert "micro-batch 3 of query q comes again with another plan" in caplog.text


def test_nan_becomes_null(database: Path) -> None:
    rows = driver_batch([("k", float("nan"))], ["key", "n"])
    SQLiteUpsert(database, "t").apply(batch(0), ["key", "n"], ["TEXT", "REAL"], [rows])
    assert query(database, "SELECT n FROM t") == [(None,)]


def test_what_is_empty_is_not_null(database: Path) -> None:
    names = ["key", "bytes", "text"]
    for key, rows in (
        ("a", [("a", b"", "")]),
        ("b", [("b", b"x", "y"), ("c", b"", ""), ("d", None, None)]),
    ):
        part = driver_batch([*rows, (key + "!", b"", "")], names, [False] * (len(rows) + 1))
        upsert = SQLiteUpsert(database, "t")
        upsert.apply(batch(ord(key)), names, ["TEXT", "BLOB", "TEXT"], [part.slice(0, len(rows))])
    found = query(database, "SELECT * FROM t ORDER BY key")
    assert found == [("a", b"", ""), ("b", b"x", "y"), ("c", b"", ""), ("d", None, None)]


@pytest.mark.parametrize("encoding", ["UTF-16le", "UTF-16be"])
def test_a_file_with_text_of_another_encoding_is_used(database: Path, encoding: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(f"PRAGMA encoding = '{encoding}'")
        connection.execute("CREATE TABLE stock (key TEXT PRIMARY KEY, n TEXT)")
    rows = [("é😀", "1"), ("a\0b", "2")]
    upsert = SQLiteUpsert(database, "stock")
    for number in range(2):
        part = driver_batch(rows, ["key", "n"])
        assert upsert.apply(batch(number), ["key", "n"], ["TEXT", "TEXT"], [part])
    assert sorted(query(database, "SELECT * FROM stock")) == sorted(rows)


def test_the_library_that_stages_rows_never_opens_the_database(
    upsert: SQLiteUpsert, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks of two SQLite libraries in one process do not exclude each other."""
    from adbc_driver_sqlite import dbapi

    opened, connect = [], dbapi.connect

    def recorded(path: str, **more: Any) -> Any:
        opened.append(path)
        return connect(path, **more)

    monkeypatch.setattr(dbapi, "connect", recorded)
    apply(upsert, 0, row(b"a", b"1", 0))
    upsert.apply(batch(0, "new", is_replacing=True), NAMES, KINDS, [])
    assert len(opened) == 2
    assert str(database) not in opened


def staging_files(database: Path) -> list[Path]:
    return list(database.parent.glob(f"{database.name}-kafkalog-*"))


def test_the_staging_file_of_a_killed_process_is_replaced_and_none_stays(
    upsert: SQLiteUpsert, database: Path
) -> None:
    def driver_batches() -> Iterator[pa.RecordBatch]:
        staged.extend(staging_files(database))
        yield driver_batch([row(b"a", b"1", 0)])

    staged: list[Path] = []
    upsert.apply(batch(0), NAMES, KINDS, driver_batches())
    assert staging_files(database) == []
    staged[0].write_bytes(b"half a file" * 1000)
    assert apply(upsert, 1, row(b"b", b"1", 1))
    assert staging_files(database) == []
    assert query(database, "SELECT key FROM stock") == [(b"a",), (b"b",)]
    with pytest.raises(ZeroDivisionError):
        upsert.apply(batch(2), NAMES, KINDS, (1 // 0 for _ in range(1)))
    assert staging_files(database) == []


def test_the_file_is_not_locked_while_spark_computes_the_rows(
    upsert: SQLiteUpsert, database: Path
) -> None:
    def driver_batches() -> Iterator[pa.RecordBatch]:
        for number in range(2):
            yield driver_batch([row(b"%d" % number, b"1", number)])
            query(database, f"INSERT INTO other VALUES ({number})")

    query(database, "CREATE TABLE other (n)")
    assert upsert.apply(batch(0), NAMES, KINDS, driver_batches())
    assert query(database, "SELECT count(*) FROM other") == [(2,)]


def test_two_queries_into_one_table_take_turns(upsert: SQLiteUpsert, database: Path) -> None:
    def follow(query_id: str) -> None:
        mine = SQLiteUpsert(database, "stock")
        for number in range(6):
            rows = [row(b"%d" % key, query_id.encode(), number) for key in range(200)]
            assert mine.apply(batch(number, query_id), NAMES, KINDS, [driver_batch(rows)])

    apply(upsert, 0, row(b"a", b"1", 0), query_id="first")  # the file is in WAL mode from now on
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(follow, query_id) for query_id in "ab"]:
            done.result()
    assert query(database, "SELECT count(*) FROM stock") == [(201,)]
    assert set(upsert.positions()) == {"first", "a", "b"}


def test_a_batch_without_rows_is_remembered(upsert: SQLiteUpsert) -> None:
    assert upsert.apply(batch(0), NAMES, KINDS, [])
    assert upsert.apply(batch(1), NAMES, KINDS, [driver_batch([row(b"a", b"1", 0)]).slice(0, 0)])
    assert not upsert.apply(batch(1), NAMES, KINDS, [])


def test_a_failure_midway_leaves_the_table_and_the_position_as_they_were(
    upsert: SQLiteUpsert, database: Path
) -> None:
    apply(upsert, 0, row(b"a", b"1", 0))

    def failing() -> Iterator[pa.RecordBatch]:
        for offset in range(3):
            yield driver_batch([row(b"a", b"2", offset), row(b"b%d" % offset, b"2", offset)])
        raise RuntimeError("a task failed")

    with pytest.raises(RuntimeError, match="a task failed"):
        upsert.apply(batch(1), NAMES, KINDS, failing())
    assert query(database, "SELECT key, value FROM stock") == [(b"a", b"1")]
    assert query(database, "SELECT batch_id FROM kafkalog_positions") == [(0,)]


def test_readers_of_a_file_made_here_do_not_wait(upsert: SQLiteUpsert, database: Path) -> None:
    apply(upsert, 0, row(b"a", b"1", 0))
    assert query(database, "PRAGMA journal_mode") == [("wal",)]

    def driver_batches() -> Iterator[pa.RecordBatch]:
        yield driver_batch([row(b"a", b"2", 1)])
        seen.extend(query(database, "SELECT key, value FROM stock"))
        yield driver_batch([row(b"b", b"2", 2)])

    seen: list[Row] = []
    assert upsert.apply(batch(1), NAMES, KINDS, driver_batches())
    assert seen == [(b"a", b"1")]


def test_a_file_of_the_users_keeps_its_journal(upsert: SQLiteUpsert, database: Path) -> None:
    query(database, "CREATE TABLE other (n)")
    apply(upsert, 0, row(b"a", b"1", 0))
    assert query(database, "PRAGMA journal_mode") == [("delete",)]


def test_names_that_need_quoting_work(database: Path) -> None:
    upsert = SQLiteUpsert(database, 'odd "name"; select')
    names = ["key", 'a "b"', "order"]
    rows = driver_batch([("k", "v", 1.0)], names)
    upsert.apply(batch(0), names, ["TEXT", "TEXT", "REAL"], [rows])
    assert query(database, 'SELECT "order" FROM "odd ""name""; select"') == [(1.0,)]


def test_a_table_of_keys_alone_works(database: Path) -> None:
    upsert = SQLiteUpsert(database, "keys")
    for batch_id in range(2):
        rows = driver_batch([(b"a",), (b"b",)], ["key"], [False, batch_id == 1])
        upsert.apply(batch(batch_id), ["key"], ["BLOB"], [rows])
    assert query(database, "SELECT * FROM keys") == [(b"a",)]


def test_a_table_whose_key_is_not_unique_is_refused(upsert: SQLiteUpsert, database: Path) -> None:
    query(database, "CREATE TABLE stock (key, value, topic, partition, offset)")
    words = "column key is neither the primary key nor unique. If the upsert has got another"
    with pytest.raises(InvalidInputError, match=words):
        apply(upsert, 0, row(b"a", b"1", 0))
    query(database, "CREATE UNIQUE INDEX some ON stock (key) WHERE value IS NOT NULL")
    query(database, "CREATE UNIQUE INDEX two ON stock (key, value)")
    with pytest.raises(InvalidInputError, match=words):
        apply(upsert, 0, row(b"a", b"1", 0))
    query(database, "CREATE UNIQUE INDEX one ON stock (KEY)")
    assert apply(upsert, 0, row(b"a", b"1", 0))


@pytest.mark.parametrize(
    "declared", ["INTEGER PRIMARY KEY", "INT UNIQUE", "INTEGER PRIMARY KEY DESC"]
)
def test_a_numbered_key_is_unique(upsert: SQLiteUpsert, database: Path, declared: str) -> None:
    query(database, f"CREATE TABLE stock (key {declared}, n)")
    rows = driver_batch([(1, 2)], ["key", "n"], [False])
    for batch_id in range(2):
        assert upsert.apply(batch(batch_id), ["key", "n"], ["INTEGER", "INTEGER"], [rows])
    assert query(database, "SELECT * FROM stock") == [(1, 2)]


@pytest.mark.parametrize(
    "made",
    [
        "CREATE TABLE stock (key TEXT PRIMARY KEY COLLATE NOCASE, n)",
        "CREATE TABLE stock (key TEXT PRIMARY KEY COLLATE NOCASE, n) WITHOUT ROWID",
        "CREATE TABLE stock (key TEXT UNIQUE, n, UNIQUE (key COLLATE RTRIM))",
    ],
)
def test_a_key_that_is_unique_by_another_collation_is_refused(
    upsert: SQLiteUpsert, database: Path, made: str
) -> None:
    query(database, made)
    with pytest.raises(
        InvalidInputError, match=r"by the collation \w+, which takes different keys"
    ):
        upsert.apply(batch(0), ["key", "n"], ["TEXT", "BLOB"], [])


def test_a_deletion_is_of_that_very_key(upsert: SQLiteUpsert, database: Path) -> None:
    query(database, "CREATE TABLE stock (key TEXT COLLATE NOCASE, n)")
    query(database, "CREATE UNIQUE INDEX one ON stock (key COLLATE BINARY)")
    rows = [
        driver_batch([("a", "1"), ("A", "2")], ["key", "n"]),
        driver_batch([("a", None)], ["key", "n"]),
    ]
    for batch_id, part in enumerate(rows):
        assert upsert.apply(batch(batch_id), ["key", "n"], ["TEXT", "TEXT"], [part])
    assert query(database, "SELECT * FROM stock") == [("A", "2")]


def test_a_generated_column_is_refused(upsert: SQLiteUpsert, database: Path) -> None:
    query(database, "CREATE TABLE stock (key PRIMARY KEY, n AS (length(key)))")
    with pytest.raises(InvalidInputError, match="column n is generated by SQLite"):
        upsert.apply(batch(0), ["key", "n"], ["TEXT", "INTEGER"], [])
    assert upsert.apply(batch(0), ["key"], ["TEXT"], [])


def test_a_locked_database_is_one_clear_error(upsert: SQLiteUpsert, database: Path) -> None:
    with closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN IMMEDIATE")
        words = r"follow\.db: table stock: database is locked; .* longer than timeout_s=0\.2$"
        with pytest.raises(StorageError, match=words):
            apply(upsert, 0, row(b"a", b"1", 0))


def test_a_file_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="unable to open database file; its directory must"):
        apply(SQLiteUpsert(tmp_path / "missing" / "x.db", "stock"), 0, row(b"a", b"1", 0))
    (tmp_path / "x.db").write_bytes(b"some other file" * 100)
    with pytest.raises(StorageError, match="file is not a database; it is a file of something els"):
        SQLiteUpsert(tmp_path / "x.db", "stock").positions()


@pytest.mark.parametrize("name", ["", ":memory:"])
def test_a_database_in_memory_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="is gone with each connection; give the path"):
        SQLiteUpsert(name, "stock")


@pytest.mark.parametrize("ends", ["", "{", "[1]", "7", '{"t": 5}', '{"t": {"0": "x"}}', b"\xff"])
def test_damaged_end_offsets_are_named(
    upsert: SQLiteUpsert, database: Path, ends: str | bytes
) -> None:
    apply(upsert, 3, row(b"a", b"1", 0))
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE kafkalog_positions SET end_offsets = ?", (ends,))
    with pytest.raises(StorageError, match=r"damaged end_offsets of query q: .*delete that row"):
        upsert.position("q")


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        *(("TEXT", "BLOB"), ("int", "BLOB"), ("INTEGER", "TEXT"), ("double", "TEXT")),
        *(("INT", "REAL"), ("decimal", "TEXT"), ("REAL", "INTEGER")),
    ],
)
def test_a_column_declared_for_other_values_is_refused(
    upsert: SQLiteUpsert, database: Path, declared: str, kind: str
) -> None:
    query(database, f"CREATE TABLE stock (key PRIMARY KEY, n {declared})")
    fault = rf"table stock: column n is declared {declared.lower()}, the rows bring {kind}"
    with pytest.raises(InvalidInputError, match=f"(?i){fault}"):
        upsert.apply(batch(0), ["key", "n"], ["TEXT", kind], [])
    assert upsert.position("q") is None


def test_a_column_of_any_type_is_used_where_it_keeps_each_value(
    upsert: SQLiteUpsert, database: Path
) -> None:
    """Only a STRICT table has such a type; in others the word is one like `decimal`."""
    names, kinds = ["key", "n"], ["TEXT", "TEXT"]
    query(database, "CREATE TABLE stock (key ANY PRIMARY KEY, n)")
    with pytest.raises(InvalidInputError, match="column key is declared ANY, the rows bring TEXT"):
        upsert.apply(batch(0), names, kinds, [])
    query(database, "DROP TABLE stock")
    if sqlite3.sqlite_version_info < (3, 37):
        return
    query(database, "CREATE TABLE stock (key ANY PRIMARY KEY, n ANY) STRICT")
    rows = [("1", "007"), ("01", "1e3")]
    assert upsert.apply(batch(0), names, kinds, [driver_batch(rows, names)])
    assert sorted(query(database, "SELECT * FROM stock")) == sorted(rows)


@pytest.mark.parametrize(
    ("declared", "kind"),
    [("date", "INTEGER"), ("", "BLOB"), ("varchar(9)", "TEXT"), ("real", "REAL")],
)
def test_a_column_declared_for_such_values_is_used(
    upsert: SQLiteUpsert, database: Path, declared: str, kind: str
) -> None:
    query(database, f"CREATE TABLE stock (key PRIMARY KEY, n {declared})")
    assert upsert.apply(batch(0), ["key", "n"], ["TEXT", kind], [])


def test_a_record_that_does_not_fit_is_named_and_nothing_is_written(
    upsert: SQLiteUpsert, database: Path
) -> None:
    query(
        database,
        "CREATE TABLE stock (key BLOB PRIMARY KEY CHECK (length(key) < 5), "
        "value, topic, partition, offset)",
    )
    apply(upsert, 0, row(b"a", b"1", 0))
    rows = [row(b"a", b"2", 1), row(b"b", b"2", 2), row(b"too long", b"2", 3), row(b"c", b"2", 4)]
    with pytest.raises(
        InvalidInputError,
        match=r"follow\.db: table stock: the record at t-0 offset 3 does not fit: CHECK constraint",
    ):
        upsert.apply(batch(1), NAMES, KINDS, [driver_batch(rows[:2]), driver_batch(rows[1:])])
    assert query(database, "SELECT key, value FROM stock") == [(b"a", b"1")]
    assert query(database, "SELECT batch_id FROM kafkalog_positions") == [(0,)]


def test_a_deletion_that_the_table_refuses_is_named(upsert: SQLiteUpsert, database: Path) -> None:
    apply(upsert, 0, row(b"a", b"1", 0), row(b"b", b"1", 1), row(b"c", b"1", 2))
    query(
        database,
        "CREATE TRIGGER kept BEFORE DELETE ON stock WHEN old.key = x'62' "
        "BEGIN SELECT RAISE(ABORT, 'b stays'); END",
    )
    rows = [row(b"a", None, 3), row(b"c", None, 4), row(b"b", None, 5), row(b"d", b"1", 6)]
    with pytest.raises(InvalidInputError, match="t-0 offset 5 does not fit: b stays"):
        apply(upsert, 1, *rows)
    assert query(database, "SELECT count(*) FROM stock") == [(3,)]


def test_a_trigger_that_ends_the_transaction_leaves_nothing(
    upsert: SQLiteUpsert, database: Path
) -> None:
    apply(upsert, 0, row(b"a", b"1", 0))
    query(
        database,
        "CREATE TRIGGER ended BEFORE INSERT ON stock WHEN new.key = x'63' "
        "BEGIN SELECT RAISE(ROLLBACK, 'no c'); END",
    )
    with pytest.raises(InvalidInputError, match="table stock: no c"):
        apply(upsert, 1, row(b"b", b"1", 1), row(b"c", b"1", 2), row(b"d", b"1", 3))
    assert query(database, "SELECT key FROM stock") == [(b"a",)]
    assert list(upsert.positions().values()) == [batch(0).position()]


def test_text_that_is_not_utf8_is_named_with_its_column(upsert: SQLiteUpsert) -> None:
    names = ["key", "name"]
    text = pa.array([b"fine", b"\xff"]).cast(pa.string(), safe=False)
    rows = driver_batch([("a", "x"), ("b", "y")], names)
    rows = rows.set_column(6, "name", pa.Array.from_buffers(pa.string(), 2, text.buffers()))
    with pytest.raises(InvalidInputError, match="t-0 offset 1 does not fit: column name: text"):
        upsert.apply(batch(0), names, ["TEXT", "TEXT"], [rows])


@pytest.mark.parametrize("name", ["", "sqlite_x", "kafkalog_positions"])
def test_names_that_are_not_the_users_are_refused(database: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match="not a table name"):
        SQLiteUpsert(database, name)
