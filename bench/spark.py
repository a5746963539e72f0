"""A Spark session to measure in: quiet, on the loopback, with everything in a scratch directory."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from bench import NO_BYTECODE
from bench.memory import Peak, peak_of_tree
from bench.stored import make_secret
from tests.conformance.jars import PEERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECTOR = PEERS / "spark"
CORES = 2
"""Task slots."""
KEY: Final = "encode(lpad(cast({0} as string), 10, '0'), 'utf-8') as key"
VALUE: Final = (
    "encode(concat('{{\"number\":', lpad(cast({0} as string), 10, '0'), ',\"hash\":\"', "
    'lpad(hex(xxhash64({0})), 16, \'0\'), \'","name":"customer","state":"active","n":\', '
    "lpad(cast({0} % 997 as string), 3, '0'), '}}'), 'utf-8') as value"
)
"""Columns of a record that expressions make of a number."""


def connector_fault() -> str | None:
    """Say why Spark's Kafka connector is not to be had; None when it is."""
    if next(CONNECTOR.glob("spark-sql-kafka-*.jar"), None) is None:
        return "no connector of Spark's for Kafka here; `make peers` fetches it"
    return None


@contextlib.contextmanager
def session(
    place: Path | None = None,
    *,
    memory: str = "2g",
    connector: bool = False,
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """Give a session with two task slots; `connector` puts Spark's for Kafka on the class path.

    `place` is where Spark's own files go, a directory; `conf` has settings of `spark.sql`. Spark is
    started, and stopped in the end, unless it runs already (bench/together.py): then the session is
    a new one of it, with settings and views of its own, but with Spark's memory and class path.
    """
    from pyspark.sql import SparkSession

    of_sql = {"spark.sql.shuffle.partitions": str(CORES), **(conf or {})}
    if running := SparkSession.getActiveSession():
        made = running.newSession()
        for name, value in of_sql.items():
            made.conf.set(name, value)
        _activate(made)
        try:
            yield made
        finally:
            _activate(running)
        return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    make_secret()  # which workers inherit from Spark
    os.environ.pop(NO_BYTECODE, None)
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=place) as scratch:
        settings = {
            "spark.driver.memory": memory,
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.local.dir": f"{scratch}/local",
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
            **({"spark.driver.extraClassPath": f"{CONNECTOR}/*"} if connector else {}),
            **of_sql,
        }
        builder = SparkSession.builder.master(f"local[{CORES}]")
        builder = builder.config(map={**settings})
        made = builder.getOrCreate()
        made.sparkContext.setLogLevel("ERROR")
        try:
            yield made
        finally:
            made.stop()


def _activate(session: Any) -> None:
    """Let Spark look for formats where this session has registered them."""
    of_java = session._get_j_spark_session_class(session._jvm)
    of_java.setActiveSession(session._jsparkSession)


def driver_pid(spark: SparkSession) -> int:
    """Return the process id of the driver's JVM; the Python workers are below it."""
    jvm: Any = spark.sparkContext._jvm
    pid: int = jvm.java.lang.ProcessHandle.current().pid()
    return pid


@contextlib.contextmanager
def watched(spark: SparkSession, *, without: int | None = None) -> Iterator[Peak]:
    """Watch what this process, Spark's JVM and its Python workers have resident, without a process.

    Idle workers end first, and the JVM gives back what it can: the remains of others do not count.
    """
    end_workers()
    jvm: Any = spark.sparkContext._jvm
    jvm.java.lang.System.gc()
    with peak_of_tree(without=without) as peak:
        yield peak


def end_workers() -> int:
    """End the idle workers, as Spark does after a minute; returns how many there were."""
    found = workers()
    for process in found:
        with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
            process.terminate()
    psutil.wait_procs(found, timeout=10)
    return len(found)


def workers() -> list[psutil.Process]:
    """Return the Python workers, which daemons below this process have forked."""
    found, daemons = [], set()
    for process in psutil.Process().children(recursive=True):  # a parent comes before its children
        with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
            if process.ppid() in daemons:
                found.append(process)
            elif "pyspark.daemon" in process.cmdline():
                daemons.add(process.pid)
    return found
