"""Offsets for the special times, and for times as each isolation level sees the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import Record, at_times, batch_data, joined

LATEST, EARLIEST, LARGEST, EARLIEST_HERE, LATEST_ELSEWHERE = -1, -2, -3, -4, -5
TIMES = [100, 300, 200, 300, 250]
"""Of the offsets 0 to 4; an open transaction begins at 3, and with it another leader epoch."""


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"cleanup.policy": "delete"})
    batches = [
        at_times(
            offset,
            [time],
            7 if offset == 3 else -1,
            transactional=offset == 3,
            leader_epoch=6 if offset >= 3 else 5,
        )
        for offset, time in enumerate(TIMES)
    ]
    engine.append_raw("t", 0, joined(batches), now_ms=400)
    return engine


def found(
    engine: DirectoryLog, at: int, isolation_level: str = "read_uncommitted"
) -> tuple[int, ...]:
    place = engine.offset_for_time("t", at, isolation_level=isolation_level)[0]
    return () if place is None else (place.offset, place.timestamp, place.leader_epoch)


def test_latest_is_the_high_watermark_or_the_last_stable_offset(engine: DirectoryLog) -> None:
    assert found(engine, LATEST)[:2] == (5, -1)
    assert found(engine, LATEST, "read_committed")[:2] == (3, -1)


def test_earliest_is_the_log_start_without_a_time_and_with_its_epoch(engine: DirectoryLog) -> None:
    assert found(engine, EARLIEST) == (0, -1, 5)
    engine.delete_records("t", 0, 3)
    assert found(engine, EARLIEST) == found(engine, EARLIEST_HERE) == (3, -1, 6)


def test_the_largest_time_is_that_of_the_first_record_that_has_it(engine: DirectoryLog) -> None:
    assert found(engine, LARGEST) == (1, 300, 5)
    engine.delete_records("t", 0, 2)
    assert found(engine, LARGEST) == (3, 300, 6)


def test_nothing_is_elsewhere(engine: DirectoryLog) -> None:
    assert found(engine, LATEST_ELSEWHERE) == ()


def test_a_log_without_times_has_no_largest_one(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1)
    assert found(engine, LARGEST) == ()
    data = batch_data([Record(0, -1, b"k", b"v")])
    engine.append_raw("t", 0, data, now_ms=400)
    assert found(engine, LARGEST) == ()


@pytest.mark.parametrize("at", range(50, 351, 25))
def test_a_time_is_that_of_the_first_record_as_young(engine: DirectoryLog, at: int) -> None:
    young = [(offset, time) for offset, time in enumerate(TIMES) if time >= at]
    assert found(engine, at)[:2] == (young[0] if young else ())
