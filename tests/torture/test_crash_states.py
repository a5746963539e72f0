"""The crash states are all there, and each missing sync is found by them."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine import files
from kafkalog.storage_engine.journal import Journal
from kafkalog.storage_engine.state import State
from kafkalog.storage_engine.transaction import Transaction
from tests.torture.crash_states import Task, Worker
from tests.torture.crashes import Outcome
from tests.torture.disk import Disk, check_recorded
from tests.torture.disk_states import states
from tests.torture.recorder import MissedActError, Recorder
from tests.torture.workloads import OPERATIONS

Tree = dict[str, bytes | None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    (made / "old").write_bytes(b"old")
    return made


def trees(recorder: Recorder) -> list[Tree]:
    """What the disk may have after all that was recorded, each once."""
    check_recorded(recorder)
    disk = Disk(recorder.begin)
    for act in recorder.acts:
        disk.apply(act)
    found: list[Tree] = []
    for state in states(disk, random.Random(1), draws=50):
        if state.tree() not in found:
            found.append(state.tree())
    return found


# --- the disk ------------------------------------------------------------------------------------


def test_a_rename_without_a_directory_sync_may_be_lost_but_not_by_half(root: Path) -> None:
    with Recorder(root) as recorder:
        os.replace(root / "old", root / "new")
        assert trees(recorder) == [{"new": b"old"}, {"old": b"old"}]
        files.sync_directory(root)
        assert trees(recorder) == [{"new": b"old"}]


def test_a_synced_file_has_its_content_and_not_its_name(root: Path) -> None:
    with Recorder(root) as recorder:
        files.create(root / "new", b"new")
    assert trees(recorder) == [{"old": b"old", "new": b"new"}, {"old": b"old"}]


def test_a_synced_name_has_not_its_content(root: Path) -> None:
    with Recorder(root) as recorder:
        fd = os.open(root / "new", os.O_RDWR | os.O_CREAT)
        files.write_at(fd, b"new", 0)
        files.sync_directory(root)
        assert trees(recorder) == [
            {"new": b"new", "old": b"old"},
            {"new": b"", "old": b"old"},
            {"new": bytes(3), "old": b"old"},
        ]
        files.sync_data(fd)
        os.close(fd)
        assert trees(recorder) == [{"new": b"new", "old": b"old"}]


def test_writes_are_torn_where_sectors_end_and_reordered(root: Path) -> None:
    (root / "old").write_bytes(b"." * 1200)
    with Recorder(root) as recorder:
        fd = os.open(root / "old", os.O_RDWR)
        files.write_at(fd, b"a" * 600, 0)
        files.write_at(fd, b"b", 1199)
        os.close(fd)
    found = [tree["old"] for tree in trees(recorder)]
    assert b"." * 1199 + b"b" in found
    assert b"a" * 512 + b"." * 688 in found
    assert b"." * 512 + b"a" * 88 + b"." * 599 + b"b" in found
    assert b"a" * 600 + b"." * 600 in found


def test_a_name_that_was_given_again_is_another_file(root: Path) -> None:
    with Recorder(root) as recorder:
        os.unlink(root / "old")
        files.create(root / "old", b"new")
    assert trees(recorder) == [{"old": b"new"}, {"old": b"old"}, {}]


def test_what_a_failed_sync_left_a_later_one_does_not_write(root: Path) -> None:
    def fail(call: str, arguments: tuple[Any, ...]) -> int | None:
        if call == "fsync" and failing:
            raise OSError(5, "failed")
        return None

    failing = True
    with Recorder(root, before=fail) as recorder:
        fd = os.open(root / "old", os.O_RDWR)
        files.write_at(fd, b"OLD", 0)
        with pytest.raises(OSError, match="failed"):
            files.sync_file(fd)
        failing = False
        files.sync_file(fd)
        assert trees(recorder) == [{"old": b"OLD"}, {"old": b"old"}]
        files.write_at(fd, b"OLD", 0)
        files.sync_file(fd)
        os.close(fd)
    assert trees(recorder) == [{"old": b"OLD"}]


# --- the recorder --------------------------------------------------------------------------------


def test_a_short_write_is_recorded_as_it_was(root: Path) -> None:
    with Recorder(root, before=lambda call, arguments: 1 if call == "pwrite" else None) as recorder:
        files.create(root / "new", b"new")
    assert (root / "new").read_bytes() == b"new"
    check_recorded(recorder)
    assert len(recorder.acts) == 5  # made, three bytes, synced


def test_a_write_that_is_not_recorded_is_found(root: Path) -> None:
    with Recorder(root) as recorder:
        recorder._real["open"](root / "secret", os.O_CREAT | os.O_WRONLY)
    with pytest.raises(AssertionError, match="not recorded: secret"):
        check_recorded(recorder)


def test_other_ways_to_write_are_refused(root: Path) -> None:
    with Recorder(root) as recorder:
        with pytest.raises(MissedActError):
            (root / "new").write_bytes(b"new")
        with pytest.raises(MissedActError):
            os.symlink("old", root / "new")
        (root.parent / "beside").write_bytes(b"of no interest")
    assert recorder.acts == []


# --- the program ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A directory with the log that workloads begin with: no sync is missing in it."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        assert first_violation(Path(name), "alter", most=1) is None
        yield Path(name)


def first_violation(directory: Path, name: str, most: int = 60) -> str | None:
    return first_of(Worker(directory, seed=1).run(Task("plain", (name,), most)))


def first_violation_when_done(directory: Path, name: str) -> str | None:
    """Look only at crashes right after an operation has returned."""
    crashes = Worker(directory, seed=1).crashes(Task("plain", (name,), 0))
    (crash,) = crashes.crashes(crashes.stages, [crashes.stages[-1].end])
    return first_of(crashes.check(crash, state) for state in crashes.states(crash))


def first_of(outcomes: Iterator[Outcome]) -> str | None:
    wrong = next((outcome for outcome in outcomes if outcome.faults), None)
    return None if wrong is None else f"{wrong.case}: {wrong.faults}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_outlives_crashes(directory: Path, name: str) -> None:
    assert first_violation(directory, name, most=3) is None


@pytest.mark.parametrize(
    ("sync", "name"),
    [
        ("sync_data", "append"),
        ("sync_file", "append"),
        ("sync_file", "adopt"),
        ("sync_directory", "adopt"),
        ("sync_directory", "clean"),
        ("sync_directory", "roll"),
        ("sync_file", "delete_records"),
    ],
)
def test_a_missing_sync_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch, sync: str, name: str
) -> None:
    monkeypatch.setattr(files, sync, lambda of: None)
    assert first_violation_when_done(directory, name) is not None


def test_a_record_that_is_synced_before_the_data_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_all, append = Transaction._sync, Journal.append
    waiting: list[Transaction] = []

    def append_and_sync(journal: Journal, change: Any, *, sync: bool = True) -> State:
        state = append(journal, change, sync=sync)
        for transaction in waiting:
            sync_all(transaction)
        waiting.clear()
        return state

    monkeypatch.setattr(Transaction, "_sync", lambda self: waiting.append(self))  # noqa: PLW0108
    monkeypatch.setattr(Journal, "append", append_and_sync)
    assert first_violation(directory, "append") is not None


def test_a_record_that_is_published_before_it_is_synced_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_data, publish = files.sync_data, Journal._publish

    def publish_and_sync(journal: Journal, fd: int, replay: Any) -> Any:
        header = publish(journal, fd, replay)
        sync_data(fd)
        return header

    monkeypatch.setattr(files, "sync_data", lambda fd: None)
    monkeypatch.setattr(Journal, "_publish", publish_and_sync)
    assert first_violation(directory, "append") is not None
