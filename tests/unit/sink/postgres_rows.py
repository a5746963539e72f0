"""Rows as Spark's tasks hand them to PostgresUpsert, and a micro-batch to bring them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, StringType

from kafkalog.sink.upsert import Batch, PostgresUpsert
from kafkalog.sink.upsert.postgres.staging import StagingTask, staging_of_a_batch
from tests.postgres_server import query

LEADING = pa.schema(
    [
        ("kl_deleted", pa.bool_()),
        ("kl_topic", pa.string()),
        ("kl_partition", pa.int32()),
        ("kl_offset", pa.int64()),
        ("kl_timestamp", pa.timestamp("us", "UTC")),
    ]
)
Shape = Mapping[str, DataType]
TEXT: Shape = {"key": StringType(), "value": StringType()}
BYTES: Shape = {"key": BinaryType(), "value": BinaryType()}
ARROW = {"string": pa.string(), "binary": pa.binary(), "integer": pa.int32()}
DF: Any = object()
"""The records of a micro-batch, which only `leave_out_refused` uses."""
Row = tuple[Any, ...]
Apply = Callable[..., bool]
"""`apply_small` or `by_tasks`."""


def driver_batch(
    rows: Sequence[Row],
    shape: Shape = TEXT,
    *,
    offset: int = 0,
    partition: int = 0,
    second: int | None = None,
) -> pa.RecordBatch:
    """Return rows with offsets from `offset` on; a null in the second column is a deletion."""
    count = len(rows)
    leading = [
        [len(row) > 1 and row[1] is None for row in rows],
        ["t"] * count,
        [partition] * count,
        list(range(offset, offset + count)),
        [None if second is None else second * 1_000_000] * count,
    ]
    arrays = [pa.array(c, kind) for c, kind in zip(leading, LEADING.types, strict=True)]
    for position, data_type in enumerate(shape.values()):
        values = [row[position] for row in rows]
        arrays.append(pa.array(values, ARROW[data_type.typeName()]))
    return pa.RecordBatch.from_arrays(arrays, names=[*LEADING.names, *shape])


def batch(batch_id: int, query_id: str = "q", **more: Any) -> Batch:
    ends = more.pop("end_offsets", {"t": {"0": batch_id}})
    return Batch(query_id, batch_id, more.pop("run_id", "run"), ends, 1_700_000_000_000, **more)


def apply_small(
    upsert: PostgresUpsert, doing: Batch, *driver_batches: pa.RecordBatch, shape: Shape = TEXT
) -> bool:
    """Apply rows by way of the driver."""
    with upsert.connection() as connection:
        table, declared = upsert.prepare(connection, list(shape), list(shape.values()))
        return upsert.merge_small(connection, table, declared, doing, driver_batches, df=DF)


def apply_staged(
    upsert: PostgresUpsert,
    doing: Batch,
    *tasks: Sequence[pa.RecordBatch],
    shape: Shape = TEXT,
    failed: Sequence[Sequence[pa.RecordBatch]] = (),
) -> bool:
    """Apply rows by way of tasks; those of `failed` have staged theirs and were not reported."""
    with upsert.connection() as connection:
        table, declared = upsert.prepare(connection, list(shape), list(shape.values()))
        with staging_of_a_batch(connection, table, declared, doing) as target:
            task = StagingTask(upsert.conninfo, target, upsert.bad_records.are_left_out)
            for attempt, rows in enumerate(failed, 1000):
                assert task.stage(rows, attempt).fault is None
            staged = [task.stage(rows, attempt) for attempt, rows in enumerate(tasks)]
            return upsert.merge_staged(connection, table, doing, target, staged, df=DF)


def by_tasks(upsert: PostgresUpsert, doing: Batch, *rows: pa.RecordBatch, **more: Any) -> bool:
    """Apply rows by way of tasks, one for each driver batch."""
    return apply_staged(upsert, doing, *([driver_batch] for driver_batch in rows), **more)


def table(conninfo: str, names: str = "key, value") -> list[Any]:
    """Return the rows of the table `stock`, by key."""
    return query(conninfo, f"SELECT {names} FROM stock ORDER BY key")
