"""What all tests share: where numba caches, a Spark session, and a clean environment.

The first lines run before anything imports numba: its cache does not notice edits of the files a
kernel imports, and takes no notice of NUMBA_BOUNDSCHECK, so each state of the sources and each set
of flags gets a cache of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LAYOUT = ROOT / "kafkalog" / "storage_engine" / "layout.py"
_SOURCES = [*sorted((ROOT / "kafkalog").rglob("kernels.py")), _LAYOUT]
_FLAGS = [
    f"{name}={os.environ.get(name, '')}" for name in ("NUMBA_BOUNDSCHECK", "NUMBA_DISABLE_JIT")
]
_KEY = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES) + ",".join(_FLAGS).encode())
os.environ["NUMBA_CACHE_DIR"] = str(
    Path(tempfile.gettempdir()) / f"kafkalog-numba-{os.getuid()}" / _KEY.hexdigest()[:16]
)
# Spark's workers are other processes; they inherit this interpreter and the cache above.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
# No JVM of a test runs long enough to gain from the second compiler, which takes half a processor.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")

import pytest  # noqa: E402 - the environment comes first

from tests.peers.installation import decided  # noqa: E402
from tests.postgres_server import postgres, postgres_server  # noqa: E402, F401 - fixtures


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield one Spark session for the whole run: two task slots, retries allowed, no web server."""
    from pyspark.sql import SparkSession

    from tests.spark_home import make_spark_home

    scratch = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_HOME"] = str(make_spark_home(scratch / "home"))
    session = (
        SparkSession.builder.master("local[2,2]")
        .appName("kafkalog-tests")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.stopTimeout", "60s")
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.local.dir", str(scratch / "local"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


_kafkas: set[str] = set()
"""Which Kafka it was that the processes of a run in several have met."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that reports, where that is another."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kafka"] = str(decided() or "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Note what a process has told as it ended."""
    if kafka := getattr(node, "workeroutput", {}).get("kafka"):
        _kafkas.add(kafka)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which Kafka it was, and why it was no other."""
    for kafka in sorted(_kafkas or filter(None, [str(decided() or "")])):
        terminalreporter.write_line(f"tests/peers: {kafka}")
