"""PostgresUpsert's connections: kept between micro-batches, closed with the upsert."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import time
from collections.abc import Callable

import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from kafkalog.sink.upsert import PostgresUpsert
from tests.acceptance.killed_steps import in_child
from tests.postgres_server import PostgresServer, query
from tests.unit.sink.postgres_rows import Apply, batch, driver_batch, table

Sessions = Callable[[], set[int]]
COPYING = """
import sys
import pyarrow as pa
from kafkalog.sink.upsert.postgres.staging import PackingTask, StagingTask
from kafkalog.sink.upsert.postgres.staging_table import StagingTable
from kafkalog.sink.upsert.postgres.table import Column

conninfo, schema, rows = sys.argv[1:]
with pa.ipc.open_stream(bytes.fromhex(rows)) as reader:
    batch = reader.read_next_batch()
columns = (Column("key", "text", None), Column("value", "text", None))
target = StagingTable(schema, "staged", columns)
assert len(list(StagingTask(conninfo, target).run([batch]))) == 1
assert len(list(PackingTask(1 << 20).run([batch]))) == 1
print([name for name in ("pandas", "psycopg") if name in sys.modules])
"""


@pytest.fixture
def named(postgres: str) -> str:
    """Return what connects sessions that `sessions` finds."""
    ((schema,),) = query(postgres, "SELECT current_schema()")
    return make_conninfo(postgres, application_name=schema)


@pytest.fixture
def sessions(postgres: str, postgres_server: PostgresServer) -> Sessions:
    """Return a function that gives the server's process ids of the named sessions."""
    ((schema,),) = query(postgres, "SELECT current_schema()")

    def found() -> set[int]:
        rows = postgres_server.query(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s", schema
        )
        return {pid for (pid,) in rows}

    return found


def test_micro_batches_use_the_same_connections_until_the_upsert_ends(
    named: str, sessions: Sessions, apply: Apply
) -> None:
    upsert = PostgresUpsert(named, "stock")
    apply(upsert, batch(0), driver_batch([("a", "1")]))
    first = sessions()
    assert first
    for number in range(1, 4):
        apply(upsert, batch(number), driver_batch([("a", str(number))], offset=number))
        assert upsert.positions() == {"q": batch(number).position()}
    assert first <= sessions()
    del upsert
    gc.collect()
    until = time.monotonic() + 120
    while sessions() and time.monotonic() < until:
        time.sleep(0.02)
    assert sessions() == set()


def test_a_connection_lost_between_micro_batches_is_replaced(
    named: str, sessions: Sessions, apply: Apply, postgres_server: PostgresServer
) -> None:
    upsert = PostgresUpsert(named, "stock")
    apply(upsert, batch(0), driver_batch([("a", "1")]))
    lost = sessions()
    for pid in lost:
        postgres_server.query("SELECT pg_terminate_backend(%s, 10000)", pid)
    assert apply(upsert, batch(1), driver_batch([("a", "2")], offset=1))
    assert table(named) == [("a", "2")]
    assert not lost & sessions()


def test_a_pickled_upsert_takes_no_connection_along(named: str, apply: Apply) -> None:
    upsert = PostgresUpsert(named, "stock")
    apply(upsert, batch(0), driver_batch([("a", "1")]))
    copy = pickle.loads(pickle.dumps(upsert))
    assert apply(copy, batch(1), driver_batch([("a", "2")], offset=1))
    assert apply(upsert, batch(2), driver_batch([("a", "3")], offset=2))
    assert table(named) == [("a", "3")]


def test_a_forked_process_opens_connections_of_its_own(
    named: str, sessions: Sessions, apply: Apply
) -> None:
    upsert = PostgresUpsert(named, "stock")
    apply(upsert, batch(0), driver_batch([("a", "1")]))
    of_parent = sessions()

    def work() -> None:
        assert apply(upsert, batch(1), driver_batch([("a", "2")], offset=1))
        assert sessions() > of_parent

    assert in_child(work)
    assert apply(upsert, batch(2), driver_batch([("a", "3")], offset=2))
    assert table(named) == [("a", "3")]


def test_a_task_imports_neither_pandas_nor_psycopg(postgres: str) -> None:
    query(
        postgres,
        "CREATE TABLE staged (kl_attempt bigint, kl_deleted boolean, kl_topic text, kl_partition "
        "integer, kl_offset bigint, kl_timestamp timestamp with time zone, key text, value text)",
    )
    ((schema,),) = query(postgres, "SELECT current_schema()")
    packed = pa.BufferOutputStream()
    rows = driver_batch([("a", "1"), ("b", "2")])
    with pa.ipc.new_stream(packed, rows.schema) as writer:
        writer.write_batch(rows)
    done = subprocess.run(
        [sys.executable, "-c", COPYING, postgres, schema, packed.getvalue().hex()],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[]\n"
    assert query(postgres, "SELECT key, value FROM staged ORDER BY key") == [("a", "1"), ("b", "2")]
