"""The plan of a micro-batch is durable before its rows are, whatever the disk says meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import StorageError
from kafkalog.sink import plan
from kafkalog.sink.plan import sync_plan, syncing_plan
from kafkalog.storage_engine.fs import file_system, files
from kafkalog.storage_engine.fs.file_system import FileSystem, Place
from tests.builders.log_contents import values
from tests.unit.sink.spark_write import SparkWrite
from tests.unit.storage_engine.faults import LyingPages

ROWS = [{"key": b"k", "value": b"v"}]
NAMES = ("metadata", "offsets/1", "offsets/.1.crc", "sources/0/1")


def checkpoint_at(directory: Path) -> None:
    """Write a checkpoint as Spark does: nothing is synced."""
    for name in NAMES:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        files.write_at(fd, b"the plan", 0)
        os.close(fd)


def synced(location: Path, batch_id: int = 1) -> set[str]:
    """Return what a call of `sync_plan` syncs."""
    found = set()

    class Noted(FileSystem):
        def fsync(self, fd: int) -> None:
            found.add(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), location))
            super().fsync(fd)

    with file_system.replaced(Noted()):
        sync_plan(str(location), batch_id)
    return found


@pytest.fixture(autouse=True)
def nothing_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_synced", {})


@pytest.mark.parametrize("refused", ["1", ".1.crc", "metadata"])
def test_a_sync_that_the_disk_refuses_once_fails_the_task_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    pages = LyingPages(monkeypatch, errno.EIO, lambda name: name == refused)
    checkpoint = tmp_path / "checkpoint"
    checkpoint_at(checkpoint)
    options = {"topic": "t", "checkpointLocation": str(checkpoint)}
    write = SparkWrite(tmp_path / "log", options=options)
    with pytest.raises(StorageError, match="refused to make the plan of the micro-batch durable"):
        write.attempt(ROWS, batch_id=1)
    assert pages.failures == [refused]
    assert list(write.root.glob("*.staged")) != []  # for the abort, or the next commit
    write.commit([write.attempt(ROWS, batch_id=1)], 1)
    for name in NAMES:
        assert pages.kept(checkpoint / name) == b"the plan", name
    assert values(write.root) == [b"v"]


def test_a_plan_that_cannot_be_synced_keeps_the_rows_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    options = {"topic": "t", "checkpointLocation": str(checkpoint)}
    write = SparkWrite(tmp_path / "log", options=options)
    message = write.attempt(ROWS, batch_id=1)
    pages = LyingPages(monkeypatch, errno.EIO, lambda name: name == "1")
    checkpoint_at(checkpoint)
    with pytest.raises(StorageError, match="refused"):
        write.commit([message], 1)
    assert values(write.root) == []
    write.commit([write.attempt(ROWS, batch_id=1)], 1)
    assert pages.kept(checkpoint / "offsets/1") == b"the plan"


def test_what_is_written_once_is_synced_once_when_it_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_at(tmp_path)
    once = {"metadata", "sources", "."}
    always = {"offsets/1", "offsets/.1.crc", "sources/0/1", "offsets", "sources/0"}
    assert synced(tmp_path) == once | always
    assert synced(tmp_path) == once | always  # it is too new to be told from another
    monkeypatch.setattr(plan, "_SETTLED_NS", -1)
    assert synced(tmp_path) == once | always
    assert synced(tmp_path) == always


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda root: (root / "sources/1").mkdir(), {"sources"}),
        (lambda root: os.replace(root / "new", root / "metadata"), {"metadata", "."}),
        (lambda root: (root / "commits").mkdir(), {"."}),
    ],
)
def test_what_changes_is_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, expected: set[str]
) -> None:
    checkpoint_at(tmp_path)
    (tmp_path / "new").write_bytes(b"the plan")
    monkeypatch.setattr(plan, "_SETTLED_NS", -1)
    before = synced(tmp_path) and synced(tmp_path)
    change(tmp_path)
    assert expected <= synced(tmp_path) - before


def test_a_checkpoint_that_is_made_anew_is_synced_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of files are used again, mostly at once."""
    root = tmp_path / "checkpoint"
    monkeypatch.setattr(plan, "_SETTLED_NS", -1)
    for _ in range(5):
        checkpoint_at(root)
        assert {"metadata", "sources", "."} <= synced(root)
        shutil.rmtree(root)


def test_two_queries_of_a_process_are_synced_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_SETTLED_NS", -1)
    for name in ("a", "b"):
        checkpoint_at(tmp_path / name)
        assert "metadata" in synced(tmp_path / name)
    for name in ("a", "b"):
        assert "metadata" not in synced(tmp_path / name)


def test_a_file_among_the_sources_is_passed_over(tmp_path: Path) -> None:
    checkpoint_at(tmp_path)
    (tmp_path / "sources" / "a file").write_text("")
    assert "sources/0/1" in synced(tmp_path)


def test_what_a_task_may_not_open_is_left_to_the_commit(tmp_path: Path) -> None:
    checkpoint_at(tmp_path)

    class Hidden(FileSystem):
        def open(self, path: Place, flags: int, mode: int = 0o777) -> int:
            if str(path).endswith("offsets/1"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return super().open(path, flags, mode)

    with file_system.replaced(Hidden()):
        with syncing_plan(str(tmp_path), 1):
            pass
        with pytest.raises(PermissionError):
            sync_plan(str(tmp_path), 1)


def test_a_task_that_fails_says_why_and_waits_for_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_at(tmp_path)
    LyingPages(monkeypatch, errno.EIO, lambda name: name == "1")
    with pytest.raises(KeyError, match="its own"), syncing_plan(str(tmp_path), 1):
        raise KeyError("its own")
    assert not any(thread.name == "kafkalog-plan" for thread in threading.enumerate())
