"""What Kafka's OffsetMapTest says, with its numbers; a build is in `rules/test_offset_map`."""

from __future__ import annotations

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.dedup.offset_map import SLOT_SIZE, OffsetMap
from kafkalog.errors import InvalidInputError
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


# --- building ------------------------------------------------------------------------------------
