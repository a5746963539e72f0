"""The oracle knows what retention may have taken, and that nothing else takes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.storage_engine.directory import staged_directory
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.segment.segments import list_segments
from tests.torture import roles
from tests.torture.oracle import EVENTS, TABLE, Model, Notes, Wrong

PARTITION = EVENTS, 0
STEPS = 80


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryLog:
    """A log of so many steps, with more events than retention leaves."""
    size = staged_directory.SEGMENT_RUN_SIZE
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", size)  # it is set there
    root = tmp_path / "log"
    roles.create(root)
    notes = Notes(tmp_path / "notes")
    writer = roles.Writer(root, "seed", notes)
    for number in range(1, STEPS + 1):
        writer.take(number)
    notes.close()
    return DirectoryLog(root)


def model() -> Model:
    made = Model("seed")
    made.extend(STEPS)
    return made


def bases(log: DirectoryLog) -> list[int]:
    return [segment.base_offset for segment in list_segments(log.partition_directory(*PARTITION))]


def test_what_retention_takes_is_not_missed(log: DirectoryLog) -> None:
    model().check(log)
    assert log.apply_retention(EVENTS)
    assert log.offsets(EVENTS)[0][0] > 0
    model().check(log)


def test_one_segment_more_than_retention_takes_is_told(log: DirectoryLog) -> None:
    log.apply_retention(EVENTS)
    log.delete_records(*PARTITION, bases(log)[1])
    with pytest.raises(Wrong, match="not what retention leaves"):
        model().check(log)


def test_half_a_segment_is_told(log: DirectoryLog) -> None:
    first, second = bases(log)[:2]
    assert second > first + 1
    log.delete_records(*PARTITION, first + 1)
    with pytest.raises(Wrong, match="not what retention leaves"):
        model().check(log)


def test_a_record_that_was_taken_from_a_compacted_topic_is_told(log: DirectoryLog) -> None:
    log.alter_topic(TABLE, {"cleanup.policy": "compact,delete"})
    log.delete_records(TABLE, 0, 1)
    with pytest.raises(Wrong, match="nothing may take away what was before"):
        model().check(log)
