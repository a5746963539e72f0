"""The first pass: which keys of a range the offset map gets, and where it ends.

The numbers are those of Kafka's LogCleanerTest.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafkalog.cleaner.dedup.latest_records import build_offset_map
from kafkalog.cleaner.dedup.offset_map import SLOT_SIZE, OffsetMap
from kafkalog.cleaner.dedup.transactions import mapped_batches
from kafkalog.cleaner.state.stats import CleanerStats
from tests.unit.cleaner.naive import Batch, batch
from tests.unit.cleaner.test_offset_map import hashed, keys
from tests.unit.rules.places import Place


def singles(first: int, *names: str) -> list[Batch]:
    """Return a batch for each record, as a producer without batching writes."""
    return [batch(first + i, [(name, "v")]) for i, name in enumerate(names)]


def built(place: Place, start: int, end: int, offset_map: OffsetMap) -> tuple[int, int]:
    """Return where the build ends, and how many records it read."""
    stats = CleanerStats("t", 0)
    with place.engine.snapshot("t", 0, whole=True) as snapshot:
        stop = build_offset_map(
            snapshot,
            start,
            end,
            offset_map,
            is_mapped=mapped_batches(snapshot, is_strict=False),
            stats=stats,
        )
    return stop, stats.map_records_read


def found(offset_map: OffsetMap, *numbers: int) -> list[int]:
    """Return the offsets that the map has for the keys of these numbers."""
    named = keys(*(b"%d" % number for number in numbers))
    return [int(offset) for offset in offset_map.get(hashed(offset_map, named))]


def test_a_build_knows_the_keys_of_its_range_and_no_others(place: Place) -> None:
    """testBuildOffsetMap (C9)"""
    contents = {
        base: singles(base, *(f"{i}" for i in range(base, base + 50))) for base in range(0, 500, 50)
    }
    place.segments_of({**contents, 500: []})
    for start, end in ((0, 50), (50, 450), (450, 500)):
        offset_map = OffsetMap(1000)
        assert built(place, start, end, offset_map) == (end, end - start)
        assert (offset_map.latest_offset + 1, offset_map.size) == (end, end - start)
        expected = [i if start <= i < end else -1 for i in range(500)]
        assert found(offset_map, *range(500)) == expected


def test_a_build_from_within_a_segment_puts_what_lies_behind_until_it_is_full(
    place: Place,
) -> None:
    """testBuildPartialOffsetMap (C10, C11); batches that end below the start are not read"""
    place.segments_of({0: singles(0, "0", "1", "2", "3", "4"), 5: []})
    offset_map = OffsetMap(3, 0.75)
    assert built(place, 2, 5, offset_map) == (4, 2)
    assert found(offset_map, 0, 1, 2, 3, 4) == [-1, -1, 2, 3, -1]
    assert (offset_map.size, offset_map.latest_offset) == (2, 3)


def test_a_batch_around_the_start_is_read_whole_and_put_in_part(place: Place) -> None:
    """C10"""
    place.segments_of({0: [batch(0, [(f"{i}", "v") for i in range(5)])], 5: []})
    offset_map = OffsetMap(3, 0.75)
    assert built(place, 2, 5, offset_map) == (4, 4)
    assert found(offset_map, 0, 1, 2, 3, 4) == [-1, -1, 2, 3, -1]


def test_a_map_that_fills_within_a_batch_ends_within_it(place: Place) -> None:
    pairs = [("a", "1"), ("", "no key"), ("b", "2"), ("c", "3")]
    place.segments_of({0: [batch(0, [("a", "0")]), batch(1, pairs)], 5: []})
    assert built(place, 0, 5, OffsetMap(3, 0.75))[0] == 4
    # Full at the end of one batch, and the next batch only begins: the round ends between them.
    assert built(place, 0, 5, OffsetMap(2, 0.75))[0] == 1


@pytest.mark.parametrize("active_base", [11, 15, 30])
def test_the_end_passes_gaps_between_segments(place: Place, active_base: int) -> None:
    place.segments_of({0: singles(0, *(f"k{i}" for i in range(10))), active_base: []})
    assert built(place, 0, active_base, OffsetMap(100))[0] == active_base


def test_a_map_that_fills_behind_a_gap_ends_at_the_next_segment(place: Place) -> None:
    place.segments_of({0: singles(0, "a"), 20: singles(20, "b"), 30: []})
    assert built(place, 0, 30, OffsetMap(2, 0.75))[0] == 20


def test_offsets_far_apart_fit_into_one_map(place: Place) -> None:
    """testBuildOffsetMapFakeLarge (C16)"""
    far = 7_206_178
    contents = [*singles(0, "0"), *singles(far, "1")]
    place.segments_of({0: contents, far + 1: []}, segment_ms=2**63 - 1)
    offset_map = OffsetMap(1000)
    assert built(place, 0, far + 1, offset_map)[0] == far + 1
    assert (offset_map.latest_offset, offset_map.size) == (far, 2)
    assert found(offset_map, 0, 1) == [0, far]


def test_a_batch_gives_its_last_offset_also_where_its_last_records_are_gone(place: Place) -> None:
    """C20"""
    first = replace(batch(0, [("0", "v")]), last=6)
    place.segments_of({0: [first, *singles(7, "1")], 8: []})
    offset_map = OffsetMap(2, 0.75)  # one key
    assert built(place, 0, 8, offset_map) == (7, 1)
    assert offset_map.latest_offset == 6


@pytest.mark.parametrize("load_factor", [0.1, 0.5, 0.9])
def test_a_buffer_of_one_key_cleans(place: Place, load_factor: float) -> None:
    """C7"""
    place.segments_of({0: singles(0, *(f"{i % 3}" for i in range(9))), 9: []})
    size = SLOT_SIZE * int(1 / load_factor + 1)
    place.settings(dedupe_buffer_size=size, io_buffer_load_factor=load_factor, spill=False)
    (stats,) = place.log.clean(force=True, now_ms=1)
    assert (stats.error, stats.end_offset) == (None, 9)
