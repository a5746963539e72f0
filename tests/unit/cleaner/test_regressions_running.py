"""What once went wrong in Kafka's cleaner: threads that died, wrong choices, races.

Each test names the fault's number. Faults of what a cleaning leaves are in test_regressions.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.directory.directory_moment import DirectoryMoment
from kafkalog.cleaner.directory.pause import abort_and_pause, is_paused
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean, clean_filthiest, retain
from kafkalog.cleaner.schedule.scheduler import choose
from kafkalog.cleaner.shelves import moment_of
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.checkpoints import read_offset_checkpoint
from kafkalog.storage_engine.segment.segments import list_segments
from tests.builders.log_contents import first_dirty
from tests.unit.cleaner.naive import batch, dump, foreign_log, latest_values, offsets, records_of
from tests.unit.cleaner.test_manager import corrupt, eventually, filled

MINUTE = 60_000


@contextmanager
def running(engine: DirectoryLog, clock: list[int] | None = None) -> Iterator[CleanerThread]:
    config = CleanerConfig(backoff_ms=2, threads=2)
    thread = CleanerThread(engine, config, clock=lambda: clock[0] if clock else 1_000)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


# --- threads that died ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["no directory", "no plan", "no segment"])
def test_a_partition_that_cannot_even_be_looked_at_does_not_end_the_thread(
    tmp_path: Path, fault: str
) -> None:
    """KAFKA-8725: a fault while the next partition was chosen ended the thread"""
    engine = filled(tmp_path, "bad", "good")
    directory = tmp_path / "bad-0"
    if fault == "no directory":
        directory.rename(tmp_path / "elsewhere")
    elif fault == "no plan":
        (directory / layout.DELETE_HORIZON).mkdir()
    else:
        for path in directory.glob("*.log"):
            path.unlink()
    with running(engine) as thread:
        eventually(lambda: status(moment_of(engine, 1_000), topic="good")[0].state == "not due")
        assert thread.is_alive
        assert thread.deaths == 0
    assert offsets(dump(engine, "good")) == [6, 7, 8, 9]


def test_no_memory_for_one_key_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Redpanda 26182: a map without capacity crashed"""
    with pytest.raises(InvalidInputError, match="room for one key"):
        CleanerConfig(dedupe_buffer_size=24)
    for load_factor in (0.05, 0.4, 0.99):  # nor does a round without dirty records need more
        engine = filled(tmp_path / f"{load_factor}", "t", delete_retention_ms="5")
        engine.append("t", [("a", None)], now_ms=1)
        config = CleanerConfig(io_buffer_load_factor=load_factor)
        assert clean(engine, force=True, now_ms=10, config=config)[0].error is None
        (stats,) = clean(engine, now_ms=20, config=config)
        assert (stats.error, offsets(dump(engine))) == (None, [9])


# --- partitions in quarantine --------------------------------------------------------------------


