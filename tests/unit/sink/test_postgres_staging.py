"""The copy of Arrow columns: what they hold is what PostgreSQL stores."""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from kafkalog.sink.upsert.postgres.client import connect, connect_for_arrow
from kafkalog.sink.upsert.postgres.staging import PackingTask
from kafkalog.sink.upsert.postgres.staging_table import RefusedRowsError, StagingTable, pieces
from tests.postgres_server import PostgresServer, query

UTC = dt.UTC
COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["a", "", None, "\\", "\\N", "\t\r\n\\.", "é😀\x01\x7f", "'\"\\x61"]),
    "bytea": (pa.binary(), [b"", None, b"\x00\xff", b"\\N\n\t", bytes(range(256))]),
    "smallint": (pa.int16(), [-32768, 32767, None, 0]),
    "integer": (pa.int32(), [-(2**31), 2**31 - 1, None]),
    "bigint": (pa.int64(), [-(2**63), 2**63 - 1, None]),
    "real": (pa.float32(), [1.5, -0.0, math.inf, None, 2.0**-149]),
    "double precision": (pa.float64(), [0.1, 1e308, 5e-324, -math.inf, None, 123456789.125]),
    "boolean": (pa.bool_(), [True, False, None]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    "numeric(38,9)": (
        pa.decimal128(38, 9),
        [Decimal("-12345678901234567890123456789.123456789"), None, Decimal("0E-9")],
    ),
    "timestamp with time zone": (
        pa.timestamp("us", "Europe/Berlin"),
        [
            dt.datetime(2024, 10, 27, 0, 30, 0, 123456, UTC),
            dt.datetime(1, 1, 2, tzinfo=UTC),
            dt.datetime(1883, 1, 1, 0, 0, 1, tzinfo=UTC),
            dt.datetime(9999, 12, 30, 23, 59, 59, 999999, UTC),
            None,
        ],
    ),
    "timestamp without time zone": (
        pa.timestamp("us"),
        [dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(1, 1, 1), None],
    ),
}


def stored(conninfo: str, kind: str, batch: pa.RecordBatch) -> list[Any]:
    ((schema,),) = query(conninfo, "SELECT current_schema()")
    query(conninfo, f"CREATE TABLE t (kl_attempt bigint, v {kind}, n int)")
    try:
        with connect_for_arrow(conninfo) as connection:
            StagingTable(schema, "t", ()).ingest(connection, list(pieces([batch])), 7)
        with connect(conninfo) as plain:
            plain.execute("SET timezone TO 'UTC'")
            rows = plain.execute("SELECT v, kl_attempt FROM t ORDER BY n").fetchall()
    finally:
        query(conninfo, "DROP TABLE t")
    assert {attempt for _, attempt in rows} <= {7}
    return [value for value, _ in rows]


def plain(value: pa.Scalar) -> Any:
    """Return what PostgreSQL's client makes of it: instants in UTC, few digits of a real."""
    found = value.as_py()
    if isinstance(found, dt.datetime) and found.tzinfo is not None:
        return found.astimezone(UTC)
    return float(str(np.float32(found))) if value.type == pa.float32() and found else found


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_value_arrives_as_it_is(postgres: str, kind: str) -> None:
    arrow, values = COLUMNS[kind]
    # As a slice too, whose buffers hold the rows before and after it.
    column = pa.array([values[0], None, *values, values[0]], arrow)
    for start, count in ((2, len(values)), (0, len(column)), (1, 2)):
        batch = pa.RecordBatch.from_arrays(
            [column, pa.array(range(len(column)), pa.int32())], names=["v", "n"]
        ).slice(start, count)
        assert stored(postgres, kind, batch) == [plain(value) for value in batch.column(0)]


def test_nan_stays_nan(postgres: str) -> None:
    batch = pa.record_batch({"v": [math.nan], "n": pa.array([0], pa.int32())})
    assert math.isnan(stored(postgres, "double precision", batch)[0])


