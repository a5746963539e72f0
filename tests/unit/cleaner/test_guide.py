"""What the cleaner's guide (docs/cleaner.md) shows is what happens."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

import kafkalog
from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.config import NAMES
from kafkalog.cleaner.directory.pause import is_paused
from kafkalog.cleaner.metrics import CleanerMetrics
from kafkalog.cli import run
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.place import directory_log_of
from tests.unit.cleaner.guide import GUIDE, blocks, shop

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
METRIC = re.compile(r"\bkafka(?:_log|log)_[a-z_]+(?:\{[a-z_,]+\}(?:_total)?)?")


def cells(heading: str) -> list[list[str]]:
    """The rows of the table below a heading, whose first column is code."""
    section = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row] for row in rows]


@pytest.mark.parametrize("source", [source for source in blocks("python") if "spark" not in source])
def test_the_examples_run(tmp_path: Path, source: str) -> None:
    with shop(tmp_path) as log:
        inside: list[bool] = []
        here = source.replace("...", "look()")

        def look() -> None:
            inside.append(is_paused(directory_log_of(log).partition_directory("stock", 0)))

        exec(compile(here, "cleaner.md", "exec"), {"log": log, "look": look})
        assert inside == [True]
        assert not is_paused(directory_log_of(log).partition_directory("stock", 0))


def without_figures(text: str) -> str:
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "TIME", text)
    text = re.sub(r"[\d.]+ (bytes|KiB|MiB|GiB)", "SIZE", text)
    return re.sub(r"\d+(\.\d+)?", "N", text)


def test_explain_says_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shop(tmp_path / "shop").close()
    (block,) = blocks("console")
    command, shown = block.split("\n", 1)
    assert command == "$ kafkalog explain /data/shop stock"
    assert run(["explain", str(tmp_path / "shop"), "stock"]) == 0
    said = capsys.readouterr().out.replace(str(tmp_path), "/data")
    assert without_figures(said).splitlines() == without_figures(shown).splitlines()


def test_every_code_of_explain_is_in_the_table() -> None:
    told = {code for row in cells("Why is it not compacting?") for code in row[0].split("`, `")}
    source = (Path(kafkalog.__file__).parent / "cleaner" / "report" / "explain.py").read_text()
    used = set(re.findall(r'Reason\(\s*"([a-z ]+)"', source))
    assert told == used


def test_the_settings_are_those_there_are_with_their_defaults() -> None:
    rows = [row for row in cells("Settings") if len(row) == 5 and row[0] != "CleanerConfig"]
    assert sorted(row[1] for row in rows) == sorted(NAMES)
    assert sorted(row[0] for row in rows) == sorted(field.name for field in fields(CleanerConfig))
    for field, name, shown, *_ in rows:
        number, _, unit = shown.partition(" ")
        text = str(int(number) * UNITS[unit]) if unit else shown
        default = getattr(CleanerConfig(), field)
        if default == math.inf:
            assert shown == "none"
        else:
            assert getattr(CleanerConfig.parse({name: text}), field) == default


def test_the_topics_settings_have_their_defaults(tmp_path: Path) -> None:
    with kafkalog.open(tmp_path) as log:
        log.create_topic("t")
        defaults = TopicConfig.parse(log.describe("t").config)
    rows = {row[0]: row[1] for row in cells("Settings") if len(row) == 4}
    assert len(rows) >= 9
    for name, shown in rows.items():
        default = getattr(defaults, name.replace(".", "_"))
        assert (default == layout.INT64_MAX) == (shown == "none")
        if shown != "none":
            assert getattr(TopicConfig.parse({name: shown}), name.replace(".", "_")) == default


def served(log: KafkaLog) -> Iterator[Sample]:
    for family in CleanerMetrics(log, CleanerThread(directory_log_of(log))).collect():
        yield from family.samples


def test_every_metric_that_is_named_is_served(tmp_path: Path) -> None:
    with shop(tmp_path) as log:
        names = {sample.name for sample in served(log)}
    named = set()
    for text in METRIC.findall(GUIDE):
        head, brace, rest = text.partition("{")
        parts, _, tail = rest.partition("}")
        named |= {head + part + tail for part in parts.split(",")} if brace else {head}
    assert named == names


def test_the_example_of_a_scrape_has_all_metrics_with_their_labels(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("text") if "kafkalog_cleaner" in block)
    with shop(tmp_path / "shop") as log:
        found = {(sample.name, *sorted(sample.labels.items())) for sample in served(log)}
    told = set()
    for line in block.replace("/data", str(tmp_path)).splitlines():
        name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? [\d.]+", line).groups(default="")
        told.add((name, *sorted(re.findall(r'(\w+)="(.*?)"', labels))))
    assert told == found


@pytest.mark.slow
def test_what_is_sound_of_a_damaged_partition_is_saved_as_shown(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("sh") if "prices-saved" in block)
    with kafkalog.open(tmp_path / "shop") as log:
        log.create_topic("prices", config={"segment.bytes": "1000"})
        for turn in range(6):
            log.append("prices", [(f"item-{n}", f"{turn}") for n in range(10)])
        first = min(directory_log_of(log).partition_directory("prices", 0).glob("*.log"))
        data = first.read_bytes()
        first.write_bytes(data[:510] + bytes([data[510] ^ 1]) + data[511:])
    commands = block.replace("/data", str(tmp_path)).replace(
        "kafkalog ", f"{sys.executable} -m kafkalog "
    )
    done = subprocess.run(["sh", "-ec", commands], check=True, stdout=subprocess.PIPE, text=True)
    told = re.findall(
        r"^# .*?(baseOffset: \d+ lastOffset: \d+) \.\.\.|^# .* (\d+\.log)$", block, re.M
    )
    assert len(told) == 2
    assert all(any(text in done.stdout for text in pair if text) for pair in told)
    with kafkalog.open(tmp_path / "shop") as log:
        saved = [row["value"] for one in log.read("prices-saved", 0) for row in one.to_pylist()]
    assert saved == [b"%d" % turn for turn in (0, 1, 4, 5) for _ in range(10)]
