"""The rows of a DataFrame on the driver, a bounded portion at a time.

Spark's own row iterator unpickles every row by itself. Here each task packs its Arrow batches into
single cells, so the driver receives columns: a portion costs a few calls, not a few per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["in_portions"]


def in_portions(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at most `spark.sql.execution.arrow.maxRecordsPerBatch`.

    The driver holds the rows of one Spark partition, packed.
    """
    import pyarrow as pa

    for row in frame.mapInArrow(_pack, "packed binary").toLocalIterator():
        with pa.ipc.open_stream(row[0]) as reader:
            yield from reader


def _pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn each batch into one cell that holds it as an Arrow stream."""
    import pyarrow as pa

    for batch in batches:
        target = pa.BufferOutputStream()
        with pa.ipc.new_stream(target, batch.schema) as stream:
            stream.write_batch(batch)
        cell = pa.array([target.getvalue().to_pybytes()], pa.binary())
        yield pa.RecordBatch.from_arrays([cell], names=["packed"])
