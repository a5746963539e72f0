"""What every verb has: help with examples that work as typed, a JSON form, errors of one line."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kafkalog as library
from kafkalog.cli import VERBS
from kafkalog.cli.topics import VERBS as TOPIC_VERBS
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.place import directory_log_of
from tests import ROOT
from tests.builders.batch_builder import batch
from tests.builders.commits import commit, key, value
from tests.builders.log_builder import LogBuilder
from tests.builders.segment_files import write_segment
from tests.unit.cli.conftest import Command, Result

NOW_MS = 1_700_000_000_000
PRINTS_NO_DATA = {"cleaner", "ui"}
ENDLESS = {"cleaner", "ui"}
"""They run until they are told to stop."""
MAY_SAY_NO = {"erase", "doctor"}
"""Their exit status is 1 where the answer is no."""
BEFORE = {"release": "kafkalog adopt /data/kafka-logs"}
WRONG = {
    "topics create": "kafkalog topics create /data/shop a/b",
}
"""What is wrong with the others is that there is no log."""


def all_examples() -> dict[str, tuple[str, ...]]:
    found = {}
    for verb in VERBS:
        if verb == "topics":
            found |= {f"topics {below}": lines for below, lines in TOPIC_VERBS.items()}
        else:
            module = importlib.import_module(f"kafkalog.cli.{verb.replace('-', '_')}")
            found[verb] = getattr(module, "EXAMPLES", ())
    return found


EXAMPLES = all_examples()
ENDING = sorted(EXAMPLES.keys() - ENDLESS)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `/data` of the examples is, and the directory they are typed in."""
    monkeypatch.chdir(tmp_path)
    with library.open(tmp_path / "shop") as log:
        log.create_topic("stock")
        log.create_topic("views", 2, {"cleanup.policy": "delete"})
        log.append("views", [("apple", "1"), ("pear", "1"), ("fig", "1"), ("nut", "1")])
        log.create_topic("customers", config={"file.delete.delay.ms": "0"})
        log.append("stock", [("apple", "3"), ("pear", "7")], now_ms=NOW_MS)
        log.append("stock", [("apple", "4"), ("pear", None)])
        log.append("customers", [("4711", "ann"), ("4712", "bob"), ("4713", "eve")])
        staged = LogBuilder(log).to("stock").stage(("fig", "1"), in_memory=True)
        directory_log_of(log).commit([staged], writer=Writer("nightly", "stock", 4))
    Path("changes.jsonl").write_text('{"key": "apple", "value": "5"}\n')
    Path("leaving.txt").write_text("4712\n")
    broker_directory(tmp_path / "kafka-logs")
    Path("ids.txt").write_text(f"stock {'B' * 21}Q\n")
    return tmp_path


