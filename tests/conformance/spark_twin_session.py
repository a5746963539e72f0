"""One Spark session with its Kafka connector, in a process of its own: it runs the jobs.

`python -m tests.conformance.spark_twin_session DIRECTORY` reads JSON requests, one a line, and
answers each with a line, `ok` or a traceback as JSON. A job leaves its rows in files. The session
that other tests share has no connector on its class path, and a process has but one session.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

from kafkalog.datasource.lag import offsets_behind_latest
from tests.conformance.jars import PEERS
from tests.conformance.spark_twin_jobs import JOBS, TASK, Reader
from tests.spark_home import make_spark_home

CONNECTOR = PEERS / "spark"
QUERY_SECONDS = 180
_AT_ONCE = 2
"""Queries at a time: most of the time of each is waiting for processes that start."""
_TOO_BUSY = "Python worker failed to connect back"
_TRIES = 5
Ways = Mapping[str, tuple[str, dict[str, str]]]
"""By name, a format with its address."""


def fault() -> str | None:
    """Say why there is no connector; None when there is."""
    if next(CONNECTOR.glob("spark-sql-kafka-*.jar"), None) is None:
        return "no connector of Spark's for Kafka here; `make peers` fetches it"
    return None


class Query(NamedTuple):
    """A job by a way; a stream has its checkpoint and its output under `name`."""

    job: str
    way: str
    name: str
    stop_after: int | None = None
    """Stop after so many batches; else it runs until it has read what there is."""


class Outcome(NamedTuple):
    """What became of a query: the rows of each batch, and what the checkpoint says of each."""

    rows: list[list[str]]
    offsets: list[list[dict[str, dict[str, int]]]]
    """Of each batch, the offsets of each source."""
    watermarks: list[int]
    input_rows: list[int]
    """Of each batch of the last run that Spark told of."""
    lags: list[list[dict[str, str]]]
    seconds: float


class TwinSession:
    """The process with the session; a context manager."""

    program: ClassVar[str] = __name__
    """The module that is run in the process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._output = directory / "spark.out"

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.program, str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._answer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def run(self, queries: Sequence[Query], ways: Ways) -> None:
        """Run queries, some at a time."""
        self.ask({"queries": queries, "ways": ways})

    def outcome(self, name: str) -> Outcome:
        """Return what became of the query, all of its runs; fails when it failed."""
        found = json.loads((self.directory / f"{name}.json").read_text())
        assert "fault" not in found, found["fault"]
        return Outcome(**found)

    def messages(
        self, cases: Sequence[tuple[bool, dict[str, str]]], ways: Ways
    ) -> list[dict[str, str]]:
        """Read, as a stream or not, with options that are wrong; returns what each way says."""
        self.ask({"cases": cases, "ways": ways})
        return list(json.loads((self.directory / "messages.json").read_text()))

    def ask(self, request: dict[str, Any]) -> None:
        """Have a request done; fails when the process does."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        tail = self._output.read_text(errors="replace")[-3000:]
        assert line and json.loads(line) == "ok", line or tail


# --- in the process ------------------------------------------------------------------------------


def _session(directory: Path) -> Any:
    from pyspark.sql import SparkSession

    os.environ["SPARK_HOME"] = str(make_spark_home(directory / "home"))
    jars = os.pathsep.join(str(path) for path in sorted(CONNECTOR.glob("*.jar")))
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraClassPath", jars)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        # Each batch keeps a file of its own that says what it wrote.
        .config("spark.sql.streaming.fileSink.log.compactInterval", "1000")
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.local.dir", str(directory / "local"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


class _Runner:
    def __init__(self, spark: Any, directory: Path, ways: Ways) -> None:
        self._spark = spark
        self._directory = directory
        self._ways = ways

    def run(self, query: Query) -> None:
        begin = time.monotonic()
        try:
            reader = Reader(self._spark.newSession(), *self._ways[query.way])
            job = JOBS[query.job]
            frame = job.plan(reader)
            progress: list[Any] = []
            if job.is_stream:
                progress = self._stream(frame, query)
                rows = self._written(query.name)
            else:
                rows = [_canonical(row.json for row in _as_json(frame).collect())]
            offsets = self._offsets(query.name)
            found = Outcome(
                rows,
                [sources for _, sources in offsets],
                [watermark for watermark, _ in offsets],
                [p["numInputRows"] for p in progress],
                [_lags(p) for p in progress],
                round(time.monotonic() - begin, 2),
            )._asdict()
        except Exception:
            found = {"fault": traceback.format_exc()}
        (self._directory / f"{query.name}.json").write_text(json.dumps(found))

    def _stream(self, frame: Any, query: Query) -> list[Any]:
        """Run a stream to its end, or until it has done so many batches."""
        return patiently(lambda: self._run_stream(frame, query))

    def _run_stream(self, frame: Any, query: Query) -> list[Any]:
        writer = (
            frame.writeStream.format("json")
            .option("path", str(self._directory / f"{query.name}.out"))
            .option("checkpointLocation", str(self._directory / f"{query.name}.checkpoint"))
        )
        if query.stop_after is None:
            running = writer.trigger(availableNow=True).start()
            if not running.awaitTermination(QUERY_SECONDS):
                running.stop()
                raise AssertionError(f"{query} has not ended after {QUERY_SECONDS} s")
        else:
            running = writer.start()
            commits = self._directory / f"{query.name}.checkpoint" / "commits"
            deadline = time.monotonic() + QUERY_SECONDS
            while not (commits / str(query.stop_after - 1)).exists():
                if fault := running.exception():
                    raise fault
                assert time.monotonic() < deadline, query
                time.sleep(0.02)
            running.stop()
        return [json.loads(p.json) for p in running.recentProgress]

    def _offsets(self, name: str) -> list[tuple[int, list[dict[str, dict[str, int]]]]]:
        offsets = []
        for path in _numbered(self._directory / f"{name}.checkpoint" / "offsets"):
            version, metadata, *sources = path.read_text().splitlines()
            assert version == "v1"
            watermark = json.loads(metadata)["batchWatermarkMs"]
            offsets.append((watermark, [json.loads(source) for source in sources]))
        return offsets

    def _written(self, name: str) -> list[list[str]]:
        """Return the rows of each batch; only what the sink's own log names has been written."""
        output = self._directory / f"{name}.out"
        batches: dict[int, list[str]] = {}
        for path in _numbered(output / "_spark_metadata"):
            rows = []
            for line in path.read_text().splitlines()[1:]:
                file = output / Path(json.loads(line)["path"]).name
                rows += file.read_text().splitlines()
            batches[int(path.name)] = _canonical(rows)
        return [batches[number] for number in sorted(batches)]


