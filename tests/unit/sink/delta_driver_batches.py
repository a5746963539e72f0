"""Rows and micro-batches as DeltaUpsert gets them from Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import types

from kafkalog.sink.upsert.delta.columns import table_schema
from kafkalog.sink.upsert.delta.upsert import DeltaUpsert
from kafkalog.sink.upsert.upsert import Batch

__all__ = ["RAW", "Row", "apply", "batch", "driver_batch", "rows_of"]

RECORD = pa.schema(
    [
        ("kl_deleted", pa.bool_()),
        ("kl_topic", pa.string()),
        ("kl_partition", pa.int32()),
        ("kl_offset", pa.int64()),
        ("kl_timestamp", pa.timestamp("us", "UTC")),
    ]
)
RAW = table_schema(["key", "value"], [types.BinaryType(), types.BinaryType()])
Row = tuple[Any, ...]


def driver_batch(rows: Sequence[Row], names: Sequence[str], arrow: Sequence[Any]) -> pa.RecordBatch:
    """Rows of (offset, key, *values); a deletion is one whose first value is the text DELETE."""
    fields = [*RECORD, *(pa.field(n, k) for n, k in zip(names, arrow, strict=True))]
    made = [
        (
            len(row) > 2 and row[2] == "DELETE",
            "t",
            0,
            row[0],
            None,
            *(None if value == "DELETE" else value for value in row[1:]),
        )
        for row in rows
    ]
    parts = zip(*made, strict=True) if made else [()] * len(fields)
    arrays = [pa.array(part, field.type) for part, field in zip(parts, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def batch(
    batch_id: int, end: int | None = None, query_id: str = "q", is_replacing: bool = False
) -> Batch:
    ends = {"t": {"0": batch_id + 1 if end is None else end}}
    return Batch(query_id, batch_id, "run", ends, 1000 + batch_id, is_replacing)


def apply(upsert: DeltaUpsert, which: Batch, *rows: Row) -> bool:
    driver_batches = [driver_batch([row], ["key", "value"], [pa.binary()] * 2) for row in rows]
    return upsert.apply(which, RAW, lambda: iter(driver_batches))


def rows_of(path: Path) -> list[Row]:
    table = DeltaTable(path).to_pyarrow_table()
    return sorted(tuple(row.values()) for row in table.to_pylist())
