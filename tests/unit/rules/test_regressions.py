"""What once went wrong in Kafka's cleaner, and in Redpanda's: what a cleaning leaves of a log.

Each test names the fault's number, and runs the cleaner as a user does. Faults of files, of threads
and of what is chosen in a directory are in tests/unit/cleaner.
"""

from __future__ import annotations

import logging
import random
import struct
from dataclasses import replace

import pytest

from kafkalog.cleaner import CleanerStats
from kafkalog.storage_engine.format import layout
from tests.builders.batch_builder import CONTROL, GZIP, TRANSACTIONAL, Record, batch_data, empty
from tests.builders.log_contents import latest_column
from tests.unit.cleaner.naive import batch, dump, offsets, records_of
from tests.unit.rules.acts import KAFKAS, Written
from tests.unit.rules.places import DAY_MS as DAY
from tests.unit.rules.places import Place

MAX = 2**31 - 1
NOW = 10 * DAY
BOTH = pytest.mark.parametrize("settings", [KAFKAS, {}], ids=["kafkas", "ours"])


def forced(place: Place, now_ms: int = NOW, **settings: object) -> CleanerStats:
    (stats,) = place.settings(**settings).log.clean("t", force=True, now_ms=now_ms)
    assert stats.error is None
    return stats


def filled(place: Place, **config: object) -> Place:
    return place.topic(segment_bytes=100, **config).rounds(5, "ab", now_ms=1000)


# --- more keys than memory -----------------------------------------------------------------------


@pytest.mark.parametrize("spill", [False, True])
def test_a_segment_with_more_keys_than_memory_is_cleaned_to_its_end(
    place: Place, spill: bool
) -> None:
    """KAFKA-3587, KAFKA-3894, Redpanda 16952 and 24323: given up, or tried again for ever"""
    made = [batch(10 * i, [(f"k{j}", f"{i}") for j in range(10)]) for i in range(6)]
    place.segments_of({0: made, 60: []}, min_cleanable_dirty_ratio=0)
    place.settings(dedupe_buffer_size=24 * 5, spill=spill, merge_batches=False)
    ends: list[int] = []
    while (stats := place.one_round(1)) is not None:
        assert stats.error is None
        ends.append(stats.end_offset)
        assert len(ends) <= 60
    assert ends == ([60] if spill else sorted(set(ends)))
    assert (ends[-1], offsets(dump(place.engine))) == (60, list(range(50, 60)))


def test_a_log_that_is_overwritten_for_ever_keeps_its_size(place: Place) -> None:
    """Redpanda 13982: overwritten topics did not shrink to a constant size"""
    place.topic(segment_bytes=1000)
    found = []
    for i in range(5):
        place.commits([(f"k{k}", f"{i:3}-{j}") for k in range(10)] for j in range(3))
        forced(place, NOW + i)
        found.append((sum(place.sizes()), len(place.sizes())))
    assert len(set(found[2:])) == 1
    assert len(latest_column(place.log)) == 10


# --- missing and far offsets ---------------------------------------------------------------------


@pytest.mark.parametrize("first_dirty", [0, 10, 12, 14])
def test_missing_offsets_are_passed_once(place: Place, first_dirty: int) -> None:
    """KAFKA-8764: a round that found no record in [first dirty offset, end) was done for ever"""
    contents = {
        0: [batch(i, [(f"k{i % 3}", "v")]) for i in range(10)],
        15: [],
        30: [batch(30, [("a", "b")])],
    }
    place.topic(min_cleanable_dirty_ratio=0)
    place.append_raw(*contents[0], end=30, now_ms=0).roll().append_raw(*contents[30], now_ms=0)
    place.set_state(first_dirty_offset=first_dirty).settings(**KAFKAS)
    for stats in place.log.clean(now_ms=NOW):
        assert stats.end_offset == 30  # there is no record in what it had to clean
    assert forced(place, **KAFKAS).end_offset == 31
    assert place.log.clean(force=True, now_ms=NOW) == []


