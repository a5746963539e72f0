"""What Kafka's LogCleanerManagerTest says, rule by rule.

Each test names in its docstring the one of Kafka's that it stands for.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kafkalog.cleaner.directory.directory_moment import DirectoryMoment
from kafkalog.cleaner.directory.pause import abort_and_pause, is_paused
from kafkalog.cleaner.plan import Schedule
from kafkalog.cleaner.schedule.manager import clean, clean_filthiest, retain
from kafkalog.cleaner.schedule.scheduler import choose
from kafkalog.cleaner.state.first_dirty_offset import heal_first_dirty_offsets
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import mark_uncleanable, read_uncleanable
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.retention import retain_partition
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.metadata.checkpoints import read_offset_checkpoint
from tests.builders.batch_builder import ABORT, at_times, joined, marker
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import first_dirty, state_of
from tests.unit.cleaner.naive import dump, offsets
from tests.unit.cleaner.test_manager import eventually

HOUR = 3_600_000
SMALL = {"segment_bytes": 14, "min_cleanable_dirty_ratio": 0.05}
"""Segments of one batch each."""


def chosen(engine: DirectoryLog, now_ms: int = 1000) -> Schedule:
    heal_first_dirty_offsets(engine, now_ms=now_ms)
    return choose(DirectoryMoment(engine, now_ms))


def engine_with(root: Path, **config: str) -> DirectoryLog:
    """An engine with a topic `t` whose segments take one batch each."""
    return LogBuilder(root).topic(**{**SMALL, **config}).engine


def create(engine: DirectoryLog, topic: str, **config: str) -> None:
    LogBuilder(engine).topic(topic, **{**SMALL, **config})


def write(engine: DirectoryLog, count: int, topic: str = "t", *, now_ms: int = 1000) -> None:
    """Append batches of one record, each of a key of its own; then begin an empty segment."""
    first = state_of(engine, topic).high_watermark
    log = LogBuilder(engine, now_ms=now_ms).to(topic)
    log.append_each(*((f"key-{n:03}", "v") for n in range(first, first + count))).roll()


def checkpoint(engine: DirectoryLog) -> dict[tuple[str, int], int]:
    return read_offset_checkpoint(engine.root / layout.CLEANER_CHECKPOINT)


def increasingly_filthy(root: Path) -> DirectoryLog:
    """Topics a, b and c: clean up to offset 20, and dirty up to 20, 25 and 30."""
    engine = DirectoryLog(root)
    for topic, count in (("a", 20), ("b", 25), ("c", 30)):
        create(engine, topic)
        write(engine, count, topic)
        LogBuilder(engine).to(topic).set_state(first_dirty_offset=20)
    return engine


def cleaned(engine: DirectoryLog) -> str | None:
    stats = clean_filthiest(engine, now_ms=1000)
    return None if stats is None else stats.topic


# --- which one is taken --------------------------------------------------------------------------


def test_a_fault_while_choosing_is_one_of_that_partition_alone(tmp_path: Path) -> None:
    """testGrabFilthiestCompactedLogThrowsException"""
    engine = increasingly_filthy(tmp_path)
    (tmp_path / "c-0" / layout.DELETE_HORIZON).mkdir()  # looked at for every plan
    assert chosen(engine).partitions == [("b", 0), ("c", 0)]
    results = clean(engine, now_ms=1000)
    assert [(stats.topic, stats.error is None) for stats in results] == [("b", True), ("c", False)]
    mark = read_uncleanable(DirectoryNotes(tmp_path / "c-0"))
    assert mark is not None and layout.DELETE_HORIZON in mark.reason
    assert chosen(engine).partitions == []


def test_the_filthiest_is_taken_first(tmp_path: Path) -> None:
    """testGrabFilthiestCompactedLogReturnsLogWithDirtiestRatio"""
    engine = increasingly_filthy(tmp_path)
    schedule = chosen(engine)
    assert schedule.partitions == [("c", 0), ("b", 0)]
    assert schedule.max_dirty_ratio == pytest.approx(1 / 3)
    assert cleaned(engine) == "c"


def test_an_uncleanable_partition_is_passed_over(tmp_path: Path) -> None:
    """testGrabFilthiestCompactedLogIgnoresUncleanablePartitions"""
    engine = increasingly_filthy(tmp_path)
    mark_uncleanable(
        DirectoryNotes(tmp_path / "c-0"), "why", engine.describe("c").config, now_ms=1000
    )
    assert cleaned(engine) == "b"


def test_a_partition_that_is_being_cleaned_is_passed_over(tmp_path: Path) -> None:
    """testGrabFilthiestCompactedLogIgnoresInProgressPartitions"""
    increasingly_filthy(tmp_path)
    with locks.FileLock(tmp_path / "c-0" / layout.CLEANER_LOCK).exclusive():
        assert cleaned(DirectoryLog(tmp_path)) == "b"


def test_what_is_being_cleaned_and_what_is_uncleanable_leave_nothing(tmp_path: Path) -> None:
    """testGrabFilthiestCompactedLogIgnoresBothInProgressPartitionsAndUncleanablePartitions"""
    engine = increasingly_filthy(tmp_path)
    mark_uncleanable(
        DirectoryNotes(tmp_path / "b-0"), "why", engine.describe("b").config, now_ms=1000
    )
    with locks.FileLock(tmp_path / "c-0" / layout.CLEANER_LOCK).exclusive():
        assert cleaned(DirectoryLog(tmp_path)) is None


def test_a_first_dirty_offset_beyond_the_end_becomes_the_log_start(tmp_path: Path) -> None:
    """testDirtyOffsetResetIfLargerThanEndOffset"""
    engine = engine_with(tmp_path)
    write(engine, 20)
    LogBuilder(engine).set_state(first_dirty_offset=200)
    assert DirectoryMoment(engine, 1000).plan("t", 0).first_dirty_offset == 0
    chosen(engine)
    state = engine.describe("t").partitions[0]
    # A view of an older moment is refused still, and one of this moment is not.
    assert (state.first_dirty_offset, state.cleaned_to) == (0, 20)
    assert len(offsets(dump(engine))) == 20


def test_a_first_dirty_offset_below_the_log_start_becomes_it(tmp_path: Path) -> None:
    """testDirtyOffsetResetIfSmallerThanStartOffset"""
    engine = engine_with(tmp_path)
    write(engine, 20)
    LogBuilder(engine).set_state(log_start_offset=10, first_dirty_offset=0)
    assert DirectoryMoment(engine, 1000).plan("t", 0).first_dirty_offset == 10


def test_a_log_start_within_the_active_segment_leaves_nothing_to_clean(tmp_path: Path) -> None:
    """testLogStartOffsetLargerThanActiveSegmentBaseOffset"""
    engine = engine_with(tmp_path, segment_bytes="2048")
    for i in range(9):
        engine.append("t", [(f"{i}", "v")], now_ms=1000)
    LogBuilder(engine).set_state(log_start_offset=2, first_dirty_offset=0)
    assert chosen(engine).partitions == []


def test_a_first_dirty_offset_within_the_active_segment_leaves_nothing_to_clean(
    tmp_path: Path,
) -> None:
    """testDirtyOffsetLargerThanActiveSegmentBaseOffset"""
    engine = engine_with(tmp_path, segment_bytes="2048")
    for i in range(6):
        engine.append("t", [(f"{i}", "v")], now_ms=1000)
    LogBuilder(engine).set_state(first_dirty_offset=3)
    assert chosen(engine).partitions == []
    assert first_dirty(engine) == 3


# --- what retention takes ------------------------------------------------------------------------


def retained(engine: DirectoryLog) -> list[str]:
    return [stats.topic for stats in retain(engine, now_ms=10**12)]


def test_the_cleaner_does_not_retain_what_is_not_compacted(tmp_path: Path) -> None:
    """testLogsWithSegmentsToDeleteShouldNotConsiderCleanupPolicyDeleteLogs"""
    engine = engine_with(tmp_path, cleanup_policy="delete", retention_ms="1")
    write(engine, 5)
    assert retained(engine) == []


def test_the_cleaner_retains_what_is_compacted_and_deleted(tmp_path: Path) -> None:
    """testLogsWithSegmentsToDeleteShouldConsiderCleanupPolicyCompactDeleteLogs"""
    engine = engine_with(tmp_path, cleanup_policy="compact,delete", retention_ms="1")
    write(engine, 5)
    assert retained(engine) == ["t"]


def test_the_cleaner_retains_what_is_compacted_alone_from_its_log_start_on(tmp_path: Path) -> None:
    """testLogsWithSegmentsToDeleteShouldConsiderCleanupPolicyCompactLogs"""
    engine = engine_with(tmp_path, retention_ms="1")
    write(engine, 5)
    assert retained(engine) == []
    LogBuilder(engine).set_state(log_start_offset=3, first_dirty_offset=3)
    assert retained(engine) == ["t"]
    assert offsets(dump(engine)) == [3, 4]


def test_the_cleaner_does_not_retain_what_is_uncleanable(tmp_path: Path) -> None:
    """testLogsWithSegmentsToDeleteShouldNotConsiderUncleanablePartitions"""
    engine = engine_with(tmp_path, cleanup_policy="compact,delete", retention_ms="1")
    write(engine, 5)
    mark_uncleanable(
        DirectoryNotes(tmp_path / "t-0"), "why", engine.describe("t").config, now_ms=1000
    )
    assert retained(engine) == []


def test_a_partition_in_retention_is_not_cleaned_whatever_its_policy_becomes(
    tmp_path: Path,
) -> None:
    """testLogsUnderCleanupIneligibleForCompaction"""
    engine = engine_with(tmp_path, cleanup_policy="delete", retention_ms="1")
    write(engine, 2)
    lock = locks.FileLock(tmp_path / "t-0" / layout.CLEANER_LOCK)
    with lock.exclusive():  # as retention holds it
        engine.alter_topic("t", {"cleanup.policy": "compact"})
        assert cleaned(engine) is None
    assert cleaned(engine) == "t"
    engine.alter_topic("t", {"cleanup.policy": "delete"})
    with lock.exclusive():  # as a cleaning holds it
        assert retain_partition(engine, "t", 0, now_ms=10**12) is None
    assert retain_partition(engine, "t", 0, now_ms=10**12) is not None


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_cleaning_adds_its_end_to_the_checkpoint(tmp_path: Path) -> None:
    """testUpdateCheckpointsShouldAddOffsetToPartition"""
    engine = increasingly_filthy(tmp_path)
    assert checkpoint(engine) == {}
    clean(engine, now_ms=1000)
    assert checkpoint(engine) == {("a", 0): 20, ("b", 0): 25, ("c", 0): 30}


def test_a_topic_that_is_gone_leaves_the_checkpoint(tmp_path: Path) -> None:
    """testUpdateCheckpointsShouldRemovePartitionData"""
    engine = increasingly_filthy(tmp_path)
    clean(engine, now_ms=1000)
    engine.delete_topic("b", now_ms=1000)
    assert checkpoint(engine) == {("a", 0): 20, ("c", 0): 30}


def test_a_checkpoint_is_put_right_where_nothing_is_to_be_cleaned(tmp_path: Path) -> None:
    """testCheckpointUpdatedForInvalidOffsetNoCleaning"""
    engine = engine_with(tmp_path)
    write(engine, 20)
    LogBuilder(engine).set_state(log_start_offset=20, first_dirty_offset=15)
    assert cleaned(engine) is None
    assert first_dirty(engine) == checkpoint(engine)["t", 0] == 20


def test_a_checkpoint_is_put_right_where_another_partition_is_taken(tmp_path: Path) -> None:
    """testCheckpointUpdatedForInvalidOffsetNotSelected"""
    engine = engine_with(tmp_path)
    create(engine, "u")
    write(engine, 20)
    write(engine, 25, "u")
    LogBuilder(engine).set_state(log_start_offset=15, first_dirty_offset=10)
    LogBuilder(engine).to("u").set_state(first_dirty_offset=5)
    assert cleaned(engine) == "u"
    assert first_dirty(engine) == checkpoint(engine)["t", 0] == 15


def test_a_checkpoint_is_put_right_only_where_it_is_wrong(tmp_path: Path) -> None:
    """testCleanableOffsetsNeedsCheckpointReset"""
    engine = engine_with(tmp_path)
    write(engine, 20)
    for start, found, expected in ((10, 15, 15), (20, 15, 20), (20, 25, 20)):
        LogBuilder(engine).set_state(log_start_offset=start, first_dirty_offset=found)
        number = engine.state().number
        chosen(engine)
        assert first_dirty(engine) == expected
        assert (engine.state().number == number) == (found == expected)


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_takes_no_lock_unless_a_cleaner_is_at_work(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    write(engine, 5)
    with locks.SegmentsLock(tmp_path / "t-0").exclusive():
        at_rest = DirectoryMoment(engine, 1000).plan("t", 0)
    swapped = tmp_path / "t-0" / "00000000000000000000.index.cleaned"
    swapped.write_bytes(b"")
    waiting = threading.Thread(
        target=lambda: DirectoryMoment(engine, 1000).plan("t", 0), daemon=True
    )
    with locks.SegmentsLock(tmp_path / "t-0").exclusive():
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(120)
    assert not waiting.is_alive()
    assert DirectoryMoment(engine, 1000).plan("t", 0) == at_rest


def test_a_plan_of_a_state_that_the_files_have_left_behind_is_made_of_the_present_one(
    tmp_path: Path,
) -> None:
    engine = engine_with(tmp_path, cleanup_policy="compact,delete")
    write(engine, 5)
    plans = DirectoryMoment(engine, 1000)
    write(engine, 5)
    engine.delete_records("t", 0, 8)
    retain(engine, now_ms=1000)
    log = plans.plan("t", 0)
    assert (log.state.log_start_offset, log.state.high_watermark) == (8, 10)
    assert [s.base_offset for s in log.segments] == [8, 9, 10]


def test_a_partition_that_came_after_the_plans_is_planned(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    plans = DirectoryMoment(engine, 1000)
    engine.alter_topic("t", partitions=2, keys_may_move=True)
    create(engine, "other")
    assert [plans.plan(*place).state.high_watermark for place in (("t", 1), ("other", 0))] == [0, 0]


# --- the cleanable range -------------------------------------------------------------------------


def cleanable(engine: DirectoryLog, now_ms: int) -> tuple[int, int]:
    log = DirectoryMoment(engine, now_ms).plan("t", 0)
    return log.first_dirty_offset, log.first_uncleanable_offset


def test_nothing_is_cleaned_from_the_last_stable_offset_on(tmp_path: Path) -> None:
    """testCleanableOffsetsForNone"""
    engine = engine_with(tmp_path)
    write(engine, 80)
    LogBuilder(engine).set_state(last_stable_offset=50)
    assert cleanable(engine, 1000) == (0, 50)


def test_nothing_is_cleaned_from_the_active_segment_on(tmp_path: Path) -> None:
    """testCleanableOffsetsActiveSegment"""
    engine = engine_with(tmp_path)
    write(engine, 8)
    engine.append("t", [("a", "1"), ("b", "1")], now_ms=1000)
    assert engine.describe("t").partitions[0].active_base == 8
    assert cleanable(engine, 1000) == (0, 8)


def test_what_is_younger_than_the_lag_waits(tmp_path: Path) -> None:
    """testCleanableOffsetsForTime"""
    engine = engine_with(tmp_path, min_compaction_lag_ms=str(HOUR))
    write(engine, 4, now_ms=1000)
    later = 1000 + HOUR + 1
    write(engine, 4, now_ms=later)
    assert cleanable(engine, later) == (0, 4)


def test_a_lag_that_has_passed_for_all_leaves_the_active_segment(tmp_path: Path) -> None:
    """testCleanableOffsetsForShortTime"""
    engine = engine_with(tmp_path, min_compaction_lag_ms=str(HOUR))
    write(engine, 8, now_ms=1000)
    engine.append("t", [("a", "1")], now_ms=1000)
    assert cleanable(engine, 1000 + HOUR + 1) == (0, 8)


def test_undecided_transactions_wait_past_every_lag(tmp_path: Path) -> None:
    """testUndecidedTransactionalDataNotCleanable"""
    engine = engine_with(tmp_path, min_compaction_lag_ms=str(HOUR), segment_bytes="1024")
    batches = [
        at_times(0, (1000, 1000), producer_id=15, transactional=True),
        at_times(2, (1000,), producer_id=15, sequence=2, transactional=True),
    ]
    engine.append_raw("t", 0, joined(batches), now_ms=1000)
    write(engine, 0)
    later = 1000 + HOUR + 1
    assert cleanable(engine, later) == (0, 0)
    ending = marker(3, ABORT, 15, timestamp=later)
    engine.append_raw("t", 0, ending.data, now_ms=later)
    write(engine, 0, now_ms=later)
    assert cleanable(engine, later) == (0, 3)
    assert cleanable(engine, later + HOUR + 1) == (0, 4)


# --- states --------------------------------------------------------------------------------------


def test_a_cleaning_that_ends_writes_its_checkpoint_and_one_that_is_aborted_none(
    tmp_path: Path,
) -> None:
    """testDoneCleaning"""
    engine = engine_with(tmp_path)
    write(engine, 8)
    with abort_and_pause(engine, "t", 0):  # paused before: it does not begin
        assert cleaned(engine) is None
    paused, resumed = threading.Event(), threading.Event()

    def pause() -> None:
        with abort_and_pause(DirectoryLog(tmp_path), "t", 0):
            paused.set()
            resumed.wait(120)

    pauser = threading.Thread(target=pause)

    def begin() -> None:
        if pauser.ident is None:
            pauser.start()
            eventually(lambda: is_paused(tmp_path / "t-0"))

    assert clean_filthiest(engine, now_ms=1000, check_abort=begin) is None
    assert paused.wait(120)  # in progress, aborted, paused
    assert (first_dirty(engine), checkpoint(engine)) == (0, {})
    assert is_paused(tmp_path / "t-0")
    resumed.set()
    pauser.join()
    assert not is_paused(tmp_path / "t-0")
    assert cleaned(engine) == "t"
    assert first_dirty(engine) == checkpoint(engine)["t", 0] == 8


def test_a_retention_that_ends_leaves_the_partition_free_and_the_checkpoint_alone(
    tmp_path: Path,
) -> None:
    """testDoneDeleting"""
    engine = engine_with(tmp_path, cleanup_policy="compact,delete", retention_ms="1")
    write(engine, 5)
    with abort_and_pause(engine, "t", 0):
        assert retained(engine) == []
    assert retained(engine) == ["t"]
    assert checkpoint(engine) == {}
    assert not locks.FileLock(tmp_path / "t-0" / layout.CLEANER_LOCK).is_held_alone()
    assert not is_paused(tmp_path / "t-0")


def test_a_partition_may_be_paused_twice_and_is_free_when_both_have_resumed(
    tmp_path: Path,
) -> None:
    """testConcurrentLogCleanupAndLogTruncation"""
    engine = engine_with(tmp_path)
    write(engine, 5)
    with abort_and_pause(engine, "t", 0):
        with abort_and_pause(engine, "t", 0):
            pass
        assert cleaned(engine) is None
    assert cleaned(engine) == "t"


def test_a_paused_topic_can_be_deleted(tmp_path: Path) -> None:
    """testConcurrentLogCleanupAndTopicDeletion"""
    engine = engine_with(tmp_path)
    write(engine, 5)
    with abort_and_pause(engine, "t", 0):
        engine.delete_topic("t", now_ms=1000)
        assert not (tmp_path / "t-0").exists()
        create(engine, "t")
        write(engine, 5)
        assert not is_paused(tmp_path / "t-0")  # the new one of that name is not
    assert cleaned(engine) == "t"
