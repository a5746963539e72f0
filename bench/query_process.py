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
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import psutil

from bench.memory import peak_mib
from bench.spark import end_workers, session, workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["QueryProcess", "everything", "peaks"]

TOPIC: Final = "t"
_LAST_S: Final = 60
"""How long it may take to end."""
_NO_BYTECODE: Final = "PYTHONDONTWRITEBYTECODE"
"""With it every new worker would compile our sources: installed ones are compiled already."""


class QueryProcess:
    """The process, as its parent sees it; a context manager."""

    def __init__(self, directory: Path, way: str, sink: str) -> None:
        self._errors = directory / f"{way}.err"
        inherited = {name: value for name, value in os.environ.items() if name != _NO_BYTECODE}
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(directory), way, sink],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=inherited,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_LAST_S)
            except BaseException:
                process.kill()
                raise
        if kind is None and process.returncode:
            self._give_up()

    def ask(self, line: str) -> Any:
        """Have something done: `session`, `first`, `next`, `workers` or `drop`; see `_Query`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._give_up()
        return json.loads(answer)

    def _give_up(self) -> NoReturn:
        told = self._errors.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{told}\nthe query's process has ended with {self._process.wait()}")


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
