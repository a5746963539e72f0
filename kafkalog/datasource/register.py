"""`register`: a live session finds the format, and its workers run this Python.

Spark starts its workers by the name in `PYSPARK_PYTHON`, else `python3`, which it reads when a
session starts. In a notebook, or with an environment that is not activated, that is another Python.
The SparkContext keeps the name as `pythonExec`. A Spark Connect server reads it from the
environment of its JVM for each request. Both can be changed if the JVM was started from here.

A write by Spark classic looks for a format in the session that is active in its thread of the JVM.
A thread of Python has a thread of the JVM as its twin, in which no session is active at first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

_VARIABLE: Final = "PYSPARK_PYTHON"
_CAUSE: Final = re.compile(
    r"No module named \S+|Cannot run program [^\n]*|\[PYTHON_VERSION_MISMATCH\][^\n]*"
)


def register(spark: SparkSession) -> None:
    """Make `format("kafkalog")` known to a session, and let Spark's workers run this Python.

    Call it once per session, at any time before its first read or write; a second call changes
    nothing. It works with Spark classic and with Spark Connect, and from any thread. A local master
    then starts its workers with this process's Python. On a cluster the executors keep the Python
    that `PYSPARK_PYTHON` names, unless only this one has kafkalog. One task tries the import.

    Raises InvalidInputError, which says what to set, if the workers cannot import kafkalog. Nobody
    can change the Python of a Spark Connect server that was started elsewhere.
    """
    import pyspark

    from kafkalog.spark_release import fault_of_release

    if refused := fault_of_release(pyspark.__version__):
        raise InvalidInputError(f"register: {refused}")
    if not hasattr(spark, "dataSource"):
        raise InvalidInputError(
            f"register: it takes a session (expected a SparkSession, found {spark!r}). Give it the "
            "one that reads or writes the log."
        )
    from kafkalog.datasource.source import KafkaLogDataSource

    context = _context(spark)
    if context is not None and hasattr(spark, "_jsparkSession"):
        _activate_in_new_threads(spark)
    fault = ""
    for python in _candidates(context):
        try:
            with _workers_running(context, python):
                _announce(spark, KafkaLogDataSource)
                spark.range(0, 1, 1, 1).mapInArrow(_unchanged, "id long").collect()
        except Exception as error:
            files.pass_on(error)
            fault = fault or _cause(error)
        else:
            return
    version = ".".join(map(str, sys.version_info[:2]))
    raise InvalidInputError(
        f"register: Spark's workers cannot run kafkalog (expected Python {version} with kafkalog, "
        f"found: {fault}). Install it for the workers' Python, and set {_VARIABLE} to that Python "
        "before the session, or its Spark Connect server, is started."
    )


def _announce(spark: SparkSession, source: type[DataSource]) -> None:
    """Register the format; Spark remembers the Python.

    Spark 4.0 refuses a format that it has found by itself, in the Python that runs now.
    """
    try:
        spark.dataSource.register(source)
    except Exception as error:
        files.pass_on(error)
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def _context(spark: SparkSession) -> SparkContext | None:
    """Return the context of the session's JVM if this process has started it; else None."""
    import pyspark

    if not hasattr(spark, "_jsparkSession") and "SPARK_LOCAL_REMOTE" not in os.environ:
        return None  # the server was started elsewhere
    holder = getattr(pyspark, "SparkContext", None)  # the package pyspark-client lacks it
    return None if holder is None else holder._active_spark_context


def _activate_in_new_threads(spark: SparkSession) -> None:
    """Make a classic session the active one in this thread, and in each that meets Spark later.

    The gateway outlives the session, so it does not keep one that nobody uses any more.
    """
    client = _jvm(spark)._gateway_client
    client._create_new_connection = functools.partial(_connected, client, weakref.ref(spark))
    _activate(spark)


def _connected(client: Any, registered: weakref.ref[SparkSession]) -> Any:
    """Return a new connection of py4j for this thread, whose twin has an active session."""
    connection = type(client)._create_new_connection(client)  # py4j keeps it weakly until used
    spark = registered()
    if spark is not None:
        _activate(spark)
        client.deque.remove(connection)  # the command that is to follow adds it again
    return connection


def _activate(spark: SparkSession) -> None:
    _jvm(spark).org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)


def _jvm(owner: SparkSession | SparkContext) -> Any:
    return owner._jvm


def _candidates(context: SparkContext | None) -> list[str]:
    """Return the Pythons to try for the workers."""
    if context is None:
        return [""]
    if re.match(r"local(\[|$)", context.master or ""):
        return [sys.executable]
    return list(dict.fromkeys([context.pythonExec, sys.executable]))


@contextlib.contextmanager
def _workers_running(context: SparkContext | None, python: str) -> Iterator[None]:
    """Let workers that Spark starts from now on run a Python; undo that if the block raises."""
    if context is None:
        yield
        return
    environment = _environment(context)
    executable, variable = context.pythonExec, environment.get(_VARIABLE)
    context.pythonExec = environment[_VARIABLE] = python
    try:
        yield
    except BaseException:
        context.pythonExec = executable
        environment.pop(_VARIABLE, None)
        if variable is not None:
            environment[_VARIABLE] = variable
        raise


def _environment(context: SparkContext) -> Any:
    """Return the environment of the JVM, which Java shows as a map that cannot be changed.

    A JVM that hides it serves Spark classic without it; the probe decides. The map is empty then.
    """
    from py4j.protocol import Py4JJavaError

    lang = _jvm(context).java.lang
    try:
        field = lang.Class.forName("java.util.Collections$UnmodifiableMap").getDeclaredField("m")
        field.setAccessible(True)
        return field.get(lang.System.getenv())
    except Py4JJavaError:
        return {}


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return what a task gets: a worker imports kafkalog to find this function."""
    return batches


def _cause(error: Exception) -> str:
    """Return why a worker failed, in some words."""
    text = str(error)
    found = _CAUSE.search(text)
    return found[0].rstrip(".") if found else text.strip().partition("\n")[0]