YEARS = (-719_162, 11_248_738)
"""Days from 1970 to the first of the year 1, and of the year 32768."""


@pytest.mark.parametrize(
    ("arrow", "per_day"),
    [
        (pa.date32(), 1),
        (pa.timestamp("us", "UTC"), 86_400_000_000),
        (pa.timestamp("us", "Asia/Tokyo"), 86_400_000_000),
        (pa.timestamp("us"), 86_400_000_000),
    ],
)
def test_times_outside_the_years_1_to_32767_are_refused(
    postgres: str, arrow: pa.DataType, per_day: int
) -> None:
    first, end = (day * per_day for day in YEARS)
    integer = pa.int32() if per_day == 1 else pa.int64()
    zoned = "timestamp with time zone" if str(arrow).endswith("]") and ", " in str(arrow) else ""
    kind = "date" if per_day == 1 else zoned or "timestamp"
    ((schema,),) = query(postgres, "SELECT current_schema()")
    query(postgres, f"CREATE TABLE t (kl_attempt bigint, v {kind})")
    with connect_for_arrow(postgres) as connection:

        def put(*times: int | None) -> None:
            batch = pa.record_batch({"v": pa.array(times, integer).cast(arrow)})
            StagingTable(schema, "t", ()).ingest(connection, [batch.slice(1), batch.slice(0, 1)], 7)

        put(first, None, end - 1)
        for far in (first - 1, end, 2 * end, -(2**31) if per_day == 1 else -(2**63)):
            with pytest.raises(RefusedRowsError, match=f"the time {far} "):
                put(0, far, None)
    found = query(postgres, "SELECT v::text FROM t WHERE v IS NOT NULL ORDER BY v")
    assert [text.partition(" ")[0] for (text,) in found] == ["0001-01-01", "32767-12-31"]


def test_any_bytes_and_texts_arrive(postgres: str) -> None:
    draw = random.Random(5)
    texts = ["".join(draw.choices("\\\n\r\tNx.aé", k=draw.randrange(9))) for _ in range(2000)]
    binaries = [draw.randbytes(draw.randrange(20)) for _ in range(2000)]
    numbers = pa.array(range(2000), pa.int32())
    assert stored(postgres, "text", pa.record_batch({"v": texts, "n": numbers})) == texts
    assert stored(postgres, "bytea", pa.record_batch({"v": binaries, "n": numbers})) == binaries


def test_pieces_are_all_rows_in_order_and_small() -> None:
    rows = pa.record_batch({"v": [b"x" * 100_000] * 200})
    sizes = [piece.nbytes for piece in pieces([rows, rows.slice(0, 0), rows.slice(0, 1)])]
    assert sum(piece.num_rows for piece in pieces([rows, rows.slice(0, 0), rows.slice(0, 1)])) == (
        201
    )
    assert max(sizes) <= 5 << 20


def test_a_connection_speaks_utf8_whatever_the_database_is_in(
    postgres_server: PostgresServer,
) -> None:
    postgres_server.query("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        conninfo = psycopg.conninfo.make_conninfo(postgres_server.conninfo, dbname="latin")
        batch = pa.record_batch({"v": ["é"], "n": pa.array([0], pa.int32())})
        assert stored(conninfo, "text", batch) == ["é"]
        assert query(conninfo, "SHOW server_encoding") == [("LATIN1",)]
    finally:
        postgres_server.query("DROP DATABASE latin WITH (FORCE)")


def test_rows_are_packed_for_the_driver_unless_they_are_too_many() -> None:
    rows = pa.record_batch({"v": [b"x" * 1000] * 10})
    (packed,) = PackingTask(25_000).run([rows, rows.slice(0, 0), rows])
    with pa.ipc.open_stream(packed["packed"][0].as_py()) as reader:
        assert reader.read_all() == pa.Table.from_batches([rows, rows])
    (packed,) = PackingTask(15_000).run([rows, rows, rows])
    assert packed["packed"].to_pylist() == [None]
    assert list(PackingTask(15_000).run([rows.slice(0, 0)])) == []
