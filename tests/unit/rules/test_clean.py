"""What a cleaning leaves of a log: records, tombstones, empty batches, indexes, figures."""

from __future__ import annotations

import random
import struct

import pytest

from kafkalog.cleaner import CleanerStats
from kafkalog.storage_engine.format import layout
from tests.builders.batch_builder import Record
from tests.unit.cleaner.naive import (
    Batch,
    batch,
    dump,
    latest_values,
    naive_clean,
    offsets,
    records_of,
    singles,
)
from tests.unit.rules.acts import KAFKAS
from tests.unit.rules.places import DAY_MS as DAY
from tests.unit.rules.places import Place


def cleaned(place: Place, now_ms: int = 10_000, slots: int = 5_000) -> CleanerStats:
    """Clean by force with Kafka's batches and rounds."""
    place.settings(**{**KAFKAS, "dedupe_buffer_size": 24 * slots})
    (stats,) = place.log.clean("t", force=True, now_ms=now_ms)
    assert stats.error is None
    return stats


def left(place: Place) -> list[Batch]:
    return dump(place.engine)


# --- against the naive cleaner -------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("seed", range(2))
def test_cleaning_again_and_again_leaves_what_the_naive_cleaner_leaves(
    place: Place, codec: str, seed: int
) -> None:
    rng = random.Random(seed)
    place.topic(compression_type=codec, segment_bytes=1200, delete_retention_ms=500)
    place.settings(**KAFKAS)
    expected: list[Batch] = []
    first_dirty = end = 0
    for now in (1_000, 1_400, 1_600, 5_000):
        for i in range(rng.randrange(8)):
            rows = [
                (f"k{rng.randrange(25)}", None if rng.random() < 0.3 else f"{now}-{i}-{j}" * 3)
                for j in range(rng.randrange(1, 12))
            ]
            place.append(*rows, now_ms=now)
        expected += [b for b in left(place) if b.base >= end]
        end = place.state().high_watermark
        assert not any(stats.error for stats in place.log.clean("t", force=True, now_ms=now))
        expected = naive_clean(
            expected, first_dirty, end, now=now, retention=500, high_watermark=end
        )
        assert left(place) == expected
        first_dirty = end
    assert place.state().first_dirty_offset == end


@pytest.mark.slow
def test_reading_a_cleaned_log_gives_the_same_latest_values_in_any_budget(place: Place) -> None:
    for slots in (3, 30, 1000):
        rng = random.Random(5)
        topic = f"t{slots}"
        place.topic(topic, segment_bytes=900)
        place.commits([(f"k{rng.randrange(30)}", f"{i}-{j}") for j in range(8)] for i in range(20))
        before = records_of(dump(place.engine, topic))
        place.settings(**{**KAFKAS, "dedupe_buffer_size": 24 * slots})
        (stats,) = place.log.clean(topic, force=True, now_ms=10_000)
        after = records_of(dump(place.engine, topic))
        assert latest_values(after) == latest_values(before)
        assert len(after) == len(latest_values(before))
        assert stats.end_offset == 160
        assert (stats.rounds > 1) == (slots < 1000)
        assert set(after) <= set(before)


# --- Kafka's rules and their numbers -------------------------------------------------------------


def test_a_segment_larger_than_the_map_is_cleaned_in_rounds(place: Place) -> None:
    """Kafka: testPartialSegmentClean. One key fits; cleaned from offset 2, then 3, then 4."""
    place.segments_of({0: singles(0, "0", "1", "0", "1", "0"), 5: []}, min_cleanable_dirty_ratio=0)
    place.set_state(first_dirty_offset=2).settings(**{**KAFKAS, "dedupe_buffer_size": 24 * 2})
    found = []
    while place.one_round(1) is not None:
        found.append(offsets(left(place)))
    rounds = [[1, 2, 3, 4], [2, 3, 4], [3, 4]]
    assert found == (rounds if place.swaps_after_each_round else rounds[-1:])


def test_the_statistics_of_a_cleaning_count_records_and_bytes(place: Place) -> None:
    place.segments_of({0: singles(0, "0", "1", "0", "1", "0"), 5: []})
    size = place.set_state(first_dirty_offset=2).sizes()[0]
    stats = cleaned(place)
    assert (stats.end_offset, stats.records_read, stats.bytes_read) == (5, 5, size)
    assert (stats.records_kept, stats.keyless_records) == (2, 0)
    assert stats.bytes_written == place.sizes()[0]


