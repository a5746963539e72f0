"""The demo compares tables, and says in one line what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.git_history import Entry
from examples.git_report import compare
from examples.git_table import main
from tests import ROOT
from tests.unit.examples.repository import Repository

FILE = Entry("100644", "a" * 40)
LINK = Entry("120000", "a" * 40)


def test_a_comparison_names_what_differs() -> None:
    table = {b"same": FILE, b"extra": FILE, b"\xff": FILE}
    found = compare("table", table, {b"same": FILE, b"missing": FILE, b"\xff": LINK})
    assert (found.missing, found.extra, found.different) == (
        ["'missing'"],
        ["'extra'"],
        ["'\\udcff'"],
    )
    assert not found.is_identical


def test_equal_tables_are_identical() -> None:
    assert compare("table", {b"a": FILE}, {b"a": FILE}).is_identical


def test_no_repository_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--repo", str(tmp_path), "--path", str(tmp_path / "log")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "log").exists()


@pytest.fixture
def one_commit(tmp_path: Path) -> Path:
    repository = Repository(tmp_path / "repository")
    repository.write("a")
    repository.commit()
    return repository.path


def test_a_repository_without_commits_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = Repository(tmp_path / "repository")
    assert main(["--repo", str(repository.path), "--path", str(tmp_path / "log")]) == 1
    assert capsys.readouterr().err == f"error: {repository.path}: no commits yet\n"


@pytest.mark.parametrize("home", ["", "/nowhere"])
def test_no_java_is_an_error_of_one_line_that_says_what_to_install(
    home: str,
    one_commit: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    git = shutil.which("git")
    assert git is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("JAVA_HOME", home)
    assert main(["--repo", str(one_commit), "--path", str(tmp_path / "log")]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("error: no Java in ") and "default-jre-headless" in message
    assert not (tmp_path / "log").exists()


@pytest.mark.slow
def test_a_java_that_ends_at_once_prints_no_traceback(one_commit: Path, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-m", "examples.git_table", "--repo", str(one_commit)],
        cwd=ROOT,
        env=os.environ | {"JAVA_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: Spark did not start: ") and "Java 17" in last
