"""Pausers and cleaners, of one process and of several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.directory.pause import abort_and_pause, is_paused
from kafkalog.cleaner.schedule.manager import clean, retain
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from tests.unit.cleaner.naive import dump, offsets
from tests.unit.cleaner.test_manager import eventually, filled


def test_a_paused_partition_is_passed_over_and_the_others_are_cleaned(tmp_path: Path) -> None:
    engine = filled(tmp_path, "a", "b")
    with abort_and_pause(engine, "a", 0):
        assert is_paused(tmp_path / "a-0") and not is_paused(tmp_path / "b-0")
        assert [stats.topic for stats in clean(DirectoryLog(tmp_path), now_ms=1)] == ["b"]
        assert clean(engine, "a", force=True, now_ms=1) == []
    assert not is_paused(tmp_path / "a-0")
    assert [stats.topic for stats in clean(engine, now_ms=1)] == ["a"]


def test_pausers_count_by_themselves(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")
    with abort_and_pause(engine, "t", 0):
        with abort_and_pause(DirectoryLog(tmp_path), "t", 0):
            assert is_paused(tmp_path / "t-0")
        assert is_paused(tmp_path / "t-0")
        assert clean(engine, now_ms=1) == []
    assert not is_paused(tmp_path / "t-0")
    assert len(clean(engine, now_ms=1)) == 1


def at_chunk(n: int, work: Callable[[], None]) -> Callable[[], None]:
    """Does the work at the n-th look around of a cleaning."""
    calls = 0

    def look() -> None:
        nonlocal calls
        calls += 1
        if calls == n:
            work()

    return look


@pytest.mark.parametrize("n", [1, 3, 6, 8])
def test_a_cleaning_at_work_lets_go_and_leaves_the_log_right(tmp_path: Path, n: int) -> None:
    engine = filled(tmp_path, "t")
    paused, resumed = threading.Event(), threading.Event()

    def pause() -> None:
        with abort_and_pause(DirectoryLog(tmp_path), "t", 0):
            paused.set()
            assert resumed.wait(120)

    pauser = threading.Thread(target=pause)

    def begin() -> None:
        pauser.start()
        eventually(lambda: is_paused(tmp_path / "t-0"))
        assert not paused.is_set()  # it waits for us to let go

    assert clean(engine, now_ms=1, check_abort=at_chunk(n, begin)) == []
    assert paused.wait(120)
    assert engine.describe("t").partitions[0].first_dirty_offset == 0  # no checkpoint (C122)
    assert not list((tmp_path / "t-0").glob("*.cleaned"))
    assert {6, 7, 8, 9} <= set(offsets(dump(engine)))
    assert clean(engine, now_ms=1) == []
    resumed.set()
    pauser.join()
    assert len(clean(engine, now_ms=1)) == 1
    assert offsets(dump(engine)) == [6, 7, 8, 9]


def test_a_pauser_that_dies_pauses_nothing_any_more(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")
    program = f"""
import kafkalog, time
from kafkalog.cleaner.directory.pause import abort_and_pause
with abort_and_pause(kafkalog.open({str(tmp_path)!r}), "t", 0):
    print("paused", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"paused\n"
        assert is_paused(tmp_path / "t-0")
        assert clean(engine, now_ms=1) == []
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not is_paused(tmp_path / "t-0")
    assert len(clean(engine, now_ms=1)) == 1


def test_asking_pauses_nobody_and_creates_nothing(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")
    assert not is_paused(tmp_path / "t-0")
    assert not (tmp_path / "t-0" / layout.CLEANING_PAUSED).exists()
    with abort_and_pause(engine, "t", 0):
        pass
    wrong: list[bool] = []

    def ask() -> None:
        wrong.extend(is_paused(tmp_path / "t-0") for _ in range(200))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 600 and not any(wrong)


def test_a_paused_partition_keeps_its_files_from_the_cleaners_retention(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t", cleanup_policy="compact,delete", retention_ms="1")
    with abort_and_pause(engine, "t", 0):
        assert retain(engine, now_ms=10**9) == []
    assert [stats.segments for stats in retain(engine, now_ms=10**9)] == [5]


def test_a_thread_lets_go_of_a_paused_partition(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t", min_cleanable_dirty_ratio="0")
    thread = CleanerThread(engine, CleanerConfig(backoff_ms=1), clock=lambda: 1_000)
    with abort_and_pause(engine, "t", 0):
        thread.start()
        eventually(lambda: thread.last_look_ms is not None)
        assert thread.cleanings == 0
    eventually(lambda: thread.cleanings == 1)
    thread.stop()
    assert thread.failures == 0


def test_only_partitions_that_can_be_cleaned_can_be_paused(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")
    with pytest.raises(UnknownTopicError), abort_and_pause(engine, "u", 0):
        pass
    with pytest.raises(InvalidInputError, match="no partition 1"), abort_and_pause(engine, "t", 1):
        pass
    reader = DirectoryLog(tmp_path, read_only=True)
    with pytest.raises(InvalidInputError, match="only read"), abort_and_pause(reader, "t", 0):
        pass


# --- what is noticed without a pause -------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 8])
def test_a_policy_without_compact_ends_a_cleaning(tmp_path: Path, n: int) -> None:
    engine = filled(tmp_path, "t")
    other = DirectoryLog(tmp_path)
    found: list[list[int]] = []

    def alter() -> None:
        found.append(offsets(dump(other)))
        other.alter_topic("t", {"cleanup.policy": "delete"})

    assert clean(engine, now_ms=1, check_abort=at_chunk(n, alter)) == []
    assert offsets(dump(engine)) == found[0]  # not a record went after the change
    assert engine.describe("t").partitions[0].first_dirty_offset == 0
    assert not (tmp_path / "t-0" / layout.UNCLEANABLE).exists()
    engine.alter_topic("t", {"cleanup.policy": "compact"})
    assert len(clean(engine, now_ms=1)) == 1


def test_a_topic_that_is_deleted_ends_a_cleaning_which_it_waits_for(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t", "u")
    deleter = threading.Thread(target=lambda: DirectoryLog(tmp_path).delete_topic("t", now_ms=1))

    def delete() -> None:
        deleter.start()
        eventually(lambda: "t" not in engine.topics())
        assert (tmp_path / "t-0").exists()

    assert [s.topic for s in clean(engine, now_ms=1, check_abort=at_chunk(3, delete))] == ["u"]
    deleter.join()
    assert not (tmp_path / "t-0").exists()
    with locks.RootLock(tmp_path).shared():
        checkpoint = (tmp_path / layout.CLEANER_CHECKPOINT).read_text()
    assert checkpoint == "0\n1\nu 0 8\n"


def test_a_deleted_topic_leaves_the_cleaners_checkpoint_at_once(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t", "u")
    clean(engine, now_ms=1)
    assert (tmp_path / layout.CLEANER_CHECKPOINT).read_text() == "0\n2\nt 0 8\nu 0 8\n"
    engine.delete_topic("t", now_ms=1)
    assert (tmp_path / layout.CLEANER_CHECKPOINT).read_text() == "0\n1\nu 0 8\n"