def _as_json(frame: Any) -> Any:
    return frame.selectExpr("to_json(struct(*)) AS json")


def _lags(progress: dict[str, Any]) -> list[dict[str, str]]:
    """Return how far each source is behind, as the connector says it or, where it does not, we."""
    return [
        source.get("metrics") or ours
        for source, ours in zip(progress["sources"], offsets_behind_latest(progress), strict=True)
    ]


def _numbered(directory: Path) -> list[Path]:
    if not directory.exists():
        return []
    return sorted(
        (path for path in directory.iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )


def _canonical(rows: Iterable[str]) -> list[str]:
    """Sort rows; those of a task become one, whose number does not count."""
    tasks: dict[int, list[dict[str, Any]]] = {}
    alone = []
    for text in rows:
        row = json.loads(text)
        if TASK in row:
            tasks.setdefault(row.pop(TASK), []).append(row)
        else:
            alone.append(json.dumps(row, sort_keys=True))
    return sorted(alone) + sorted(json.dumps(rows, sort_keys=True) for rows in tasks.values())


def patiently(act: Callable[[], Any]) -> Any:
    """Do it again where the machine was too busy.

    Spark gives the process of a source in Python ten seconds to begin; nothing has happened then.
    """
    for _ in range(_TRIES):
        try:
            return act()
        except Exception as fault:
            if _TOO_BUSY not in str(fault):
                raise
    return act()


def _message(spark: Any, way: tuple[str, dict[str, str]], case: tuple[bool, Any]) -> str:
    is_stream, options = case
    reader = spark.readStream if is_stream else spark.read
    try:
        frame = reader.format(way[0]).options(**{**way[1], **options}).load()
        if is_stream:
            writer = frame.writeStream.format("noop").trigger(availableNow=True)
            patiently(lambda: writer.start().awaitTermination(QUERY_SECONDS))
        else:
            frame.count()
    except Exception as error:
        return str(error)
    return ""


def _do(spark: Any, directory: Path, request: dict[str, Any], pool: ThreadPoolExecutor) -> None:
    ways = {name: tuple(way) for name, way in request["ways"].items()}
    if "queries" in request:
        runner = _Runner(spark, directory, ways)
        list(pool.map(runner.run, [Query(*each) for each in request["queries"]]))
        return
    asked = [(name, case) for case in request["cases"] for name in ways]
    found = list(pool.map(lambda each: _message(spark, ways[each[0]], each[1]), asked))
    size = len(ways)
    rows = [found[place : place + size] for place in range(0, len(found), size)]
    messages = [dict(zip(ways, row, strict=True)) for row in rows]
    (directory / "messages.json").write_text(json.dumps(messages))


def serve(directory: Path, do: Callable[..., None]) -> None:
    """Answer requests as long as there are any; `do` gets session, directory, request and pool."""
    # What libraries print to the standard output would be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spark = _session(directory)
    print(json.dumps("ok"), file=answers)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for line in sys.stdin:
            try:
                do(spark, directory, json.loads(line), pool)
                answer = "ok"
            except Exception:
                answer = traceback.format_exc()
            print(json.dumps(answer), file=answers)
    with contextlib.suppress(Exception):
        spark.stop()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), _do)
