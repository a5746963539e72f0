"""The rows of a DataFrame on the driver, a bounded driver batch at a time.

Spark's own row iterator unpickles every row by itself. Here each task packs its Arrow batches into
single cells, so the driver receives columns: a driver batch costs a few calls, not a few per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["in_driver_batches", "parts_for"]

_PART_ROWS = 50_000
_PARTS_MAX = 200
"""Each part is a Spark job of its own: some 20 ms even where it is empty."""
_OF_AN_EXECUTION = ("spark.sql.execution.id", "spark.sql.execution.root.id")
"""Spark's local properties that count a job to an SQL execution."""


def parts_for(rows_max: int | None) -> int | None:
    """Return into how many Spark partitions to cut at most so many rows, to take one at a time.

    None, Spark's own number, when it is not known how many rows they are.
    """
    return None if rows_max is None else min(max(-(-rows_max // _PART_ROWS), 1), _PARTS_MAX)


def in_driver_batches(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at most `spark.sql.execution.arrow.maxRecordsPerBatch`.

    Driver and JVM hold the rows of two Spark partitions, packed: one comes while one is used. Each
    is a job of its own, and of no SQL execution: of the jobs of one, as those of `toLocalIterator`
    and of a micro-batch are, Spark's scheduler keeps all results until the execution ends.
    """
    import pyarrow as pa
    from pyspark.util import inheritable_thread_target

    packed = frame.mapInArrow(_pack, "packed binary").rdd
    session, context = frame.sparkSession, frame.sparkSession.sparkContext

    # In a thread that has this one's properties: a query that is stopped cancels its jobs by them.
    @inheritable_thread_target(session)
    def fetch(part: int) -> list[Any]:
        for name in _OF_AN_EXECUTION:
            # None removes it, as pyspark says in words but not in its types.
            context.setLocalProperty(name, None)  # type: ignore[arg-type]
        return context.runJob(packed, iter, [part])

    with ThreadPoolExecutor(1) as beside:
        jobs = (beside.submit(fetch, part) for part in range(packed.getNumPartitions()))
        ahead = next(jobs, None)
        while ahead is not None:
            cells, ahead = ahead.result(), next(jobs, None)
            for (cell,) in cells:
                with pa.ipc.open_stream(cell) as reader:
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
