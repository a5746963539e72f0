"""How Kafka's text files are written: the checkpoints of a root and of a partition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints

ROOT_FILES = [
    "recovery-point-offset-checkpoint",
    "log-start-offset-checkpoint",
    "replication-offset-checkpoint",
    "cleaner-offset-checkpoint",
]


def test_a_checkpoint_is_a_version_a_count_and_lines_with_an_end() -> None:
    assert checkpoints.checkpoint([]) == b"0\n0\n"
    data = checkpoints.checkpoint([("t", 0, 7), ("a-b", 12, 2**40)])
    assert data == b"0\n2\nt 0 7\na-b 12 1099511627776\n"


@pytest.mark.parametrize("data", [b"1\n0\n", b"0\n2\n1 0\n", b"0\n1\n1\n", b"0\n1\n1 x\n"])
def test_malformed_leader_epochs_are_an_error_that_names_the_byte(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "leader-epoch-checkpoint").write_bytes(data)
    with pytest.raises(CorruptLogError, match="leader-epoch-checkpoint: at byte"):
        checkpoints.read_leader_epochs(tmp_path)


def test_a_file_is_synced_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        act = getattr(files, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            acts.append(name)
            return act(*args, **kwargs)

        return wrapper

    for name in ("create", "rename", "sync_directory"):
        monkeypatch.setattr(files, name, noted(name))
    checkpoints.write_leader_epochs(tmp_path, [(0, 0)])
    assert acts == ["create", "rename", "sync_directory"]
    assert [path.name for path in tmp_path.iterdir()] == ["leader-epoch-checkpoint"]


def test_the_root_has_four_checkpoints_of_topic_partition_and_offset(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("a", 2, {"cleanup.policy": "delete"})
        engine.append("a", [("k", "v"), ("k", "v")], now_ms=5)
        (used,) = (n for n, (_, end) in engine.offsets("a").items() if end)
        engine.delete_records("a", used, 1)
    found = {name: checkpoints.read_offset_checkpoint(tmp_path / name) for name in ROOT_FILES}
    ends = {("a", used): 2, ("a", 1 - used): 0}
    assert found["recovery-point-offset-checkpoint"] == ends
    assert found["replication-offset-checkpoint"] == ends
    # What a broker would find out from the first segment alone needs no line.
    assert found["log-start-offset-checkpoint"] == {("a", used): 1}


def test_the_file_of_a_clean_shutdown_is_json() -> None:
    found = json.loads(checkpoints.CLEAN_SHUTDOWN_CONTENT)
    assert found == {"version": 0, "brokerEpoch": -1}
