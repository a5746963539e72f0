"""`doctor`: what is wrong is said with what to do, and nothing is wrong where all is well."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

import kafkalog as library
from kafkalog.storage_engine.fs import file_system
from tests.unit.cli.conftest import Command

VERSION = ".".join(map(str, sys.version_info[:2]))
NAMES = ["java", "python", "spark", "workers", "kernels", "memory", "worker memory"]


def program(path: Path, printed: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{printed}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host on which all is well: its programs answer, and Spark has no settings."""
    java = program(tmp_path / "java" / "bin" / "java", 'openjdk version "17.0.9" 2023-10-17')
    monkeypatch.setenv("JAVA_HOME", str(java.parent.parent))
    python = program(tmp_path / "python", f"Python {VERSION}\nkafkalog {library.__version__}")
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    for name in ("PYSPARK_SUBMIT_ARGS", "KAFKALOG_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kafkalog.storage_engine.fs.host.memory_limit", lambda: None)
    return tmp_path


def checks(kafkalog: Command, *arguments: Any) -> dict[str, dict[str, Any]]:
    result = kafkalog("doctor", "--json", *arguments)
    found = {row["check"]: row for row in result.json}
    assert result.status == any(row["state"] == "wrong" for row in found.values())
    assert all((row["advice"] is None) == (row["state"] == "fine") for row in found.values())
    return found


def test_nothing_is_wrong_where_all_is_well(kafkalog: Command, tmp_path: Path) -> None:
    found = checks(kafkalog, tmp_path)
    assert list(found) == [*NAMES, "locks"]
    assert [row for row in found.values() if row["state"] == "wrong"] == []
    assert list(checks(kafkalog)) == NAMES


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ('openjdk version "21" 2023-09-19', "fine"),
        ('openjdk version "11.0.20" 2023-07-18', "wrong"),
        ('java version "1.8.0_392"', "wrong"),
        ("no such thing", "wrong"),
    ],
)
def test_a_java_before_17_is_wrong(kafkalog: Command, host: Path, text: str, state: str) -> None:
    program(host / "java" / "bin" / "java", text)
    assert checks(kafkalog)["java"]["state"] == state


def test_a_java_that_is_missing_is_wrong(
    kafkalog: Command, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(host / "none"))
    found = checks(kafkalog)["java"]
    assert "No such file" in found["found"]
    assert "JAVA_HOME" in found["advice"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Python 3.9", "Python 3.9 without kafkalog"),
        (f"Python {VERSION}", f"Python {VERSION} without kafkalog"),
        (f"Python 3.9\nkafkalog {library.__version__}", "Python 3.9 kafkalog"),
        (f"Python {VERSION}\nkafkalog 0.0.1", "kafkalog 0.0.1"),
        ("hello", "it is no Python"),
    ],
)
def test_workers_that_cannot_run_this_kafkalog_are_wrong(
    kafkalog: Command, host: Path, text: str, found: str
) -> None:
    program(host / "python", text)
    check = checks(kafkalog)["workers"]
    assert found in check["found"]
    assert "kafkalog.register(spark)" in check["advice"]
    assert f"PYSPARK_PYTHON={sys.executable}" in check["advice"]


def test_no_module_of_the_current_directory_is_taken_for_an_installed_one(
    kafkalog: Command, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host / "kafkalog.py").write_text("__version__ = 'another'\n")
    monkeypatch.chdir(host)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert checks(kafkalog)["workers"]["state"] == "fine"


@pytest.mark.parametrize(
    ("release", "pandas", "state", "words"),
    [
        ("3.5.9", "2.2.0", "wrong", "Install Spark 4.0 or later"),
        ("4.0.5", "2.3.3", "fine", "delta-spark_4.0_2.13"),
        ("4.2.1", "3.0.0", "advice", "pandas from 2.2 to before 3"),
        ("4.2.1", "2.0.3", "advice", "pandas from 2.2 to before 3"),
        ("4.3.0", "2.3.3", "fine", "Delta Lake is for Spark 4.2"),
    ],
)
def test_doctor_says_what_fits_the_spark_that_it_finds(
    kafkalog: Command,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    pandas: str,
    state: str,
    words: str,
) -> None:
    versions = {"pyspark": release, "pandas": pandas}
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or version(name)
    )
    row = checks(kafkalog)["spark"]
    assert row["state"] == state
    assert words in f"{row['found']} {row['advice']}"


@pytest.mark.parametrize(
    ("setting", "state"), [("512m", "wrong"), ("900", "wrong"), ("2g", "fine"), ("much", "wrong")]
)
def test_little_memory_for_workers_is_wrong(
    kafkalog: Command, host: Path, setting: str, state: str
) -> None:
    (host / "spark-defaults.conf").write_text(f"# all\nspark.executor.pyspark.memory {setting}\n")
    assert checks(kafkalog)["worker memory"]["state"] == state


@pytest.mark.parametrize("option", ["--conf ", "-c ", "--conf="])
def test_a_setting_of_the_command_wins_over_the_file(
    kafkalog: Command, host: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (host / "spark-defaults.conf").write_text("spark.executor.pyspark.memory=2g\n")
    given = f"{option}spark.executor.pyspark.memory=256m pyspark-shell"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", given)
    assert "256m" in checks(kafkalog)["worker memory"]["found"]


def test_arguments_of_spark_with_an_open_quotation_are_wrong(
    kafkalog: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--conf 'x")
    check = checks(kafkalog)["worker memory"]
    assert check["state"] == "wrong"
    assert check["found"] == "PYSPARK_SUBMIT_ARGS=--conf 'x: No closing quotation"


def test_a_small_container_gets_advice(kafkalog: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafkalog.storage_engine.fs.host.memory_limit", lambda: 1 << 30)
    check = checks(kafkalog)["memory"]
    assert (check["state"], check["found"]) == ("advice", "limit of 1.0 GiB")


def test_kernels_that_are_python_get_advice(
    kafkalog: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(library), "__compiled__", False)
    assert checks(kafkalog)["kernels"]["state"] == "advice"


def test_a_file_system_without_locks_is_wrong(
    kafkalog: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLocks(file_system.FileSystem):
        def flock(self, fd: int, operation: int) -> None:
            raise OSError(37, "No locks available")

    monkeypatch.setenv("KAFKALOG_PATH", str(tmp_path))
    with file_system.replaced(NoLocks()):
        check = checks(kafkalog)["locks"]
    assert check["state"] == "wrong"
    assert f"{tmp_path}: this file system has no locks" in check["found"]


def test_advice_is_printed_below_what_was_found(kafkalog: Command, host: Path) -> None:
    program(host / "python", "Python 3.9")
    lines = kafkalog("doctor").lines
    (place,) = [place for place, line in enumerate(lines) if line.startswith("wrong   workers ")]
    assert lines[place + 1].strip().startswith("Call kafkalog.register(spark)")
