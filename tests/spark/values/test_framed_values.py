"""Framed values, bad records and their tables: the rules of three files, in a process of their own.

The process has one Spark with the Avro package and Delta Lake, which no other test has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import delta_spark, spark_peers

pytestmark = [pytest.mark.spark, pytest.mark.slow]
RULES = (
    "framed_rules.py",
    "bad_record_rules.py",
    "debezium_avro_rules.py",
    "kept_value_rules.py",
)


def test_framed_values_and_bad_records(tmp_path: Path) -> None:
    delta_spark.require()
    environment = delta_spark.environment()
    classes = os.pathsep.join([environment["KAFKALOG_DELTA_JARS"], spark_peers.avro_package()])
    rules = [str(Path(__file__).with_name(name)) for name in RULES]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-c", os.devnull, "-q", *rules],
        check=False,
        cwd=tmp_path,
        env={**environment, "KAFKALOG_DELTA_JARS": classes},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