def test_a_fault_is_found_by_one_cleaner_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause doubles with each failure: two that found the same would double it at once"""
    engine = filled(tmp_path, "t")
    corrupt(engine, "t")
    were_locked = []
    write = files.write_atomically

    def look(path: Path, *args: object, **options: object) -> None:
        if path.name == layout.UNCLEANABLE:
            were_locked.append(locks.FileLock(tmp_path / "t-0" / layout.CLEANER_LOCK).is_held())
        write(path, *args, **options)

    monkeypatch.setattr(files, "write_atomically", look)

    def be_quicker(_: object) -> None:
        stats = clean_filthiest(DirectoryLog(tmp_path), now_ms=1_000)
        assert stats is not None and stats.error is not None

    assert clean_filthiest(engine, now_ms=1_000, watch=be_quicker) is None
    assert were_locked == [True]
    mark = read_uncleanable(DirectoryNotes(tmp_path / "t-0"))
    assert mark is not None and mark.failures == 1


# --- where the dirty section begins --------------------------------------------------------------


def test_segments_below_the_log_start_go_also_where_nothing_is_deleted_by_time(
    tmp_path: Path,
) -> None:
    """KAFKA-7400: in a compacted topic they stayed for ever"""
    engine = filled(tmp_path, "t", cleanup_policy="compact,delete", retention_ms="-1")
    engine.delete_records("t", 0, 6, now_ms=1)
    engine.alter_topic("t", {"cleanup.policy": "compact"})
    with running(engine) as thread:
        eventually(lambda: thread.segments_deleted >= 1)
    assert min(s.base_offset for s in list_segments(tmp_path / "t-0")) == 6
    assert offsets(dump(engine)) == [6, 7, 8, 9]


# --- ratios --------------------------------------------------------------------------------------


def test_a_ratio_of_more_than_two_gib_is_a_ratio(tmp_path: Path) -> None:
    """KAFKA-6030: bytes beyond 2^31 overflowed"""
    large = 3 << 30
    contents = {i: [batch(i, [("k", "v")])] for i in range(4)}
    engine = foreign_log(tmp_path, contents | {4: []}, first_dirty=1)
    for i in range(4):
        os.truncate(tmp_path / "t-0" / f"{i:020d}.log", large)  # sparse
    log = DirectoryMoment(engine, 1).plan("t", 0)
    assert (log.clean_bytes, log.cleanable_bytes) == (large, 3 * large)
    assert log.dirty_ratio == 0.75
    assert choose(DirectoryMoment(engine, 1)).max_dirty_ratio == 0.75


# --- races ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pausers_retention_and_cleaners_may_meet_in_any_order(tmp_path: Path) -> None:
    """KAFKA-6568, KAFKA-7441: a state that somebody else had taken was removed"""
    engine = filled(tmp_path, "t", cleanup_policy="compact,delete", retention_ms="-1")
    faults: list[BaseException] = []

    def many(work: object) -> threading.Thread:
        def run() -> None:
            try:
                mine = DirectoryLog(tmp_path)
                for i in range(15):
                    work(mine, i)
            except BaseException as fault:
                faults.append(fault)

        return threading.Thread(target=run)

    def pause(mine: DirectoryLog, _: int) -> None:
        with abort_and_pause(mine, "t", 0):
            assert is_paused(tmp_path / "t-0")

    def append(mine: DirectoryLog, i: int) -> None:
        mine.append("t", [("a", f"{i}"), (f"n{i}", "x")], now_ms=1)

    threads = [
        many(pause),
        many(pause),
        many(append),
        many(lambda mine, i: retain(mine, now_ms=1)),
        many(lambda mine, i: clean(mine, force=True, now_ms=1)),
        many(lambda mine, i: clean_filthiest(mine, now_ms=1)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert faults == []
    assert not is_paused(tmp_path / "t-0")
    assert [stats.error for stats in clean(engine, force=True, now_ms=2)] in ([], [None])
    assert len(records_of(dump(engine))) == len(latest_values(records_of(dump(engine)))) == 17


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_a_policy_that_changes_at_any_moment_leaves_one_at_work(tmp_path: Path, n: int) -> None:
    """KAFKA-7322: the retention of a topic ran while the cleaner still swapped its segments"""
    engine = filled(tmp_path, "t", retention_ms="1", min_cleanable_dirty_ratio="0")
    before = latest_values(records_of(dump(engine)))
    other = DirectoryLog(tmp_path)
    calls = 0

    def change() -> None:
        nonlocal calls
        calls += 1
        if calls == n:
            other.alter_topic("t", {"cleanup.policy": "delete"})
            assert other.apply_retention("t", now_ms=10**14) == []  # the cleaner is still there

    assert clean(engine, now_ms=1, check_abort=change) == []
    assert calls == n  # it has let go at once
    assert latest_values(records_of(dump(engine))) == before
    (retained,) = other.apply_retention("t", now_ms=10**14)
    assert retained.segments > 0
    assert records_of(dump(engine)) == []
    assert engine.offsets("t")[0] == (10, 10)
    assert not list((tmp_path / "t-0").glob("*.cleaned"))


def test_the_checkpoint_of_a_partition_that_is_gone_goes_with_it(tmp_path: Path) -> None:
    """KAFKA-8362: an entry that was left behind was believed by who came to its place"""
    engine = filled(tmp_path, "t", "u")
    clean(engine, force=True, now_ms=1)
    path = tmp_path / layout.CLEANER_CHECKPOINT
    assert read_offset_checkpoint(path) == {("t", 0): 10, ("u", 0): 10}
    engine.delete_topic("t", now_ms=1)
    assert read_offset_checkpoint(path) == {("u", 0): 10}
    filled(tmp_path, "t")
    assert first_dirty(engine) == 0
    (stats,) = clean(engine, "t", force=True, now_ms=1)
    assert (stats.start_offset, stats.end_offset) == (0, 10)
    assert offsets(dump(engine)) == [8, 9]
