"""`dump` and `verify` as commands: what they print where, and their exit status."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.file_system import FileSystem
from tests.unit.cli.conftest import Command


@pytest.fixture
def root(kafkalog: Command, tmp_path: Path) -> Path:
    root = tmp_path / "log"
    config = ("--config", "index.interval.bytes=50", "--config", "cleanup.policy=delete")
    kafkalog("topics", "create", root, "t", *config)
    for _ in range(5):
        kafkalog("append", root, "t", stdin=b'{"key":"k","value":"v"}\n{"value":null}\n')
    return root


@pytest.fixture
def log(root: Path) -> Path:
    (path,) = (root / "t-0").glob("*.log")
    return path


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_dump_prints_data_to_the_output_and_nothing_else(kafkalog: Command, log: Path) -> None:
    result = kafkalog("dump", log, "--print-data-log")
    assert (result.status, result.err) == (0, "")
    assert result.lines[:2] == [f"Dumping {log}", "Log starting offset: 0"]
    assert sum(line.startswith("baseOffset: ") for line in result.lines) == 5
    assert result.lines[3].endswith(" key: k payload: v")
    hexed = kafkalog("dump", log, "--print-data-log", "--encoding", "hex")
    assert hexed.lines[3].endswith(" key: 6b payload: 76")


def test_dump_json_has_one_object_an_entry(kafkalog: Command, root: Path, log: Path) -> None:
    entries = kafkalog("dump", log, root / "commit", "--print-data-log", "--json").json
    assert [entry["type"] for entry in entries[:4]] == ["log", "batch", "record", "record"]
    assert entries[2]["payload"] == "v"
    assert entries[3]["payload"] is None
    assert entries[-1]["type"] == "commit"
    assert {entry["file"] for entry in entries} == {str(log), str(root / "commit")}


def test_every_file_of_a_log_can_be_dumped(kafkalog: Command, root: Path) -> None:
    paths = [
        path
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith("kl-") and path.name != ".lock"
    ]
    assert len(paths) >= 10
    assert kafkalog("dump", *paths).status == 0


def test_dump_of_a_damaged_file_has_status_1(kafkalog: Command, log: Path) -> None:
    index = log.with_suffix(".index")
    damage(index, 3)
    result = kafkalog("dump", index, "--verify-index-only")
    assert result.status == 1
    assert result.lines == [f"Dumping {index}"]
    heading, *lines = result.err.splitlines()
    assert heading == f"Mismatches in :{index}"
    assert len(lines) == 1
    assert kafkalog("dump", index, "--index-sanity-check").status == 0
    damage(log, 70)
    assert kafkalog("dump", log).status == 1


def test_dump_names_what_is_not_a_file_of_a_log(kafkalog: Command, log: Path) -> None:
    for name in ("missing.log", "notes.txt"):
        (log.parent / "notes.txt").write_text("x")
        result = kafkalog("dump", log.parent / name)
        assert (result.status, result.err.count("\n")) == (2, 1)
        assert name in result.err


def test_verify_of_a_sound_log_prints_nothing_but_a_sum(kafkalog: Command, root: Path) -> None:
    result = kafkalog("verify", root, "--deep")
    assert (result.status, result.out) == (0, "")
    assert result.err == f"{root}: no damage, no notices\n"


def test_verify_prints_damage_with_file_and_position(
    kafkalog: Command, root: Path, log: Path
) -> None:
    damage(log, 70)
    (root / "notes.txt").write_text("x")
    result = kafkalog("verify", root)
    assert result.status == 1
    assert result.lines[0].startswith(f"damage: {log}: at byte 0: expected checksum 0x")
    assert result.lines[1].startswith(f"notice: {root / 'notes.txt'}: ")
    assert result.err == f"{root}: 1 damage, 1 notice\n"
    first, second = kafkalog("verify", root, "--json").json
    assert (first["kind"], first["path"], first["position"]) == ("damage", str(log), 0)
    assert second["kind"] == "notice"


def test_what_cannot_be_looked_at_is_a_fault_and_no_damage(kafkalog: Command, root: Path) -> None:
    class Lockless(FileSystem):
        def flock(self, fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with file_system.replaced(Lockless()):
        result = kafkalog("verify", root)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("kafkalog: ")
    assert "has no locks" in result.err
    assert result.err.count("\n") == 1


def test_a_log_without_its_journal_is_damaged(kafkalog: Command, root: Path) -> None:
    (root / "commit").unlink()
    result = kafkalog("verify", root)
    assert result.status == 1
    assert "the journal is missing" in result.lines[0]
    (root / "kl-commit.lock").unlink()
    assert kafkalog("verify", root).status == 1


def test_a_directory_without_a_log_is_wrong_usage(kafkalog: Command, tmp_path: Path) -> None:
    (tmp_path / "photos-2024").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    result = kafkalog("verify", tmp_path)
    assert (result.status, result.out) == (2, "")
    assert "no log here" in result.err


def test_notices_alone_are_status_0(kafkalog: Command, root: Path) -> None:
    (root / "notes.txt").write_text("x")
    assert kafkalog("verify", root).status == 0


@pytest.mark.parametrize("topic", [(), ("t",)])
def test_a_lost_journal_is_named_and_no_new_log_is_advised(
    kafkalog: Command, root: Path, topic: tuple[str, ...]
) -> None:
    (root / "commit").unlink()
    result = kafkalog("explain" if topic else "status", root, *topic)
    assert (result.status, result.out) == (2, "")
    assert "the journal `commit` is missing" in result.err
