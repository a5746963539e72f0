"""Retention beside cleaning: compact,delete, the thread, topics that go while they are cleaned."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean, clean_and_retain, retain
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import mark_uncleanable
from kafkalog.errors import InvalidInputError
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import latest_column
from tests.unit.cleaner.test_manager import eventually
from tests.unit.cleaner.transactional_log import Log

HOUR = 3_600_000


def filled(root: Path, *topics: str, hours: int = 6, **config: str) -> DirectoryLog:
    """Topics with two records an hour, of a key that comes again and of one that does not."""
    log = LogBuilder(root)
    for topic in topics:
        log.topic(topic, segment_bytes=100, **config)
        for hour in range(hours):
            log.append(("a", f"{hour}"), (f"k{hour}", "x"), now_ms=hour * HOUR + 1)
    return log.engine


def start(engine: DirectoryLog, topic: str = "t") -> tuple[int, int]:
    state = engine.describe(topic).partitions[0]
    return state.log_start_offset, state.first_dirty_offset


def test_compact_delete_is_cleaned_and_then_loses_its_old_segments(tmp_path: Path) -> None:
    with filled(
        tmp_path, "t", cleanup_policy="compact,delete", retention_ms=str(3 * HOUR)
    ) as engine:
        (stats,) = clean_and_retain(engine, now_ms=int(4.5 * HOUR))
        assert stats.error is None
        assert start(engine) == (4, 10)
        assert [*latest_column(engine).values()] == [5, 7, 9, 10, 11]
        assert clean_and_retain(engine, now_ms=int(4.5 * HOUR)) == []


def test_compact_alone_keeps_every_key_however_old(tmp_path: Path) -> None:
    with filled(tmp_path, "t", retention_ms="1", retention_bytes="1") as engine:
        clean_and_retain(engine, now_ms=10**9 * HOUR)
        assert start(engine)[0] == 0
        assert len([*latest_column(engine).values()]) == 7


def test_nothing_below_the_log_start_is_dirty_or_cleaned_into_another_segment(
    tmp_path: Path,
) -> None:
    engine = filled(tmp_path, "t", cleanup_policy="compact,delete", retention_ms="-1")
    engine.alter_topic("t", {"min.cleanable.dirty.ratio": "0"})  # clean is what lies below, too
    engine.alter_topic("t", {"segment.bytes": "100000"})  # cleaned, all would be one segment
    engine.delete_records("t", 0, 7, now_ms=1)
    assert start(engine) == (7, 7)
    (stats,) = clean(engine, now_ms=1)
    assert stats.start_offset == 7
    assert [*latest_column(engine).values()] == [7, 9, 10, 11]
    names = sorted(path.name for path in (tmp_path / "t-0").glob("*.log"))
    assert [int(name[:20]) for name in names] == [0, 2, 4, 6, 10]
    retain(engine, now_ms=1)
    assert sorted(int(path.name[:20]) for path in (tmp_path / "t-0").glob("*.log")) == [6, 10]
    assert [*latest_column(engine).values()] == [7, 9, 10, 11]


def test_records_deleted_during_a_round_stay_clean(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t", cleanup_policy="compact,delete", retention_ms="-1")
    other = DirectoryLog(tmp_path)

    def check_abort() -> None:
        other.delete_records("t", 0, -1, now_ms=1)

    assert clean(engine, now_ms=1, check_abort=check_abort)[0].error is None
    assert start(engine) == (12, 12)
    assert [*latest_column(engine).values()] == []


def test_an_uncleanable_partition_is_not_retained(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t", "u", cleanup_policy="compact,delete", retention_ms="1")
    mark_uncleanable(DirectoryNotes(tmp_path / "t-0"), "why", {}, now_ms=1)
    assert [stats.topic for stats in retain(engine, now_ms=100 * HOUR)] == ["u"]


def test_a_topic_that_is_deleted_while_it_is_cleaned_stops_the_cleaner_cleanly(
    tmp_path: Path,
) -> None:
    engine = filled(tmp_path, "t", "u")
    other = DirectoryLog(tmp_path)
    deleter = threading.Thread(target=other.delete_topic, args=("t",), kwargs={"now_ms": 10**14})

    def check_abort() -> None:
        if deleter.ident is None:
            deleter.start()
            eventually(lambda: "t" not in engine.topics())

    assert [s.topic for s in clean(engine, now_ms=1, check_abort=check_abort)] == ["u"]
    deleter.join(120)
    assert not (tmp_path / "t-0").exists()
    engine.create_topic("t", 1)
    assert list((tmp_path / "t-0").glob("*.cleaned")) == []
    assert not (tmp_path / "t-0" / layout.UNCLEANABLE).exists()
    assert [s.topic for s in status(engine, 1)] == ["t", "u"]


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_the_thread_applies_retention(tmp_path: Path, policy: str) -> None:
    engine = filled(tmp_path, "t", cleanup_policy=policy, retention_ms=str(3 * HOUR))
    clock = [int(4.5 * HOUR)]
    config = CleanerConfig(backoff_ms=5, retention_check_interval_ms=HOUR)
    thread = CleanerThread(engine, config, clock=lambda: clock[0])
    thread.start()
    try:
        eventually(lambda: thread.segments_deleted == 2)
        clock[0] += HOUR
        eventually(lambda: thread.segments_deleted == 3)
    finally:
        thread.stop()
    assert engine.offsets("t")[0] == (6, 12)
    assert thread.failures == 0


def test_the_thread_looks_at_topics_without_compact_only_at_their_interval(tmp_path: Path) -> None:
    engine = filled(tmp_path, "c", "d", cleanup_policy="delete", retention_ms=str(3 * HOUR))
    engine.alter_topic("c", {"cleanup.policy": "compact,delete", "min.cleanable.dirty.ratio": "1"})
    clock = [0]
    config = CleanerConfig(backoff_ms=5, retention_check_interval_ms=10 * HOUR)
    thread = CleanerThread(engine, config, clock=lambda: clock[0])
    thread.start()
    try:
        eventually(lambda: thread._all_retained_ms == 0)
        clock[0] = 5 * HOUR
        eventually(lambda: thread.segments_deleted == 2)
        assert [engine.offsets(name)[0][0] for name in "cd"] == [4, 0]
        clock[0] = 10 * HOUR
        eventually(lambda: thread.segments_deleted == 12)
    finally:
        thread.stop()


def test_the_interval_is_checked() -> None:
    with pytest.raises(InvalidInputError, match="retention_check_interval_ms"):
        CleanerConfig(retention_check_interval_ms=0)


@pytest.mark.parametrize("rounds", [0, 1, 2])
@pytest.mark.parametrize("deleted_below", [4, 5, 7])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_transaction_that_lost_its_beginning_is_no_damage(
    tmp_path: Path, is_aborted: bool, deleted_below: int, rounds: int
) -> None:
    log = Log.create(tmp_path, cleanup_policy="compact,delete", retention_ms="-1")
    log.data(1, 2)
    log.transact(7, 1, 2)
    log.roll()
    log.mark(7, int(not is_aborted))  # offset 4: of the segment before it retention takes all
    log.data(1, 3)
    log.roll()
    log.data(1, 4)
    log.engine.delete_records("t", 0, deleted_below)
    for now_ms in range(rounds):
        log.clean(now_ms * 100_000_000)
    assert list(verify(tmp_path)) == []
    retain(log.engine, now_ms=0)
    assert list(verify(tmp_path)) == []
