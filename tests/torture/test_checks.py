"""What a log must not show is named: lost, doubled, back from the dead, or half there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.torture.checks import PartitionRows, Snapshot, TopicRows, faults_of, snapshot
from tests.torture.going_on import GoingOn
from tests.torture.workloads import (
    OPERATIONS,
    Moment,
    Opened,
    prepare,
    random_sequences,
    sequences,
    small_files,
)

COMPACTED = (("cleanup.policy", "compact"),)
DELETED = (("cleanup.policy", "delete"),)
OLD, OTHER, NEW, TOMBSTONE = (0, b"k", b"old"), (1, b"o", b"1"), (2, b"k", b"new"), (3, b"o", None)


def shown(
    *rows: tuple[int, bytes, bytes | None],
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
    assert any("(2, b'k', b'new')" in fault and "lost" in fault for fault in faults), faults


@pytest.mark.parametrize("kind", ["none", "atomic", "partial"])
def test_a_doubled_record_is_named(kind: str) -> None:
    faults = faults_of(shown(OLD, OTHER, NEW, NEW, TOMBSTONE), BEFORE, CLEANED, kind)
    assert any("twice" in fault for fault in faults), faults


def test_a_key_that_is_back_is_named() -> None:
    (fault,) = faults_of(shown(OTHER, NEW), BEFORE, CLEANED, "partial")
    assert "an older value of b'o' is back" in fault
    assert faults_of(shown(NEW, TOMBSTONE), BEFORE, CLEANED, "partial") == []
    assert faults_of(shown(OTHER, NEW, TOMBSTONE), BEFORE, CLEANED, "partial") == []


def test_of_a_cleaning_whose_end_is_unknown_the_newest_values_are_kept() -> None:
    assert faults_of(CLEANED, BEFORE, None, "partial") == []
    (fault,) = faults_of(shown(OTHER, TOMBSTONE), BEFORE, None, "partial")
    assert "the newest record of b'k' is lost" in fault


def test_half_of_an_atomic_commit_is_named() -> None:
    new = (4, b"n", b"1")
    other = PartitionRows(0, 1, ((0, b"m", b"1"),))
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
    before = {**BEFORE, "x": TopicRows(COMPACTED, {0: PartitionRows(0, 1, ((0, b"k", b"v"),))})}
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


def test_sequences_are_all_there_are_and_drawn_ones_follow_from_the_seed() -> None:
    assert len(list(sequences(2))) == 12 + 144
    assert len(set(sequences(3, least=3))) == 12**3
    assert list(random_sequences(1, 9, 3)) == list(random_sequences(1, 9, 3))
    assert list(random_sequences(1, 9, 3)) != list(random_sequences(2, 9, 3))
