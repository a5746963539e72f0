"""What goes wrong on the way into PostgreSQL: nothing half written or twice; records are named."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql.types import TimestampNTZType, TimestampType

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.sink.upsert import PostgresUpsert
from kafkalog.sink.upsert.postgres.client import connect
from kafkalog.sink.upsert.postgres.staging import StagingTask, remove_orphans, staging_of_a_batch
from kafkalog.sink.upsert.postgres.table import PostgresTable
from tests.postgres_server import PostgresServer, query
from tests.unit.sink.postgres_rows import (
    BYTES,
    TEXT,
    Apply,
    apply_small,
    apply_staged,
    batch,
    driver_batch,
    table,
)


def staging_tables(conninfo: str) -> list[str]:
    rows = query(
        conninfo,
        "SELECT relname FROM pg_class WHERE relname LIKE 'kafkalog\\_staging%' "
        "AND relnamespace = current_schema()::regnamespace",
    )
    return [name for (name,) in rows]


def many(count: int = 5000, **odd: str | None) -> list[tuple[str, str | None]]:
    """Return rows of keys k0, k1 and so on, those of `odd` with other values."""
    return [(f"k{n}", odd.get(f"k{n}", str(n))) for n in range(count)]


@pytest.mark.parametrize(
    ("declared", "rows", "message"),
    [
        (
            "key text PRIMARY KEY, value varchar(6)",
            many(k1234="too wide", k4000="too wide as well"),
            r't-0 offset 1334 does not fit: column "value": value too long for type character var',
        ),
        (
            "key varchar(5) PRIMARY KEY, value text",
            [*many(900), ("longer", "x"), ("longest", "x")],
            r't-0 offset 1000 does not fit: column "key": value too long for type character var',
        ),
        (
            "key text PRIMARY KEY, value int",
            many(k77="7.7", k78=None),
            r't-0 offset 177 does not fit: column "value": invalid input syntax for type integer: '
            r'"7.7"',
        ),
        (
            "key text PRIMARY KEY, value text",
            many(k4999="a\x00b"),
            r't-0 offset 5099 does not fit: column "value": invalid byte sequence for encoding "U',
        ),
        (
            "key text PRIMARY KEY, value json",
            [("k", "1\n\n\n"), ("l", "\n{")],
            r't-0 offset 101 does not fit: column "value": invalid input syntax for type json',
        ),
        (
            "key text PRIMARY KEY, value text CHECK (value <> 'x')",
            many(k2500="x", k2501="x"),
            r't-0 offset 2600 does not fit: new row for relation "stock" violates check constraint',
        ),
        (
            "key text PRIMARY KEY, value text UNIQUE",
            many(k1700="1699"),
            r't-0 offset 1800 does not fit: .*"stock_value_key" \(Key \(value\)=\(1699\) already',
        ),
        (
            "key text PRIMARY KEY, value text REFERENCES stock DEFERRABLE INITIALLY DEFERRED",
            [("a", "a"), ("b", "a"), ("c", "nobody"), ("d", "nobody")],
            r"t-0 offset 102 does not fit: .* violates foreign key constraint",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_named_and_nothing_is_written(
    upsert: PostgresUpsert, apply: Apply, declared: str, rows: list[Any], message: str
) -> None:
    query(upsert.conninfo, f"CREATE TABLE stock ({declared})")
    with pytest.raises(InvalidInputError, match=message) as caught:
        apply(upsert, batch(4), driver_batch(rows, offset=100))
    assert "table stock: the record at t-0 " in str(caught.value)
    assert "nothing of micro-batch 4 was written" in str(caught.value)
    assert table(upsert.conninfo) == []
    assert upsert.positions() == {}
    assert staging_tables(upsert.conninfo) == []


def not_utf8(*values: bytes) -> pa.Array:
    binary = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), binary.buffers())


def in_column(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return rows.set_column(rows.schema.get_field_index(name), name, column)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("key", r't-0 offset 8 does not fit: column "key": invalid byte sequence'),
        ("value", r't-0 offset 8 does not fit: column "value": invalid byte sequence'),
    ],
)
def test_text_that_is_not_utf8_is_named_by_its_record(
    upsert: PostgresUpsert, apply: Apply, name: str, message: str
) -> None:
    rows = driver_batch([("a", "1"), ("b", "1"), ("c", "1")], offset=7)
    with pytest.raises(InvalidInputError, match=message):
        apply(upsert, batch(0), in_column(rows, name, not_utf8(b"x", b"\xff", b"y")))
    assert upsert.positions() == {}


def test_a_row_of_no_record_is_named_by_its_keys_bytes(
    upsert: PostgresUpsert, apply: Apply
) -> None:
    rows = in_column(driver_batch([("a", "1"), ("b", "1")]), "key", not_utf8(b"x", b"\xff"))
    rows = in_column(rows, "kl_offset", pa.nulls(2, pa.int64()))
    with pytest.raises(InvalidInputError, match=r"the row of key b'\\xff' does not fit: column"):
        apply(upsert, batch(0), rows)


@pytest.mark.parametrize("declared", ["timestamp with time zone", "text"])
@pytest.mark.parametrize("zone", ["UTC", None])
def test_a_time_far_away_is_named_and_never_stored_as_another(
    upsert: PostgresUpsert, apply: Apply, declared: str, zone: str | None
) -> None:
    query(upsert.conninfo, f"CREATE TABLE stock (key text PRIMARY KEY, value {declared})")
    rows = driver_batch([("a", "1"), ("b", "1"), ("c", "1")], offset=7)
    shape = {**TEXT, "value": TimestampNTZType() if zone is None else TimestampType()}
    times = pa.array([0, 9223371331200000000, 0], pa.int64()).cast(pa.timestamp("us", zone))
    message = r't-0 offset 8 does not fit: column "value": the time 9223371331200000000 us from'
    with pytest.raises(InvalidInputError, match=message):
        apply(upsert, batch(0), in_column(rows, "value", times), shape=shape)
    assert table(upsert.conninfo) == []
    assert upsert.positions() == {}


def test_a_key_too_large_for_an_index_is_named(upsert: PostgresUpsert, apply: Apply) -> None:
    rows = [(b"a", b"1"), (random.Random(1).randbytes(9000), b"2"), (b"c", b"1" * 200_000)]
    with pytest.raises(InvalidInputError, match=r"t-0 offset 1 does not fit: index row "):
        apply(upsert, batch(0), driver_batch(rows, shape=BYTES), shape=BYTES)
    assert upsert.positions() == {}


def test_a_deletion_that_the_table_refuses_is_named(upsert: PostgresUpsert, apply: Apply) -> None:
    apply(upsert, batch(0), driver_batch([("a", "1"), ("b", "1"), ("c", "1")]))
    query(upsert.conninfo, "CREATE TABLE sold (key text REFERENCES stock)")
    query(upsert.conninfo, "INSERT INTO sold VALUES ('b')")
    with pytest.raises(InvalidInputError, match=r'offset 8 does not fit: .*table "sold"'):
        apply(upsert, batch(1), driver_batch([("a", None), ("b", None), ("c", "2")], offset=7))
    assert table(upsert.conninfo) == [("a", "1"), ("b", "1"), ("c", "1")]
    assert upsert.positions() == {"q": batch(0).position()}


def test_a_misfit_among_large_rows_is_named(upsert: PostgresUpsert) -> None:
    query(upsert.conninfo, "CREATE TABLE stock (key varchar(9) PRIMARY KEY, value text)")
    large = "x" * 3_000_000
    rows = [driver_batch([(f"k{n}", large)], offset=n) for n in range(12)]
    rows.append(driver_batch([("k", "v"), ("much too long", "v"), ("l", large)], offset=12))
    with pytest.raises(InvalidInputError, match=r't-0 offset 13 does not fit: column "key"'):
        apply_staged(upsert, batch(0), rows)


def test_rows_of_attempts_that_spark_did_not_report_do_not_count(upsert: PostgresUpsert) -> None:
    first, second = [driver_batch([("a", "1")])], [driver_batch([("b", "1")], offset=1)]
    half = [driver_batch([("a", "other"), ("c", "1")], offset=9)]
    assert apply_staged(upsert, batch(0), first, second, failed=[half, first, half])
    assert table(upsert.conninfo) == [("a", "1"), ("b", "1")]


def test_the_staging_is_gone_after_each_batch_and_never_the_tables(
    upsert: PostgresUpsert,
) -> None:
    for number in range(3):
        apply_staged(upsert, batch(number), [driver_batch([("a", str(number))])])
        assert staging_tables(upsert.conninfo) == []
    assert table(upsert.conninfo) == [("a", "2")]


def test_staging_of_dead_drivers_is_removed_and_that_of_live_ones_is_not(
    upsert: PostgresUpsert,
) -> None:
    other = PostgresUpsert(upsert.conninfo, "other")
    for each in (upsert, other):
        apply_small(each, batch(0), driver_batch([("a", "1")]))

    def staging(connection: Any, each: PostgresUpsert, number: int) -> Any:
        place = PostgresTable.find(connection, each.table)
        declared = place.prepare(connection, list(TEXT), list(TEXT.values()))
        return staging_of_a_batch(connection, place, declared, batch(number))

    dead, live = connect(upsert.conninfo), connect(upsert.conninfo)
    left = [staging(dead, each, 1) for each in (upsert, other)]  # held, as their end drops them
    orphan, _ = [staged.__enter__() for staged in left]
    with staging(live, upsert, 2) as used:
        assert len(staging_tables(upsert.conninfo)) == 3
        # Its task is still at work when the driver dies.
        task = connect(upsert.conninfo)
        copy = task.cursor().copy(f"COPY {orphan.name} FROM STDIN".encode())
        copy.__enter__().write(b"1\tt\t")
        dead.close()
        with connect(upsert.conninfo) as connection:
            place = PostgresTable.find(connection, "stock")
            assert remove_orphans(connection, place) == [orphan.name]
            assert remove_orphans(connection, place) == []
        assert used.name in staging_tables(upsert.conninfo)
        with pytest.raises(psycopg.OperationalError):
            copy.__exit__(None, None, None)
        task.close()
    assert len(staging_tables(upsert.conninfo)) == 1
    live.close()


def test_staging_that_a_backup_holds_is_removed_later(
    upsert: PostgresUpsert, caplog: pytest.LogCaptureFixture
) -> None:
    apply_small(upsert, batch(0), driver_batch([("a", "1")]))
    with connect(upsert.conninfo) as backup, upsert.connection() as connection:
        place = PostgresTable.find(connection, "stock")
        declared = place.prepare(connection, list(TEXT), list(TEXT.values()))
        with (
            backup.transaction(),
            staging_of_a_batch(connection, place, declared, batch(1)) as target,
        ):
            backup.execute(f"LOCK TABLE {target.name} IN ACCESS SHARE MODE".encode())
            staged = StagingTask(upsert.conninfo, target).stage([driver_batch([("b", "1")])], 1)
            assert upsert.merge_staged(connection, place, batch(1), target, [staged])
        assert "stays for now" in caplog.text
        assert backup.execute("SELECT 1").fetchall() == [(1,)]
        assert remove_orphans(connection, place) == [target.name]
    assert table(upsert.conninfo) == [("a", "1"), ("b", "1")]


def ended_by_a_trigger(conninfo: str, when: str) -> None:
    query(
        conninfo,
        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END$$",
    )
    query(conninfo, f"CREATE {when} FOR EACH ROW WHEN (NEW.key = 'k7') EXECUTE FUNCTION die()")


@pytest.mark.parametrize(
    "when",
    [
        "TRIGGER lost BEFORE INSERT ON stock",
        "CONSTRAINT TRIGGER lost AFTER INSERT ON stock DEFERRABLE INITIALLY DEFERRED",
    ],
)
def test_a_connection_lost_in_the_middle_leaves_nothing(
    upsert: PostgresUpsert, apply: Apply, when: str
) -> None:
    apply(upsert, batch(0), driver_batch([("a", "1")]))
    ended_by_a_trigger(upsert.conninfo, when)
    with pytest.raises(StorageError, match="table stock: terminating connection"):
        apply(upsert, batch(1), driver_batch(many(20)))
    assert table(upsert.conninfo) == [("a", "1")]
    assert upsert.positions() == {"q": batch(0).position()}
    query(upsert.conninfo, "DROP TRIGGER lost ON stock")
    assert apply(upsert, batch(1), driver_batch(many(20)))
    assert len(table(upsert.conninfo)) == 21


def test_a_commit_whose_answer_is_lost_is_not_repeated(
    upsert: PostgresUpsert, apply: Apply, postgres_server: PostgresServer
) -> None:
    """The server commits, then waits for a standby that does not exist, and is cut off there."""
    apply(upsert, batch(0), driver_batch([("a", "1")]))
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    postgres_server.query("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    postgres_server.query("SELECT pg_reload_conf()")

    def cut_off() -> None:
        while not (found := postgres_server.query(waits)):
            time.sleep(0.02)
        postgres_server.query("SELECT pg_terminate_backend(%s)", found[0][0])

    try:
        cutter = threading.Thread(target=cut_off)
        with connect(upsert.conninfo) as connection:
            connection.execute("SET synchronous_commit TO local")
            place = PostgresTable.find(connection, "stock")
            declared = place.prepare(connection, list(TEXT), list(TEXT.values()))
            connection.execute("SET synchronous_commit TO on")
            cutter.start()
            with pytest.raises(psycopg.OperationalError):
                upsert.merge_small(
                    connection, place, declared, batch(1), [driver_batch([("a", "2")])]
                )
        cutter.join()
    finally:
        postgres_server.query("ALTER SYSTEM RESET synchronous_standby_names")
        postgres_server.query("SELECT pg_reload_conf()")
    assert upsert.positions() == {"q": batch(1).position()}
    assert not apply(upsert, batch(1), driver_batch([("a", "3")]))
    assert table(upsert.conninfo) == [("a", "2")]


@pytest.mark.slow
def test_staged_rows_that_a_crash_of_the_server_took_are_missed(
    upsert: PostgresUpsert, postgres_server: PostgresServer
) -> None:
    doing = batch(0)
    with connect(upsert.conninfo) as connection:
        place = PostgresTable.find(connection, "stock")
        declared = place.prepare(connection, list(TEXT), list(TEXT.values()))
        staging = staging_of_a_batch(connection, place, declared, doing)
        target = staging.__enter__()
        staged = StagingTask(upsert.conninfo, target).stage([driver_batch(many(100))], 5)
        connection.execute("CREATE TABLE after ()")  # a synced commit: the staging table is kept
        postgres_server.stop(signal.SIGQUIT)
        postgres_server.start()
        with pytest.raises(psycopg.OperationalError):
            upsert.merge_staged(connection, place, doing, target, [staged])
    with (
        upsert.connection() as connection,
        pytest.raises(StorageError, match="holds 0 of the 100 rows that the tasks put there"),
    ):
        upsert.merge_staged(connection, place, doing, target, [staged])
    assert upsert.positions() == {}
    assert apply_staged(upsert, doing, [driver_batch(many(100))])
    assert len(table(upsert.conninfo)) == 100
    with upsert.connection() as connection:
        assert remove_orphans(connection, place) == [target.name]


def test_two_queries_into_one_table_take_turns(upsert: PostgresUpsert, apply: Apply) -> None:
    """Both touch the same keys in opposite orders, which deadlocks without a lock of the table."""
    batches, keys = 6, 300

    def follow(query_id: str) -> None:
        mine = PostgresUpsert(upsert.conninfo, "stock")
        for number in range(batches):
            rows = [(f"{key:04}", f"{query_id}{number}") for key in range(keys)]
            if query_id == "b":
                rows.reverse()
            assert apply(mine, batch(number, query_id), driver_batch(rows))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(follow, query_id) for query_id in "ab"]:
            done.result()
    last = {value for _, value in table(upsert.conninfo)}
    assert last in ({"a5"}, {"b5"})
    assert len(table(upsert.conninfo)) == keys
    assert set(upsert.positions()) == {"a", "b"}


def test_two_runs_of_one_query_apply_each_batch_once(upsert: PostgresUpsert, apply: Apply) -> None:
    query(upsert.conninfo, "CREATE TABLE stock (key text PRIMARY KEY, value text, n serial)")

    def follow(_: int) -> list[bool]:
        mine = PostgresUpsert(upsert.conninfo, "stock")
        done = []
        for number in range(8):
            try:
                done.append(apply(mine, batch(number), driver_batch([(f"k{number}", "x")])))
            except Exception as fault:  # the other run is ahead by then
                assert "this checkpoint is older than the table" in str(fault)
                done.append(False)
        return done

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(follow, range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert len(table(upsert.conninfo)) == 8


def test_a_deadlock_with_a_transaction_of_others_is_tried_again(
    upsert: PostgresUpsert, apply: Apply, postgres_server: PostgresServer
) -> None:
    apply(upsert, batch(0), driver_batch([("a", "1"), ("b", "1")]))
    ((schema,),) = query(upsert.conninfo, "SELECT current_schema()")
    with connect(postgres_server.conninfo) as theirs:
        theirs.execute(f"SET search_path TO {schema}".encode())
        theirs.execute("SET deadlock_timeout TO '100s'")  # so it is ours that PostgreSQL ends
        with ThreadPoolExecutor(1) as thread:
            with theirs.transaction():
                theirs.execute("UPDATE stock SET value = 'theirs' WHERE key = 'b'")
                ours = thread.submit(
                    apply, upsert, batch(1), driver_batch([("a", "2"), ("b", "2")])
                )
                while not query(
                    upsert.conninfo,
                    "SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
                    "WHERE NOT l.granted AND a.application_name = 'kafkalog'",
                ):
                    time.sleep(0.02)
                theirs.execute("UPDATE stock SET value = 'theirs' WHERE key = 'a'")
            assert ours.result()
    assert table(upsert.conninfo) == [("a", "2"), ("b", "2")]
