"""The Spark that has Delta Lake, which `make peers` installs beside the latest one.

Delta Lake is published for an earlier Spark than the tests run on. What needs Delta runs in a
process with that Spark's PySpark, and `environment` leads the process there.
"""

from __future__ import annotations

import os

from tests import spark_peers

__all__ = ["PYSPARK", "environment", "require", "settings", "settings_of"]

_RELEASE = "4.2"
PYSPARK = spark_peers.package(_RELEASE)
_JARS = "KAFKALOG_DELTA_JARS"


def require() -> None:
    """Skip the test if there is no Delta Lake, or fail it in CI."""
    spark_peers.require(_RELEASE)


def environment() -> dict[str, str]:
    """Return the environment of a process that starts Spark with Delta Lake."""
    return {**spark_peers.environment(_RELEASE), _JARS: spark_peers.jars(_RELEASE, "delta")}


def settings() -> dict[str, str]:
    """Return Spark's settings in such a process; none in any other."""
    return settings_of(os.environ[_JARS]) if _JARS in os.environ else {}


def settings_of(jars: str) -> dict[str, str]:
    """Return Spark's settings for Delta Lake with a class path."""
    return {
        "spark.driver.extraClassPath": jars,
        "spark.executor.extraClassPath": jars,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
