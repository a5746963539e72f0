"""The Spark session that writes: the same jobs, and the same wrong writes, with both formats.

It is a process of its own, as that of spark_twin_session.py is, which has the rest of it.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from examples.mirror_kafka import mirror
from pyspark_kafkalog import DefaultSource
from tests.conformance.spark_twin_session import QUERY_SECONDS, TwinSession, patiently, serve
from tests.conformance.spark_twin_sink import JOBS, KAFKA, OURS, Target, write_file
from tests.conformance.spark_twin_sink_errors import CASES, Case

FORMATS = (KAFKA, OURS)
Addresses = Mapping[str, dict[str, str]]
"""By format."""
_ANSWERS = "answers.json"


class Said(NamedTuple):
    """What Spark says of a wrong write; nothing where it was none."""

    kind: str
    """The class of the exception."""
    message: str


class SinkSession(TwinSession):
    """The process with the session; a context manager."""

    program: ClassVar[str] = __name__

    def write(self, jobs: Sequence[str], addresses: Addresses) -> None:
        """Run jobs with both formats."""
        self.ask({"jobs": jobs, "addresses": addresses})

    def written(self, job: str, format: str) -> list[int] | None:
        """Return what the job has returned; fails when it failed."""
        found = json.loads((self.directory / f"{job}-{format}.json").read_text())
        assert "fault" not in found, found["fault"]
        return None if found["rows"] is None else list(found["rows"])

    def refusals(self, cases: Sequence[str], addresses: Addresses) -> dict[str, dict[str, Said]]:
        """Make writes that are wrong; returns by case and format what is said of them."""
        self.ask({"cases": cases, "addresses": addresses})
        found = json.loads((self.directory / _ANSWERS).read_text())
        return {
            name: {format: Said(*said) for format, said in answers.items()}
            for name, answers in found.items()
        }

    def mirror(self, bootstrap: str, topic: str, path: Path) -> None:
        """Copy a topic of a broker into a log, or what has come since it was copied last."""
        checkpoint = self.directory / f"{path.name}.checkpoint"
        self.ask({"mirror": [bootstrap, [topic], str(path), str(checkpoint)]})


# --- in the process ------------------------------------------------------------------------------


def _activate(spark: Any) -> None:
    """Make the session that of this thread: without one Spark finds no format in Python to write.

    As `createDataFrame` says of itself.
    """
    spark.createDataFrame([(0,)], "id int")


def _run(spark: Any, directory: Path, addresses: Addresses, job: str, format: str) -> None:
    scratch = directory / f"{job}-{format}"
    scratch.mkdir()
    try:
        _activate(spark)
        rows = JOBS[job].run(Target(spark, format, addresses, scratch))
        found: dict[str, Any] = {"rows": rows}
    except Exception:
        found = {"fault": traceback.format_exc()}
    (directory / f"{job}-{format}.json").write_text(json.dumps(found))


def _refusal(spark: Any, source: Path, address: dict[str, str], case: Case, format: str) -> Said:
    options = {**address, **case.options}
    try:
        _activate(spark)
        if case.is_stream:
            rows = spark.readStream.schema("id bigint").json(str(source)).selectExpr(*case.columns)
            writer = rows.writeStream.format(format).outputMode(case.mode)
            writer = writer.options(**options).trigger(availableNow=True)

            def run() -> None:
                running = writer.start()
                assert running.awaitTermination(QUERY_SECONDS)

            patiently(run)
        else:
            rows = spark.range(3).coalesce(1).selectExpr(*case.columns)
            patiently(rows.write.format(format).mode(case.mode).options(**options).save)
    except Exception as error:
        return Said(type(error).__name__, str(error))
    return Said("", "")


def _mirror(spark: Any, bootstrap: str, topics: list[str], path: Path, checkpoint: Path) -> None:
    now = {"availableNow": True}
    running = mirror(spark, bootstrap, topics, path, checkpoint, trigger=now)
    assert running.awaitTermination(QUERY_SECONDS)


def _do(spark: Any, directory: Path, request: dict[str, Any], pool: ThreadPoolExecutor) -> None:
    # Spark looks for formats once, and goes without where a machine is too busy for it.
    spark.dataSource.register(DefaultSource)
    if "mirror" in request:
        bootstrap, topics, path, checkpoint = request["mirror"]
        patiently(lambda: _mirror(spark, bootstrap, topics, Path(path), Path(checkpoint)))
        return
    addresses = request["addresses"]
    if "jobs" in request:
        asked = [(job, format) for job in request["jobs"] for format in FORMATS]
        list(pool.map(lambda each: _run(spark, directory, addresses, *each), asked))
        return
    source = directory / "ids"
    source.mkdir()
    write_file(source, 0)
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(directory / "checkpoints"))
    asked = [(name, format) for name in request["cases"] for format in FORMATS]
    said = pool.map(
        lambda each: _refusal(spark, source, addresses[each[1]], CASES[each[0]], each[1]), asked
    )
    found: dict[str, dict[str, Said]] = {}
    for (name, format), answer in zip(asked, said, strict=True):
        found.setdefault(name, {})[format] = answer
    (directory / _ANSWERS).write_text(json.dumps(found))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), _do)
