"""Which position counts in PostgreSQL: the very table's, of the query whose rows are in it."""

from __future__ import annotations

import logging
import signal
import time
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from kafkalog.errors import CommitConflictError, InvalidInputError
from kafkalog.sink.upsert import PostgresUpsert
from kafkalog.sink.upsert.postgres.client import connect
from kafkalog.sink.upsert.postgres.table import PostgresTable
from tests.postgres_server import PostgresServer, query
from tests.unit.sink.postgres_rows import (
    TEXT,
    apply_small,
    apply_staged,
    batch,
    driver_batch,
    table,
)


def test_who_replaces_a_table_ends_the_positions_of_all_others(upsert: PostgresUpsert) -> None:
    other = PostgresUpsert(upsert.conninfo, "other")
    apply_small(other, batch(7, "A"), driver_batch([("a", "1")]))
    apply_small(upsert, batch(3, "A"), driver_batch([("a", "1")]))
    apply_small(upsert, batch(0, "B", is_replacing=True), driver_batch([("b", "1")]))
    assert upsert.positions() == {"B": batch(0).position()}
    assert other.positions() == {"A": batch(7).position()}
    upsert.refuses_gaps = True
    with pytest.raises(CommitConflictError, match="query A is none, the next is 4"):
        apply_small(upsert, batch(4, "A"), driver_batch([("c", "1")]))
    assert table(upsert.conninfo) == [("b", "1")]


def test_a_table_dropped_during_the_reduction_is_refused(upsert: PostgresUpsert) -> None:
    upsert.refuses_gaps = True
    apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    query(upsert.conninfo, "DROP TABLE stock")
    with pytest.raises(CommitConflictError, match="query q is none, the next is 1"):
        apply_staged(upsert, batch(1), [driver_batch([("b", "1")])])
    assert table(upsert.conninfo) == []
    assert upsert.positions() == {}


def test_a_backup_put_back_during_the_reduction_is_refused(upsert: PostgresUpsert) -> None:
    upsert.refuses_gaps = True
    for number in range(3):
        apply_small(upsert, batch(number), driver_batch([(f"k{number}", "1")]))
    query(upsert.conninfo, "DELETE FROM stock WHERE key > 'k0'")
    query(upsert.conninfo, "UPDATE kafkalog_positions SET batch_id = 0")
    with pytest.raises(CommitConflictError, match="query q is 0, the next is 3"):
        apply_small(upsert, batch(3), driver_batch([("k3", "1")]))
    assert table(upsert.conninfo) == [("k0", "1")]


