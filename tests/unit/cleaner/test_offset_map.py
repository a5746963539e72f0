from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kafkalog.cleaner.dedup.offset_map import WHOLE, HashPart, OffsetMap
from kafkalog.errors import CorruptBatchError, InvalidInputError


@dataclass
class Keys:
    """As much of a record table as the map looks at."""

    arena: npt.NDArray[np.uint8]
    key_positions: npt.NDArray[np.int64]
    key_sizes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def keys(*items: bytes | None, first: int = 0) -> Keys:
    sizes = [-1 if item is None else len(item) for item in items]
    lengths = np.array([max(size, 0) for size in sizes], dtype=np.int64)
    return Keys(
        np.frombuffer(b"".join(item or b"" for item in items), dtype=np.uint8),
        np.cumsum(lengths) - lengths,
        np.array(sizes, dtype=np.int64),
        np.arange(first, first + len(items), dtype=np.int64),
    )


def hashed(offset_map: OffsetMap, records: Keys) -> npt.NDArray[np.uint64]:
    return offset_map.hash(records, path="f", file_position=0)


def put(offset_map: OffsetMap, records: Keys, **span: int) -> tuple[int, int]:
    return offset_map.put(
        hashed(offset_map, records),
        records.key_sizes,
        records.offsets,
        **span,
    )


def test_two_maps_hash_the_same_key_under_different_secrets() -> None:
    records = keys(b"key")
    assert (hashed(OffsetMap(4), records) != hashed(OffsetMap(4), records)).any()


def test_a_key_outside_of_the_bytes_is_a_corrupt_batch() -> None:
    records = keys(b"one", b"two")
    records.key_positions[1] = 4
    with pytest.raises(CorruptBatchError, match="offset 1"):
        hashed(OffsetMap(4), records)


def test_an_absent_key_has_no_offset_and_a_present_one_its_latest() -> None:
    offset_map = OffsetMap(10)
    put(offset_map, keys(b"a", b"b", b"a", None, b""))
    assert offset_map.get(hashed(offset_map, keys(b"a", b"b", b"", b"c"))).tolist() == [2, 1, 4, -1]
    assert (offset_map.size, offset_map.latest_offset) == (3, 4)


def test_the_capacity_is_the_slots_times_the_load_factor_rounded_down() -> None:
    assert OffsetMap(3, 0.75).capacity == 2
    assert OffsetMap(2, 0.9).capacity == 1
    with pytest.raises(InvalidInputError, match="dedupe_buffer_size"):
        OffsetMap(1, 0.9)


def test_the_next_keyed_record_after_the_map_is_full_ends_the_build_even_if_it_is_known() -> None:
    offset_map = OffsetMap(3, 0.75)
    assert put(offset_map, keys(b"a", b"b", None, b"a")) == (3, 1)
    assert offset_map.is_full
    assert offset_map.get(hashed(offset_map, keys(b"a"))).tolist() == [0]


def test_a_map_filled_to_its_last_slot_finds_what_it_has_and_misses_what_it_has_not() -> None:
    offset_map = OffsetMap(64, 1.0)
    names = [b"%d" % i for i in range(64)]
    assert put(offset_map, keys(*names)) == (64, 63)
    assert offset_map.get(hashed(offset_map, keys(*names))).tolist() == list(range(64))
    assert offset_map.get(hashed(offset_map, keys(b"x", b"y"))).tolist() == [-1, -1]


def test_a_cleared_map_is_empty_and_splits_keys_as_before() -> None:
    offset_map = OffsetMap(10)
    records = keys(b"a", b"b")
    before = hashed(offset_map, records)
    put(offset_map, records)
    offset_map.clear()
    assert (offset_map.size, offset_map.latest_offset) == (0, -1)
    assert offset_map.get(before).tolist() == [-1, -1]
    assert (hashed(offset_map, records) == before).all()


def test_the_budget_is_a_limit_and_not_a_reservation() -> None:
    assert len(OffsetMap.for_records(100, budget_bytes=1 << 27).slots) == 113
    assert len(OffsetMap.for_records(10**12, budget_bytes=1 << 27).slots) == (1 << 27) // 24
    assert OffsetMap.for_records(1000, budget_bytes=1 << 27).capacity >= 1000


@pytest.mark.parametrize("seed", range(20))
def test_the_map_is_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    offset_map = OffsetMap(rng.randrange(20, 200), 0.9)
    model: dict[bytes, int] = {}
    first = 0
    for _ in range(5):
        names = [
            None if rng.random() < 0.1 else b"%d" % rng.randrange(60)
            for _ in range(rng.randrange(1, 60))
        ]
        start, end = sorted(rng.randrange(first, first + len(names) + 1) for _ in range(2))
        stop, _ = put(offset_map, keys(*names, first=first), start=start, end=end)
        for index, name in enumerate(names):
            if name is None or not start <= first + index < end:
                continue
            if len(model) >= offset_map.capacity:
                assert stop == index
                break
            model[name] = first + index
        else:
            assert stop == len(names)
        wanted = [b"%d" % i for i in range(70)]
        found = offset_map.get(hashed(offset_map, keys(*wanted))).tolist()
        assert found == [model.get(name, -1) for name in wanted]
        assert offset_map.size == len(model)
        first += len(names)


def test_every_key_is_in_exactly_one_part_of_a_split() -> None:
    names = [b"%d" % i for i in range(500)]
    parts = [quarter for half in WHOLE.halves() for quarter in half.halves()]
    found = []
    offset_map = OffsetMap(1000)
    hashes = hashed(offset_map, keys(*names))
    for part in parts:
        offset_map.clear()
        records = keys(*names)
        offset_map.put(hashes, records.key_sizes, records.offsets, part=part)
        found.append({i for i, offset in enumerate(offset_map.get(hashes).tolist()) if offset >= 0})
    assert set.union(*found) == set(range(500))
    assert sum(map(len, found)) == 500
    assert min(map(len, found)) > 60
    assert HashPart(2, 3).mask == 3


@pytest.mark.parametrize("at_once", [1, 3, 1 << 16])
def test_the_offsets_of_a_map_are_those_of_its_latest_records_in_order(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.cleaner.dedup.offset_map._TAKEN_AT_ONCE", at_once)
    rng = random.Random(at_once)
    names = [b"key-%d" % rng.randrange(40) for _ in range(200)]
    offset_map = OffsetMap(60)
    put(offset_map, keys(*names))
    latest = {name: offset for offset, name in enumerate(names)}
    assert offset_map.take_offsets().tolist() == sorted(latest.values())
    assert offset_map.size == 0
    offset_map.clear()
    put(offset_map, keys(b"one"))
    assert offset_map.take_offsets().tolist() == [0]
    assert OffsetMap(5).take_offsets().tolist() == []
