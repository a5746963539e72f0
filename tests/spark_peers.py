"""Older releases of PySpark, which `make peers` installs with the Delta Lake and Avro that fit.

What needs one runs in a process with it, and `environment` leads the process there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import ROOT

__all__ = ["RELEASES", "avro_package", "environment", "jars", "package", "require"]

RELEASES = ("4.0", "4.1", "4.2")


def package(release: str) -> Path:
    """Return the directory of pyspark 4.0, 4.1 or 4.2."""
    return ROOT / ".peers" / f"spark-{release}" / "pyspark"


def jars(release: str, name: str = "") -> str:
    """Return the class path of Delta Lake and the Avro package for a release, or of one by name."""
    found = (ROOT / ".peers" / f"packages-{release}").glob(f"{name}*.jar")
    return os.pathsep.join(map(str, sorted(found)))


def require(release: str) -> None:
    """Skip the test if a release or its packages are not there, or fail it in CI."""
    if not (package(release).is_dir() and jars(release)):
        _miss(f"Spark {release}")


def avro_package() -> str:
    """Return the class path of the newest Avro package; skip the test without it, or fail in CI."""
    found = jars(RELEASES[-1], "spark-avro")
    if not found:
        _miss("Avro package of Spark")
    return found


def _miss(what: str) -> None:
    reason = f"no {what}: `make peers` fetches it"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def environment(release: str) -> dict[str, str]:
    """Return the environment of a process that starts a release of Spark."""
    return {
        **{name: value for name, value in os.environ.items() if name != "SPARK_HOME"},
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(package(release).parent), str(ROOT)]),
    }
