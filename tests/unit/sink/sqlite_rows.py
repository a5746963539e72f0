"""Rows and micro-batches as SQLiteUpsert gets them from Spark."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from kafkalog.sink.upsert import Batch

__all__ = ["KINDS", "NAMES", "Row", "batch", "driver_batch", "query", "row"]

NAMES = ["key", "value", "topic", "partition", "offset"]
KINDS = ["BLOB", "BLOB", "TEXT", "INTEGER", "INTEGER"]
LEADING = {
    "kl_deleted": pa.bool_(),
    "kl_topic": pa.string(),
    "kl_partition": pa.int32(),
    "kl_offset": pa.int64(),
    "kl_timestamp": pa.timestamp("us", tz="UTC"),
}
Row = tuple[Any, ...]


def row(key: Any, value: Any, offset: int, partition: int = 0) -> Row:
    return (key, value, "t", partition, offset)


def driver_batch(
    rows: Sequence[Row], names: Sequence[str] = NAMES, deleted: Sequence[bool] | None = None
) -> pa.RecordBatch:
    """Return rows as Spark gives them; without `deleted` a null in the second column deletes."""
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    deleted = [row[1] is None for row in rows] if deleted is None else deleted
    offsets = [row[4] if names is NAMES else number for number, row in enumerate(rows)]
    leading = [deleted, ["t"] * len(rows), [0] * len(rows), offsets, [None] * len(rows)]
    typed = [pa.array(c, kind) for c, kind in zip(leading, LEADING.values(), strict=True)]
    return pa.RecordBatch.from_arrays([*typed, *columns], names=[*LEADING, *names])


def query(database: Path, sql: str) -> list[Row]:
    """Run one statement and commit; return its rows."""
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(sql).fetchall()
        connection.commit()
        return rows


def batch(batch_id: int, query_id: str = "q", **more: Any) -> Batch:
    ends = more.pop("end_offsets", {"t": {"0": batch_id}})
    return Batch(query_id, batch_id, "run", ends, 1_700_000_000_000, **more)