def test_a_gap_is_only_warned_of_where_gaps_are_not_refused(
    upsert: PostgresUpsert, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    apply_small(upsert, batch(1), driver_batch([("a", "2")]))
    assert caplog.text == ""
    assert apply_small(upsert, batch(5), driver_batch([("a", "3")]))
    assert "its last micro-batch of query q is 1, the next is 5" in caplog.text


def test_a_table_put_back_alone_has_no_position(upsert: PostgresUpsert) -> None:
    for number in range(2):
        apply_small(upsert, batch(number), driver_batch([(f"k{number}", "1")]))
    query(upsert.conninfo, "DROP TABLE stock")
    query(upsert.conninfo, "CREATE TABLE stock (key text PRIMARY KEY, value text)")
    query(upsert.conninfo, "INSERT INTO stock VALUES ('k0', '1')")
    assert upsert.positions() == {}
    upsert.refuses_gaps = True
    with pytest.raises(CommitConflictError, match="query q is none, the next is 2"):
        apply_small(upsert, batch(2), driver_batch([("k2", "1")]))
    assert apply_small(upsert, batch(0, is_replacing=True), driver_batch([("new", "1")]))
    assert table(upsert.conninfo) == [("new", "1")]
    assert upsert.positions() == {"q": batch(0).position()}


def test_the_writers_of_a_table_that_was_dropped_or_put_back_are_known(
    upsert: PostgresUpsert,
) -> None:
    assert upsert.writers() == set()
    apply_small(PostgresUpsert(upsert.conninfo, "other"), batch(0, "C"), driver_batch([("a", "1")]))
    assert upsert.writers() == set()
    for query_id in ("A", "B"):
        apply_small(upsert, batch(0, query_id), driver_batch([("a", "1")]))
    for statement in ("DROP TABLE stock", "CREATE TABLE stock (key text PRIMARY KEY, value text)"):
        query(upsert.conninfo, statement)
        assert upsert.positions() == {}
        assert upsert.writers() == {"A", "B"}
    apply_small(upsert, batch(0, "D", is_replacing=True), driver_batch([("a", "1")]))
    assert upsert.writers() == {"D"}


def test_a_table_that_is_rewritten_or_emptied_keeps_its_position(upsert: PostgresUpsert) -> None:
    apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    query(upsert.conninfo, "ALTER TABLE stock ADD n int DEFAULT random()")
    query(upsert.conninfo, "TRUNCATE stock")
    assert upsert.positions() == {"q": batch(0).position()}


def test_no_other_table_takes_the_place_before_the_transaction_ends(
    upsert: PostgresUpsert,
) -> None:
    apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    with connect(upsert.conninfo) as connection, connection.transaction():
        place = PostgresTable.find(connection, "stock")
        assert place.lock_position(connection, "q") == batch(0).position()
        with connect(upsert.conninfo) as other, pytest.raises(Exception, match="lock timeout"):
            other.execute("SET lock_timeout TO '100ms'")
            other.execute("DROP TABLE stock")


@pytest.mark.slow
def test_a_batch_outlives_a_crash_of_a_server_whose_roles_do_not_wait_for_the_disk(
    postgres: str, postgres_server: PostgresServer
) -> None:
    ((options,),) = query(postgres, "SELECT current_setting('search_path')")
    conninfo = make_conninfo(
        postgres, options=f"-c search_path={options} -c synchronous_commit=off"
    )
    assert query(conninfo, "SHOW synchronous_commit") == [("off",)]
    postgres_server.query("ALTER SYSTEM SET wal_writer_delay = '10s'")
    postgres_server.query("SELECT pg_reload_conf()")
    try:
        time.sleep(0.5)  # the WAL writer ends the sleep that it is in
        upsert = PostgresUpsert(conninfo, "stock")
        for number in range(5):
            apply_small(upsert, batch(number), driver_batch([(f"k{number}", "1")]))
        postgres_server.stop(signal.SIGQUIT)
        postgres_server.start()
    finally:
        postgres_server.query("ALTER SYSTEM RESET wal_writer_delay")
        postgres_server.query("SELECT pg_reload_conf()")
    assert upsert.positions() == {"q": batch(4).position()}
    assert [key for key, _ in table(conninfo)] == [f"k{number}" for number in range(5)]


@pytest.mark.parametrize("setting", ["off", "local", "remote_apply"])
def test_a_stronger_or_weaker_wait_is_kept_unless_it_waits_for_nothing(
    postgres: str, setting: str
) -> None:
    ((path,),) = query(postgres, "SELECT current_setting('search_path')")
    conninfo = make_conninfo(
        postgres, options=f"-c search_path={path} -c synchronous_commit={setting}"
    )
    query(postgres, "CREATE TABLE seen (setting text)")
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value text)")
    query(
        postgres,
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
        "INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NEW; END$$",
    )
    query(
        postgres,
        "CREATE TRIGGER see BEFORE INSERT ON stock FOR EACH ROW EXECUTE FUNCTION see()",
    )
    apply_staged(PostgresUpsert(conninfo, "stock"), batch(0), [driver_batch([("a", "1")])])
    assert query(postgres, "SELECT * FROM seen") == [("on" if setting == "off" else setting,)]


@pytest.mark.parametrize("action", ["", "ON DELETE CASCADE"])
def test_a_rebuild_leaves_rows_that_stay_and_what_others_have_of_them(
    upsert: PostgresUpsert, action: str
) -> None:
    apply_small(upsert, batch(0), driver_batch([("a", "1"), ("b", "1")]))
    query(upsert.conninfo, "ALTER TABLE stock ADD note text")
    query(upsert.conninfo, "UPDATE stock SET note = 'mine'")
    query(upsert.conninfo, f"CREATE TABLE sold (key text REFERENCES stock {action})")
    query(upsert.conninfo, "INSERT INTO sold VALUES ('a')")
    rebuilt = driver_batch([("a", None), ("a", "2"), ("b", "2"), ("b", None), ("c", "2")])
    for number in range(2):
        doing = batch(0, f"rebuilt{number}", is_replacing=True)
        if number:
            assert apply_staged(upsert, doing, [rebuilt])
        else:
            assert apply_small(upsert, doing, rebuilt)
        assert table(upsert.conninfo, "key, value, note") == [("a", "2", "mine"), ("c", "2", None)]
    assert query(upsert.conninfo, "SELECT * FROM sold") == [("a",)]


