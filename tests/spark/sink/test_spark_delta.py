"""DeltaUpsert in Spark with Delta Lake: the rules of `delta_rules`, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import DeltaUpsert
from tests import ROOT, delta_spark

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SOURCE = Path(__file__).with_name("delta_rules.py")
RULES = re.findall(r"^def (test_\w+)", SOURCE.read_text(), re.MULTILINE)
PATIENCE_S = 1200


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what each rule failed with; "" if it holds."""
    delta_spark.require()
    scratch = tmp_path_factory.mktemp("delta")
    report = scratch / "report.xml"
    python = [sys.executable, "-m", "pytest", "--noconftest", "-c", os.devnull]
    rules = [f"{SOURCE}::{rule}" for rule in RULES]
    ended = subprocess.run(
        [*python, "-q", f"--rootdir={ROOT}", f"--junit-xml={report}", *rules],
        check=False,
        cwd=scratch,
        env=delta_spark.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert report.exists(), ended.stdout[-8000:] + ended.stderr[-2000:]
    found: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        name = str(case.get("name")).partition("[")[0]
        faults = [str(each.text) for kind in ("failure", "error") for each in case.iter(kind)]
        found[name] = "\n".join(filter(None, [found.get(name, ""), *faults]))
    return found


@pytest.mark.parametrize("rule", RULES)
def test_delta(rule: str, outcomes: dict[str, str]) -> None:
    assert rule in outcomes
    if outcomes[rule]:
        pytest.fail(outcomes[rule], pytrace=False)


def test_a_session_without_delta_is_answered_with_what_to_add(spark: Any, tmp_path: Path) -> None:
    words = (
        rf"no Delta Lake \(expected Spark 4\.2 with Delta, found Spark {spark.version} without\)\. "
        r"Start Spark 4\.2 with --packages io\.delta:delta-spark_4\.2_2\.13:4\.4\.0"
    )
    with pytest.raises(InvalidInputError, match=words + ".*DeltaSparkSessionExtension"):
        DeltaUpsert(tmp_path / "table").positions()
