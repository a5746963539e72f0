from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerStats
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.shelves import moment_of
from kafkalog.cleaner.state.last_cleaning import (
    KEPT,
    LastCleaning,
    read_cleanings,
    write_last_cleaning,
)
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.errors import UnknownTopicError
from kafkalog.storage_engine.format import layout
from tests.builders.log_builder import LogBuilder

NOW = 1_700_000_000_000


def test_a_last_cleaning_comes_back_as_it_was_written(tmp_path: Path) -> None:
    stats = CleanerStats("t", 0, 3, 9, 2, 100, 40, 5000, 2000, tombstones_kept=7, elapsed_ms=12.7)
    write_last_cleaning(DirectoryNotes(tmp_path), stats, ended_ms=NOW)
    (written,) = read_cleanings(DirectoryNotes(tmp_path))
    assert written == LastCleaning(NOW, 13, 3, 9, 2, 100, 40, 5000, 2000, 7)
    content = json.loads((tmp_path / layout.LAST_CLEANING).read_bytes())
    assert content["version"] == 1
    assert written is not None
    assert replace(written) == written


def test_a_disk_that_takes_no_last_cleaning_costs_nothing_else(tmp_path: Path) -> None:
    write_last_cleaning(DirectoryNotes(tmp_path / "none"), CleanerStats("t", 0), ended_ms=NOW)


def test_status_of_one_topic_is_that_of_its_partitions(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    engine.create_topic("u", 3)
    assert [one.partition for one in status(moment_of(engine, NOW), "u")] == [0, 1, 2]
    with pytest.raises(UnknownTopicError):
        status(moment_of(engine, NOW), "v")


def test_the_cleanings_before_the_last_are_remembered_up_to_a_number(tmp_path: Path) -> None:
    for number in range(KEPT + 3):
        write_last_cleaning(
            DirectoryNotes(tmp_path), CleanerStats("t", 0, records_read=number), ended_ms=number
        )
    found = read_cleanings(DirectoryNotes(tmp_path))
    assert [one.ended_ms for one in found] == list(range(KEPT + 2, 2, -1))
    assert [one.records_read for one in found] == [one.ended_ms for one in found]


def test_what_a_release_that_remembered_one_cleaning_wrote_is_read(tmp_path: Path) -> None:
    write_last_cleaning(DirectoryNotes(tmp_path), CleanerStats("t", 0), ended_ms=NOW)
    path = tmp_path / layout.LAST_CLEANING
    told = json.loads(path.read_bytes())
    assert "earlier" not in told
    for earlier in ({}, {"earlier": None}, {"earlier": [1, {}]}):
        path.write_text(json.dumps({**told, **earlier}))
        assert [one.ended_ms for one in read_cleanings(DirectoryNotes(tmp_path))] == [NOW]
