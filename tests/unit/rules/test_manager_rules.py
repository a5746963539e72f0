"""What Kafka's LogCleanerManagerTest says, rule by rule.

Each test names in its docstring the one of Kafka's that it stands for.
"""

from __future__ import annotations

import pytest

from kafkalog.cleaner import PartitionStatus
from tests.builders.batch_builder import ABORT, Record, at_times, marker
from tests.builders.log_contents import offsets
from tests.unit.cleaner.naive import Batch
from tests.unit.rules.places import HOUR_MS, Place

SMALL = {"segment_bytes": 14, "min_cleanable_dirty_ratio": 0.05}
"""Segments of one batch each."""


def topic(place: Place, name: str = "t", **config: object) -> Place:
    """Create a topic whose segments take one batch each."""
    return place.topic(name, **{**SMALL, **config})


def write(place: Place, count: int, name: str = "t", *, now_ms: int = 1000) -> Place:
    """Append batches of one record, each of a key of its own; then begin an empty segment."""
    first = place.to(name).state(name).high_watermark
    made = [
        Batch(n, n, (Record(n, now_ms, b"key-%03d" % n, b"v"),))
        for n in range(first, first + count)
    ]
    if made:
        place.append_raw(*made, now_ms=now_ms)
    return place.roll()


def increasingly_filthy(place: Place) -> Place:
    """Topics a, b and c: clean up to offset 20, and dirty up to 20, 25 and 30."""
    for name, count in (("a", 20), ("b", 25), ("c", 30)):
        write(topic(place, name), count, name).set_state(first_dirty_offset=20)
    return place


def cleaned(place: Place) -> str | None:
    stats = place.one_round(1000)
    return None if stats is None else stats.topic


def due(place: Place) -> list[str]:
    """The topics that are due."""
    return [one.topic for one in place.log.status(now_ms=1000) if one.state == "dirty"]


# --- which one is taken --------------------------------------------------------------------------


def test_the_filthiest_is_taken_first(place: Place) -> None:
    """testGrabFilthiestCompactedLogReturnsLogWithDirtiestRatio"""
    increasingly_filthy(place)
    assert due(place) == ["b", "c"]
    assert place.status(1000, "c").dirty_ratio == pytest.approx(1 / 3)
    assert cleaned(place) == "c"
    assert [stats.topic for stats in place.log.clean(now_ms=1000)] == ["b"]


def test_an_uncleanable_partition_is_passed_over(place: Place) -> None:
    """testGrabFilthiestCompactedLogIgnoresUncleanablePartitions"""
    increasingly_filthy(place).mark(topic="c", now_ms=1000)
    assert cleaned(place) == "b"


def test_a_partition_that_is_being_cleaned_is_passed_over(place: Place) -> None:
    """testGrabFilthiestCompactedLogIgnoresInProgressPartitions"""
    increasingly_filthy(place)
    with place.at_work("c", now_ms=1000):
        assert cleaned(place) == "b"


def test_what_is_being_cleaned_and_what_is_uncleanable_leave_nothing(place: Place) -> None:
    """testGrabFilthiestCompactedLogIgnoresBothInProgressPartitionsAndUncleanablePartitions"""
    increasingly_filthy(place).mark(topic="b", now_ms=1000)
    with place.at_work("c", now_ms=1000):
        assert cleaned(place) is None


def test_a_first_dirty_offset_beyond_the_end_becomes_the_log_start(place: Place) -> None:
    """testDirtyOffsetResetIfLargerThanEndOffset"""
    write(topic(place), 20).set_state(first_dirty_offset=200)
    assert place.status(1000).first_dirty_offset == 0
    assert place.log.clean(now_ms=1000)[0].start_offset == 0
    assert place.state().first_dirty_offset == 20
    assert len(offsets(place.log)) == 20


def test_a_first_dirty_offset_below_the_log_start_becomes_it(place: Place) -> None:
    """testDirtyOffsetResetIfSmallerThanStartOffset"""
    write(topic(place), 20).set_state(log_start_offset=10, first_dirty_offset=0)
    assert place.status(1000).first_dirty_offset == 10


