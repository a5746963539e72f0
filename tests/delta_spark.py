"""The Spark that has Delta Lake, which `make peers` installs beside the latest one.

Delta Lake is published for an earlier Spark than the tests run on. What needs Delta runs in a
process with that Spark's PySpark, and `environment` leads the process there.
"""

from __future__ import annotations

import os

import pytest

from tests import ROOT

__all__ = ["PYSPARK", "environment", "require", "settings"]

_PEER = ROOT / ".peers" / "delta"
PYSPARK = _PEER / "python" / "pyspark"
_JARS = "KAFKALOG_DELTA_JARS"


def require() -> None:
    """Skip the test if there is no Delta Lake, or fail it in CI."""
    if not PYSPARK.is_dir():
        reason = "no Delta Lake: `make peers` fetches it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def environment() -> dict[str, str]:
    """Return the environment of a process that starts Spark with Delta Lake."""
    return {
        **{name: value for name, value in os.environ.items() if name != "SPARK_HOME"},
        "PYTHONPATH": os.pathsep.join([str(PYSPARK.parent), str(ROOT)]),
        _JARS: os.pathsep.join(map(str, sorted(_PEER.glob("*.jar")))),
    }


def settings() -> dict[str, str]:
    """Return Spark's settings in such a process; none in any other."""
    if _JARS not in os.environ:
        return {}
    return {
        "spark.driver.extraClassPath": os.environ[_JARS],
        "spark.executor.extraClassPath": os.environ[_JARS],
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
    }
