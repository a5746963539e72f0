"""What Kafka's LogCleanerTest says, with its numbers: rounds, groups, deletions, faults.

Each test names in its docstring the one of Kafka's, or the rules, that it stands for. Kafka's tests
of transactions are in test_transactions.py, those of the offset map in test_log_cleaner_rules_map.
"""

from __future__ import annotations

import time

import pytest

from kafkalog.cleaner import CleanerStats
from tests.builders.batch_builder import Record
from tests.unit.cleaner.naive import Batch, batch, records_of
from tests.unit.rules.acts import Written
from tests.unit.rules.places import DAY_MS as DAY
from tests.unit.rules.places import Place

MAX = 2**31 - 1
NOW = 10 * DAY


def fill(log: Written, count: int, keys: int = 10**9) -> None:
    """Append records, each in a batch, until there are so many segments."""
    while len(log.place.bases()) < count:
        log.data(log.end % keys)


def opened(place: Place) -> Written:
    """Go on with a log that has records."""
    return Written(place, place.state().high_watermark)


def values(log: Written) -> list[int]:
    """The keys of the records that have a value."""
    return [int(r.key or b"-1") for r in records_of(log.batches()) if r.value is not None]


# --- rounds --------------------------------------------------------------------------------------


def test_keys_that_occur_again_go_and_every_byte_is_read(place: Place) -> None:
    """testCleanSegments (C44, C48)"""
    log = Written.create(place, segment_bytes=1024)
    fill(log, 4)
    first_dirty = place.bases()[-1]
    end = log.end
    log.data(1, 3, 5, 7, 9, 0)
    log.roll()
    expected_bytes = sum(place.sizes())
    stats = log.clean(from_offset=first_dirty)
    gone = {0, 1, 3, 5, 7, 9}
    assert log.keys() == [key for key in range(end) if key not in gone] + [1, 3, 5, 7, 9, 0]
    assert stats.bytes_read == expected_bytes
    # The first segment keeps its name, though its first record is gone.
    assert (place.bases()[0], log.offsets()[0]) == (0, 2)


def test_a_segment_that_holds_an_uncleanable_offset_is_left_as_it_is(place: Place) -> None:
    """testCleaningWithUncleanableSection (C31)"""
    log = Written.create(place, segment_bytes=1024)
    fill(log, 3, keys=10)
    log.transact(1, log.end % 10)  # open, one offset past the third segment's base
    uncleanable = log.end - 1
    fill(log, 6, keys=10)
    before = place.segments()
    third = before[2].base_offset
    assert third < uncleanable < before[3].base_offset
    kept = [batch for batch in log.batches() if batch.base >= third]
    assert log.clean().end_offset == third
    after = place.segments()
    assert sum(s.size for s in after if s.base_offset < third) < 1024
    assert [s for s in after if s.base_offset >= third] == before[2:]
    assert [batch for batch in log.batches() if batch.base >= third] == kept


def test_clean_and_cleanable_bytes_are_all_but_the_active_segment(place: Place) -> None:
    """testLogToClean (C32)"""
    log = Written.create(place, segment_bytes=100)
    for _ in range(6):
        log.data(1)
    closed = place.sizes()[:-1]
    assert len(closed) == 5
    for first_dirty in (5, 3, 0):
        found = place.set_state(first_dirty_offset=first_dirty).status(0)
        assert found.clean_bytes == sum(closed[:first_dirty])
        assert found.clean_bytes + found.dirty_bytes == sum(closed)


def test_the_dirty_ratio_is_that_of_segments_between_both_offsets(place: Place) -> None:
    """testLogToCleanWithUncleanableSection (C32)"""
    log = Written.create(place, segment_bytes=100)
    for _ in range(6):
        log.data(1)
    sizes = place.sizes()
    found = place.set_state(first_dirty_offset=2, last_stable_offset=4).status(0)
    assert (found.clean_bytes, found.dirty_bytes) == (sum(sizes[:2]), sum(sizes[2:4]))
    assert found.uncleanable_bytes == sum(sizes[4:])
    assert found.dirty_ratio == pytest.approx(sum(sizes[2:4]) / sum(sizes[:4]))


@pytest.mark.parametrize("bases", [(0, 11), (0, 15, 30)])
def test_a_cleaning_goes_past_missing_offsets(place: Place, bases: tuple[int, ...]) -> None:
    """testCleaningBeyondMissingOffsets (C15)"""
    contents = {
        base: [batch(base + i, [(f"{base + i}", "v")]) for i in range(10)] for base in bases[:-1]
    }
    active = bases[-1]
    place.segments_of(contents | {active: [batch(active, [("1015", "v")])]})
    log = opened(place)
    assert log.clean().end_offset == active
    assert log.first_dirty_offset == active
    assert len(log.offsets()) == 10 * len(bases[:-1]) + 1