def test_a_log_start_within_the_active_segment_leaves_nothing_to_clean(place: Place) -> None:
    """testLogStartOffsetLargerThanActiveSegmentBaseOffset"""
    topic(place, segment_bytes=2048).append_each(*((f"{i}", "v") for i in range(9)), now_ms=1000)
    place.set_state(log_start_offset=2, first_dirty_offset=0)
    assert (due(place), cleaned(place)) == ([], None)


def test_a_first_dirty_offset_within_the_active_segment_leaves_nothing_to_clean(
    place: Place,
) -> None:
    """testDirtyOffsetLargerThanActiveSegmentBaseOffset"""
    topic(place, segment_bytes=2048).append_each(*((f"{i}", "v") for i in range(6)), now_ms=1000)
    place.set_state(first_dirty_offset=3)
    assert (due(place), cleaned(place)) == ([], None)
    assert place.state().first_dirty_offset == 3


# --- what retention takes ------------------------------------------------------------------------


def test_the_cleaner_retains_what_is_compacted_and_deleted(place: Place) -> None:
    """testLogsWithSegmentsToDeleteShouldConsiderCleanupPolicyCompactDeleteLogs"""
    write(topic(place, policy="compact,delete", retention_ms=1), 5)
    place.log.clean(now_ms=10**12)
    assert place.log.offsets("t") == {0: (5, 5)}


def test_the_cleaner_retains_what_is_compacted_alone_from_its_log_start_on(place: Place) -> None:
    """testLogsWithSegmentsToDeleteShouldConsiderCleanupPolicyCompactLogs"""
    write(topic(place, retention_ms=1), 5)
    place.log.clean(now_ms=10**12)
    assert offsets(place.log) == [0, 1, 2, 3, 4]
    place.log.alter_topic("t", {"cleanup.policy": "compact,delete", "retention.ms": "-1"})
    place.log.delete_records("t", 0, 3)
    place.log.alter_topic("t", {"cleanup.policy": "compact"})
    place.log.clean(now_ms=10**12)
    assert (offsets(place.log), place.bases()[0]) == ([3, 4], 3)


# --- the cleanable range -------------------------------------------------------------------------


def cleanable(place: Place, now_ms: int) -> tuple[int, int]:
    found: PartitionStatus = place.status(now_ms)
    return found.first_dirty_offset, found.first_uncleanable_offset


def test_a_cleaning_ends_before_the_last_stable_offset(place: Place) -> None:
    """testCleanableOffsetsForNone"""
    write(topic(place), 80).set_state(last_stable_offset=50)
    assert cleanable(place, 1000) == (0, 50)


def test_a_cleaning_ends_before_the_active_segment(place: Place) -> None:
    """testCleanableOffsetsActiveSegment"""
    write(topic(place), 8).append(("a", "1"), ("b", "1"), now_ms=1000)
    assert place.state().active_base == 8
    assert cleanable(place, 1000) == (0, 8)


def test_what_is_younger_than_the_lag_waits(place: Place) -> None:
    """testCleanableOffsetsForTime"""
    later = 1000 + HOUR_MS + 1
    write(topic(place, min_compaction_lag_ms=HOUR_MS), 4, now_ms=1000)
    write(place, 4, now_ms=later)
    assert cleanable(place, later) == (0, 4)


def test_a_lag_that_has_passed_for_all_leaves_the_active_segment(place: Place) -> None:
    """testCleanableOffsetsForShortTime"""
    write(topic(place, min_compaction_lag_ms=HOUR_MS), 8, now_ms=1000)
    place.append(("a", "1"), now_ms=1000)
    assert cleanable(place, 1000 + HOUR_MS + 1) == (0, 8)


def test_undecided_transactions_wait_past_every_lag(place: Place) -> None:
    """testUndecidedTransactionalDataNotCleanable"""
    topic(place, min_compaction_lag_ms=HOUR_MS, segment_bytes=1024)
    place.append_raw(
        at_times(0, (1000, 1000), producer_id=15, transactional=True),
        at_times(2, (1000,), producer_id=15, sequence=2, transactional=True),
        now_ms=1000,
    ).roll()
    later = 1000 + HOUR_MS + 1
    assert cleanable(place, later) == (0, 0)
    place.append_raw(marker(3, ABORT, 15, timestamp=later), now_ms=later).roll()
    assert cleanable(place, later) == (0, 3)
    assert cleanable(place, later + HOUR_MS + 1) == (0, 4)
