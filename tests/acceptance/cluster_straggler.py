"""A task that straggles on one host until Spark runs a copy of it on another; runs on executors.

What it does depends on the micro-batch, see `LATE` and `TIED`. Each attempt of the task leaves a
file in `meeting`, a directory that both hosts see: `<micro-batch>-<attempt>` with its host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "key binary, value binary, partition int"
LATE, TIED = 0, 1
"""Micro-batches: the copy is done while the straggler still runs; both are done at the same time.
In the first each of the two has written a large staged file by then."""
LARGE = 900_000
"""Bytes of each value of the straggling task in the micro-batch `LATE`."""
LARGE_ROWS = 96
"""So many of them make a run that gets a file in its partition before its task is at its end."""
_PATIENCE_S = 120.0


def straggling(
    meeting: Path, partition: Path
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for mapInArrow over rows of (key, value, partition).

    The task of log partition 0 straggles; `partition` is the directory that it writes to.
    """

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        batch_id = int(context.getLocalProperty("streaming.sql.batchId") or -1)
        is_slow = False
        for batch in batches:
            is_slow |= batch_id in {LATE, TIED} and 0 in batch["partition"].to_pylist()
            yield from _widened(batch, LARGE if is_slow and batch_id == LATE else 0)
        if not is_slow:
            return
        host = os.environ["SPARK_LOCAL_IP"]
        (meeting / f"{batch_id}-{context.attemptNumber()}").write_text(host)
        if batch_id == LATE:
            _wait(lambda: len(list(partition.glob("kl-*.staged"))) == 2)
            if context.attemptNumber() == 0:
                time.sleep(_PATIENCE_S)
        else:
            _wait(lambda: len(list(meeting.glob(f"{batch_id}-*"))) == 2)

    return rows


def _widened(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows one by one, each value with so many zeros behind it that it has a size."""
    import pyarrow as pa

    for row in batch.to_pylist():
        row["value"] = row["value"].ljust(size, b"\0")
        yield pa.RecordBatch.from_pylist([row], schema=batch.schema)


def _wait(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, "no other attempt came"
        time.sleep(0.005)
