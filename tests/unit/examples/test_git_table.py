"""The demo, on a small repository of odd things; `make demo` is the same on a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from aiokafka.record import MemoryRecords

from examples.git_history import Entry, head_tree
from examples.git_report import compare
from examples.git_table import main
from tests import ROOT
from tests.unit.examples.repository import ODD_NAMES, Repository

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
def test_a_java_that_ends_at_once_is_no_traceback(one_commit: Path, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-m", "examples.git_table", "--repo", str(one_commit)],
        cwd=ROOT,
        env=os.environ | {"JAVA_HOME": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: Spark did not start: ") and "Java 17" in last


@pytest.mark.spark
@pytest.mark.slow
def test_a_repository_of_odd_things_ends_identical(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    for name in ODD_NAMES:
        repository.write(name)
    repository.commit()
    repository.commit()
    for name in ODD_NAMES[::2]:
        repository.write(name, "changed")
    repository.git("mv", "tab\t", "renamed")
    repository.remove(b"\xff\xfe not utf-8")
    (repository.path / "link").symlink_to(b"\xfe".decode("utf-8", "surrogateescape"))
    repository.commit()
    log = tmp_path / "log"
    options = ["--json", "--repo", str(repository.path), "--path", str(log)]
    result = subprocess.run(
        [sys.executable, "-m", "examples.git_table", *options],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["identical"]
    assert figures["records_written"] == figures["changes"]
    # A history of one file has one stage; both producers wrote to each partition in it.
    assert figures["transactions"]["committed"] == figures["transactions"]["aborted"] > 0
    # Forced to the end, the log holds one record per path and no delete.
    assert figures["records_kept"] == figures["paths"] == len(ODD_NAMES)
    assert figures["dirty_ratio_after"] == 0
    assert result.stderr.rstrip().endswith("identical")
    latest = {key: json.loads(value) for key, value in latest_by_another_reader(log).items()}
    assert {key: Entry(value["mode"], value["blob"]) for key, value in latest.items()} == (
        head_tree(repository.path)
    )


def latest_by_another_reader(log: Path) -> dict[bytes, bytes]:
    """Read every byte of every `.log` with aiokafka; return the latest value per key."""
    latest: dict[bytes, bytes | None] = {}
    files = sorted(log.glob("git-*/*.log"))
    assert files
    for path in files:
        last_offset = int(path.stem) - 1
        records = MemoryRecords(path.read_bytes())
        assert records.size_in_bytes() == path.stat().st_size
        while (batch := records.next_batch()) is not None:
            assert batch.validate_crc()
            if batch.is_control_batch:
                last_offset = batch.base_offset
                continue
            for record in batch:
                assert record.offset > last_offset
                last_offset = record.offset
                latest[record.key] = record.value
    return {key: value for key, value in latest.items() if value is not None}