def test_segments_without_records_do_not_pile_up(place: Place) -> None:
    """KAFKA-12889: segments that were cleaned away whole were never joined"""
    span = MAX + 1
    contents = {
        i * span: [batch(i * span, [("k", "v")]), batch((i + 1) * span - 1, [("k", "v")])]
        for i in range(6)
    }
    never = {"segment_ms": 2**63 - 1}
    place.segments_of(contents | {6 * span: [batch(6 * span, [("k", "w")])]}, **never)
    for i in range(3):
        forced(place)
        place.append(("k", f"{i}"))
    assert len(place.sizes()) <= 4
    assert place.sizes().count(0) <= 1


# --- batches too large ---------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [1, 1 << 20])
@pytest.mark.parametrize("merge", [False, True])
def test_batches_beyond_what_the_topic_takes_are_cleaned(
    place: Place, buffer: int, merge: bool
) -> None:
    """KAFKA-6834, KAFKA-4019: larger than max.message.bytes, and than the cleaner's buffer"""
    noise = random.Random(1).randbytes(300_000)
    place.topic()
    for i in range(4):
        place.append((f"k{i % 2}", noise), ("x", noise[i:]), batch_size=1 << 20)
    place.log.alter_topic("t", {"max.message.bytes": "1000"})
    forced(place, io_buffer_size=buffer, merge_batches=merge)
    found = dump(place.engine)
    assert offsets(found) == [4, 6, 7]
    assert {len(r.value or b"") for r in records_of(found)} == {300_000, 299_997}


@BOTH
def test_a_batch_that_grows_by_being_compressed_anew_is_written(
    place: Place, settings: dict[str, object]
) -> None:
    """KAFKA-5316: what remained of a batch was larger than all of it, and than the limit"""
    words = [b"%d" % n for n in range(300)]
    rng = random.Random(2)
    records = [
        Record(i, 1000, b"key-%d" % i, b" ".join(rng.choices(words, k=400))) for i in range(40)
    ]
    data = batch_data(records, codec=GZIP, leader_epoch=0)
    place.topic(compression_gzip_level=1, max_message_bytes=len(data))
    place.append_bytes(data).append(("key-39", None))
    forced(place, **settings)
    assert place.sizes()[0] - len(empty(40, 40).data) > len(data)
    found = dump(place.engine)
    assert offsets(found) == [*range(39), 40]
    assert [r.value for r in records_of(found)][:39] == [r.value for r in records[:39]]


# --- the end of the log --------------------------------------------------------------------------


@BOTH
def test_the_log_end_survives_a_tail_that_is_cleaned_away_after_the_roll(
    place: Place, settings: dict[str, object]
) -> None:
    """KAFKA-17076: the same with obsolete records, which need a record above them"""
    log = Written.create(place)
    for _ in range(3):
        log.data(1, 2)
    log.roll()
    log.data(1, 2, tombstones=True)
    place.settings(**settings)
    for i in range(4):
        place.log.clean(force=True, now_ms=NOW + i * (DAY + 1))
    assert (log.offsets(), log.last_offsets(), place.bases()[-1]) == ([], [7], 8)
    log.data(3)
    assert log.offsets() == [8]
    forced(place, NOW + 9 * DAY, **settings)
    assert log.last_offsets() == [8]  # the empty batch has done its work


# --- transactions and producers ------------------------------------------------------------------


def test_batches_of_a_producer_whose_sequences_begin_anew_do_not_pile_up(place: Place) -> None:
    """KAFKA-8335: a coordinator's producers left an empty batch for every transaction"""
    log = Written.create(place)
    counts = []
    for i in range(7):
        log.sequences.clear()
        now_ms = NOW + i * (DAY + 1)  # the producer never expires
        log.transact(1, 1, time=now_ms)
        log.commit(1, time=now_ms)
        forced(place, now_ms, **KAFKAS)
        counts.append(len(log.batches()))
    assert max(counts) <= 5
    assert log.keys() == [1]


@pytest.mark.parametrize("end", [0, 1])
def test_a_transaction_over_many_segments_is_whole_or_gone(place: Place, end: int) -> None:
    """KAFKA-8351: markers in another segment than their data"""
    log = Written.create(place, segment_bytes=75)
    log.data(1, 2)
    for key in (1, 2, 3):
        log.transact(9, key)
        log.roll()
    log.mark(9, end)
    log.data(4)
    expected = {b"1": 2, b"2": 3, b"3": 4} if end else {b"1": 0, b"2": 1}
    for i in range(3):
        forced(place, NOW + i * (DAY + 1), **KAFKAS)
        assert latest_column(place.log) == expected | {b"4": log.end - 1}
        assert (5 in log.offsets()) == (bool(end) or i < 2)  # in two stages, behind its data
        log.data(4)


