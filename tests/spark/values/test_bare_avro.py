"""Avro values without a header: each is read to its last byte, and a framed one is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT, spark_peers

pytestmark = [pytest.mark.spark, pytest.mark.slow]
RULES = Path(__file__).with_name("bare_avro_rules.py")


def test_bare_values_are_decoded_and_framed_ones_are_errors(tmp_path: Path) -> None:
    """The rules run in a process whose Spark has the package, which no other test has."""
    ended = subprocess.run(
        [*(sys.executable, "-m", "pytest", "--noconftest", "-c", os.devnull), "-q", str(RULES)],
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": sys.executable,
            "KAFKALOG_AVRO_JAR": spark_peers.avro_package(),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
