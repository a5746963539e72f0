"""Where a compacted topic sets no segment.bytes, the cleaner closes the active segment."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.plan import CLOSING_LEAST
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.object_store import object_log
from tests.builders.log_builder import NOW_MS
from tests.unit.rules.acts import KAFKAS, Written, dies_at
from tests.unit.rules.places import DIRECTORY, HOUR_MS, OBJECTS, Place, new_place
from tests.unit.storage_engine.spoiled_client import SpoiledClient

KILOBYTE = "v" * 1000
LATER_MS = NOW_MS + HOUR_MS


def write(place: Place, records: int, *, keys: int = 20, **options: Any) -> Place:
    """Append so many records of a kilobyte in one commit."""
    rows = [(f"k{number % keys}", f"{number}{KILOBYTE}") for number in range(records)]
    return place.append(*rows, **options)


def test_a_segment_that_makes_its_partition_due_is_closed_and_cleaned(place: Place) -> None:
    write(place.topic(), 100)
    assert place.bases() == [0]
    place.turn(LATER_MS)
    assert place.bases()[-1] == 100
    assert place.state().first_dirty_offset == 100
    assert place.latest_offsets() == [*range(80, 100)]
    write(place, 70)
    place.turn(LATER_MS)
    assert place.latest_offsets() == [*range(150, 170)]
    assert place.state().first_dirty_offset == 170
    assert place.findings() == []


def test_a_segment_stays_open_where_the_topic_sets_segment_bytes(place: Place) -> None:
    write(place.topic(segment_bytes=1 << 30), 100).turn(LATER_MS)
    assert (place.bases(), place.state().first_dirty_offset) == ([0], 0)
    assert place.status(LATER_MS).closed_by == "writer"
    place.log.alter_topic("t", {"segment.bytes": None})
    assert place.status(LATER_MS).closed_by == "cleaner"
    assert place.turn(LATER_MS).state().first_dirty_offset == 100


def test_a_tiny_segment_stays_open(place: Place) -> None:
    write(place.topic(), CLOSING_LEAST // 1100).turn(LATER_MS)
    assert place.bases() == [0]
    write(place, 20).turn(LATER_MS)
    assert len(place.bases()) == 2


def test_a_segment_that_is_small_for_its_log_stays_open(place: Place) -> None:
    place.topic("large", 1, segment_bytes=1 << 30)
    write(place, 3000, keys=3000)
    write(place.topic("t"), 100).turn(LATER_MS)
    assert place.bases() == [0]
    write(place, 300).turn(LATER_MS)
    assert place.state().first_dirty_offset == 400


def test_a_segment_stays_open_while_the_dirty_ratio_with_it_is_low(place: Place) -> None:
    write(place.topic(), 200, keys=200).turn(LATER_MS)
    bases = write(place, 150).bases()
    assert place.turn(LATER_MS).bases() == bases
    assert place.status(LATER_MS).state == "not due"
    place.log.alter_topic("t", {"min.cleanable.dirty.ratio": "0.4"})
    assert place.status(LATER_MS).state == "dirty"
    assert place.turn(LATER_MS).state().first_dirty_offset == 350


def test_what_min_compaction_lag_holds_back_stays_open(place: Place) -> None:
    write(place.topic(min_compaction_lag_ms=HOUR_MS), 100)
    assert place.turn(NOW_MS + HOUR_MS - 1).bases() == [0]
    assert place.turn(NOW_MS + HOUR_MS).state().first_dirty_offset == 100


def test_a_segment_is_closed_once_its_share_that_is_old_enough_is_due(place: Place) -> None:
    place.topic(min_compaction_lag_ms=HOUR_MS)
    for minute in range(0, 180, 10):
        write(place, 10, now_ms=NOW_MS + minute * 60_000)
    now_ms = NOW_MS + 3 * HOUR_MS
    assert len(place.turn(now_ms).bases()) == 2
    assert place.state().first_dirty_offset == 0
    assert place.turn(now_ms + HOUR_MS).state().first_dirty_offset == 180


def test_what_an_open_transaction_holds_back_stays_open(place: Place) -> None:
    log = Written.create(place)
    log.transact(7, 1)
    for _ in range(60):
        log.data(*range(100))
    assert place.turn(LATER_MS).bases() == [0]
    log.commit(7)
    place.settings(**KAFKAS).turn(LATER_MS)
    assert place.state().first_dirty_offset == log.end


def test_looks_close_nothing_and_say_the_rule(place: Place) -> None:
    write(place.topic(), 10)
    (told,) = place.log.explain("t", now_ms=NOW_MS)
    assert (told.answer, told.findings[0].code) == ("is not due", "active segment")
    sentence = told.findings[0].sentence
    assert "sets no segment.bytes, the cleaner closes it once it has 64 KiB" in sentence
    assert f"That segment has {sum(place.sizes()) / 1024:.1f} KiB." in sentence
    write(place, 100)
    found = place.status(NOW_MS)
    assert (found.state, found.closed_by) == ("dirty", "cleaner")
    assert (found.dirty_bytes, found.uncleanable_bytes) == (sum(place.sizes()), 0)
    assert found.dirty_ratio == 1.0
    (told,) = place.log.explain("t", now_ms=NOW_MS)
    assert told.is_due and told.findings[0].code == "due"
    assert "closes because the topic sets no segment.bytes" in told.findings[0].sentence
    with contextlib.suppress(KafkaLogError):
        place.other(read_only=True).clean(now_ms=NOW_MS)
    assert place.bases() == [0]


def test_a_partition_that_waits_for_a_retry_gets_no_more_segments(place: Place) -> None:
    write(place.topic(), 100)
    place.spoil(0)
    place.turn(LATER_MS)
    assert place.status(LATER_MS).state == "uncleanable"
    bases = place.bases()
    write(place, 200).turn(LATER_MS + HOUR_MS)
    assert place.bases() == bases


def survives(place: Place) -> None:
    """Go on with a log whose cleaner has died, and compare."""
    place.reopen()
    assert place.latest_offsets() == [*range(90, 110)]
    write(place, 30)
    place.turn(LATER_MS + 3 * HOUR_MS).turn(LATER_MS + 6 * HOUR_MS)
    assert place.latest_offsets() == [*range(120, 140)]
    # A dead cleaner of a store may leave objects that no commit names.
    assert [found for found in place.findings() if "a sweep deletes it" not in found] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DIRECTORY, OBJECTS])
def test_a_death_at_any_step_of_closing_and_cleaning_loses_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_log, "ObjectClient", SpoiledClient)
    step, is_over = 0, False
    while not is_over:
        place = new_place(kind, tmp_path / f"{step}")
        write(place.topic(), 110)
        is_over = not dies_at(place, step, lambda place: place.turn(LATER_MS))
        survives(place)
        place.close()
        step += 1
    assert step > 20


def test_writers_go_on_while_the_cleaner_closes_segments(place: Place) -> None:
    place.topic()
    is_over = threading.Event()

    def clean() -> None:
        while not is_over.is_set():
            place.log.clean(now_ms=LATER_MS)

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        for _ in range(30):
            write(place, 40, now_ms=NOW_MS)
    finally:
        is_over.set()
        cleaner.join()
    assert place.turn(LATER_MS).turn(LATER_MS).latest_offsets() == [*range(1180, 1200)]
    assert place.state().first_dirty_offset > 1000
    assert place.findings() == []
