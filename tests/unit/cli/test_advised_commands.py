"""A command that a message advises runs as it is written, also where a path has a blank."""

from __future__ import annotations

import shlex
from pathlib import Path

import kafkalog as package
from tests.unit.cli.conftest import Command, kafkalog

__all__ = ["kafkalog"]


def test_explain_advises_a_command_that_runs(tmp_path: Path, kafkalog: Command) -> None:
    root = tmp_path / "my log's"
    with package.open(root) as log:
        log.create_topic("t")
        log.append("t", [("a", "1"), ("a", "2")])
        advised = [
            command for each in log.explain() for f in each.findings for command in f.commands
        ]
    name, *arguments = shlex.split(next(each for each in advised if " clean " in each))
    assert name == "kafkalog"
    assert kafkalog(*arguments).status == 0
    with package.open(root) as log:
        assert log.table("t").num_rows == sum(batch.num_rows for batch in log.read("t")) == 1


def test_a_missing_log_is_created_by_the_command_that_is_advised(
    tmp_path: Path, kafkalog: Command
) -> None:
    told = kafkalog("topics", "list", tmp_path / "a b").err
    name, *arguments = shlex.split(told.partition("create one with ")[2])
    assert name == "kafkalog"
    assert kafkalog(*arguments).status == 0
    assert "NAME" in kafkalog("topics", "list", tmp_path / "a b").out
