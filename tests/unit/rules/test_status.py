"""What `status` says of a partition: its sections, its last cleaning, and what waits."""

from __future__ import annotations

import json

import pytest

from kafkalog.cleaner import abort_and_pause
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from tests.builders.log_builder import NOW_MS
from tests.unit.rules.places import DAY_MS, HOUR_MS, Place


def test_bytes_are_clean_dirty_or_not_to_be_cleaned_yet(place: Place) -> None:
    place.topic(segment_bytes=100, min_cleanable_dirty_ratio=0.9).rounds(3, "ab")
    place.log.clean(now_ms=NOW_MS)
    place.rounds(2, "ab")
    found, sizes = place.status(NOW_MS), dict(place.segments())
    clean_size = sum(size for base, size in sizes.items() if base < 4)
    dirty_size = sum(size for base, size in sizes.items() if 4 <= base < 8)
    assert clean_size > 0
    assert (found.clean_bytes, found.dirty_bytes) == (clean_size, dirty_size)
    assert found.uncleanable_bytes == sizes[8]
    assert found.dirty_ratio == dirty_size / (clean_size + dirty_size)
    assert (found.first_dirty_offset, found.first_uncleanable_offset) == (4, 8)
    assert (found.last_stable_offset, found.high_watermark, found.state) == (10, 10, "not due")


