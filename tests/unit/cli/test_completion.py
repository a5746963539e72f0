"""Shell completion: verbs, options, choices, and the topics of the log that was named before."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kafkalog.cli import VERBS
from tests import ROOT
from tests.builders.log_builder import LogBuilder
from tests.unit.cli.conftest import Command

SHELLS = ("zsh", "fish")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return LogBuilder(tmp_path / "log").topic("orders").topic("order-lines").topic("stock").close()


@pytest.fixture
def complete(kafkalog: Command, monkeypatch: pytest.MonkeyPatch) -> object:
    """Ask as bash does: with the words of a line, the last of which is half typed."""

    def completed(*words: str | Path) -> list[str]:
        monkeypatch.setenv("_KAFKALOG_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["kafkalog", *map(str, words)]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        result = kafkalog()
        assert (result.status, result.err) == (0, "")
        return [
            text
            for kind, _, text in (line.partition(",") for line in result.lines)
            if kind == "plain"
        ]

    return completed


def test_verbs_and_those_below_topics_are_completed(complete: Command) -> None:
    assert sorted(complete("")) == sorted(VERBS)
    assert complete("wr") == ["writers"]
    assert complete("topics", "de") == ["describe", "delete"]


def test_options_and_their_choices_are_completed(complete: Command, log: Path) -> None:
    assert complete("read", log, "orders", "--fr") == ["--from-beginning", "--from-time"]
    assert complete("read", log, "orders", "--encoding", "b") == ["base64"]
    assert complete("topics", "create", log, "x", "--pa") == ["--partitions"]
    assert complete("--ver") == ["--version"]


@pytest.mark.parametrize("verb", ["read", "append", "clean", "status", "explain", "verify"])
def test_topics_of_the_log_before_them_are_completed(
    complete: Command, log: Path, verb: str
) -> None:
    assert complete(verb, log, "ord") == ["order-lines", "orders"]
    assert complete(verb, log, "x") == []


def test_topics_are_completed_below_topics_but_for_a_new_one(complete: Command, log: Path) -> None:
    assert complete("topics", "describe", log, "st") == ["stock"]
    assert complete("topics", "create", log, "st") == []
    assert complete("writers", log, "--topic", "st") == ["stock"]


def test_where_no_log_is_nothing_is_completed_or_told(complete: Command, tmp_path: Path) -> None:
    assert complete("read", tmp_path / "none", "t") == []
    (tmp_path / "commit").write_bytes(b"x" * 600)
    assert complete("read", tmp_path, "t") == []


def test_paths_are_left_to_the_shell(complete: Command) -> None:
    assert complete("read", "/") == []
    assert complete("dump", "/") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_other_shells_get_the_same_with_what_each_verb_does(
    kafkalog: Command, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("_KAFKALOG_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "kafkalog wri")
    monkeypatch.setenv("COMP_CWORD", "wri" if shell == "fish" else "1")
    result = kafkalog()
    assert (result.status, result.err) == (0, "")
    assert "writers" in result.out
    assert "List the writers of a log" in result.out


@pytest.mark.slow
def test_bash_completes_with_the_script_that_the_command_prints(tmp_path: Path, log: Path) -> None:
    """The script finds `kafkalog` on the path, and is for bash."""
    command = tmp_path / "bin" / "kafkalog"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m kafkalog "$@"\n')
    command.chmod(0o755)
    program = (
        'script="$(_KAFKALOG_COMPLETE=bash_source kafkalog)" || exit 1\neval "$script"\n'
        f"COMP_WORDS=(kafkalog read {shlex.quote(str(log))} ord) COMP_CWORD=3\n"
        '_kafkalog_completion kafkalog\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    script = tmp_path / "completes.sh"
    script.write_text(program)
    path = f"{command.parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "--norc", script],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
    )
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    assert result.stdout.split() == ["order-lines", "orders"]