def test_a_rebuild_frees_what_is_unique_before_it_is_taken(postgres: str) -> None:
    query(postgres, "CREATE TABLE stock (key text PRIMARY KEY, value text UNIQUE)")
    upsert = PostgresUpsert(postgres, "stock")
    apply_small(upsert, batch(0), driver_batch([("a", "1"), ("b", "2")]))
    apply_small(upsert, batch(0, "new", is_replacing=True), driver_batch([("c", "1"), ("b", "2")]))
    assert table(postgres) == [("b", "2"), ("c", "1")]


@pytest.mark.parametrize("rows", [[], [("b", "1")]])
def test_a_rebuild_that_may_not_delete_a_row_says_so(
    upsert: PostgresUpsert, rows: list[Any]
) -> None:
    apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    query(upsert.conninfo, "CREATE TABLE sold (key text REFERENCES stock)")
    query(upsert.conninfo, "INSERT INTO sold VALUES ('a')")
    message = r'no record .* keeps cannot be deleted: .*"sold" \(Key \(key\)=\(a\) is still'
    doing = batch(0, "new", is_replacing=True)
    for driver_batches in [driver_batch(rows)] if rows else [[], [driver_batch([])]]:
        with pytest.raises(InvalidInputError, match=message):
            apply_small(upsert, doing, *([driver_batches] if rows else driver_batches))
    with pytest.raises(InvalidInputError, match=message):
        apply_staged(upsert, doing, [driver_batch(rows)])
    assert table(upsert.conninfo) == [("a", "1")]
    assert upsert.positions() == {"q": batch(0).position()}


def test_a_missing_schema_is_named_with_advice(postgres: str) -> None:
    upsert = PostgresUpsert(postgres, "nowhere.stock")
    assert upsert.positions() == {}
    with pytest.raises(InvalidInputError, match='the database has no schema "nowhere"; create it'):
        apply_small(upsert, batch(0), driver_batch([("a", "1")]))


def test_names_that_postgresql_would_cut_off_are_refused_first(postgres: str) -> None:
    for name in ("t" * 64, "é" * 32, "s" * 64 + ".t"):
        with pytest.raises(InvalidInputError, match="has 64 bytes, PostgreSQL takes 63"):
            PostgresUpsert(postgres, name)
    upsert = PostgresUpsert(postgres, "t" * 63)
    assert apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    assert list(upsert.positions()) == ["q"]
    long = {**TEXT, "c" * 64: TEXT["value"]}
    with pytest.raises(InvalidInputError, match=r"table .*stock: the name .* has 64 bytes"):
        apply_small(
            PostgresUpsert(postgres, "stock"),
            batch(0),
            driver_batch([("a", "1", "2")], long),
            shape=long,
        )
    assert query(postgres, "SELECT to_regclass('stock')") == [(None,)]


def test_each_table_has_a_table_of_deletions_whose_name_postgresql_keeps_whole() -> None:
    sizes = [("t", 63), ("é", 31)]
    names = [letter * size for letter, most in sizes for size in range(1, most + 1)]
    kept = {PostgresTable("s", name).deletions for name in names}
    assert len(kept) == len(names)
    assert max(len(name.encode()) for name in kept) <= 63


@pytest.mark.parametrize(
    "conninfo",
    [
        "host=x password=hid den",
        "host=x password='hid den",
        "host=x password=hid den=x",
        "postgresql://u:hid%zzden@h/db",
        "postgresql://u:hid@den@h/db",
        "postgresql://u:hid/den@h/db",
        "postgres://u:h/id?den@h/db",
        "postgresql://u:hid?a@den@h/db",
        "host=x password=hid\0den",
    ],
)
def test_an_error_of_the_conninfo_shows_nothing_of_it_and_is_one_line(conninfo: str) -> None:
    with pytest.raises(InvalidInputError, match="conninfo cannot be read") as caught:
        PostgresUpsert(conninfo, "t")
    assert "hid" not in str(caught.value)
    assert "den" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "conninfo",
    [
        "postgresql://u:a%40b%2Fc@h:1/db",
        "postgresql://h/db?user=a@b",
        "postgresql://u:a?b=c@h/db?options=@",
        "postgresql:///db?host=/x",
        "dbname=d",
    ],
)
def test_a_conninfo_that_libpq_reads_as_meant_is_taken(conninfo: str) -> None:
    assert PostgresUpsert(conninfo, "t").where.endswith(": table t")
