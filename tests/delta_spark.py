"""The Spark that has Delta Lake, which `make peers` installs beside the latest one.

Delta Lake is published for an earlier Spark than the tests run on. What needs Delta runs in a
process with that Spark's PySpark, and `environment` leads the process there.
"""

from __future__ import annotations

import os

from tests import ROOT, spark_peers

__all__ = ["PYSPARK", "environment", "require", "settings"]

_RELEASE = "4.2"
PYSPARK = spark_peers.package(_RELEASE)
_JARS = "KAFKALOG_DELTA_JARS"


def require() -> None:
    """Skip the test if there is no Delta Lake, or fail it in CI."""
    spark_peers.require(_RELEASE)


def environment() -> dict[str, str]:
    """Return the environment of a process that starts Spark with Delta Lake."""
    jars = sorted((ROOT / ".peers" / "delta").glob("*.jar"))
    return {**spark_peers.environment(_RELEASE), _JARS: os.pathsep.join(map(str, jars))}


def settings() -> dict[str, str]:
    """Return Spark's settings in such a process; none in any other."""
    if _JARS not in os.environ:
        return {}
    return {
        "spark.driver.extraClassPath": os.environ[_JARS],
        "spark.executor.extraClassPath": os.environ[_JARS],
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
