"""Rows a second of a streaming write and a streaming read, on each release of Spark.

    python -m bench.releases [--quick] [--json] [--path DIR] [--rounds N]

Each release has a process of its own, with the PySpark of `make peers`. They take turns, round by
round, at the same rows of 100 bytes: micro-batches that Spark makes of numbers go to a log by
`writeStream`, and a stream reads all of them in one micro-batch into the format `noop`. The time is
Spark's own `triggerExecution`. A sink in Python that only counts, and a source in Python that hands
over one ready batch again and again, show what each release takes for itself. The first micro-batch
of a write, in which Spark starts its processes, does not count. The faster one of two reads does.
The first round warms up.

It is run by hand: the page of benchmarks has the newest Spark alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import kafkalog
from bench import MORE, compare_figures, in_turn, leave_out, program, report
from bench.answering_process import AnsweringProcess
from bench.spark import KEY, VALUE, session
from tests import spark_peers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEWEST: Final = spark_peers.RELEASES[-1]
TARGET: Final = ">= 0.9"
TASKS: Final = 4
COUNT: Final = 4
"""Micro-batches of a query."""
COUNTING: Final = "counting"
READY: Final = "ready"
BATCH: Final = 10_000
"""Rows of a ready batch."""


class ReleaseProcess(AnsweringProcess):
    """The process of a release, as its parent sees it."""

    def __init__(self, release: str, scratch: Path, rows: int) -> None:
        directory = scratch / release
        directory.mkdir()
        kept = dict(os.environ)
        os.environ.update(spark_peers.environment(release))
        os.environ.pop("SPARK_HOME", None)
        try:
            errors = directory / "errors"
            super().__init__(
                "bench.releases", "--process", str(directory), str(rows), errors=errors
            )
        finally:
            os.environ.clear()
            os.environ.update(kept)


def _counting() -> Any:
    """Return a sink that counts; Spark gives it Arrow batches, and Spark 4.0 rows.

    `bench.floor` is the same for the newest Spark alone.
    """
    from pyspark.sql import datasource

    arrow = getattr(datasource, "DataSourceStreamArrowWriter", None)

    class Writer(arrow or datasource.DataSourceStreamWriter):  # type: ignore[misc]  # by the release
        def write(self, iterator: Any) -> Any:
            count = sum(each.num_rows if arrow else 1 for each in iterator)
            assert count
            return datasource.WriterCommitMessage()

        def commit(self, messages: Any, batchId: int) -> None: ...

        def abort(self, messages: Any, batchId: int) -> None: ...

    class Counting(datasource.DataSource):
        @classmethod
        def name(cls) -> str:
            return COUNTING

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return Writer()

    return Counting


def _ready() -> Any:
    """Return a source that hands over `rows` rows in each of TASKS tasks, as one micro-batch."""
    import pyarrow as pa
    from pyspark.sql import datasource

    from kafkalog.datasource.columns import spark_schema
    from kafkalog.schema import changelog_schema

    class Reader(datasource.DataSourceStreamReader):
        def __init__(self, rows: int) -> None:
            self._rows = rows

        def initialOffset(self) -> dict[str, int]:
            return {"rows": 0}

        def latestOffset(self, *_: Any) -> dict[str, int]:  # since Spark 4.2: start and limit
            return {"rows": self._rows}

        def partitions(self, start: Any, end: Any) -> list[datasource.InputPartition]:
            return [datasource.InputPartition(number) for number in range(TASKS)]

        def read(self, partition: Any) -> Any:
            schema = changelog_schema()
            columns = [pa.nulls(BATCH, field.type) for field in schema]
            columns[schema.get_field_index("key")] = pa.array([b"k" * 10] * BATCH, pa.binary())
            columns[schema.get_field_index("value")] = pa.array([b"v" * 90] * BATCH, pa.binary())
            batch = pa.RecordBatch.from_arrays(columns, schema=schema)
            for _ in range(self._rows // BATCH):
                yield batch

    class Ready(datasource.DataSource):
        @classmethod
        def name(cls) -> str:
            return READY

        def schema(self) -> Any:
            return spark_schema(include_headers=False)

        def streamReader(self, schema: Any) -> Any:
            return Reader(int(self.options["rows"]))

    return Ready


class _Release:
    def __init__(self, spark: SparkSession, directory: Path, rows: int) -> None:
        self._spark, self._directory, self._rows = spark, directory, rows
        self._turn = 0
        starts, size = directory / "starts", rows // TASKS
        starts.mkdir()
        for number in range(COUNT * TASKS):
            (starts / str(number)).write_text(str(number * size))
        source = spark.readStream.format("text").option("maxFilesPerTrigger", TASKS)
        first = "cast(value as bigint)"
        numbers = f"explode(sequence({first}, {first} + {size - 1})) as number"
        frame = source.load(str(starts)).selectExpr(numbers)
        self._frame = frame.selectExpr(KEY.format("number"), VALUE.format("number"))

    def release(self) -> str:
        return str(self._spark.version)

    def write(self) -> float:
        """Write a topic; returns million rows a second."""
        self._turn += 1
        with kafkalog.open(self._log) as log:
            log.create_topic(self._topic, TASKS, {"cleanup.policy": "delete"})
        writer = self._frame.writeStream.format("kafkalog").option("topic", self._topic)
        return self._rate(writer.option("path", self._log), "write")

    def count(self) -> float:
        """Write the same rows into a sink that counts them; returns million rows a second."""
        return self._rate(self._frame.writeStream.format(COUNTING), "count")

    def read(self) -> float:
        """Read the topic that was written last, twice; returns million rows a second."""
        reader = self._spark.readStream.format("kafkalog").option("startingOffsets", "earliest")
        return self._read(reader.option("subscribe", self._topic).load(self._log), "read")

    def ready(self) -> float:
        """Read as many ready rows, twice; returns million rows a second."""
        reader = self._spark.readStream.format(READY)
        return self._read(reader.option("rows", self._rows * COUNT // TASKS).load(), "ready")

    def _read(self, frame: Any, name: str) -> float:
        writer = frame.writeStream.format("noop")
        took = [sum(self._run(writer, f"{name}-{number}")) for number in range(2)]
        return self._rows * COUNT / min(took) / 1000

    def _rate(self, writer: Any, name: str) -> float:
        done = self._run(writer, name)
        assert len(done) == COUNT, done
        return self._rows * (COUNT - 1) / sum(done[1:]) / 1000

    @property
    def _log(self) -> str:
        return str(self._directory / "log")

    @property
    def _topic(self) -> str:
        return f"t{self._turn}"

    def _run(self, writer: Any, name: str) -> list[int]:
        """Run a query to the end of its source; return what each micro-batch took, in ms."""
        checkpoint = self._directory / f"checkpoint-{name}-{self._turn}"
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        try:
            query.processAllAvailable()
            done = [each for each in query.recentProgress if each["numInputRows"]]
        finally:
            query.stop()
        return [each["durationMs"]["triggerExecution"] for each in done]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the ratios to the newest of the releases."""
    parser = program("releases", __doc__, quick="few rows")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    options = parser.parse_args(arguments)
    rows, rounds = (20_000, 1) if options.quick else (200_000, options.rounds)
    found = {(what, name): list[float]() for what in WORK for name in spark_peers.RELEASES}
    for release in spark_peers.RELEASES:
        if not spark_peers.package(release).is_dir():
            leave_out(f"Spark {release}", "`make peers` fetches it")
            return
    with contextlib.ExitStack() as opened:
        name = TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path)
        scratch = Path(opened.enter_context(name))
        running = {
            release: opened.enter_context(ReleaseProcess(release, scratch, rows))
            for release in spark_peers.RELEASES
        }
        versions = {release: process.ask("release") for release, process in running.items()}
        for turn in range(rounds + 1):
            for release in in_turn(turn, spark_peers.RELEASES):
                for what in WORK:
                    os.sync()
                    rate = running[release].ask(what)
                    found[what, release] += [rate] if turn else []
    for what, words in WORK.items():
        for release in spark_peers.RELEASES[:-1]:
            ours, peer = found[what, release], found[what, NEWEST]
            claim = compare_figures(
                f"{words}, {rows:,} rows a micro-batch, Spark {versions[release]}",
                ours,
                peer,
                unit="million rows/s",
                peer_name=f"Spark {versions[NEWEST]}",
                ratio_is=MORE,
                target=TARGET if what in OURS else "",
            )
            best = round(max(ours) / max(peer), 3)
            report(claim.told(ratio_of_the_best=best), as_json=options.json)


WORK: Final = {
    "write": "writeStream",
    "read": "readStream",
    "count": "writeStream into a sink that counts",
    "ready": "readStream of ready batches",
}
OURS: Final = ("write", "read")


def answer(directory: Path, rows: int) -> None:
    """Be the process of a release: do what each line names."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print would be taken for an answer
    conf = {"spark.sql.files.minPartitionNum": str(TASKS)}
    with session(directory, memory="1g", conf=conf) as spark:
        kafkalog.register(spark)
        for floor in (_counting(), _ready()):
            spark.dataSource.register(floor)
        release = _Release(spark, directory, rows)
        for line in sys.stdin:
            print(json.dumps(getattr(release, line.strip())()), file=answers)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        answer(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
