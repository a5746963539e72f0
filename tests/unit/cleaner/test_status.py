from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerStats
from kafkalog.cleaner.directory.pause import abort_and_pause
from kafkalog.cleaner.report.explain import explain
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.state.last_cleaning import (
    KEPT,
    LastCleaning,
    read_cleanings,
    write_last_cleaning,
)
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.errors import UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from tests.builders.log_builder import LogBuilder

HOUR = 3_600_000
NOW = 1_700_000_000_000


def size(engine: DirectoryLog, first: int, end: int) -> int:
    """Bytes of the segments whose base offsets lie in [first, end)."""
    files = {int(path.stem): path for path in (engine.root / "t-0").glob("*.log")}
    return sum(path.stat().st_size for base, path in files.items() if first <= base < end)


def test_bytes_are_clean_dirty_or_not_to_be_cleaned_yet(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(segment_bytes=100, min_cleanable_dirty_ratio=0.9)
        .rounds(3, "ab")
        .engine
    )
    clean(engine, now_ms=NOW)
    LogBuilder(engine).rounds(2, "ab")
    (found,) = status(engine, NOW)
    clean_size, dirty_size = size(engine, 0, 4), size(engine, 4, 8)
    assert clean_size > 0
    assert (found.clean_bytes, found.dirty_bytes) == (clean_size, dirty_size)
    assert found.uncleanable_bytes == size(engine, 8, 10)
    assert found.dirty_ratio == dirty_size / (clean_size + dirty_size)
    assert (found.first_dirty_offset, found.first_uncleanable_offset) == (4, 8)
    assert (found.last_stable_offset, found.high_watermark, found.state) == (10, 10, "not due")


def test_a_log_is_not_due_while_its_obsolete_records_are_in_the_active_segment(
    tmp_path: Path,
) -> None:
    engine = LogBuilder(tmp_path).topic().append(*[("k", f"{i}") for i in range(10)]).engine
    (found,) = status(engine, NOW)
    assert (found.state, found.dirty_bytes) == ("not due", 0)
    (told,) = explain(engine, "t", NOW)
    assert (told.answer, told.findings[0].code) == ("is not due", "active segment")
    assert found.reason == told.findings[0].sentence
    assert explain(engine, None, NOW) == [told]
    clean(engine, force=True, now_ms=NOW)
    (found,) = status(engine, NOW)
    assert (found.state, found.reason) == ("clean", None)


def test_the_last_cleaning_is_told_with_what_it_did(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).rounds(3, "ab").engine
    assert status(engine, NOW)[0].last_cleaning is None
    (stats,) = clean(engine, now_ms=NOW)
    (found,) = status(engine, NOW + HOUR)
    last = found.last_cleaning
    assert last is not None
    assert NOW <= last.ended_ms < NOW + HOUR
    assert last.elapsed_ms <= stats.elapsed_ms + 1
    assert (last.start_offset, last.end_offset) == (0, 4)
    assert (last.records_read, last.records_kept) == (4, 2)
    assert (last.bytes_read, last.bytes_written) == (stats.bytes_read, stats.bytes_written)


def test_a_look_that_finds_nothing_to_do_leaves_the_last_cleaning_as_it_was(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    for i in range(3):
        engine.append("t", [("a", f"{i}")], now_ms=NOW)
    clean(engine, force=True, now_ms=NOW)
    before = status(engine, NOW)[0].last_cleaning
    assert clean(engine, force=True, now_ms=NOW + HOUR) == []
    assert status(engine, NOW)[0].last_cleaning == before


def test_tombstones_that_wait_are_counted_with_the_earliest_horizon(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100, delete_retention_ms=HOUR).engine
    engine.append("t", [("a", "1"), ("b", "1"), ("c", "1")], now_ms=NOW)
    assert status(engine, NOW)[0].tombstones_waiting is None
    engine.append("t", [("a", None), ("b", None)], now_ms=NOW)
    clean(engine, force=True, now_ms=NOW)
    (found,) = status(engine, NOW)
    assert (found.tombstones_waiting, found.earliest_delete_horizon_ms) == (2, NOW + HOUR)
    clean(engine, force=True, now_ms=NOW + HOUR)
    (found,) = status(engine, NOW + HOUR)
    assert (found.tombstones_waiting, found.earliest_delete_horizon_ms) == (0, None)


def test_tombstones_are_counted_once_in_a_cleaning_of_several_rounds(tmp_path: Path) -> None:
    from kafkalog.cleaner import CleanerConfig

    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    for i in range(10):
        engine.append("t", [(f"k{i}", "1"), (f"d{i}", None)], now_ms=NOW)
    config = CleanerConfig(dedupe_buffer_size=24 * 8, spill=False)
    (stats,) = clean(engine, force=True, now_ms=NOW, config=config)
    assert stats.rounds > 1
    assert status(engine, NOW)[0].tombstones_waiting == 10


def test_a_count_of_another_cleaning_is_unknown(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    engine.append("t", [("a", None)], now_ms=NOW)
    clean(engine, force=True, now_ms=NOW)
    stats = CleanerStats("t", 0, start_offset=0, end_offset=77, tombstones_kept=5)
    write_last_cleaning(DirectoryNotes(tmp_path / "t-0"), stats, ended_ms=NOW)
    assert status(engine, NOW)[0].tombstones_waiting is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 9}', b'{"version": 1}', b"\xff"]
)
def test_a_last_cleaning_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    (tmp_path / "t-0" / layout.LAST_CLEANING).write_bytes(content)
    assert status(engine, NOW)[0].last_cleaning is None


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


def test_a_paused_partition_says_so(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    with abort_and_pause(engine, "t", 0):
        assert status(engine, NOW)[0].state == "paused"
    assert status(engine, NOW)[0].state == "clean"


def test_status_of_one_topic_is_that_of_its_partitions(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    engine.create_topic("u", 3)
    assert [one.partition for one in status(engine, NOW, "u")] == [0, 1, 2]
    with pytest.raises(UnknownTopicError):
        status(engine, NOW, "v")


def test_asking_writes_nothing(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    engine.append("t", [("a", "1")], now_ms=NOW)
    status(engine, NOW)
    before = sorted(tmp_path.rglob("*"))
    status(DirectoryLog(tmp_path, read_only=True), NOW)
    assert sorted(tmp_path.rglob("*")) == before


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
    for earlier in ({}, {"earlier": None}, {"earlier": [1, {}]}):
        del told["earlier"]
        told |= earlier
        path.write_text(json.dumps(told))
        assert [one.ended_ms for one in read_cleanings(DirectoryNotes(tmp_path))] == [NOW]
        told.setdefault("earlier", [])