def test_an_abort_marker_stays_while_a_later_round_may_need_it(place: Place) -> None:
    """KAFKA-13727: partial rounds removed a marker, and aborted records came back"""
    log = Written.create(place)
    for key in range(6):
        log.data(key)
    for key in range(6):  # it begins where the first rounds have ended
        log.transact(1, key)
    log.abort(1)
    log.data(9)
    log.roll()
    expected = {b"%d" % key: key for key in range(6)} | {b"9": 13}
    rounds = 0
    while log.first_dirty_offset < log.end:
        log.clean(NOW + rounds * (DAY + 1), dedupe_buffer_size=24 * 3)
        assert latest_column(place.log) == expected
        rounds += 1
    assert rounds > 2
    log.clean(NOW + 99 * DAY)
    assert (latest_column(place.log), log.indexed()) == (expected, [])


@pytest.mark.parametrize("kind", [0, 1])
def test_records_with_the_key_of_a_marker_and_markers_pass_each_other_by(
    place: Place, kind: int
) -> None:
    """KAFKA-14055, and the same fault in crabka (528): either removed the other"""
    log = Written.create(place)
    key = struct.pack(">hh", 0, kind)
    place.append((key, "before"), now_ms=0)
    log.end += 1
    log.transact(1, 1)
    log.mark(1, kind)
    expected = {key: 0, b"1": 1} if kind else {key: 0}
    for _ in range(2):
        forced(place, NOW, **KAFKAS)
        assert (latest_column(place.log), 2 in log.offsets()) == (expected, True)
        log.data(2)
        expected[b"2"] = log.end - 1
    place.append((key, "behind"), now_ms=0)
    forced(place, NOW, **KAFKAS)
    assert latest_column(place.log) == expected | {key: log.end}
    assert 2 in log.offsets()


def test_aborted_batches_larger_than_all_buffers_go(place: Place) -> None:
    """KAFKA-6854: batches that were dropped whole were taken for a buffer that is too small"""
    log = Written.create(place)
    for _ in range(3):
        log.transact(1, *range(500))
    log.abort(1)
    log.data(1)
    forced(place, NOW, **KAFKAS, io_buffer_size=1)
    assert latest_column(place.log) == {b"1": log.end - 1}
    assert len(log.offsets()) == 2


@BOTH
def test_a_producers_last_batch_stays_and_readers_pass_over_it(
    place: Place, settings: dict[str, object]
) -> None:
    """KAFKA-5490: the last sequence number was lost, and consumers stopped at empty batches"""
    log = Written.create(place)
    log.data(1, 2, producer=5, time=NOW)
    log.data(1, 2)
    log.data(3)
    forced(place, NOW, **settings)
    (left, *_) = log.batches()
    assert (left.producer, left.sequence, left.last, left.records) == (5, 0, 1, ())
    for start in range(log.end):
        rows = [o for b in place.log.read("t", 0, start=start) for o in b["offset"].to_pylist()]
        assert rows == [offset for offset in (2, 3, 4) if offset >= start]


def test_a_control_batch_without_a_record_is_accepted(place: Place) -> None:
    """KAFKA-7467: it ended the thread"""
    log = Written.create(place)
    log.data(1)
    without = batch(1, [], producer=3, attributes=TRANSACTIONAL | CONTROL)
    log._append(replace(without, last=1))
    log.data(1)
    forced(place, NOW, **KAFKAS)
    assert log.offsets() == [2]


# --- damage --------------------------------------------------------------------------------------


