"""The rows of a DataFrame on the driver, one bounded driver batch at a time.

Spark's own row iterator unpickles row by row, and its `toArrow` brings all rows at once. Here the
JVM turns rows into Arrow batches. In a classic session each job brings those of a few Spark
partitions. A server of Spark Connect sends those of one job, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kafkalog.spark_results import is_connect

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


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
    """Yield the rows in batches of at most `spark.sql.execution.arrow.maxRecordsPerBatch`."""
    return _from_server(frame) if is_connect(frame) else _from_jvm(frame)


def _from_server(frame: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches as the client of Spark Connect gets them, after the frame's schema."""
    from pyspark.sql.types import StructType

    client, plan = frame.sparkSession.client, frame._plan
    for found in client.to_table_as_iterator(plan.to_proto(client), plan.observations):
        if not isinstance(found, StructType):
            yield from found.to_batches()


def _from_jvm(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    """Yield the batches of one job after the other.

    Each job brings two Spark partitions, outside any SQL execution, since Spark's scheduler keeps
    all results of an execution's jobs until it ends. Driver and JVM hold the rows of two jobs: one
    is read while the next one comes.
    """
    import pyarrow as pa
    from pyspark.util import inheritable_thread_target

    from kafkalog.spark_release import arrow_schema
    from kafkalog.spark_results import messages_from_socket

    session, context = frame.sparkSession, frame.sparkSession.sparkContext
    jvm: Any = context._jvm
    is_large = session.conf.get("spark.sql.execution.arrow.useLargeVarTypes")
    schema = arrow_schema(frame.schema, has_large_types=is_large == "true")
    # Spark's Dataset has this method for its own use (tried: 4.0 to 4.3). Each item is one batch
    # without its schema.
    messages = frame._jdf.toArrowBatchRdd().toJavaRDD()

    # The thread inherits this one's properties, by which a stopped query cancels its jobs.
    @inheritable_thread_target(session)
    def fetch(parts: Sequence[int]) -> list[Any]:
        for name in _OF_AN_EXECUTION:
            # None removes it, says pyspark's documentation.
            context.setLocalProperty(name, None)  # type: ignore[arg-type]  # its types lack None
        # `context.runJob` would send each message through a Python worker.
        found = jvm.PythonRDD.runJob(context._jsc.sc(), messages, list(parts))
        return messages_from_socket(found, context._gateway)

    with ThreadPoolExecutor(1) as beside:
        numbers = range(messages.getNumPartitions())
        starts = range(0, len(numbers), _PARTS_AT_ONCE)
        jobs = (
            beside.submit(fetch, list(numbers[start : start + _PARTS_AT_ONCE])) for start in starts
        )
        ahead = next(jobs, None)
        while ahead is not None:
            found, ahead = ahead.result(), next(jobs, None)
            for message in found:
                yield pa.ipc.read_record_batch(pa.py_buffer(message), schema)
