"""One read, one moment, as far as it can be seen without Spark."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.report.explain import explain
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.shelves import moment_of
from kafkalog.datasource import pin, range_reader
from kafkalog.datasource.batch_reader import KafkaLogBatchReader
from kafkalog.datasource.offsets import TopicPartition
from kafkalog.datasource.pin import driver_name
from kafkalog.errors import DataLossError, InvalidInputError, MomentPassedError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.pins import LivePins
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, file_system, files
from kafkalog.storage_engine.fs.file_system import FileSystem, Place
from kafkalog.storage_engine.reading import directory_snapshot
from tests.builders.batch_builder import at_times, joined
from tests.builders.log_builder import LogBuilder
from tests.unit.datasource.logs import append, numbered, rows, source
from tests.unit.datasource.spark_task import task
from tests.unit.storage_engine.broker_root import BrokerRoot

LATEST = {"view": "latest"}


@pytest.fixture(autouse=True)
def application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/scratch/blockmgr-1")


def planned(root: Path, **options: str) -> tuple[KafkaLogBatchReader, Any]:
    data_source = source(root, **options)
    reader = data_source.reader(data_source.schema())
    return reader, reader.partitions()


def compacted(root: Path, pairs: list[tuple[bytes, bytes | None]]) -> None:
    log = LogBuilder(root).topic(segment_bytes=100, min_cleanable_dirty_ratio=0, exist_ok=True)
    log.append_each(*pairs).close()


def pins(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(layout.PIN)]


def limit(engine: DirectoryLog, topic: str = "t") -> int:
    held = LivePins(engine.root, clock.now_ms())
    return held.limit(topic, engine.describe(topic).topic_id, 0)


def values(found: list[dict[str, Any]]) -> dict[bytes, bytes]:
    return {row["key"]: row["value"] for row in found}


@pytest.mark.parametrize("options", [{}, LATEST])
def test_tasks_of_one_action_see_one_moment_and_the_next_action_a_new_one(
    tmp_path: Path, options: dict[str, str]
) -> None:
    append(tmp_path, "t", numbered(3))
    reader, partitions = planned(tmp_path, **options)
    with task("1"):
        first = rows(reader, partitions)
    append(tmp_path, "t", [(b"k1", b"new"), (b"k9", b"late")])

    with task("1"):
        assert rows(reader, partitions) == first
    with task("2"):
        assert values(rows(reader, partitions)) == values(first) | {b"k1": b"new", b"k9": b"late"}
    assert len(pins(tmp_path)) == 2


def test_different_reads_of_one_action_share_its_moment(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(2))
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("u", 1)
        engine.append("u", [("a", "0")])
    one, other = planned(tmp_path), planned(tmp_path, subscribe="u", **LATEST)
    with task("1"):
        assert len(rows(*one)) == 2
    with DirectoryLog(tmp_path) as engine:
        engine.append("u", [("a", "1")])

    with task("1"):
        assert values(rows(*other)) == {b"a": b"0"}
    with task("2"):
        assert values(rows(*other)) == {b"a": b"1"}


def test_without_an_execution_the_stage_is_the_action(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    reader, partitions = planned(tmp_path)
    with task(stage=1):
        assert len(rows(reader, partitions)) == 1
    append(tmp_path, "t", numbered(1))
    with task(stage=1):
        assert len(rows(reader, partitions)) == 1
    with task(stage=2):
        assert len(rows(reader, partitions)) == 2


def test_applications_have_moments_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, "t", numbered(1))
    mine = planned(tmp_path)
    with task("1"):
        assert len(rows(*mine)) == 1
    append(tmp_path, "t", numbered(1))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/scratch/blockmgr-2")
    with task("1"):
        assert len(rows(*mine)) == 1
        assert len(rows(*planned(tmp_path))) == 2


def test_outside_of_spark_nobody_shares_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/scratch/of/everybody")
    assert driver_name() != driver_name()
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert driver_name() != driver_name()


def test_outside_of_a_task_and_with_a_fixed_end_nothing_is_pinned(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(3))
    assert len(rows(*planned(tmp_path))) == 3
    with task("1"):
        assert len(rows(*planned(tmp_path, endingOffsets='{"t":{"0":2}}'))) == 2
    assert pins(tmp_path) == []


def test_the_isolation_level_chooses_the_end_of_the_moment(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    with DirectoryLog(tmp_path) as engine:
        engine.append_raw("t", 0, joined([at_times(1, (1, 2), 5, transactional=True)]))
    committed = planned(tmp_path)
    dirty = planned(tmp_path, **{"kafka.isolation.level": "read_uncommitted"})
    with task("1"):
        assert len(rows(*committed)) == 1
        append(tmp_path, "t", numbered(1))
        assert len(rows(*committed)) == 1
        assert len(rows(*dirty)) == 3


def test_a_pinned_view_is_there_while_the_cleaner_runs(tmp_path: Path) -> None:
    compacted(tmp_path, [(b"a", b"old"), (b"b", b"old")])
    snapshot = planned(tmp_path, **LATEST)
    with task("1"):
        first = rows(*snapshot)
    compacted(tmp_path, [(b"a", b"new"), (b"b", b"new")])
    with task("1"):
        reading = snapshot[0].read(snapshot[1][0])
        next(reading)
        with DirectoryLog(tmp_path) as engine:
            clean(engine, "t", force=True, now_ms=clock.now_ms())
        assert rows(*snapshot) == first
        reading.close()


def test_a_cleaner_that_takes_its_word_back_is_waited_for(tmp_path: Path) -> None:
    compacted(tmp_path, [(b"a", b"old"), (b"b", b"old")])
    snapshot = planned(tmp_path, **LATEST)
    with task("1"):
        first = rows(*snapshot)
    compacted(tmp_path, [(b"a", b"new"), (b"b", b"new")])

    def announce(offset: int) -> None:
        with DirectoryLog(tmp_path) as engine, engine.transaction() as transaction:
            transaction.change_partition("t", 0, cleaning_offset=offset)
            transaction.publish(1_700_000_000_000)

    announce(4)
    withdrawal = threading.Timer(0.3, announce, [0])
    withdrawal.start()
    with task("1"):
        assert rows(*snapshot) == first
    withdrawal.join()


def test_a_lease_is_renewed_while_a_task_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, "t", numbered(1))
    reader, partitions = planned(tmp_path, **LATEST)
    monkeypatch.setattr(pin, "_RENEWAL_S", 0.01)

    def renewed_ms() -> int:
        (name,) = pins(tmp_path)
        return (tmp_path / name).stat().st_mtime_ns // 1_000_000

    def age() -> None:
        (name,) = pins(tmp_path)
        files.set_times(tmp_path / name, 0)

    with task("1"):
        reading = reader.read(partitions[0])
        next(reading)
        age()
        deadline = time.monotonic() + 120
        while renewed_ms() == 0:
            assert time.monotonic() < deadline, "nobody renews it"
            time.sleep(0.01)
        reading.close()
        while True:  # it may be renewed once more just then
            age()
            time.sleep(0.3)
            if renewed_ms() == 0:
                break
            assert time.monotonic() < deadline, "it is renewed for nobody"


def test_a_task_that_may_not_open_the_pin_of_another_user_reads_on(tmp_path: Path) -> None:
    compacted(tmp_path, [(b"a", b"old"), (b"b", b"old")])
    with DirectoryLog(tmp_path) as engine:
        with contextlib.ExitStack() as held:
            path = pin.pin_ends(engine, {TopicPartition("t", 0): 2}, held)
        assert path is not None
        leased = limit(engine)

        class Hidden(FileSystem):
            def open(self, path: Place, flags: int, mode: int = 0o777) -> int:
                self._refuse(path)
                return super().open(path, flags, mode)

            def utime(self, path: Place, times_ns: tuple[int, int]) -> None:
                self._refuse(path)
                super().utime(path, times_ns)

            def _refuse(self, path: Place) -> None:
                if layout.PIN in str(path):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        with contextlib.ExitStack() as renewing:
            with file_system.replaced(Hidden()):
                renewing.enter_context(pin.renewed(path))
            assert limit(engine) == leased == 2


def test_an_end_that_a_cleaner_has_passed_is_not_pinned(tmp_path: Path) -> None:
    """It would hold back for nothing; the other ends are pinned."""
    compacted(tmp_path, [(b"a", b"old"), (b"b", b"old"), (b"a", b"new"), (b"b", b"new")])
    append(tmp_path, "u", numbered(3))
    ends = {TopicPartition("t", 0): 2, TopicPartition("u", 0): 1}
    with DirectoryLog(tmp_path) as engine, contextlib.ExitStack() as held:
        clean(engine, "t", force=True, now_ms=clock.now_ms())
        assert pin.pin_ends(engine, {TopicPartition("t", 0): 2}, held) is None
        assert pins(tmp_path) == []
        assert pin.pin_ends(engine, ends, held) is not None
        assert (limit(engine, "t"), limit(engine, "u")) == (4, 1)


def test_a_task_whose_moment_a_forced_cleaning_passed_is_told_both_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted(tmp_path, [(b"a", b"old"), (b"b", b"old")])
    snapshot = planned(tmp_path, **LATEST)
    with task("1"):
        rows(*snapshot)
    compacted(tmp_path, [(b"a", b"new"), (b"b", b"new")])
    with DirectoryLog(tmp_path) as engine:
        clean(engine, "t", force=True, now_ms=clock.now_ms())
    monkeypatch.setattr(range_reader, "_CLEANER_WAIT_S", 0.1)

    with task("1"), pytest.raises(InvalidInputError, match=r"offset 2, .*cleaned up to offset 4"):
        rows(*snapshot)
    with task("2"):
        assert values(rows(*snapshot)) == {b"a": b"new", b"b": b"new"}


PAIRS: list[tuple[bytes, bytes | None]] = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", None)]


def cleaned(root: Path, now_ms: int = 1_700_000_000_000, *, force: bool = True) -> int:
    with DirectoryLog(root) as engine:
        clean(engine, "t", force=force, now_ms=now_ms)
        return engine.describe("t").partitions[0].cleaned_to


@pytest.mark.parametrize("more", [PAIRS, []])
@pytest.mark.parametrize("options", [{}, {"maxRecordsPerPartition": "2"}, {"minPartitions": "4"}])
def test_a_changelog_is_refused_when_a_cleaning_has_taken_records_of_its_moment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    more: list[tuple[bytes, bytes | None]],
) -> None:
    """Whether it went beyond the moment or not, and whichever piece of the log the task reads."""
    monkeypatch.setattr(range_reader, "_CLEANER_WAIT_S", 0.0)
    compacted(tmp_path, PAIRS)
    reader, partitions = planned(tmp_path, **options)
    with task("1"):
        assert len(rows(reader, partitions)) == 4
    compacted(tmp_path, more)
    assert cleaned(tmp_path) == 4 + len(more)

    for piece in partitions:
        told = rf"ended at offset 4, .*cleaned up to offset {4 + len(more)}; run the action again"
        with task("1"), pytest.raises(MomentPassedError, match=told):
            rows(reader, [piece])
    with task("2"):
        found = rows(reader, partitions)
    assert [row["offset"] for row in found][-1] == len(more) + 3
    assert len(found) < len(more) + 4


def test_a_changelog_is_refused_when_its_cleaned_part_was_cleaned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion that was there at the moment goes when its horizon has come, and nothing else."""
    monkeypatch.setattr(range_reader, "_CLEANER_WAIT_S", 0.0)
    compacted(tmp_path, PAIRS)
    assert cleaned(tmp_path) == 4
    changelog, snapshot = planned(tmp_path), planned(tmp_path, **LATEST)
    with task("1"):
        assert [row["offset"] for row in rows(*changelog)] == [1, 2, 3]
        first = rows(*snapshot)
    assert cleaned(tmp_path, 1_700_000_000_000 + 2 * 86_400_000) == 4

    with task("1"), pytest.raises(MomentPassedError, match="run the action again"):
        rows(*changelog)
    with task("1"):
        assert rows(*snapshot) == first
    with task("2"):
        assert [row["offset"] for row in rows(*changelog)] == [1, 2]


