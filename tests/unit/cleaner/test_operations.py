"""What runs and watches a cleaner: the files of docs/operations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

import kafkalog
from kafkalog.cleaner.metrics import CleanerMetrics
from kafkalog.cli import _command
from tests import ROOT

OPERATIONS = ROOT / "docs" / "operations"
PROMTOOL = ROOT / ".peers" / "prometheus" / "usr" / "bin" / "promtool"
NAME = re.compile(r"kafka(?:log|_log)_\w+")


def metrics(log: kafkalog.KafkaLog) -> set[str]:
    registry = CollectorRegistry()
    cleaner = log.cleaner
    assert cleaner is not None
    CleanerMetrics(log, cleaner).register(registry)
    found: list[Metric] = list(registry.collect())
    return {sample.name for metric in found for sample in metric.samples}


@pytest.mark.parametrize("file", ["kafkalog-rules.yaml", "kafkalog-dashboard.json"])
def test_rules_and_dashboard_name_metrics_that_a_cleaner_serves(file: str, tmp_path: Path) -> None:
    with kafkalog.open(tmp_path, cleaner=True) as log:
        log.create_topic("stock")
        log.append("stock", [("k", "v")])
        log.clean("stock", force=True)
        served = metrics(log)
    named = {*NAME.findall((OPERATIONS / file).read_text())} - {"kafkalog_cleaner"}
    assert named
    assert named <= served


def needs(program: str | Path, how: str) -> str:
    """Return a program, or skip; CI has it."""
    found = shutil.which(program)
    if found is None:
        assert not os.environ.get("CI"), f"{program} is missing in CI"
        pytest.skip(f"{program} is missing: {how}")
    return found


def test_prometheus_takes_the_rules() -> None:
    promtool = needs(PROMTOOL, "run `make peers`")
    rules = str(OPERATIONS / "kafkalog-rules.yaml")
    done = subprocess.run(
        [promtool, "check", "rules", rules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "SUCCESS: 7 rules found" in done.stdout


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = needs("systemd-analyze", "install systemd")
    text = (OPERATIONS / "kafkalog-cleaner.service").read_text()
    here = text.replace("/opt/kafkalog/bin/kafkalog", shutil.which("true") or "/bin/true")
    unit = tmp_path / "kafkalog-cleaner.service"
    unit.write_text(here.replace("User=kafkalog", "User=root"))
    done = subprocess.run(
        [analyze, "verify", str(unit)], capture_output=True, text=True, check=False
    )
    own = [line for line in done.stderr.splitlines() if "kafkalog-cleaner" in line]
    assert (done.returncode, own) == (0, [])


def command_lines() -> list[list[str]]:
    unit = (OPERATIONS / "kafkalog-cleaner.service").read_text()
    (start,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.M)
    manifest: dict[str, Any] = yaml.safe_load((OPERATIONS / "kafkalog-cleaner.yaml").read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    probes = [container[name]["exec"]["command"] for name in ("readinessProbe", "livenessProbe")]
    return [start.split(), container["args"], *(probe[1:] for probe in probes)]


@pytest.mark.parametrize("line", command_lines(), ids=" ".join)
def test_the_command_lines_are_those_of_the_cleaner(line: list[str]) -> None:
    verb, *arguments = line
    assert verb == "cleaner"
    command = _command(verb)
    with click.Context(command) as context:
        command.parse_args(context, arguments)


def test_the_dashboard_has_each_panel_once_and_its_source_to_choose() -> None:
    board = json.loads((OPERATIONS / "kafkalog-dashboard.json").read_text())
    numbers = [panel["id"] for panel in board["panels"]]
    assert numbers == [*range(1, len(numbers) + 1)]
    (source,) = board["templating"]["list"]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {f"${{{source['name']}}}"}
