"""Archives of Java's classes, with which a JVM of Spark or of Kafka starts in half the time.

    python -m tests.class_archives {spark,broker}

The command runs the program once and keeps what classes it has loaded, parsed and checked: Java's
class data sharing. A JVM that finds other jars, or is another Java, does without the archive.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests import ROOT
from tests.spark_home import make_spark_home

__all__ = ["BROKER", "QUICK_JVM", "SPARK", "options"]

SPARK: Final = ROOT / ".venv" / "spark.jsa"
BROKER: Final = ROOT / ".peers" / "broker.jsa"
QUICK_JVM: Final = (
    "-XX:TieredStopAtLevel=1",
    "-XX:ReservedCodeCacheSize=240m",
    "-XX:MetaspaceSize=256m",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
"""No JVM of a test runs long enough to gain from the second compiler, which takes half a processor.
The first alone has 48 MB for its code; the plans of Delta Lake need more, and would be compiled
again and again.
The verifier takes a second of each start."""
_QUIET: Final = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
"""What does not fit goes to the standard output otherwise."""
_ENDS_S: Final = 600


def options(archive: Path) -> list[str]:
    """Return the options by which a JVM takes an archive; none if it could not be made."""
    is_made = archive.exists() and archive.stat().st_size > 0
    return [f"-XX:SharedArchiveFile={archive}", *_QUIET] if is_made else []


def _made(archive: Path) -> str:
    return f"-XX:ArchiveClassesAtExit={archive}"


def archive_spark(archive: Path, scratch: Path) -> None:
    """Run a session of Spark: a query with a shuffle, a stream, and its function in Python."""
    os.environ["SPARK_HOME"] = str(make_spark_home(scratch / "home"))
    words = shlex.join(["--driver-java-options", " ".join([*QUICK_JVM, _made(archive)])])
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{words} pyspark-shell"
    from pyspark.sql import SparkSession

    import kafkalog

    builder = SparkSession.builder.master("local[2]")
    builder = builder.config(
        map={
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.local.dir": str(scratch / "local"),
        }
    )
    spark = builder.getOrCreate()
    with kafkalog.open(scratch / "log") as log:
        log.create_topic("t")
        log.append("t", [("a", "1"), ("b", "2")])
    kafkalog.register(spark)
    stream: Any = spark.readStream.format("kafkalog").option("path", str(scratch / "log"))
    rows = stream.options(subscribe="t", startingOffsets="earliest").load()

    def count(frame: Any, _: int) -> None:
        frame.groupBy("key").count().write.mode("append").parquet(str(scratch / "out"))

    writer = rows.writeStream.foreachBatch(count).trigger(availableNow=True)
    writer.option("checkpointLocation", str(scratch / "checkpoint")).start().awaitTermination()
    assert spark.read.parquet(str(scratch / "out")).count() == 2
    java: Any = spark.sparkContext._gateway
    spark.stop()
    java.proc.stdin.close()  # by which the JVM ends
    java.proc.wait(_ENDS_S)


def archive_broker(archive: Path, scratch: Path) -> None:
    """Run a broker with a topic, and end it."""
    from tests.conformance.installation import Program
    from tests.conformance.jars import Jars
    from tests.conformance.kafka import KafkaBroker

    class Archived(Jars):
        def _command(self, program: Program, arguments: tuple[str, ...]) -> list[str]:
            java, *words = super()._command(program, arguments)
            return [java, *([_made(archive)] if program is Program.SERVER else []), *words]

    with KafkaBroker(scratch / "kafka", installation=Archived(ROOT / ".peers")) as broker:
        broker.create_topic("t")
        broker.stop()


_PROGRAMS: Final[dict[str, tuple[Path, Callable[[Path, Path], None]]]] = {
    "spark": (SPARK, archive_spark),
    "broker": (BROKER, archive_broker),
}


def main() -> None:
    """Make the archive that is asked for."""
    archive, make = _PROGRAMS[sys.argv[1]]
    archive.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="kafkalog-classes-") as scratch:
        fresh = archive.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        make(fresh, Path(scratch))
        fresh.rename(archive)


if __name__ == "__main__":
    main()