def test_what_lies_behind_a_bad_batch_is_never_dropped(place: Place) -> None:
    """crabka took a bad batch for the end of its segment"""
    contents = [batch(i, [(f"k{i}", "v")]) for i in range(6)]
    place.segments_of({0: contents, 6: []})
    place.spoil(0, 2 * place.sizes()[0] // 6 + 30)
    before = place.content()
    for _ in range(2):
        (stats,) = place.log.clean(force=True, now_ms=NOW)
        assert stats.error is not None
        assert place.content() == before


# --- where the dirty section begins --------------------------------------------------------------


def test_a_first_dirty_offset_within_the_active_segment_makes_no_endless_loop(
    place: Place,
) -> None:
    """KAFKA-9826"""
    filled(place, min_cleanable_dirty_ratio=0, max_compaction_lag_ms=1)
    assert place.log.clean(now_ms=10**6)[0].end_offset == 8
    place.set_state(first_dirty_offset=9)
    for _ in range(3):
        assert place.one_round(10**6) is None
    assert place.state().first_dirty_offset == 9
    (stats,) = place.log.clean(force=True, now_ms=10**6)
    assert (stats.error, stats.end_offset) == (None, 10)
    # `a` at 8 lies below where the keys were taken.
    assert offsets(dump(place.engine)) == [6, 8, 9]


@pytest.mark.parametrize("before", [9, 10])
def test_a_log_start_in_the_active_segment_leaves_nothing_to_clean_and_no_fault(
    place: Place, before: int
) -> None:
    """KAFKA-9133"""
    filled(place, policy="compact,delete", retention_ms=-1, min_cleanable_dirty_ratio=0)
    place.log.delete_records("t", 0, before, now_ms=1)
    for _ in range(2):
        assert place.one_round(1_000) is None
    place.log.clean(force=True, now_ms=1_000)
    assert [o for o in offsets(dump(place.engine)) if o >= before] == list(range(before, 10))
    assert place.note(layout.UNCLEANABLE) is None


@pytest.mark.parametrize("log_start", [0, 5, 8])
@pytest.mark.parametrize("dirty", [0, 7, 8, 99])
@pytest.mark.parametrize("stable", [0, 5, 10])
def test_offsets_in_any_order_are_a_range_or_nothing(
    place: Place, log_start: int, dirty: int, stable: int
) -> None:
    """KAFKA-8724: a range whose end lay before its start ended the thread"""
    filled(place, policy="compact,delete", retention_ms=-1)
    place.set_state(
        log_start_offset=log_start,
        first_dirty_offset=dirty,
        last_stable_offset=max(log_start, stable),
    )
    found = place.status(1)
    assert found.first_dirty_offset <= found.first_uncleanable_offset
    assert min(found.clean_bytes, found.dirty_bytes, found.uncleanable_bytes) >= 0
    for stats in place.log.clean(force=True, now_ms=1):
        assert stats.error is None
    assert place.note(layout.UNCLEANABLE) is None
    assert {8, 9} <= set(offsets(dump(place.engine)))


def test_the_dirty_ratio_leaves_out_the_active_segment(place: Place) -> None:
    """KAFKA-2660"""
    filled(place).log.clean(now_ms=1)
    place.log.alter_topic("t", {"segment.bytes": "1000000"})
    place.rounds(9, "ab", now_ms=1)
    found = place.status(1)
    assert (found.dirty_bytes, found.dirty_ratio) == (0, 0.0)
    found, closed = place.roll().status(1), place.sizes()[:-1]
    assert found.clean_bytes + found.dirty_bytes == sum(closed)
    assert found.dirty_ratio == found.dirty_bytes / sum(closed)


def test_tombstones_are_not_lost_between_two_cleaners(place: Place) -> None:
    """KAFKA-8522 and a cleaner of another process: the horizon is in the log, not in the process"""
    filled(place).append(("a", None), now_ms=1)
    place.log.clean(force=True, now_ms=DAY)
    for now, expected in ((2 * DAY - 1, [9, 10]), (2 * DAY, [9])):
        place.other().clean(now_ms=now)
        assert offsets(dump(place.engine)) == expected


def test_a_reset_first_dirty_offset_is_reported_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """KAFKA-6266: told with every look at a partition that then had nothing to clean"""
    filled(place, min_cleanable_dirty_ratio=1).set_state(first_dirty_offset=10**6)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert place.one_round(1_000) is None
    told = [r for r in caplog.records if "first dirty offset" in r.message]
    assert len(told) == int(place.repairs_the_first_dirty_offset)
    assert place.status(1_000).first_dirty_offset == 0