def test_obsolete_keys_go_and_all_others_stay_intact(place: Place) -> None:
    segments = {
        base: [batch(base, [(f"k{i % 8}", f"v{i}") for i in range(base, base + 4)])]
        for base in (0, 4, 8)
    }
    cleaned(place.segments_of(segments | {12: []}))
    assert offsets(left(place)) == list(range(4, 12))


def test_a_batch_in_which_all_records_stay_is_copied_byte_for_byte(place: Place) -> None:
    first, second = batch(0, [("a", "1"), ("b", "1")]), batch(2, [("c", "1")])
    segments = {0: [first, second], 3: [batch(3, [("d", "1"), ("c", "2")])], 5: []}
    cleaned(place.segments_of(segments))
    assert next(iter(place.content().values())) == first.data + segments[3][0].data


def test_offsets_timestamps_and_the_last_offset_of_a_filtered_batch_stay(place: Place) -> None:
    source = batch(0, [("a", "1"), ("b", "1"), ("a", "2"), ("c", "1"), ("b", "2")])
    cleaned(place.segments_of({0: [source], 5: [batch(5, [("b", "3")])], 6: []}))
    (first, _) = left(place)
    assert (first.base, first.last) == (0, 4)
    assert [(r.offset, r.timestamp) for r in first.records] == [(2, 2000), (3, 3000)]


def test_records_without_a_key_go(place: Place) -> None:
    place.segments_of({0: [batch(0, [("", "x"), ("a", "y"), ("", "z")])], 3: []})
    stats = cleaned(place)
    assert [record.key for record in records_of(left(place))] == [b"a"]
    assert stats.keyless_records == 2


def test_records_beyond_the_end_of_the_round_stay_also_without_a_key(place: Place) -> None:
    pairs = [("a", "1"), ("a", "2"), ("b", "1"), ("", "x"), ("b", "2")]
    place.segments_of({0: [batch(0, pairs)], 5: []}, min_cleanable_dirty_ratio=0)
    place.settings(**{**KAFKAS, "dedupe_buffer_size": 24 * 2})
    found = []
    while place.one_round(1) is not None:
        found.append(offsets(left(place)))
    if place.swaps_after_each_round:  # the map took offset 0 alone
        assert found[:2] == [[0, 1, 2, 3, 4], [1, 2, 3, 4]]
    assert found[-1] == [1, 4]


def test_an_empty_value_is_data_and_no_tombstone(place: Place) -> None:
    place.segments_of({0: [batch(0, [("a", "1"), ("a", "")])], 2: []}).settings(**KAFKAS)
    for now in (1, DAY + 1, 3 * DAY):
        place.log.clean(force=True, now_ms=now)
    assert [(r.offset, r.value) for r in records_of(left(place))] == [(1, b"")]


# --- tombstones ----------------------------------------------------------------------------------


def test_a_tombstone_goes_only_in_the_second_cleaning_past_its_horizon(place: Place) -> None:
    place.segments_of({0: [batch(0, [("a", "1"), ("a", None), ("b", "1")])], 3: []})
    cleaned(place, now_ms=1_000)
    assert [(b.horizon, offsets([b])) for b in left(place)] == [(1_000 + DAY, [1, 2])]
    assert place.log.clean(force=True, now_ms=1_000 + DAY - 1) == []  # nothing to do
    cleaned(place, now_ms=1_000 + DAY)
    # Sticky: the batch keeps its horizon though no tombstone is left in it.
    assert [(b.horizon, offsets([b])) for b in left(place)] == [(1_000 + DAY, [2])]


def test_with_no_retention_a_tombstone_still_takes_two_cleanings(place: Place) -> None:
    place.segments_of({0: [batch(0, [("a", "1"), ("a", None)])], 2: []}, delete_retention_ms=0)
    cleaned(place, now_ms=7)
    assert offsets(left(place)) == [1]
    cleaned(place, now_ms=7)
    assert offsets(left(place)) == []


def test_the_horizon_is_the_cleaners_time_and_not_the_records(place: Place) -> None:
    future = Record(0, 10**14, b"a", None)
    never = {"segment_ms": 2**63 - 1}
    place.segments_of({0: [Batch(0, 0, (future,)), batch(1, [("b", "1")])], 2: []}, **never)
    cleaned(place, now_ms=1_000)
    (first, _) = left(place)
    assert (first.horizon, first.records) == (1_000 + DAY, (future,))


