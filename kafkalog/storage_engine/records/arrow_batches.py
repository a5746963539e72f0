"""Convert records to Arrow batches of bounded size.

Spark holds a batch several times: in the worker, in the pipe, and in the JVM. Batches are therefore
split by bytes. Only a single larger record makes a larger batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.storage_engine.records.columns import to_arrow

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.records.tables import BatchTable, Integers, RecordTable

ARROW_SIZE: Final = 4 << 20
"""Largest size of an Arrow batch in bytes, unless one row is larger."""
_FIXED: Final = {"partition": 4, "offset": 8, "timestamp": 8, "timestampType": 4}
_OFFSET: Final = 4
"""Bytes of Arrow's offset to a value of variable size."""


def arrow_batches(
    records: RecordTable,
    table: BatchTable,
    rows: Integers | None,
    place: tuple[str, int],
    *,
    schema: pa.Schema,
    max_bytes: int = ARROW_SIZE,
) -> Iterator[pa.RecordBatch]:
    """Yield the records `rows` (None: all), in order, in batches of at most about `max_bytes`.

    `place` is their topic and partition. No batch is empty. Raises like `to_arrow`.
    """
    topic, partition = place
    if rows is None:
        rows = np.arange(len(records), dtype=np.int64)
    ends = np.cumsum(_sizes(records, rows, schema.names, topic))
    first = 0
    while first < len(rows):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(ends.searchsorted(before + max_bytes, side="right")))
        yield to_arrow(
            records, table, rows[first:stop], schema=schema, topic=topic, partition=partition
        )
        first = stop


def row_size(names: list[str], topic: str) -> int:
    """Return the bytes of a row in Arrow without its key, value and headers."""
    fixed = sum(_FIXED.get(name, _OFFSET) for name in names)
    return fixed + (len(topic.encode()) if "topic" in names else 0)


def _sizes(records: RecordTable, rows: Integers, names: list[str], topic: str) -> Integers:
    """Return the bytes of each row in Arrow: int64 (n,); an upper bound with headers."""
    sizes = np.full(len(rows), row_size(names, topic), dtype=np.int64)
    if "key" in names:
        sizes += np.maximum(records.key_sizes[rows], 0)
    if "value" in names:
        sizes += np.maximum(records.value_sizes[rows], 0)
    if "headers" in names:
        # A header takes at least two bytes in a record, and two offsets, eight bytes, in Arrow.
        others = np.maximum(records.key_sizes[rows], 0) + np.maximum(records.value_sizes[rows], 0)
        sizes += 5 * (records.ends[rows] - records.starts[rows] - others)
    return sizes