def test_a_cleaning_that_takes_nothing_refuses_no_changelog(tmp_path: Path) -> None:
    compacted(tmp_path, [(b"a", b"1"), (b"b", b"1")])
    cleaned(tmp_path)
    reader, partitions = planned(tmp_path)
    with task("1"):
        first = rows(reader, partitions)
    cleaned(tmp_path)
    with task("1"):
        assert rows(reader, partitions) == first


def test_a_changelog_of_more_segments_than_are_open_at_once_is_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleaning swaps the segments that a task has not opened yet."""
    monkeypatch.setattr(directory_snapshot, "WINDOW", 2)
    compacted(tmp_path, [(b"a", b"%d" % n) for n in range(10)])
    reader, partitions = planned(tmp_path)
    with task("1"):
        reading = reader.read(partitions[0])
        next(reading)
        cleaned(tmp_path)
        with pytest.raises(MomentPassedError, match="run the action again"):
            list(reading)


def test_a_read_that_was_planned_after_the_moment_ends_with_it(tmp_path: Path) -> None:
    """Spark may plan a later stage of an action when the first one has pinned."""
    append(tmp_path, "t", numbered(4))
    with task("1"):
        first = rows(*planned(tmp_path))
    append(tmp_path, "t", numbered(8))
    for options in ({}, {"maxRecordsPerPartition": "3"}, {"startingOffsets": '{"t":{"0":2}}'}):
        later = planned(tmp_path, **options)
        with task("1"):
            assert rows(*later) == [row for row in first if not options.get("startingOffsets")
                                    or row["offset"] >= 2]  # fmt: skip
        with task("2"):
            assert rows(*later)[-1]["offset"] == 11
    beyond = planned(tmp_path, startingOffsets='{"t":{"0":6}}')
    with task("1"):
        assert rows(*beyond) == []


@pytest.mark.parametrize("options", [{}, {"maxRecordsPerPartition": "1"}])
def test_a_changelog_whose_beginning_was_deleted_meanwhile_is_a_loss(
    tmp_path: Path, options: dict[str, str]
) -> None:
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1, {"cleanup.policy": "compact,delete"})
        engine.append("t", [("a", "0"), ("b", "0")])
    strict = planned(tmp_path, **options)
    lenient = planned(tmp_path, failOnDataLoss="false", **options)
    with task("1"):
        assert len(rows(*strict)) == 2
    with DirectoryLog(tmp_path) as engine:
        engine.delete_records("t", 0, 1)

    with task("1"):
        with pytest.raises(DataLossError, match=r"wanted the offsets \[0, .*available .*\[1, 2"):
            rows(*strict)
        assert values(rows(*lenient)) == {b"b": b"0"}
    with task("2"):
        assert values(rows(*strict)) == {b"b": b"0"}


def test_an_explicit_end_is_kafkas_promise_and_pins_nothing(tmp_path: Path) -> None:
    """What a cleaning takes of such a range is not missed, as in Kafka."""
    compacted(tmp_path, PAIRS)
    reader, partitions = planned(tmp_path, endingOffsets='{"t":{"0":4}}')
    with task("1"):
        assert len(rows(reader, partitions)) == 4
    compacted(tmp_path, PAIRS)
    cleaned(tmp_path)
    with task("1"):
        assert rows(reader, partitions) == []
    assert pins(tmp_path) == []


def test_no_cleaning_begins_as_long_as_a_changelog_is_read(tmp_path: Path) -> None:
    """But for one that is forced, and one that max.compaction.lag.ms demands."""
    now_ms = clock.now_ms()
    compacted(tmp_path, PAIRS)
    reader, partitions = planned(tmp_path)
    with DirectoryLog(tmp_path) as engine, task("1"):
        reading = reader.read(partitions[0])
        next(reading)
        assert clean(engine, "t", now_ms=now_ms) == []
        (told,) = explain(moment_of(engine, now_ms), "t")
        assert told.answer == "is not due"
        assert told.findings[0].code == "pin"
        assert "tasks read the changelog of a snapshot of this log" in told.findings[0].sentence
        assert status(moment_of(engine, now_ms))[0].state == "not due"

        engine.alter_topic("t", {"max.compaction.lag.ms": "1000"})
        assert status(moment_of(engine, now_ms))[0].state == "dirty"
        engine.alter_topic("t", {"max.compaction.lag.ms": str(2**63 - 1)})
        reading.close()
        assert status(moment_of(engine, now_ms))[0].state == "dirty"
        (done,) = clean(engine, "t", now_ms=now_ms)
        assert done.error is None and done.end_offset == 3


def pinned_views(
    root: Path,
) -> tuple[tuple[KafkaLogBatchReader, Any], tuple[KafkaLogBatchReader, Any]]:
    """Two views of a and b that action 1 has pinned; the second one accepts data loss."""
    with DirectoryLog(root) as engine:
        engine.create_topic("t", 1, {"cleanup.policy": "compact,delete"})
        engine.append("t", [("a", "0"), ("b", "0")])
    strict = planned(root, **LATEST)
    lenient = planned(root, failOnDataLoss="false", **LATEST)
    with task("1"):
        assert len(rows(*strict)) == 2
    return strict, lenient


def test_a_view_whose_beginning_was_deleted_meanwhile_is_a_loss(tmp_path: Path) -> None:
    strict, lenient = pinned_views(tmp_path)
    with DirectoryLog(tmp_path) as engine:
        engine.delete_records("t", 0, 1)

    with task("1"):
        with pytest.raises(DataLossError, match=r"wanted the offsets \[0, 2\), available .*\[1, 2"):
            rows(*strict)
        assert values(rows(*lenient)) == {b"b": b"0"}
    with task("2"):
        assert values(rows(*strict)) == {b"b": b"0"}


def test_a_pinned_view_below_the_log_start_is_a_loss(tmp_path: Path) -> None:
    strict, lenient = pinned_views(tmp_path)
    with DirectoryLog(tmp_path) as engine:
        engine.append("t", [("a", "1"), ("b", "1")])
        engine.delete_records("t", 0, 3)

    with task("1"):
        with pytest.raises(DataLossError, match=r"wanted the offsets \[0, 2\), available .*\[3, 4"):
            rows(*strict)
        assert rows(*lenient) == []
    with task("2"):
        assert values(rows(*strict)) == {b"b": b"1"}


def test_a_topic_created_anew_is_not_the_one_of_the_moment(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    reader, partitions = planned(tmp_path)
    with task("1"):
        rows(reader, partitions)
    with DirectoryLog(tmp_path) as engine:
        engine.delete_topic("t")
    append(tmp_path, "t", numbered(1))

    with task("1"), pytest.raises(DataLossError, match="deleted and created again"):
        rows(reader, partitions)


def test_a_topic_that_came_after_the_moment_is_empty_in_it(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(1))
    first = planned(tmp_path)
    with task("1"):
        rows(*first)
    append(tmp_path, "u", numbered(1))
    with task("1"):
        assert rows(*planned(tmp_path, subscribe="u")) == []


def test_a_root_that_cannot_be_written_is_read_without_a_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, "t", numbered(2))
    snapshot = planned(tmp_path, **LATEST)

    def refuse(path: Path, data: bytes = b"") -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(files, "create", refuse)
    with task("1"):
        assert len(rows(*snapshot)) == 2
    assert pins(tmp_path) == []


def test_nothing_is_pinned_in_a_brokers_directory(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path)
    root.partition("t-0", (0,), 10)
    root.shut_down()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with task("1"):
        found = rows(*planned(tmp_path))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert len(found) == 10