def test_an_obsolete_tombstone_goes_at_once(place: Place) -> None:
    cleaned(place.segments_of({0: [batch(0, [("a", None), ("a", "1")])], 2: []}))
    assert offsets(left(place)) == [1]
    assert left(place)[0].horizon is None


def test_a_horizon_stays_when_the_retention_changes(place: Place) -> None:
    place.segments_of({0: [batch(0, [("a", None), ("b", "1")])], 2: []})
    cleaned(place, now_ms=1_000)
    place.log.alter_topic("t", {"delete.retention.ms": "5"})
    place.append(("b", "2"))
    cleaned(place, now_ms=2_000)
    assert [b.horizon for b in left(place)] == [1_000 + DAY, None]


def test_a_horizon_past_the_range_is_not_set(place: Place) -> None:
    place.segments_of({0: [batch(0, [("a", None)])], 1: []})
    cleaned(place, now_ms=layout.INT64_MAX - DAY + 1)
    assert [b.horizon for b in left(place)] == [None]


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_tombstone_goes_in_time_however_often_its_segment_is_written(
    place: Place, is_merged: bool
) -> None:
    """KAFKA-8522: each cleaning gave the file a new time, and with it every tombstone a new day"""
    place.topic(min_cleanable_dirty_ratio=0).settings(merge_batches=is_merged)
    place.append(("a", "1"), ("a", None))
    now, step = 10 * DAY, DAY // 8
    for i in range(10):
        place.append(("x", f"{i}"), (f"y{i}", "1"))
        place.log.clean("t", force=True, now_ms=now + i * step)
        assert (b"a" in {r.key for r in records_of(left(place))}) == (i < 8), i


# --- batches of any size -------------------------------------------------------------------------


@pytest.mark.parametrize("io_buffer_size", [1, 1024])
def test_a_batch_beyond_the_buffer_and_max_message_bytes_is_cleaned(
    place: Place, io_buffer_size: int
) -> None:
    made = [batch(i, [(f"k{i % 3}", "x" * (1 << 18) + str(i))]) for i in range(6)]
    place.segments_of({0: made, 6: []}, max_message_bytes=1000)
    (stats,) = place.settings(io_buffer_size=io_buffer_size).log.clean(force=True, now_ms=1)
    assert (stats.error, offsets(left(place))) == (None, [3, 4, 5])


@pytest.mark.parametrize("length", [0, 13, 48, 200, 10**6, 2**31 - 1])
def test_a_batch_whose_size_is_wrong_is_not_cleaned_away(place: Place, length: int) -> None:
    place.segments_of({0: singles(0, "a", "a", "a"), 3: []})
    name, data = next(iter(place.content().items()))
    at = len(data) // 3 + 8
    place.put_content(name, data[:at] + struct.pack(">i", length) + data[at + 4 :])
    before = place.content()
    (stats,) = place.log.clean(force=True, now_ms=1)
    assert name in str(stats.error)
    assert place.content() == before


# --- batches of which no record stays ------------------------------------------------------------


def test_the_batch_that_ends_at_the_high_watermark_stays_empty(place: Place) -> None:
    place.segments_of({0: [batch(0, [("a", None), ("", "x")], horizon=5)], 2: []})
    cleaned(place, now_ms=10)
    (last,) = left(place)
    assert (last.base, last.last, last.records, last.horizon) == (0, 1, (), None)
    assert place.sizes()[0] == 61
    place.append(("b", "1"))
    cleaned(place, now_ms=20)
    assert [b.base for b in left(place)] == [2]


def test_an_empty_batch_keeps_its_producer_sequence_and_largest_timestamp(place: Place) -> None:
    segments = {
        0: [batch(0, [("a", "1"), ("b", "1")], producer=1, sequence=0)],
        2: [batch(2, [("a", "2")], producer=1, sequence=2)],
        3: [batch(3, [("a", "3"), ("b", "3")], producer=2, sequence=0)],
        5: [],
    }
    cleaned(place.segments_of(segments))
    # Producer 1's last batch keeps its header, the one before it goes.
    found = left(place)
    assert [(b.base, b.last, b.producer, b.sequence, len(b.records)) for b in found] == [
        (2, 2, 1, 2, 0),
        (3, 4, 2, 0, 2),
    ]
    fields = layout.BATCH_HEADER.unpack(next(iter(place.content().values()))[:61])
    assert fields[5:9] == (0, 0, -1, 2000)
    assert place.log.clean(force=True, now_ms=10_000) == []
    place.append(("c", "1"))
    cleaned(place)
    assert [b.base for b in left(place)] == [2, 3, 5]


