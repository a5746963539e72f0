"""The rows of a DataFrame on the driver, one bounded driver batch at a time.

Spark's own row iterator unpickles row by row. Here each task packs its Arrow batches into single
cells, so a driver batch costs a few calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kafkalog.sink.query import is_connect

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["in_driver_batches", "parts_for"]

_PART_ROWS = 50_000
_PARTS_MAX = 200
"""Each part is its own Spark job: some 20 ms even if it is empty."""
_OF_AN_EXECUTION = ("spark.sql.execution.id", "spark.sql.execution.root.id")
"""Spark's local properties that assign a job to an SQL execution."""


def parts_for(rows_max: int | None) -> int | None:
    """Return the Spark partitions for at most so many rows; None: Spark's own number."""
    return None if rows_max is None else min(max(-(-rows_max // _PART_ROWS), 1), _PARTS_MAX)


def in_driver_batches(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at most `spark.sql.execution.arrow.maxRecordsPerBatch`.

    Driver and JVM hold the packed rows of two Spark partitions: one is read while the next one
    comes. Each partition is a job outside any SQL execution, since Spark's scheduler keeps all
    results of an execution's jobs until it ends. Spark Connect has no such jobs: its server sends
    the results of one job, a driver batch at a time.
    """
    import pyarrow as pa

    packed = frame.mapInArrow(_pack, "packed binary")
    cells = (
        (row.packed for row in packed.toLocalIterator()) if is_connect(frame) else _cells(packed)
    )
    for cell in cells:
        with pa.ipc.open_stream(cell) as reader:
            yield from reader


def _cells(frame: DataFrame) -> Iterator[Any]:
    """Yield the cells of a frame's only column, by a job for each Spark partition."""
    from pyspark.util import inheritable_thread_target

    packed = frame.rdd
    session, context = frame.sparkSession, frame.sparkSession.sparkContext

    # The thread inherits this one's properties, by which a stopped query cancels its jobs.
    @inheritable_thread_target(session)
    def fetch(part: int) -> list[Any]:
        for name in _OF_AN_EXECUTION:
            # None removes it: pyspark documents that, but its types do not allow it.
            context.setLocalProperty(name, None)  # type: ignore[arg-type]
        return context.runJob(packed, iter, [part])

    with ThreadPoolExecutor(1) as beside:
        jobs = (beside.submit(fetch, part) for part in range(packed.getNumPartitions()))
        ahead = next(jobs, None)
        while ahead is not None:
            cells, ahead = ahead.result(), next(jobs, None)
            for (cell,) in cells:
                yield cell


def _pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        target = pa.BufferOutputStream()
        with pa.ipc.new_stream(target, batch.schema) as stream:
            stream.write_batch(batch)
        cell = pa.array([target.getvalue().to_pybytes()], pa.binary())
        yield pa.RecordBatch.from_arrays([cell], names=["packed"])
