"""Cleanings whose keys do not fit the memory: what stays, in how many rounds, and what is told."""

from __future__ import annotations

import random

import pytest

from kafkalog.cleaner import CleanerStats
from tests.unit.cleaner.naive import Batch, batch, dump, latest_values, naive_clean, records_of
from tests.unit.rules.places import Place

SMALL = {"dedupe_buffer_size": 24 * 30, "merge_batches": False}
"""27 keys."""


def written(place: Place, seed: int, *, keys: int = 300, commits: int = 30) -> Place:
    config = {"segment_bytes": 2_500, "delete_retention_ms": 500, "file_delete_delay_ms": 0}
    rng = random.Random(seed)
    return place.topic(**config).random_commits(rng, commits, keys=keys, rows_max=24, now_ms=1)


def cleaned(place: Place, now_ms: int, **settings: object) -> CleanerStats:
    (stats,) = place.settings(**{**SMALL, **settings}).log.clean("t", force=True, now_ms=now_ms)
    assert stats.error is None
    return stats


@pytest.mark.parametrize("slots", [3, 30, 200])
@pytest.mark.parametrize("seed", range(3))
def test_round_after_round_leaves_what_the_naive_cleaner_leaves_in_any_memory(
    place: Place, seed: int, slots: int
) -> None:
    rng = random.Random(seed)
    written(place, seed, commits=1).settings(dedupe_buffer_size=24 * slots, merge_batches=False)
    expected: list[Batch] = []
    first_dirty = end = 0
    for now in (1_000, 1_400, 1_600, 5_000):
        place.random_commits(rng, rng.randrange(20), keys=300, rows_max=24, now_ms=now)
        expected += [b for b in dump(place.engine) if b.base >= end]
        end = place.state().high_watermark
        for stats in place.log.clean("t", force=True, now_ms=now):
            assert (stats.error, stats.rounds) == (None, 1)
        expected = naive_clean(
            expected, first_dirty, end, now=now, retention=500, high_watermark=end
        )
        assert dump(place.engine) == expected
        first_dirty = end


def test_without_spilling_there_are_kafkas_rounds_with_the_same_end(place: Place) -> None:
    before = records_of(dump(written(place, 1).engine))
    stats = cleaned(place, 1_000, spill=False, merge_batches=True)
    assert (stats.rounds > 5, stats.spilled_bytes) == (True, 0)
    assert latest_values(records_of(dump(place.engine))) == latest_values(before)
    assert len(records_of(dump(place.engine))) == len(latest_values(before))


def test_spilling_is_told_in_the_statistics(place: Place) -> None:
    stats = cleaned(written(place, 1), 1_000)
    assert stats.rounds == 1
    assert 24 * 27 < stats.spilled_bytes <= 24 * stats.map_records_read


@pytest.mark.parametrize("slots", [2, 3, 10])
@pytest.mark.parametrize("seed", range(4))
def test_every_bounded_round_gets_on_whatever_offsets_are_missing(
    place: Place, seed: int, slots: int
) -> None:
    """KAFKA-8764: a round that ended at a gap was done again, for ever."""
    rng = random.Random(seed)
    segments: dict[int, list[Batch]] = {}
    offset = 0
    for _ in range(8):
        made = segments[offset] = []
        for _ in range(rng.randrange(1, 6)):
            offset += rng.choice([0, 0, 1, 40]) if made else 0
            made.append(batch(offset, [(f"k{rng.randrange(9)}", "v")] * rng.randrange(1, 4)))
            offset = made[-1].last + 1
        offset += rng.choice([1, 7])
    place.segments_of({**segments, offset: []}, min_cleanable_dirty_ratio=0)
    start = rng.randrange(offset // 2)
    place.set_state(first_dirty_offset=start)
    before = latest_values(records_of(dump(place.engine)))
    place.settings(dedupe_buffer_size=24 * slots, spill=False, merge_batches=False)
    while start < offset:
        stats = place.one_round(1_000)
        assert (stats.error, stats.start_offset) == (None, start)
        assert stats.end_offset > start
        start = stats.end_offset
    assert place.one_round(1_000) is None
    assert latest_values(records_of(dump(place.engine))) == before
