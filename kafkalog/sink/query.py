"""Which streaming query and micro-batch a piece of code runs for, as Spark's local properties say.

Spark sets these properties for everything a micro-batch runs: they are seen by its tasks, and by
the driver's thread inside `foreachBatch`. A plain batch job has none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["MicroBatch", "checkpoint_query_id", "micro_batch_of_driver", "micro_batch_of_task"]

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
_RUN_ID = "spark.jobGroup.id"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a query."""

    query_id: str
    """Lives as long as the checkpoint does."""
    batch_id: int
    run_id: str
    """New at every start of the query."""


def micro_batch_of_task() -> MicroBatch | None:
    """Return the micro-batch the running task belongs to; None in a plain batch job."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return None if context is None else _read(context.getLocalProperty)


def micro_batch_of_driver(frame: DataFrame, caller: str) -> MicroBatch:
    """Return the micro-batch that `foreachBatch` is running; `caller` names the asker in the error.

    Raises InvalidInputError outside foreachBatch, and under Spark Connect, which hides the
    properties from the client.
    """
    try:
        found = _read(frame.sparkSession.sparkContext.getLocalProperty)
    except AttributeError as fault:  # what Spark Connect raises
        raise InvalidInputError(f"{caller} needs a classic Spark session: {fault}") from fault
    if found is None:
        raise InvalidInputError(
            f"{caller} works inside foreachBatch only: outside there is no query and no "
            "micro-batch to be exactly once about; use df.write with txnAppId and txnVersion"
        )
    return found


def checkpoint_query_id(location: str | None) -> str | None:
    """Return the query id that a checkpoint on a local file system holds; None when unknown."""
    if location is None:
        return None
    parts = urlsplit(location)
    if parts.scheme not in {"", "file"}:
        return None
    path = Path(unquote(parts.path) if parts.scheme else location) / "metadata"
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(get: Callable[[str], str | None]) -> MicroBatch | None:
    query_id, batch_id = get(_QUERY_ID), get(_BATCH_ID)
    if not query_id or batch_id is None:
        return None
    return MicroBatch(query_id, int(batch_id), get(_RUN_ID) or "")
