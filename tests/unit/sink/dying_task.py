"""A task that puts its rows into the staging table and then fails, once: Spark tries it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from kafkalog.sink.upsert.postgres.staging import StagingTask

__all__ = ["DyingTask"]


class DyingTask(StagingTask):
    """Fails in the first attempt of each Spark partition, after its rows are committed."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        yield from super().run(batches)
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("the task dies with its rows staged")
