"""A streaming query in a process of its own, which a benchmark tells what to do.

    python -m bench.query_process DIRECTORY WAY SINK

`WAY` is `kafkalog` or `ready`, `SINK` one of them or `noop`. The directory has the log `log` with
the topic `t`, or the file `rows`, from which the query reads (`ready_batches`). Each line on the
standard input asks for one thing, and each is answered by a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from bench.answering_process import AnsweringProcess
from bench.memory import peak_mib
from bench.spark import end_workers, session, workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QueryProcess", "everything", "peaks"]

TOPIC: Final = "t"


class QueryProcess(AnsweringProcess):
    """The process, as its parent sees it: it does what a method of `_Query` is named."""

    def __init__(self, directory: Path, way: str, sink: str) -> None:
        errors = directory / f"{way}.err"
        super().__init__(__name__, str(directory), way, sink, errors=errors)


class _Query:
    def __init__(self, directory: Path, way: str, sink: str, opened: contextlib.ExitStack) -> None:
        self._directory = directory
        self._opened = opened
        self._way = way
        self._sink = sink
        self._spark: SparkSession | None = None
        self._query: Any = None

    def session(self) -> bool:
        """Start Spark, and let it run one job without Python."""
        from bench.ready_batches import ReadyBatches

        self._spark = self._opened.enter_context(session(self._directory, memory="1g"))
        self._spark.dataSource.register(ReadyBatches)
        self._spark.range(1000).selectExpr("sum(id)").collect()
        return True

    def first(self) -> float:
        """Start the query; returns the seconds until its first micro-batch is done."""
        assert self._spark is not None
        started = time.perf_counter()
        reader = self._spark.readStream.format(self._way).option("startingOffsets", "earliest")
        if self._way == "ready":
            frame = reader.load(str(self._directory / "rows"))
        else:
            frame = reader.option("subscribe", TOPIC).load(str(self._directory / "log"))
        writer = frame.select("key", "value").writeStream.format(self._sink)
        if self._sink == "kafkalog":
            writer = writer.option("path", str(self._directory / "log")).option("topic", "out")
        checkpoint = self._directory / f"{self._way}-checkpoint"
        self._query = writer.option("checkpointLocation", str(checkpoint)).start()
        self._opened.callback(self._query.stop)
        self._query.processAllAvailable()
        return time.perf_counter() - started

    def next(self) -> dict[str, float]:
        """Wait until all there is has been read; tells of the last micro-batch that had rows."""
        self._query.processAllAvailable()
        while not (done := [p for p in self._query.recentProgress if p.numInputRows]):
            time.sleep(0.01)
        last = done[-1]
        return {
            "batch": last.batchId,
            "rows": last.numInputRows,
            "seconds": last.durationMs["triggerExecution"] / 1000,
            "worker_mib": max(peaks(workers()), default=0.0),
            "all_mib": sum(peaks(everything())),
        }

    def workers(self) -> int:
        """Return how many Python workers there are."""
        return len(workers())

    def drop(self) -> int:
        """End the idle workers, as Spark does after a minute; returns how many there were."""
        return end_workers()


def everything() -> list[psutil.Process]:
    """Return this process and all below it."""
    myself = psutil.Process()
    return [myself, *myself.children(recursive=True)]


def peaks(processes: Sequence[psutil.Process]) -> list[float]:
    """Return the most that each had resident, in MiB: without a watcher, which would take part."""
    found = []
    for process in processes:
        with contextlib.suppress(OSError, StopIteration):  # it may have ended meanwhile
            found.append(peak_mib(process.pid))
    return found


def main() -> None:
    """Answer as long as anything is asked."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print would be taken for an answer
    directory, way, sink = sys.argv[1:]
    with contextlib.ExitStack() as opened:
        query = _Query(Path(directory), way, sink, opened)
        for line in sys.stdin:
            print(json.dumps(getattr(query, line.strip())()), file=answers)


if __name__ == "__main__":
    main()
