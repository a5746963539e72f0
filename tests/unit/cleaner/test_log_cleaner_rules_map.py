"""What Kafka's OffsetMapTest says, with its numbers, and the map's part of LogCleanerTest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.dedup.latest_records import build_offset_map
from kafkalog.cleaner.dedup.offset_map import SLOT_SIZE, OffsetMap
from kafkalog.cleaner.dedup.transactions import mapped_batches
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.unit.cleaner.naive import batch, foreign_log
from tests.unit.cleaner.test_offset_map import hashed, keys, put

MEMORY = 4096


def named(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def found(offset_map: OffsetMap, *numbers: int) -> list[int]:
    """The offsets that the map has for the keys of these numbers."""
    return [int(o) for o in offset_map.get(hashed(offset_map, keys(*named(*numbers))))]


def put_one(offset_map: OffsetMap, number: int, offset: int) -> bool:
    return put(offset_map, keys(*named(number), first=offset))[0] == 1


def filled() -> OffsetMap:
    """A map of 4 KiB whose slots are all taken, by keys from 37 on at offsets of that number."""
    offset_map = OffsetMap(MEMORY // SLOT_SIZE, 1.0)
    number = 37
    while offset_map.size < len(offset_map.slots):
        assert put_one(offset_map, number, number)
        number += 1
    return offset_map


def last_key(offset_map: OffsetMap) -> int:
    return 36 + len(offset_map.slots)


# --- OffsetMapTest -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, 100, 1000, 5000])
def test_what_was_put_is_found_in_48_bytes_a_key(count: int) -> None:
    """testBasicValidation (C1, C2)"""
    offset_map = OffsetMap.for_records(10**9, budget_bytes=count * 48)
    assert len(offset_map.slots) == 2 * count
    put(offset_map, keys(*named(*range(count))))
    assert found(offset_map, *range(count)) == list(range(count))
    assert found(offset_map, count, count + 1) == [-1, -1]


def test_a_cleared_map_knows_nothing() -> None:
    """testClear (C5)"""
    offset_map = OffsetMap(MEMORY // SLOT_SIZE)
    put(offset_map, keys(*named(*range(10))))
    assert found(offset_map, *range(10)) == list(range(10))
    offset_map.clear()
    assert found(offset_map, *range(10)) == [-1] * 10
    assert (offset_map.size, offset_map.latest_offset, offset_map.utilization) == (0, -1, 0.0)


def test_a_full_map_misses_an_absent_key_and_has_its_last_one() -> None:
    """testGetWhenFull (C4)"""
    offset_map = filled()
    last = last_key(offset_map)
    assert found(offset_map, last + 1, last) == [-1, last]
    assert not put_one(offset_map, last + 1, last + 1)
    assert not put_one(offset_map, last, last + 1)  # nor one that is there (C12)
    assert found(offset_map, last) == [last]


def test_a_later_latest_offset_changes_no_key() -> None:
    """testUpdateLatestOffset"""
    offset_map = filled()
    last = last_key(offset_map)
    offset_map.update_latest_offset(last + 40)
    assert found(offset_map, 40, last) == [40, last]
    assert offset_map.latest_offset == last + 40


def test_the_latest_offset_is_the_last_one_put() -> None:
    """testLatestOffset (C3)"""
    offset_map = filled()
    assert offset_map.latest_offset == last_key(offset_map)


def test_a_key_put_again_has_the_new_offset_and_no_slot_more() -> None:
    """C3"""
    offset_map = OffsetMap(10)
    assert put_one(offset_map, 1, 5) and put_one(offset_map, 1, 9)
    assert (found(offset_map, 1), offset_map.size, offset_map.latest_offset) == ([9], 1, 9)


def test_utilization_is_the_share_of_slots_that_are_taken() -> None:
    """testUtilization (C8)"""
    offset_map = OffsetMap(MEMORY // SLOT_SIZE, 1.0)
    assert offset_map.utilization == 0.0
    for number in range(37, 37 + MEMORY // SLOT_SIZE):
        put_one(offset_map, number, number)
        assert offset_map.utilization == offset_map.size / len(offset_map.slots)
    assert offset_map.utilization == 1.0


# --- sizes ---------------------------------------------------------------------------------------


def test_the_default_buffer_holds_as_many_keys_as_kafkas() -> None:
    """C1, C11: 128 MiB in slots of 24 bytes, nine tenths of them"""
    config = CleanerConfig()
    slots = config.dedupe_buffer_size // SLOT_SIZE
    assert (slots, int(slots * config.io_buffer_load_factor)) == (5_592_405, 5_033_164)
    assert config.of_one_thread().dedupe_buffer_size == 134_217_728
    four = CleanerConfig(threads=4).of_one_thread()
    assert four.dedupe_buffer_size == 33_554_432


@pytest.mark.parametrize("size", [0, 1, 24, 26])
def test_a_buffer_that_cannot_hold_one_key_is_refused_at_once(size: int) -> None:
    """C7"""
    with pytest.raises(InvalidInputError, match="dedupe_buffer_size"):
        CleanerConfig(dedupe_buffer_size=size)


@pytest.mark.parametrize("load_factor", [0.1, 0.5, 0.9])
def test_a_buffer_of_one_key_cleans(tmp_path: Path, load_factor: float) -> None:
    """C7"""
    size = SLOT_SIZE * int(1 / load_factor + 1)
    config = CleanerConfig(dedupe_buffer_size=size, io_buffer_load_factor=load_factor, spill=False)
    contents = [batch(i, [(f"{i % 3}", "v")]) for i in range(9)]
    (stats,) = clean(
        foreign_log(tmp_path, {0: contents, 9: []}), force=True, now_ms=1, config=config
    )
    assert (stats.error, stats.end_offset) == (None, 9)


# --- building ------------------------------------------------------------------------------------


def built(engine: DirectoryLog, start: int, end: int, offset_map: OffsetMap) -> tuple[int, int]:
    """Where the build ends, and how many records it read."""
    stats = CleanerStats("t", 0)
    with engine.snapshot("t", 0, whole=True) as snapshot:
        stop = build_offset_map(
            snapshot,
            start,
            end,
            offset_map,
            is_mapped=mapped_batches(snapshot, is_strict=False),
            stats=stats,
        )
    return stop, stats.map_records_read


@pytest.fixture
def five(tmp_path: Path) -> Iterator[DirectoryLog]:
    """Five records of five keys in one segment, batch by batch."""
    with foreign_log(tmp_path, {0: [batch(i, [(f"{i}", "v")]) for i in range(5)], 5: []}) as engine:
        yield engine


def test_a_build_from_within_a_segment_puts_what_lies_behind_until_it_is_full(
    five: DirectoryLog,
) -> None:
    """testBuildPartialOffsetMap (C10, C11); batches that end below the start are not read"""
    offset_map = OffsetMap(3, 0.75)
    assert built(five, 2, 5, offset_map) == (4, 2)
    assert found(offset_map, 0, 1, 2, 3, 4) == [-1, -1, 2, 3, -1]
    assert (offset_map.size, offset_map.latest_offset) == (2, 3)


def test_a_batch_around_the_start_is_read_whole_and_put_in_part(tmp_path: Path) -> None:
    """C10"""
    pairs = [(f"{i}", "v") for i in range(5)]
    offset_map = OffsetMap(3, 0.75)
    assert built(foreign_log(tmp_path, {0: [batch(0, pairs)], 5: []}), 2, 5, offset_map) == (4, 4)
    assert found(offset_map, 0, 1, 2, 3, 4) == [-1, -1, 2, 3, -1]


def test_a_build_knows_the_keys_of_its_range_and_no_others(tmp_path: Path) -> None:
    """testBuildOffsetMap (C9)"""
    contents = {
        base: [batch(i, [(f"{i}", "v")]) for i in range(base, base + 50)]
        for base in range(0, 500, 50)
    }
    engine = foreign_log(tmp_path, contents | {500: []})
    for start, end in ((0, 50), (50, 450), (450, 500)):
        offset_map = OffsetMap(1000)
        assert built(engine, start, end, offset_map) == (end, end - start)
        assert offset_map.latest_offset + 1 == end
        expected = [i if start <= i < end else -1 for i in range(500)]
        assert found(offset_map, *range(500)) == expected


def test_offsets_far_apart_fit_into_one_map(tmp_path: Path) -> None:
    """testBuildOffsetMapFakeLarge (C16)"""
    far = 7_206_178
    contents = [batch(0, [("0", "v")]), batch(far, [("1", "v")])]
    engine = foreign_log(tmp_path, {0: contents, far + 1: []})
    offset_map = OffsetMap(1000)
    assert built(engine, 0, far + 1, offset_map)[0] == far + 1
    assert (offset_map.latest_offset, offset_map.size) == (far, 2)
    assert found(offset_map, 0, 1) == [0, far]


def test_a_batch_gives_its_last_offset_also_where_its_last_records_are_gone(tmp_path: Path) -> None:
    """C20"""
    from dataclasses import replace

    first = replace(batch(0, [("0", "v")]), last=6)
    engine = foreign_log(tmp_path, {0: [first, batch(7, [("1", "v")])], 8: []})
    offset_map = OffsetMap(2, 0.75)  # one key
    assert built(engine, 0, 8, offset_map) == (7, 1)
    assert offset_map.latest_offset == 6
