"""Commits that are synced later (`flush.messages`): what a sync that fails leaves of them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.segment import partition_directory
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import values
from tests.torture.disk import Disk
from tests.torture.recorder import Recorder
from tests.torture.repeatable import booted
from tests.torture.workloads import small_files
from tests.unit.storage_engine.faults import Died, LyingPages

CONFIG = {"flush.messages": "3", "segment.bytes": "1000"}


def begun(root: Path) -> DirectoryLog:
    """A log whose first record is synced, and the next two are not."""
    engine = LogBuilder(root).topic(**CONFIG).append(("k", "0")).engine
    engine.sync()
    LogBuilder(engine).append_each(("k", "1"), ("k", "2"))
    assert engine.state().unsynced == {("t", 0): (0, log(engine).stat().st_size // 3)}
    return engine


def log(engine: DirectoryLog) -> Path:
    return engine.partition_directory("t", 0) / layout.segment_file(0, layout.LOG)


def append(engine: DirectoryLog) -> None:
    engine.append("t", [("k", "3")])


def append_and_roll(engine: DirectoryLog) -> None:
    engine.append("t", [("k", "v" * 900)])


def alter(engine: DirectoryLog) -> None:
    engine.alter_topic("t", {"max.message.bytes": "5000"})


def is_log(name: str) -> bool:
    return name.endswith(layout.LOG)


def fails_to_write_again(directory: Path, start: tuple[int, int], end: tuple[int, int]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("work", [append, append_and_roll, alter, DirectoryLog.sync])
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "another process"])
@pytest.mark.parametrize("how", ["fails", "stays full", "killed"])
def test_they_outlive_a_power_cut_after_a_sync_of_theirs_that_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    is_alone: bool,
    work: Callable[[DirectoryLog], None],
) -> None:
    ready: list[bool] = []

    def is_refused(name: str) -> bool:
        return is_log(name) and bool(ready)

    disk = LyingPages(monkeypatch, errno.EIO, is_refused, kills=how == "killed")
    engine = begun(tmp_path / "log")
    ready.append(True)
    with monkeypatch.context() as patch, pytest.raises((StorageError, Died)):
        if how == "stays full":
            patch.setattr(partition_directory, "write_again", fails_to_write_again)
        work(engine if is_alone else DirectoryLog(tmp_path / "log"))
    assert disk.failures
    assert values(engine) == [b"0", b"1", b"2"]
    append(engine if not is_alone else DirectoryLog(tmp_path / "log"))
    engine.sync()
    assert engine.state().unsynced == {}
    logs = sorted(log(engine).parent.glob(f"*{layout.LOG}"))
    assert [disk.kept(path) for path in logs] == [path.read_bytes() for path in logs]
    assert values(engine) == [b"0", b"1", b"2", b"3"]


def test_nothing_is_committed_before_they_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begun(tmp_path / "log")
    assert Journal(engine.root / layout.COMMIT).begin_syncs()  # and was killed
    with monkeypatch.context() as patch:
        patch.setattr(partition_directory, "write_again", fails_to_write_again)
        for work in (append, alter, DirectoryLog.sync):
            with pytest.raises(StorageError, match="No space left"):
                work(engine)
    append(engine)
    assert values(engine) == [b"0", b"1", b"2", b"3"]


def test_a_failed_sync_rewrites_only_unsynced_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begun(tmp_path / "log")
    path = log(engine)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"of a commit that died")
    written: list[tuple[int, int]] = []
    write_at = files.write_at

    def note(fd: int, data: files.Buffer, position: int) -> None:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == str(path):
                written.append((position, position + len(data)))
        write_at(fd, data, position)

    monkeypatch.setattr(files, "write_at", note)
    assert Journal(engine.root / layout.COMMIT).begin_syncs()
    engine.sync()
    assert written == [(size // 3, size)]
    written.clear()
    for _ in range(3):  # by turns, and nothing failed
        append(engine)
        append(DirectoryLog(engine.root))
    assert [start for start, _ in written] == sorted({start for start, _ in written})


def test_a_sync_makes_a_rewrite_of_the_journal_durable_that_was_broken_off(tmp_path: Path) -> None:
    root, cut = tmp_path / "log", tmp_path / "cut"
    root.mkdir()
    with small_files(), Recorder(root) as recorder:
        engine = DirectoryLog(root)
        engine.create_topic("t", 1, {"flush.messages": "1000"})
        engine.append("t", [("k", "v")])
        engine.sync()
        inode = (root / layout.COMMIT).stat().st_ino
        with pytest.MonkeyPatch.context() as patch:
            sync = files.sync_directory

            def dies(path: Path) -> None:
                if path == root and (root / layout.COMMIT).stat().st_ino != inode:
                    raise Died
                sync(path)

            patch.setattr(files, "sync_directory", dies)
            with pytest.raises(Died):
                for _ in range(500):
                    engine.append("t", [("k", "v")])
        other = DirectoryLog(root)
        shown = other.offsets("t")
        other.sync()
    disk = Disk(recorder.begin)
    for act in recorder.acts:
        disk.apply(act)
    disk.state("none", {}).write(cut)
    with booted("after the cut"):
        assert DirectoryLog(cut, read_only=True).offsets("t") == shown
