"""What a log must not show is named: lost, doubled, back from the dead, or half there."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.directory import directory_shelf
from kafkalog.cleaner.schedule import manager
from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.torture.checks import (
    PartitionRows,
    Snapshot,
    TopicRows,
    cleaning_faults,
    faults_of,
    later,
    snapshot,
    with_obsolete,
    works,
)
from tests.torture.complaints import Complaints
from tests.torture.going_on import GoingOn
from tests.torture.workloads import OPERATIONS, Moment, Opened, prepare, small_files

COMPACTED = (("cleanup.policy", "compact"), ("delete.retention.ms", "100"))
DELETED = (("cleanup.policy", "delete"),)
Row = tuple[int, bytes | None, bytes | None, int]
OLD: Row = (0, b"k", b"old", 10)
OTHER: Row = (1, b"o", b"1", 11)
NEW: Row = (2, b"k", b"new", 12)
TOMBSTONE: Row = (3, b"o", None, 13)


def shown(
    *rows: Row,
    config: tuple[tuple[str, str], ...] = COMPACTED,
    log_start: int = 0,
    end: int = 4,
) -> Snapshot:
    return {"t": TopicRows(config, {0: PartitionRows(log_start, end, rows)})}


BEFORE = shown(OLD, OTHER, NEW, TOMBSTONE)
CLEANED = shown(NEW)


@pytest.mark.parametrize("kind", ["none", "atomic", "partial", "topic", "handed"])
def test_a_lost_record_is_named(kind: str) -> None:
    faults = faults_of(shown(OLD, OTHER, TOMBSTONE), BEFORE, BEFORE, kind)
    assert any("(2, b'k', b'new', 12)" in fault and "lost" in fault for fault in faults), faults


@pytest.mark.parametrize("kind", ["none", "atomic", "partial"])
def test_a_doubled_record_is_named(kind: str) -> None:
    faults = faults_of(shown(OLD, OTHER, NEW, NEW, TOMBSTONE), BEFORE, CLEANED, kind)
    assert any("twice" in fault for fault in faults), faults


def test_a_key_that_is_back_is_named() -> None:
    (fault,) = faults_of(shown(OTHER, NEW), BEFORE, CLEANED, "partial")
    assert "an older value of b'o' is back" in fault
    assert faults_of(shown(NEW, TOMBSTONE), BEFORE, CLEANED, "partial") == []
    assert faults_of(shown(OTHER, NEW, TOMBSTONE), BEFORE, CLEANED, "partial") == []


def test_of_a_cleaning_whose_end_is_unknown_the_latest_values_are_kept() -> None:
    assert faults_of(CLEANED, BEFORE, None, "partial") == []
    (fault,) = faults_of(shown(OTHER, TOMBSTONE), BEFORE, None, "partial")
    assert "the latest record of b'k' is lost" in fault


def test_half_of_an_atomic_commit_is_named() -> None:
    new = (4, b"n", b"1", 14)
    other = PartitionRows(0, 1, ((0, b"m", b"1", 14),))
    topic = BEFORE["t"]
    before = {"t": replace(topic, partitions={**topic.partitions, 1: PartitionRows(0, 0, ())})}
    grown = PartitionRows(0, 5, (*topic.partitions[0].rows, new))
    after = {"t": replace(topic, partitions={0: grown, 1: other})}
    half = {"t": replace(topic, partitions={0: grown, 1: PartitionRows(0, 0, ())})}
    assert faults_of(before, before, after, "atomic") == []
    assert faults_of(after, before, after, "atomic") == []
    faults = faults_of(half, before, after, "atomic")
    assert any("not as before: t-0" in fault for fault in faults)
    assert any("not as after: t-1" in fault for fault in faults)


def test_retention_takes_from_the_start_alone() -> None:
    before = shown(OLD, OTHER, NEW, config=DELETED)
    after = shown(NEW, config=DELETED, log_start=2)
    between = shown(OTHER, NEW, config=DELETED, log_start=1)
    assert faults_of(between, before, after, "partial") == []
    hole = shown(OLD, NEW, config=DELETED)
    assert any("lost" in fault for fault in faults_of(hole, before, after, "partial"))
    beyond = shown(config=DELETED, log_start=3)
    assert any("log start" in fault for fault in faults_of(beyond, before, after, "partial"))


def test_a_topic_that_is_created_anew_may_be_missing_and_no_other() -> None:
    before = {**BEFORE, "x": TopicRows(COMPACTED, {0: PartitionRows(0, 1, ((0, b"k", b"v", 0),))})}
    after = {**BEFORE, "x": TopicRows(DELETED, {0: PartitionRows(0, 0, ())})}
    assert faults_of(BEFORE, before, after, "topic") == []
    mixed = {**BEFORE, "x": TopicRows(DELETED, before["x"].partitions)}
    assert faults_of(mixed, before, after, "topic") != []
    assert faults_of({"x": before["x"]}, before, after, "topic") != []


def test_work_goes_on_after_every_operation(tmp_path: Path) -> None:
    with small_files():
        prepare(tmp_path)
        log = Opened(tmp_path)
        for name in OPERATIONS:
            before = snapshot(log.engine)
            log.perform(name)
            after = snapshot(log.engine)
            assert faults_of(after, before, after, OPERATIONS[name].kind) == [], name
            assert snapshot(tmp_path) == after
        faults = GoingOn().faults(
            tmp_path, after, log.moment, retry=name, before=before, after=after
        )
    assert faults == []


def test_damage_keeps_work_from_going_on(tmp_path: Path) -> None:
    with small_files():
        prepare(tmp_path)
        found = snapshot(tmp_path)
        path = min((tmp_path / "d-0").glob("*.log"))
        data = bytearray(path.read_bytes())
        data[80] ^= 1
        path.write_bytes(data)
        (fault,) = GoingOn().faults(tmp_path, found, Moment(), retry="alter")
        assert "CorruptBatchError" in fault


# --- a forced cleaning ---------------------------------------------------------------------------


EARLY, LATE = 50, 500
DONE = {**shown(NEW, TOMBSTONE), "u": BEFORE["t"]}
WAS = {**BEFORE, "u": BEFORE["t"]}


def cleaned(found: Snapshot, now_ms: int = EARLY) -> list[str]:
    return list(cleaning_faults(found, WAS, "t", now_ms))


def test_a_cleaning_takes_all_that_is_obsolete_and_nothing_else() -> None:
    assert cleaned(DONE) == []
    (fault,) = cleaned({**DONE, "t": shown(OLD, NEW, TOMBSTONE)["t"]})
    assert "(0, b'k', b'old', 10) is not expected" in fault
    (fault,) = cleaned({**DONE, "t": shown(TOMBSTONE)["t"]})
    assert "(2, b'k', b'new', 12) is lost" in fault


def test_a_tombstone_goes_when_its_time_is_over_and_not_before() -> None:
    gone = {**DONE, "t": shown(NEW)["t"]}
    assert cleaned(gone, LATE) == cleaned(DONE, LATE) == []
    (fault,) = cleaned(gone)
    assert "(3, b'o', None, 13) is lost" in fault


def test_a_cleaning_leaves_the_range_as_it_was() -> None:
    for log_start, end in ((2, 4), (4, 4), (0, 3)):
        topic = shown(NEW, TOMBSTONE, log_start=log_start, end=end)["t"]
        (fault,) = cleaned({**DONE, "t": topic})
        assert "range: expected [0, 4)" in fault
    assert cleaned({**DONE, "t": shown(log_start=4)["t"]}) != []


def test_a_cleaning_leaves_other_topics_as_they_were() -> None:
    assert cleaned({**DONE, "u": DONE["t"]}) != []
    assert cleaned({"t": DONE["t"]}) != []
    assert cleaned({**DONE, "t": replace(DONE["t"], config=DELETED)}) != []


# --- work that goes on ---------------------------------------------------------------------------


def work(root: Path) -> list[str]:
    with small_files():
        prepare(root)
        return works(Opened(root), snapshot(root))


def test_a_cleaner_that_does_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "clean", lambda *args, **kwargs: [])
    faults = work(tmp_path)
    assert faults and all("is not expected" in fault for fault in faults), faults


def test_a_cleaning_that_writes_to_another_topic_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = manager.clean

    def untidy(engine: DirectoryLog, *args: Any, **kwargs: Any) -> Any:
        engine.delete_records("d", 0, 1)
        return clean(engine, *args, **kwargs)

    monkeypatch.setattr(manager, "clean", untidy)
    faults = work(tmp_path)
    assert faults and all("d-0" in fault for fault in faults), faults


def test_what_is_lost_as_a_log_is_closed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reopen = Opened.reopen

    def careless(log: Opened) -> None:
        reopen(log)
        log.engine.delete_records("d", 0, 1)

    monkeypatch.setattr(Opened, "reopen", careless)
    assert any("after close and open: d-0" in fault for fault in work(tmp_path))


@pytest.mark.parametrize(
    "fault, is_noted", [(KeyError("k"), True), (StorageError("s"), False), (OSError(5, "o"), False)]
)
def test_an_error_that_is_passed_over_has_a_type_of_ours_or_the_systems(
    fault: Exception, is_noted: bool
) -> None:
    logger = logging.getLogger("kafkalog.cleaner.schedule.thread")
    logging.disable(logging.CRITICAL)
    with Complaints() as told:
        logger.warning("t-%d: retention failed: %s", 0, fault)
    with Complaints() as raised:
        logger.error("t-0 cannot be cleaned", exc_info=fault)
    assert [bool(heard.faults) for heard in (told, raised)] == [is_noted] * 2
    assert logging.root.manager.disable == logging.CRITICAL


def test_a_cleaning_of_a_partition_that_fails_without_a_type_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unkind(*args: Any, **kwargs: Any) -> None:
        raise KeyError("k")

    monkeypatch.setattr(directory_shelf, "write_last_cleaning", unkind)
    assert any("logged KeyError" in fault for fault in work(tmp_path))


def test_what_comes_later_bears_later_times() -> None:
    after = shown(OLD, OTHER, NEW, TOMBSTONE, (4, b"n", b"1", 14), end=5)
    (topic,) = later(after, BEFORE, 7).values()
    assert topic.partitions[0].rows == (OLD, OTHER, NEW, TOMBSTONE, (4, b"n", b"1", 21))


def test_what_a_cleaning_has_taken_may_come_back_and_what_was_deleted_not() -> None:
    seen = shown(NEW, log_start=1)
    assert with_obsolete(seen, BEFORE) == shown(OTHER, NEW, TOMBSTONE, log_start=1)
    assert with_obsolete(shown(NEW, config=DELETED), BEFORE) == shown(NEW, config=DELETED)