def test_a_producers_last_batch_is_found_in_the_active_segment_too(place: Place) -> None:
    segments = {
        0: [batch(0, [("a", "1")], producer=1, sequence=0)],
        1: [batch(1, [("a", "2")])],
        2: [batch(2, [("z", "1")], producer=1, sequence=1)],
    }
    place.segments_of(segments, min_cleanable_dirty_ratio=0).settings(**KAFKAS)
    place.log.clean(now_ms=1)
    assert [b.base for b in left(place)] == [1, 2]


def test_a_producers_last_batch_is_found_also_after_swaps_of_the_round(place: Place) -> None:
    segments = {
        0: [batch(0, [("a", "1")]), batch(1, [("z", "1")])],
        2: [batch(2, [("b", "1")], producer=1, sequence=0)],
        3: [batch(3, [("c", "1")], producer=2, sequence=0)],
        4: [batch(4, [("a", "2"), ("b", "2"), ("c", "2")], producer=2, sequence=1)],
        7: [],
    }
    place.segments_of(segments)
    place.log.alter_topic("t", {"segment.bytes": "75"})
    cleaned(place)
    assert [(b.base, b.producer, len(b.records)) for b in left(place)] == [
        (1, -1, 1),
        (2, 1, 0),
        (4, 2, 3),
    ]


def test_an_emptied_segment_stays_until_it_is_merged(place: Place) -> None:
    segments = {
        0: [batch(0, [("a", "1")])],
        1: [batch(1, [("b", "1")])],
        2: [batch(2, [("a", "2"), ("b", "2")])],
        4: [],
    }
    cleaned(place.segments_of(segments, segment_bytes=75))
    assert [size > 0 for size in place.sizes()] == [False, False, True, False]
    place.append(("c", "1"))
    cleaned(place)
    assert place.bases() == [0, 2, 4, 5]


# --- indexes and figures -------------------------------------------------------------------------


def test_the_indexes_of_a_cleaned_segment_lead_to_its_batches(place: Place) -> None:
    place.topic(index_interval_bytes=100, segment_bytes=100_000)
    rng = random.Random(3)
    for i in range(80):
        rows = [(f"k{rng.randrange(900)}", f"{i}") for _ in range(10)]
        place.append(*rows, now_ms=rng.randrange(1_000, 5_000))
    cleaned(place)
    data = next(iter(place.content().values()))
    # Kafka's rule said naively: one decision per batch, the bytes since the last entry first.
    position = since = 0
    top, top_offset = -1, 0
    entries, times = [], []
    while position < len(data):
        fields = layout.BATCH_HEADER.unpack_from(data, position)
        last, size = fields[0] + fields[6], fields[1] + 12
        if fields[8] > top:
            top, top_offset = fields[8], last
        if since > 100:
            entries.append((last, position))
            if not times or top > times[-1][0]:
                times.append((top, top_offset))
            since = 0
        since += size
        position += size
    if not times or top > times[-1][0]:
        times.append((top, top_offset))
    assert len(entries) > 50
    assert [*struct.iter_unpack(">ii", place.sections(layout.INDEX)[0])] == entries
    assert [*struct.iter_unpack(">qi", place.sections(layout.TIME_INDEX)[0])] == times


def test_how_far_the_log_is_clean_is_known_to_every_process(place: Place) -> None:
    cleaned(place.segments_of({0: [batch(0, [("a", "1"), ("a", "2")])], 2: []}))
    assert place.other(read_only=True).describe("t").partitions[0].first_dirty_offset == 2


def test_a_clean_log_is_not_written_again(place: Place) -> None:
    """An object without a key index is written once more, with the same bytes, to get one."""
    place.segments_of({0: singles(0, "a", "b", "c"), 3: []})
    before = place.content()
    cleaned(place)
    after = place.content()
    if place.gets_key_indexes_beside_what_stays:
        assert after == before
    assert {*before.values()} <= {*after.values()}
    assert place.log.clean(force=True, now_ms=10_001) == []
    assert place.content() == after
