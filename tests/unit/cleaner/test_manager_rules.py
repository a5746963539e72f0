"""What Kafka's LogCleanerManagerTest says, rule by rule.

Each test names in its docstring the one of Kafka's that it stands for.
"""

from __future__ import annotations

import threading
from pathlib import Path

from kafkalog.cleaner.directory.directory_moment import DirectoryMoment
from kafkalog.cleaner.directory.pause import abort_and_pause, is_paused
from kafkalog.cleaner.plan import Schedule
from kafkalog.cleaner.schedule.manager import clean, clean_filthiest, retain
from kafkalog.cleaner.schedule.scheduler import choose
from kafkalog.cleaner.state.first_dirty_offset import heal_first_dirty_offsets
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.retention import retain_partition
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.metadata.checkpoints import read_offset_checkpoint
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import first_dirty, state_of
from tests.unit.rules.acts import eventually

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


# --- what retention takes ------------------------------------------------------------------------


def retained(engine: DirectoryLog) -> list[str]:
    return [stats.topic for stats in retain(engine, now_ms=10**12)]


def test_the_cleaner_does_not_retain_what_is_not_compacted(tmp_path: Path) -> None:
    """testLogsWithSegmentsToDeleteShouldNotConsiderCleanupPolicyDeleteLogs"""
    engine = engine_with(tmp_path, cleanup_policy="delete", retention_ms="1")
    write(engine, 5)
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
    assert [piece.base_offset for piece in plans.pieces(log)] == [8, 9, 10]


def test_a_partition_that_came_after_the_plans_is_planned(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    plans = DirectoryMoment(engine, 1000)
    engine.alter_topic("t", partitions=2, keys_may_move=True)
    create(engine, "other")
    assert [plans.plan(*place).state.high_watermark for place in (("t", 1), ("other", 0))] == [0, 0]


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
