"""A file that is still being written is synced in between; what counts is the sync at the end."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import early_sync, file_system, files
from kafkalog.storage_engine.fs.early_sync import EarlySync
from kafkalog.storage_engine.fs.file_system import FileSystem

NOW_MS = 1_700_000_000_000


class Synced(FileSystem):
    """Notes which thread syncs which file; the early ones fail with `fault`."""

    def __init__(self, fault: OSError | None = None) -> None:
        self.early: list[str] = []
        self.last: list[str] = []
        self._fault = fault

    def fsync(self, fd: int) -> None:
        name = Path(file_system.path_of(fd)).name
        if threading.current_thread().name != "kafkalog-early-sync":
            self.last.append(name)
        else:
            self.early.append(name)
            if self._fault is not None:
                raise self._fault
        super().fsync(fd)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_sync, "_SIZE", 1)


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t")
    return engine


def append(engine: DirectoryLog, value: str) -> None:
    engine.append("t", [("k", value)], now_ms=NOW_MS)


def test_a_log_that_was_synced_early_is_synced_again_before_the_record(
    engine: DirectoryLog,
) -> None:
    system = Synced()
    with file_system.replaced(system):
        append(engine, "v")
    name = layout.segment_file(0, layout.LOG)
    assert system.early == [name] and name in system.last


def test_an_early_sync_that_fails_fails_the_commit_and_nothing_is_appended(
    engine: DirectoryLog,
) -> None:
    append(engine, "v")
    with (
        file_system.replaced(Synced(OSError(errno.EIO, "it broke"))),
        pytest.raises(StorageError, match="it broke"),
    ):
        append(engine, "w")
    append(engine, "x")
    values = [value for rows in engine.read("t", 0) for value in rows["value"].to_pylist()]
    assert values == [b"v", b"x"]
    assert engine.describe("t").partitions[0].active_base == 1  # the old file is not trusted


def test_a_file_is_closed_only_when_no_sync_of_it_is_under_way(tmp_path: Path) -> None:
    may_end, is_ended = threading.Event(), threading.Event()

    class Slow(FileSystem):
        def fsync(self, fd: int) -> None:
            may_end.wait(120)
            super().fsync(fd)  # a closed file would raise here
            is_ended.set()

    fd = files.open_empty(tmp_path / "file")
    early = EarlySync(fd)
    with file_system.replaced(Slow()):
        early.note_written(1)
        early.note_written(1)  # one is under way: no second one begins
        threading.Timer(0.05, may_end.set).start()
        early.end()
    assert is_ended.is_set()
    os.close(fd)


def test_a_failed_sync_is_reported_on_every_call(tmp_path: Path) -> None:
    with files.closing(files.open_empty(tmp_path / "file")) as fd:
        early = EarlySync(fd)
        with file_system.replaced(Synced(OSError(errno.EIO, "it broke"))):
            early.note_written(1)
            for _ in range(2):
                with pytest.raises(OSError, match="it broke"):
                    early.wait()
        early.end()


def test_no_more_threads_sync_than_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_sync, "_room", threading.BoundedSemaphore(1))
    early_sync._room.acquire()
    system = Synced()
    with files.closing(files.open_empty(tmp_path / "file")) as fd, file_system.replaced(system):
        early = EarlySync(fd)
        early.note_written(1)
        early.wait()
        assert system.early == []
        early_sync._room.release()
        early.note_written(1)
        early.wait()
        assert system.early == ["file"]
