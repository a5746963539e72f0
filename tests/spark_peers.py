"""Older releases of PySpark, which `make peers` installs beside the latest one.

What needs one runs in a process with it, and `environment` leads the process there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import ROOT

__all__ = ["environment", "package", "require"]


def package(release: str) -> Path:
    """Return the directory of pyspark 4.0, 4.1 or 4.2."""
    return ROOT / ".peers" / f"spark-{release}" / "pyspark"


def require(release: str) -> None:
    """Skip the test if a release is not there, or fail it in CI."""
    if not package(release).is_dir():
        reason = f"no Spark {release}: `make peers` fetches it"
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