def test_the_status_gives_sections_in_offsets_and_bytes(place: Place) -> None:
    place.topic(segment_bytes=100).rounds(5, "ab", now_ms=1000)
    found, size = place.status(1000), sum(place.sizes())
    assert (found.first_dirty_offset, found.first_uncleanable_offset) == (0, 8)
    assert (found.clean_bytes, found.dirty_bytes) == (0, size * 4 // 5)
    assert (found.uncleanable_bytes, found.dirty_ratio) == (size // 5, 1.0)
    assert (found.state, found.reason) == ("dirty", None)
    place.log.clean(now_ms=1000)
    found = place.status(1000)
    assert (found.first_dirty_offset, found.dirty_ratio, found.state) == (8, 0.0, "not due")


def test_a_log_is_not_due_while_its_obsolete_records_are_in_the_active_segment(
    place: Place,
) -> None:
    place.topic().append(*[("k", f"{i}") for i in range(10)])
    found = place.status(NOW_MS)
    assert (found.state, found.dirty_bytes) == ("not due", 0)
    (told,) = place.log.explain("t", now_ms=NOW_MS)
    assert (told.answer, told.findings[0].code) == ("is not due", "active segment")
    assert found.reason == told.findings[0].sentence
    assert place.log.explain(now_ms=NOW_MS) == [told]
    place.log.clean("t", force=True, now_ms=NOW_MS)
    found = place.status(NOW_MS)
    assert (found.state, found.reason) == ("clean", None)


def test_the_last_cleaning_is_told_with_what_it_did(place: Place) -> None:
    place.topic(segment_bytes=100).rounds(3, "ab")
    assert place.status(NOW_MS).last_cleaning is None
    (stats,) = place.log.clean(now_ms=NOW_MS)
    last = place.status(NOW_MS + HOUR_MS).last_cleaning
    assert last is not None
    assert NOW_MS <= last.ended_ms < NOW_MS + HOUR_MS
    assert last.elapsed_ms <= stats.elapsed_ms + 1
    assert (last.start_offset, last.end_offset) == (0, 4)
    assert (last.records_read, last.records_kept) == (4, 2)
    assert (last.bytes_read, last.bytes_written) == (stats.bytes_read, stats.bytes_written)


@pytest.mark.parametrize(
    ("rows", "kept", "tombstones"),
    [
        ([("a", "1"), ("b", "1"), ("a", None)], 2, 1),
        ([("a", "1"), ("a", "2"), ("a", "3")], 1, 0),
        ([("a", None), ("b", None)], 2, 2),
        ([("a", "1")], 1, 0),
    ],
)
def test_status_tells_the_last_cleaning_and_what_waits(
    place: Place, rows: list[tuple[str, str | None]], kept: int, tombstones: int
) -> None:
    place.topic().append(*rows)
    place.log.clean("t", force=True, now_ms=NOW_MS + 1_000)
    place.append(("c", "1"), now_ms=NOW_MS + 2_000)
    status = place.status(NOW_MS + 3_000)
    last = status.last_cleaning
    assert last is not None
    assert (last.end_offset, last.records_read, last.records_kept) == (len(rows), len(rows), kept)
    assert status.tombstones_waiting == tombstones
    horizon = NOW_MS + 1_000 + DAY_MS if tombstones else None
    assert status.earliest_delete_horizon_ms == horizon
    assert (status.state, status.reason_code) == ("not due", "active segment")
    assert (status.first_dirty_offset, status.first_uncleanable_offset) == (len(rows), len(rows))


def test_a_look_that_finds_nothing_to_do_leaves_the_last_cleaning_as_it_was(place: Place) -> None:
    place.topic(segment_bytes=100).append_each(*[("a", f"{i}") for i in range(3)])
    place.log.clean("t", force=True, now_ms=NOW_MS)
    before = place.status(NOW_MS).last_cleaning
    assert place.log.clean("t", force=True, now_ms=NOW_MS + HOUR_MS) == []
    assert place.status(NOW_MS).last_cleaning == before


def test_tombstones_that_wait_are_counted_with_the_earliest_horizon(place: Place) -> None:
    place.topic(segment_bytes=100, delete_retention_ms=HOUR_MS)
    place.append(("a", "1"), ("b", "1"), ("c", "1"))
    assert place.status(NOW_MS).tombstones_waiting is None
    place.append(("a", None), ("b", None))
    place.log.clean("t", force=True, now_ms=NOW_MS)
    found = place.status(NOW_MS)
    assert (found.tombstones_waiting, found.earliest_delete_horizon_ms) == (2, NOW_MS + HOUR_MS)
    place.log.clean("t", force=True, now_ms=NOW_MS + HOUR_MS)
    found = place.status(NOW_MS + HOUR_MS)
    assert (found.tombstones_waiting, found.earliest_delete_horizon_ms) == (0, None)


def test_tombstones_are_counted_once_in_a_cleaning_of_several_rounds(place: Place) -> None:
    place.topic(segment_bytes=100).settings(dedupe_buffer_size=24 * 8, spill=False)
    place.commits([(f"k{i}", "1"), (f"d{i}", None)] for i in range(10))
    (stats,) = place.log.clean("t", force=True, now_ms=NOW_MS)
    assert stats.rounds > 1
    assert place.status(NOW_MS).tombstones_waiting == 10


def test_a_count_of_another_cleaning_is_unknown(place: Place) -> None:
    place.topic(segment_bytes=100).append(("a", None))
    place.log.clean("t", force=True, now_ms=NOW_MS)
    assert place.status(NOW_MS).tombstones_waiting == 1
    told = json.loads(place.note(layout.LAST_CLEANING) or "")
    place.put_note(layout.LAST_CLEANING, json.dumps({**told, "end_offset": 77}))
    assert place.status(NOW_MS).tombstones_waiting is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 9}', '{"version": 1}', "\xff"])
def test_a_last_cleaning_that_cannot_be_read_is_left_out(place: Place, content: str) -> None:
    place.topic(segment_bytes=100).put_note(layout.LAST_CLEANING, content)
    assert place.status(NOW_MS).last_cleaning is None


def test_a_paused_partition_says_so(place: Place) -> None:
    place.topic(segment_bytes=100)
    if place.can_be_paused:
        with abort_and_pause(place.log, "t", 0):
            assert place.status(NOW_MS).state == "paused"
    else:
        with pytest.raises(InvalidInputError, match="expected a log directory"):
            abort_and_pause(place.log, "t", 0).__enter__()
    assert place.status(NOW_MS).state == "clean"


def test_asking_writes_nothing(place: Place) -> None:
    place.topic(segment_bytes=100).append(("a", "1"))
    place.log.status(now_ms=NOW_MS)
    before = place.everything()
    reader = place.other(read_only=True)
    reader.status(now_ms=NOW_MS)
    reader.explain(now_ms=NOW_MS)
    assert place.everything() == before


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_batch_without_records_stays_only_at_the_end_of_the_log(
    place: Place, goes_on: bool
) -> None:
    place.topic().append(("a", None))
    place.log.clean("t", force=True, now_ms=NOW_MS + 1)
    later = NOW_MS + 2 * DAY_MS
    if goes_on:
        place.append(("b", "1"), now_ms=later)
    place.log.clean("t", now_ms=later)
    status = place.status(later)
    assert status.last_cleaning is not None
    header = 0 if goes_on else 61
    assert (status.last_cleaning.bytes_written, status.clean_bytes) == (header, header)
