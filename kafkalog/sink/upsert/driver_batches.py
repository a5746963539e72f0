"""The rows of a DataFrame on the driver, one bounded driver batch at a time.

Spark's own row iterator unpickles row by row. Here each task packs its Arrow batches into single
cells, so a driver batch costs a few calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["in_driver_batches", "parts_for"]

_PART_ROWS = 25_000
_PARTS_MAX = 400
_PARTS_AT_ONCE = 2
"""Parts of one Spark job, which costs some 20 ms even if they are empty."""
_OF_AN_EXECUTION = ("spark.sql.execution.id", "spark.sql.execution.root.id")
"""Spark's local properties that assign a job to an SQL execution."""


def parts_for(rows_max: int | None) -> int | None:
    """Return the Spark partitions for at most so many rows; None: Spark's own number."""
    return None if rows_max is None else min(max(-(-rows_max // _PART_ROWS), 1), _PARTS_MAX)


def in_driver_batches(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at most `spark.sql.execution.arrow.maxRecordsPerBatch`.

    Each job brings two Spark partitions, outside any SQL execution, since Spark's scheduler keeps
    all results of an execution's jobs until it ends. Driver and JVM hold the packed rows of two
    jobs: one is read while the next one comes.
    """
    import pyarrow as pa
    from pyspark.util import inheritable_thread_target

    packed = frame.mapInArrow(_pack, "packed binary").rdd
    session, context = frame.sparkSession, frame.sparkSession.sparkContext

    # The thread inherits this one's properties, by which a stopped query cancels its jobs.
    @inheritable_thread_target(session)
    def fetch(parts: Sequence[int]) -> list[Any]:
        for name in _OF_AN_EXECUTION:
            # None removes it: pyspark documents that, but its types do not allow it.
            context.setLocalProperty(name, None)  # type: ignore[arg-type]
        return context.runJob(packed, iter, parts)

    with ThreadPoolExecutor(1) as beside:
        numbers = range(packed.getNumPartitions())
        starts = range(0, len(numbers), _PARTS_AT_ONCE)
        jobs = (
            beside.submit(fetch, list(numbers[start : start + _PARTS_AT_ONCE])) for start in starts
        )
        ahead = next(jobs, None)
        while ahead is not None:
            cells, ahead = ahead.result(), next(jobs, None)
            for (cell,) in cells:
                with pa.ipc.open_stream(cell) as reader:
                    yield from reader


def _pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        target = pa.BufferOutputStream()
        with pa.ipc.new_stream(target, batch.schema) as stream:
            stream.write_batch(batch)
        cell = pa.array([target.getvalue().to_pybytes()], pa.binary())
        yield pa.RecordBatch.from_arrays([cell], names=["packed"])