def broker_directory(root: Path) -> None:
    """A directory of a broker that was shut down in good order."""
    partition = root / "stock-0"
    partition.mkdir(parents=True)
    write_segment(partition, 0, [batch(0, 4)])
    (partition / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    (partition / "partition.metadata").write_text(f"version: 0\ntopic_id: {'A' * 21}Q")
    groups = root / "__consumer_offsets-0"
    groups.mkdir()
    write_segment(groups, 0, [commit(0, (key("billing", "stock"), value(3)))])
    (root / "meta.properties").write_text("version=1\ncluster.id=c\nnode.id=1\n")
    for name in ("recovery-point", "replication"):
        lines = "0\n2\nstock 0 4\n__consumer_offsets 0 1\n"
        (root / f"{name}-offset-checkpoint").write_text(lines)
    (root / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')


def typed(kafkalog: Command, line: str, data: Path) -> Result:
    """Run a line as it is typed, a directory for a store; what is before a pipe is the shell's."""
    *sources, command = line.split(" | ")
    written = b"".join(
        subprocess.run(source, shell=True, check=True, stdout=subprocess.PIPE).stdout
        for source in sources
    )
    command = command.replace("s3://", f"{data}/store-")
    name, *arguments = shlex.split(command.replace("/data/", f"{data}/"))
    assert name == "kafkalog"
    return kafkalog(*arguments, stdin=written)


@pytest.mark.parametrize("verb", EXAMPLES)
def test_the_help_of_a_verb_ends_with_its_examples_as_they_are_typed(
    kafkalog: Command, verb: str
) -> None:
    result = kafkalog(*verb.split(), "--help")
    assert (result.status, result.err) == (0, "")
    _, examples = result.out.split("  Examples:\n")
    assert EXAMPLES[verb]
    assert examples == "".join(f"    {line}\n" for line in EXAMPLES[verb])
    for line in EXAMPLES[verb]:
        assert line.split(" | ")[-1].startswith(f"kafkalog {verb}")


@pytest.mark.parametrize("verb", EXAMPLES)
def test_the_help_of_a_verb_names_no_types_of_python(kafkalog: Command, verb: str) -> None:
    shown = kafkalog(*verb.split(), "--help").out
    assert [kind for kind in re.findall("<(.*?)>", shown) if "|" not in kind] == []  # but choices


@pytest.mark.parametrize("verb", EXAMPLES)
def test_the_help_of_a_verb_says_what_each_argument_is(kafkalog: Command, verb: str) -> None:
    shown = kafkalog(*verb.split(), "--help").out
    for name, text in re.findall(r"^  ([A-Z]+) +(.*)$", shown, re.MULTILINE):
        assert text and not text.startswith("["), name


@pytest.mark.parametrize("verb", ENDING)
def test_the_examples_of_a_verb_work_as_they_are_typed(
    kafkalog: Command, data: Path, verb: str
) -> None:
    for line in EXAMPLES[verb]:
        if verb in BEFORE:
            assert typed(kafkalog, BEFORE[verb], data).status == 0
        for report in data.glob("kafkalog-erase-*.json"):  # of the same second
            report.unlink()
        result = typed(kafkalog, line, data)
        assert result.status in ({0, 1} if verb in MAY_SAY_NO else {0}), result.err
        if "--json" in line:
            assert all(isinstance(row, dict) for row in result.json)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for verb in sorted(ENDLESS & EXAMPLES.keys()) for line in EXAMPLES[verb]]
)
def test_a_verb_without_an_end_works_until_it_is_told_to_stop(data: Path, line: str) -> None:
    anywhere = line.replace("/data/", f"{data}/").replace("port 9308", "port 0")
    command = shlex.split(anywhere)[1:]
    with subprocess.Popen(
        [sys.executable, "-m", "kafkalog", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        assert str(data) in running.stderr.readline() or "metrics" in line
        running.terminate()
        _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err


@pytest.mark.parametrize("verb", sorted(EXAMPLES.keys() - PRINTS_NO_DATA))
def test_a_verb_that_prints_data_prints_it_as_json_lines(
    kafkalog: Command, data: Path, verb: str
) -> None:
    if verb in BEFORE:
        typed(kafkalog, BEFORE[verb], data)
    line = next(line for line in EXAMPLES[verb] if " | " not in line)
    result = typed(kafkalog, line if "--json" in line else f"{line} --json", data)
    assert [row for row in result.lines if not isinstance(json.loads(row), dict)] == []
    assert verb in {"clean", "verify"} or result.lines  # which find nothing here
    assert "--json" in kafkalog(*verb.split(), "--help").out


@pytest.mark.parametrize("verb", EXAMPLES)
def test_an_expected_error_of_a_verb_is_one_line(kafkalog: Command, data: Path, verb: str) -> None:
    line = WRONG.get(verb, EXAMPLES[verb][0].replace("/data/", "/data/none/"))
    result = typed(kafkalog, line, data)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("kafkalog: ")
    assert not (data / "none").exists()


@pytest.mark.parametrize("verb", EXAMPLES)
def test_an_unknown_option_of_a_verb_is_told_with_the_way_to_its_help(
    kafkalog: Command, verb: str
) -> None:
    result = kafkalog(*verb.split(), "--nonsense")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.endswith(f"; see kafkalog {verb} --help\n")


@pytest.mark.parametrize("verb", EXAMPLES)
def test_an_output_of_a_verb_that_is_not_a_terminal_has_no_colours(
    kafkalog: Command, data: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if verb in ENDLESS:
        return
    monkeypatch.setitem(os.environ, "FORCE_COLOR", "1")
    result = typed(kafkalog, EXAMPLES[verb][0], data)
    assert "\x1b" not in result.out + result.err
