"""A task of Spark without Spark: what readers ask of the task they run in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pyspark import TaskContext


@contextlib.contextmanager
def task(execution: str | None = None, *, stage: int = 0, **properties: str) -> Iterator[None]:
    """Be in a task of a SQL execution, or of a stage alone; more local properties by name."""
    context = TaskContext._getOrCreate()
    context._stageId = stage
    context._localProperties = {name.replace("_", "."): text for name, text in properties.items()}
    if execution is not None:
        context._localProperties["spark.sql.execution.id"] = execution
    try:
        yield
    finally:
        TaskContext._setTaskContext(None)
