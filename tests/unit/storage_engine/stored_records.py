"""Rows for logs in object stores: they count, and go to each partition in turn."""

from __future__ import annotations

import pyarrow as pa

NOW_MS = 1_700_000_000_000


def rows_of(
    count: int, partitions: int = 1, *, first: int = 0, timestamp_ms: int = NOW_MS, size: int = 10
) -> pa.RecordBatch:
    """Return rows that go to each partition in turn."""
    numbers = range(first, first + count)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k%d" % (number % 7) for number in numbers], pa.binary()),
            "value": pa.array([b"%0*d" % (size, number) for number in numbers], pa.binary()),
            "partition": pa.array([number % partitions for number in numbers], pa.int32()),
            "timestamp": pa.array(
                [timestamp_ms + number for number in numbers], pa.timestamp("ms", "UTC")
            ),
        }
    )
