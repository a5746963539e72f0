"""Shared by all tests: kernels of these sources, a clean environment, a Spark session, a limit."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import psutil

from tests import class_archives
from tests.other_platform import VARIABLE, become

if os.environ.get(VARIABLE):
    become(os.environ[VARIABLE])

ROOT = Path(__file__).resolve().parent.parent
# Spark's workers inherit this interpreter.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
# Nor would the JVM of a test gain from a collector with threads of its own.
_java = ["-XX:+UseSerialGC", *class_archives.QUICK_JVM]
_java += class_archives.options(class_archives.SPARK)
os.environ.setdefault("JAVA_TOOL_OPTIONS", " ".join(_java))
# No test needs what it writes after the machine has stopped. So its directory is in memory, where
# a sync takes no time, if there is more room than all tests take.
_memory, _room = Path("/dev/shm"), 8 << 30
if _memory.is_dir() and _room <= min(
    shutil.disk_usage(_memory).free, psutil.virtual_memory().available
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_memory))
# Spark's workers inherit the secret of the object store too, which `StoreServer` takes. A store of
# the user's has secrets of its own.
if not os.environ.get("KAFKALOG_TEST_PATH"):
    os.environ["AWS_ACCESS_KEY_ID"] = token_hex(8)
    os.environ["AWS_SECRET_ACCESS_KEY"] = token_hex(16)

import pytest  # noqa: E402 - the environment comes first

from tests.conformance.installation import decided  # noqa: E402
from tests.kernel_builds import SHEETS  # noqa: E402
from tests.log_place import TEST_PATH, delete_logs  # noqa: E402
from tests.object_store_server import (  # noqa: E402 - fixtures
    _proxy,  # noqa: F401
    s3_address,  # noqa: F401
    s3_url,  # noqa: F401
    store_proxy,  # noqa: F401
    store_server,  # noqa: F401
)
from tests.postgres_server import postgres, postgres_server  # noqa: E402, F401 - fixtures

UNIT = ROOT / "tests" / "unit"
CPU_SECONDS_MAX = 1.0
ALLOWANCE = 3
"""What a shared machine, or an unlucky draw of hypothesis, may add to a test below the limit."""
LOOP_SECONDS = 0.04
"""The processor time of the loop in `_slowness` on the machine of the limit."""


def pytest_configure() -> None:
    """Refuse to test compiled kernels of other sources than these."""
    sheets = {*(ROOT / "kafkalog").rglob("*.pxd")}
    latest = max(path.stat().st_mtime for path in sheets - {*SHEETS})
    for sheet in SHEETS:
        own = max(path.stat().st_mtime for path in (sheet, sheet.with_suffix(".py")))
        for library in sheet.parent.glob(f"{sheet.stem}.*.so"):
            if library.stat().st_mtime < max(latest, own):
                raise pytest.UsageError(f"{library}: older than its sources. Run `make setup`.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` runs: each unit test that is not slow is `chosen`."""
    for item in items:
        if UNIT in item.path.parents and not item.get_closest_marker("slow"):
            item.add_marker("chosen")


def _cpu_seconds() -> float:
    """Return the processor time of this process, and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _slowness() -> float:
    """Return how many times slower than the limit's machine this one is now; at least 1."""
    before = time.process_time()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.process_time() - before) / LOOP_SECONDS)


@pytest.fixture(scope="session", autouse=True)
def _heavy_imports() -> None:
    """Import what the first test of a process would otherwise pay for."""
    import pyarrow.compute  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test of `make test` that needs more than a second of processor time.

    Its mark `slow` moves it to `make test-rest`, where no test has a limit. A busy machine does not
    change that time. Fixtures, a debugger and other builds of the kernels do not count.
    """
    is_free = (
        item.get_closest_marker("chosen") is None
        or item.get_closest_marker("slow") is not None
        or sys.gettrace() is not None
        or "KAFKALOG_KERNEL_BUILD" in os.environ
    )
    before = _cpu_seconds()
    result = yield
    used = _cpu_seconds() - before
    limit = ALLOWANCE * CPU_SECONDS_MAX
    if not is_free and used > limit and used > limit * _slowness():
        pytest.fail(
            f"{item.nodeid}: the test is slow (expected at most {CPU_SECONDS_MAX} s of processor "
            f"time, found {used:.2f} s). Make it faster, or mark it `slow`.",
            pytrace=False,
        )
    return result


@pytest.fixture(scope="module")
def compared_kernels() -> Iterator[None]:
    """Compare each kernel that is called with its own source as Python."""
    from tests.compared_kernels import compared

    with compared():
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield one Spark session for the whole run: two task slots, retries allowed, no web server."""
    from pyspark.sql import SparkSession

    from tests.spark_home import INTERPRETED, make_spark_home, remember_names

    scratch = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_HOME"] = str(make_spark_home(scratch / "home"))
    remember_names()
    session = (
        SparkSession.builder.master("local[2,2]")
        .appName("kafkalog-tests")
        .config(map={**INTERPRETED})
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
    """Delete what went to a store of the user; tell the process that reports, if it is another."""
    if TEST_PATH and session.testscollected:
        delete_logs()
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
        terminalreporter.write_line(f"tests/conformance: {kafka}")
