"""Runs rules in a process whose Spark has the Avro package, which no other test has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

JARS = Path(os.environ.get("KAFKALOG_AVRO_JARS", ROOT / ".peers" / "avro"))


def run_rules(rules: Path, directory: Path) -> None:
    """Run a file of rules; skip without the package, or fail if this is CI."""
    jars = sorted(JARS.glob("spark-avro*.jar"))
    if not jars:
        reason = "no Avro package of Spark: `make peers` fetches it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    ended = subprocess.run(
        [*(sys.executable, "-m", "pytest", "--noconftest", "-c", os.devnull), "-q", str(rules)],
        check=False,
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": sys.executable,
            "KAFKALOG_AVRO_JAR": str(jars[0]),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