def test_records_without_a_key_go_and_are_counted(place: Place) -> None:
    """testCleaningWithUnkeyedMessages (C19, C53)"""
    log = Written.create(place, segment_bytes=1024)
    while len(place.bases()) < 2:
        log.data(None)
    unkeyed, size = log.end, sum(place.sizes())
    fill(log, 3)
    log.roll()
    expected = sum(place.sizes()) - size
    assert log.clean().keyless_records == unkeyed
    assert sum(place.sizes()) == expected
    assert log.offsets() == list(range(unkeyed, log.end))


def test_records_deleted_before_the_swap_stay_deleted(place: Place) -> None:
    """testCleanSegmentsWithConcurrentSegmentDeletion (C112)"""
    log = Written.create(place, policy="compact,delete", retention_ms=-1, segment_bytes=1024)
    for _ in range(2):
        log.data(0)
        log.roll()
    assert len(place.bases()) == 3
    other = place.other()
    retained: list[object] = []

    def delete(_: CleanerStats) -> None:
        if not retained:
            other.delete_records("t", 0, 2, now_ms=1)
            retained.append(other._log.apply_retention(now_ms=1))

    for stats in place.log.clean(force=True, now_ms=1, progress=delete):
        assert stats.error is None
    assert retained == [[]]  # in a directory it waits for the cleaner
    assert (place.log.offsets("t")[0], log.first_dirty_offset) == ((2, 2), 2)
    place.engine.apply_retention(now_ms=1)
    assert place.bases() == [2]
    first = sum(f"{0:020d}.log" in name for name in place.everything())
    assert first == int(place.keeps_what_lies_below_the_log_start)  # retired, and once
    log.data(7)
    assert log.offsets() == [2]


def test_the_empty_batch_of_an_aborted_transaction_goes_when_its_producer_goes_on(
    place: Place,
) -> None:
    """testLogCleanerRetainsLastSequenceEvenIfTransactionAborted (C76)"""
    log = Written.create(place)
    log.transact(1, 1)
    log.transact(1, 2, 3)
    log.abort(1)
    log.roll()
    log.clean()
    assert (log.offsets(), log.last_offsets()) == ([3], [2, 3])
    (empty, _) = log.batches()
    assert empty.sequence + empty.last - empty.base == 2
    log.transact(1, 1, 5)
    log.roll()
    log.clean(from_offset=0)
    assert (log.offsets(), log.last_offsets()) == ([3, 4, 5], [3, 5])
    assert log.batches()[-1].sequence + 1 == 4


def test_only_markers_in_a_log_stay_until_their_second_round(place: Place) -> None:
    """C65, C74: a marker of a transaction without data, of a producer that has expired"""
    log = Written.create(place)
    log.commit(1, time=0)
    log.data(1, time=0)
    log.roll()
    log.clean(NOW)
    assert [(b.base, b.horizon) for b in log.batches()] == [(0, NOW + DAY), (1, None)]
    log.clean(NOW + DAY - 1)
    assert log.last_offsets() == [0, 1]
    log.clean(NOW + DAY)
    assert log.last_offsets() == [1]


# --- groups --------------------------------------------------------------------------------------


def test_segments_that_became_empty_are_made_one_by_the_next_round(place: Place) -> None:
    """testSegmentGroupingWithSparseOffsetsAndEmptySegments (C46, C47)"""
    span = MAX + 1
    contents = {
        i * span: [batch(i * span, [("key", "v")]), batch((i + 1) * span - 1, [("key", "v")])]
        for i in range(3)
    }
    never = {"segment_ms": 2**63 - 1}
    place.segments_of(contents | {3 * span: [batch(3 * span, [("key", "v")])]}, **never)
    log = opened(place)
    log.clean()
    assert [size > 0 for size in place.sizes()] == [False, False, True, True]
    log.clean(from_offset=0)
    assert place.bases() == [0, 2 * span, 3 * span]
    assert log.offsets() == [3 * span - 1, 3 * span]


@pytest.mark.parametrize(("last", "count"), [(MAX, 1), (MAX + 1, 2)])
def test_segments_are_grouped_by_where_their_offsets_end_and_not_by_their_index(
    place: Place, last: int, count: int
) -> None:
    """testSegmentGroupingWithSparseOffsets, testSegmentGroupingFollowingLoadOfZeroIndex (C46)"""
    half = MAX // 2
    place.segments_of(
        {
            0: [batch(0, [("a", "v")]), batch(1, [("b", "v")])],
            half: [batch(half, [("c", "v")]), batch(last, [("d", "v")])],
            last + 1: [],
        },
        index_interval_bytes=400,
        segment_ms=2**63 - 1,
    )
    log = opened(place)
    log.clean()
    assert len(place.bases()) == count + 1
    assert log.offsets() == [0, 1, half, last]


