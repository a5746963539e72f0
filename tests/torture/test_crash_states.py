"""The crash states are all there, and each missing sync is found by them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.directory import active_segment
from kafkalog.storage_engine.directory.transaction import Transaction
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.state import State
from tests.torture.acts import Sync, Write
from tests.torture.crash_states import ALL, EVERY_MOMENT, ONE_MOMENT, Task, Worker, tasks
from tests.torture.crashes import Outcome
from tests.torture.disk import Disk, check_recorded
from tests.torture.disk_states import states
from tests.torture.recorder import Recorder
from tests.torture.workloads import OPERATIONS, VARIANTS, sequences

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
        files.rename(root / "old", root / "new")
        assert trees(recorder) == [{"new": b"old"}, {"old": b"old"}]
        files.sync_directory(root)
        assert trees(recorder) == [{"new": b"old"}]


def test_a_synced_file_has_its_content_and_not_its_name(root: Path) -> None:
    with Recorder(root) as recorder:
        files.create(root / "new", b"new")
    assert trees(recorder) == [{"old": b"old", "new": b"new"}, {"old": b"old"}]


def test_a_synced_name_has_not_its_content(root: Path) -> None:
    with Recorder(root) as recorder:
        fd = files.open_to_write(root / "new", create=True)
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
        fd = files.open_to_write(root / "old")
        files.write_at(fd, b"a" * 600, 0)
        files.write_at(fd, b"b", 1199)
        os.close(fd)
    found = [tree["old"] for tree in trees(recorder)]
    assert b"." * 1199 + b"b" in found
    assert b"a" * 512 + b"." * 688 in found
    assert b"." * 512 + b"a" * 88 + b"." * 599 + b"b" in found
    assert b"a" * 600 + b"." * 600 in found


def test_a_write_is_torn_at_each_of_its_sectors(root: Path) -> None:
    (root / "old").write_bytes(b"." * 3072)
    with Recorder(root) as recorder:
        fd = files.open_to_write(root / "old")
        files.write_at(fd, b"a" * 3072, 0)
        os.close(fd)
    found = [tree["old"] for tree in trees(recorder)]
    for at in range(0, 3072, 512):
        assert b"a" * at + b"." * (3072 - at) in found
        assert b"a" * at + b"." * 512 + b"a" * (3072 - at - 512) in found


def test_a_name_that_was_given_again_is_another_file(root: Path) -> None:
    with Recorder(root) as recorder:
        files.remove(root / "old")
        files.create(root / "old", b"new")
    assert trees(recorder) == [{"old": b"new"}, {"old": b"old"}, {}]


def test_what_a_failed_sync_left_a_later_one_does_not_write(root: Path) -> None:
    def fail(call: str, arguments: tuple[Any, ...]) -> int | None:
        if call == "fsync" and failing:
            raise OSError(5, "failed")
        return None

    failing = True
    with Recorder(root, before=fail) as recorder:
        fd = files.open_to_write(root / "old")
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


def test_a_file_that_is_made_past_the_recorder_is_found(root: Path) -> None:
    with Recorder(root) as recorder:
        (root / "secret").touch()
    with pytest.raises(AssertionError, match="not recorded: secret"):
        check_recorded(recorder)


def test_a_write_past_the_recorder_is_found(root: Path) -> None:
    with Recorder(root) as recorder:
        (root / "old").write_bytes(b"new")
    with pytest.raises(AssertionError, match="not recorded: old"):
        check_recorded(recorder)


def test_what_is_done_next_to_the_root_is_not_recorded(root: Path) -> None:
    with Recorder(root) as recorder:
        files.create(root.parent / "beside", b"of no interest")
    assert recorder.acts == []


# --- the program ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A directory with the log that workloads begin with: no sync is missing in it."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        assert first_violation(Path(name), "alter", most=1) is None
        yield Path(name)


def first_violation(directory: Path, name: str, most: int | None = None) -> str | None:
    depth = ALL if most is None else ONE_MOMENT
    outcomes = Worker(directory, seed=1).run(Task("plain", (name,), depth))
    return first_of(islice(outcomes, most))


def first_violation_when_done(directory: Path, workload: str) -> str | None:
    """Look only at crashes right after an operation has returned."""
    crashes = Worker(directory, seed=1).crashes(Task.parse(workload))
    (crash,) = crashes.crashes(crashes.stages[-1:], [crashes.stages[-1].end])
    return first_of(crashes.check(crash, state) for state in crashes.states(crash))


def first_of(outcomes: Iterator[Outcome]) -> str | None:
    wrong = next((outcome for outcome in outcomes if outcome.faults), None)
    return None if wrong is None else f"{wrong.case}: {wrong.faults}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_outlives_crashes(directory: Path, name: str) -> None:
    assert first_violation(directory, name, most=4) is None


@pytest.mark.parametrize(
    ("sync", "workload"),
    [
        ("sync_data", "append"),
        ("sync_file", "append"),
        ("sync_file", "adopt"),
        ("sync_directory", "adopt"),
        ("sync_directory", "clean"),
        ("sync_directory", "roll,append"),
        ("sync_file", "delete_records"),
        ("sync_directory", "full/alter"),  # the journal's own new name
        ("sync_directory", "relaxed/wide,alter"),
    ],
)
def test_a_missing_sync_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch, sync: str, workload: str
) -> None:
    assert first_violation_when_done(directory, workload) is None
    monkeypatch.setattr(files, sync, lambda of: None)
    assert first_violation_when_done(directory, workload) is not None


def test_the_program_finds_a_journal_record_that_is_synced_before_its_data(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_all, append = Transaction._sync, Journal.append
    waiting: list[Transaction] = []

    def append_and_sync(journal: Journal, change: Any, **how: bool) -> State:
        state = append(journal, change, **how)
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

    def publish_and_sync(journal: Journal, fd: int, *more: Any) -> Any:
        header = publish(journal, fd, *more)
        sync_data(fd)
        return header

    monkeypatch.setattr(files, "sync_data", lambda fd: None)
    monkeypatch.setattr(Journal, "_publish", publish_and_sync)
    assert first_violation(directory, "append") is not None


@pytest.mark.parametrize("first", ["died", "all"])
def test_what_a_second_crash_brings_back_of_the_first_attempt_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """An index entry that was cut, but not durably, where another time is by now."""
    assert stale_entry(directory, first) is None
    monkeypatch.setattr(active_segment, "_truncate_durably", files.truncate)
    found = stale_entry(directory, first)
    assert found is not None
    assert "expected timestamp" in found


def stale_entry(directory: Path, first: str) -> str | None:
    """Crash an append right behind its first entry of a time index, and again after the retry."""
    crashes = Worker(directory, seed=1).crashes(Task("plain", ("append",)))
    paths = {
        number: path for path, number in crashes.recording.begin.everything().numbers().items()
    }
    written = next(
        n
        for n, act in enumerate(crashes.recording.acts)
        if isinstance(act, Write) and paths.get(act.file, "").endswith(layout.TIME_INDEX)
    )
    (crash,) = crashes.crashes(crashes.stages, [written + 1])
    (state,) = (state for state in crashes.states(crash) if state.label == first)
    again = crashes.recovery(crash, state)
    (end,) = again.crashes(again.stages, [again.stages[-1].end])
    return first_of(again.check(end, state) for state in again.states(end))


def test_a_commit_that_dies_before_its_record_is_synced_or_published_is_tried_again(
    directory: Path,
) -> None:
    """At once, as the same batch: it is there exactly once."""
    crashes = Worker(directory, seed=1).crashes(Task("plain", ("commit",)))
    (stage,) = crashes.stages
    journal = crashes.recording.begin.everything().numbers()[layout.COMMIT]
    acts = [
        (n, isinstance(act, Sync))
        for n, act in enumerate(crashes.recording.acts)
        if act == Sync(journal) or (isinstance(act, Write) and act.file == journal)
    ]
    (_, is_note), (record, is_record), (sync, is_sync), (_, is_published) = acts[:4]
    assert (is_note, is_record, is_sync, is_published) == (False, False, True, False)
    assert stage.retry == "commit"
    for crash in crashes.crashes([stage], [record + 1, sync + 1]):
        outcomes = [crashes.check(crash, state) for state in crashes.states(crash)]
        assert outcomes[0].case == f"commit:{crash.count}:died"
        assert first_of(iter(outcomes)) is None


# --- what is tried -------------------------------------------------------------------------------


def test_a_full_run_has_all_sequences_up_to_three_operations_and_all_states_of_one() -> None:
    planned = tasks(seed=1)
    names = {task.names for task in planned}
    assert {*sequences(3)} <= names
    ones = [task for task in planned if len(task.names) == 1]
    assert {(task.variant, *task.names) for task in ones} == {*product(VARIANTS, OPERATIONS)}
    assert all(task.depth == ALL for task in ones)


def test_a_full_run_has_pairs_in_two_variants_and_in_one_of_them_at_every_moment() -> None:
    planned = tasks(seed=1)
    pairs = sorted(product(OPERATIONS, repeat=2))
    twos = [task for task in planned if len(task.names) == 2]
    assert len({(task.variant, task.names) for task in twos}) == len(twos)
    for depth in (EVERY_MOMENT, ONE_MOMENT):
        of_depth = [task for task in twos if task.depth == depth]
        assert sorted(task.names for task in of_depth) == pairs
        assert {task.variant for task in of_depth} == {*VARIANTS}


def test_a_sample_has_deaths_after_deaths() -> None:
    assert any(task.depth.deaths for task in tasks(seed=1, states=900))


def test_of_a_single_operation_all_states_are_checked(directory: Path) -> None:
    worker = Worker(directory, seed=1)
    crashes = worker.crashes(Task("plain", ("alter",)))
    checked = worker.check(Task("plain", ("alter",)))
    sampled = worker.check(Task("plain", ("alter",), ONE_MOMENT))
    assert checked.trees == checked.all_trees == crashes.count(crashes.stages)
    assert sampled.trees < sampled.all_trees == checked.all_trees


def test_of_a_pair_what_is_always_checked_is_checked_at_every_moment(directory: Path) -> None:
    worker = Worker(directory, seed=1)
    task = Task("plain", ("close", "append"), EVERY_MOMENT)
    crashes = worker.crashes(task)
    wanted = {
        crashes.key(crash, state)
        for crash in crashes.crashes(crashes.stages[-1:], crashes.moments(crashes.stages[-1:]))
        for state in crashes.states(crash)
        if state.is_simple
    }
    checked = worker.check(task)
    assert wanted <= {outcome.key for outcome in checked.outcomes}
    assert checked.trees < checked.all_trees


def test_a_worker_checks_the_same_states_whatever_it_did_before(directory: Path) -> None:
    first, second = (
        Task("plain", ("alter",), ONE_MOMENT),
        Task("plain", ("close", "alter"), ONE_MOMENT),
    )
    worker, other = Worker(directory, seed=1), Worker(directory, seed=1)
    assert [worker.check(first), worker.check(second)] == [other.check(first), other.check(second)]
    assert worker.check(first) == other.check(first)


def test_a_case_is_repeated_by_its_name(directory: Path) -> None:
    worker, other = Worker(directory, seed=1), Worker(directory, seed=1)
    crashes = worker.crashes(Task("lz4", ("roll", "append")))
    (crash,) = crashes.crashes(crashes.stages[-1:], [crashes.stages[-1].first + 4])
    died, *_, drawn = crashes.states(crash)
    again = crashes.recovery(crash, died)
    (end,) = again.crashes(again.stages, [again.stages[-1].end])
    *_, below = again.states(end)
    for found in (again.check(end, below), crashes.check(crash, drawn)):
        assert list(other.replay(found.case)) == [found]


def test_a_workload_is_repeated_by_its_name(directory: Path) -> None:
    found = list(Worker(directory, seed=1).run(Task("full", ("close",))))
    assert list(Worker(directory, seed=1).replay("full/close:")) == found


@pytest.mark.slow
def test_what_is_recorded_does_not_depend_on_the_process(tmp_path: Path) -> None:
    """Nor on the order in which it has the members of sets."""
    found = {
        subprocess.check_output(
            [sys.executable, "-c", RECORDED, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    }
    assert len(found) == 1


RECORDED = """
import hashlib, sys
from pathlib import Path
from tests.torture.crash_states import Task, Worker
from tests.torture.workloads import OPERATIONS
Path(sys.argv[1]).mkdir()
worker = Worker(Path(sys.argv[1]), seed=1)
acts = [worker.crashes(Task("plain", tuple(OPERATIONS))).recording.acts]
crashes = worker.crashes(Task("plain", ("clean",)))
for crash in crashes.crashes(crashes.stages, crashes.moments(crashes.stages)[::5]):
    acts.append(crashes.recovery(crash, next(crashes.states(crash))).recording.acts)
print(hashlib.blake2b(repr(acts).encode()).hexdigest())
"""