# --- deletions -----------------------------------------------------------------------------------


def test_no_value_of_a_deleted_key_is_left(place: Place) -> None:
    """testCleaningWithDeletes (C57)"""
    log = Written.create(place, segment_bytes=1024)
    fill(log, 2)
    end = log.end
    for key in range(0, end, 2):
        log.data(key, tombstones=True)
    fill(log, 4)
    log.clean(NOW)
    assert not set(range(0, end, 2)) & set(values(log))
    assert set(range(1, end, 2)) <= set(values(log))
    log.roll()
    log.clean(NOW + DAY)
    deleted = [int(r.key or b"") for r in records_of(log.batches()) if r.value is None]
    assert deleted == []


def test_a_tombstones_own_time_says_nothing_of_when_it_goes(place: Place) -> None:
    """testCleanTombstone (C55, C56)"""
    log = Written.create(place)
    log.data(0, time=NOW + DAY + 10_000)
    log.roll()
    log.clean(NOW, from_offset=0)
    log.data(0, tombstones=True, time=NOW - DAY - 10_000)
    log.roll()
    log.clean(NOW, from_offset=1)
    assert log.last_offsets()[0] == 1
    log.data(1, time=NOW)
    log.roll()
    log.clean(NOW, from_offset=2)
    assert log.last_offsets() == [1, 2]
    assert log.batches()[0].horizon == NOW + DAY


def test_a_tombstone_beyond_the_end_of_the_round_gets_its_horizon_early(place: Place) -> None:
    """C51, C60"""
    log = Written.create(place)
    log.data(1)
    log.data(2, tombstones=True)
    log.roll()
    assert log.clean(NOW, dedupe_buffer_size=48).end_offset == 1  # one key
    assert [b.horizon for b in log.batches()] == [None, NOW + DAY]
    log.clean(NOW + 7)
    assert [b.horizon for b in log.batches()] == [None, NOW + DAY]
    log.clean(NOW + DAY)
    assert log.offsets() == [0]


# --- damage --------------------------------------------------------------------------------------


def large(place: Place) -> Written:
    """Records of a MiB, far above what the topic allows by now."""
    made = [batch(i, [(f"{i % 5}", "x" * 2**20)]) for i in range(10)]
    return opened(place.segments_of({0: made, 10: []}, max_message_bytes=1024))


def fails(place: Place) -> str:
    before = place.content()
    (stats,) = place.log.clean(force=True, now_ms=1)
    assert place.content() == before
    assert place.status(1).state == "uncleanable"
    assert stats.error is not None
    return stats.error


def test_a_large_batch_with_an_unknown_magic_is_not_cleaned_away(place: Place) -> None:
    """testMessageLargerThanMaxMessageSizeWithCorruptHeader (C104)"""
    large(place)
    name, data = next(iter(place.content().items()))
    place.put_content(name, data[:16] + b"\xff" + data[17:])
    assert name in fails(place)


@pytest.mark.parametrize("size", [1024, 2**20 + 500])
def test_a_log_that_ends_within_a_batch_is_not_cleaned_away(place: Place, size: int) -> None:
    """testCorruptMessageSizeLargerThanBytesAvailable (C105)"""
    large(place)
    name, data = next(iter(place.content().items()))
    place.put_content(name, data[:size])
    assert name in fails(place)


def test_records_whose_bytes_are_wrong_get_no_new_checksum(place: Place) -> None:
    """C100, where Kafka does not look"""
    place.segments_of({0: [batch(0, [("a", "1"), ("b", "1")])], 2: []}).spoil(0)
    assert "checksum" in fails(place)  # though the changed value decodes


def test_a_zero_length_value_is_data(place: Place) -> None:
    """C63"""
    log = opened(place.segments_of({0: [Batch(0, 0, (Record(0, 0, b"a", b""),))], 1: []}))
    for now in (NOW, NOW + 2 * DAY):
        log.clean(now, from_offset=0)
    assert log.offsets() == [0]


def test_the_time_of_a_round_is_one_for_all_its_groups(place: Place) -> None:
    """C41"""
    log = Written.create(place, segment_bytes=75)
    for key in range(4):
        log.data(key, tombstones=True)
        log.roll()
    place.make_due(NOW).one_round(NOW, check_abort=lambda: time.sleep(0.002))
    assert {b.horizon for b in log.batches()} == {NOW + DAY}
