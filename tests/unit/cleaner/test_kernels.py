"""Every kernel against a naive twin, on small random arrays."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kafkalog.cleaner.dedup import kernels
from tests.unit.cleaner.naive import siphash_128

pytestmark = pytest.mark.usefixtures("compared_kernels")

SECRET = np.frombuffer(bytes(range(16)), dtype=np.uint64)
NO_MASK = np.uint64(0)
EVER = 2**62
NO_BITS = (np.empty(0, dtype=np.uint8), 0)


def integers(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def hashes_of(numbers: list[int]) -> npt.NDArray[np.uint64]:
    """Hashes that collide in their first word's place as often as the table is small."""
    return np.array([[n * 0x9E3779B97F4A7C15 % 2**64, n] for n in numbers], dtype=np.uint64)


def table(known: dict[int, int], slots: int = 64) -> npt.NDArray[np.uint64]:
    """A table that holds offset `known[n]` for the hash of n."""
    found = np.zeros((slots, 3), dtype=np.uint64)
    numbers = sorted(known, key=lambda n: known[n])
    if numbers:
        kernels.put_offsets(
            found, hashes_of(numbers), integers([1] * len(numbers)),
            integers([known[n] for n in numbers]), 0, 0, EVER, slots, 0, NO_MASK, NO_MASK,
            *NO_BITS,
        )  # fmt: skip
    return found


def set_bits(bits: npt.NDArray[np.uint8], start: int) -> set[int]:
    return set((np.flatnonzero(np.unpackbits(bits, bitorder="little")) + start).tolist())


# --- hash_keys -----------------------------------------------------------------------------------


def test_hash_keys_is_siphash_2_4_of_128_bits() -> None:
    texts = [bytes(range(size)) for size in range(70)] + [bytes(i % 256 for i in range(300))]
    sizes = integers([len(text) for text in texts])
    hashes = np.empty((len(texts), 2), dtype=np.uint64)
    arena = np.frombuffer(b"".join(texts), dtype=np.uint8)
    assert kernels.hash_keys(arena, np.cumsum(sizes) - sizes, sizes, SECRET, hashes) == -1
    found = [row.astype("<u8").tobytes() for row in hashes]
    # The first two of the reference implementation's vectors (vectors_sip128).
    assert found[0].hex() == "a3817f04ba25a8e66df67214c7550293"
    assert found[1].hex() == "da87c1d86b99af44347659119b22fc45"
    assert found == [siphash_128(bytes(range(16)), text) for text in texts]


@pytest.mark.parametrize(
    ("position", "size"), [(-1, 1), (0, 9), (8, 1), (4, 5), (2**62, 1), (0, 2**62)]
)
def test_hash_keys_reports_a_key_that_is_not_inside_the_arena(position: int, size: int) -> None:
    arena = np.zeros(8, dtype=np.uint8)
    hashes = np.empty((3, 2), dtype=np.uint64)
    places = (integers([0, 8, position]), integers([8, 0, size]))
    assert kernels.hash_keys(arena, *places, SECRET, hashes) == 2


# --- put_offsets, get_offsets --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_put_offsets_and_get_offsets_are_a_dict_of_limited_size(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.randrange(1, 12)
    capacity = rng.randrange(1, slots + 1)
    numbers = [rng.randrange(1, 16) for _ in range(40)]
    sizes = [rng.choice([-1, 0, 3, 3]) for _ in numbers]
    start, end = sorted(rng.randrange(45) for _ in range(2))
    mask, prefix = rng.choice([(0, 0), (1, 1), (3, 2)])
    model: dict[int, int] = {}
    replaced: set[int] = set()
    stop, last = len(numbers), -1
    for i, number in enumerate(numbers):
        if sizes[i] < 0 or not start <= i < end or number & mask != prefix:
            continue
        if len(model) >= capacity:
            stop = i
            break
        if number in model:
            replaced.add(model[number])
        model[number], last = i, i
    bits, bits_start = np.zeros(3, dtype=np.uint8), rng.choice([0, 5, 20])
    found = np.zeros((slots, 3), dtype=np.uint64)
    result = kernels.put_offsets(
        found, hashes_of(numbers), integers(sizes), np.arange(len(numbers)), 0, start, end,
        capacity, 0, np.uint64(mask), np.uint64(prefix), bits, bits_start,
    )  # fmt: skip
    assert set_bits(bits, bits_start) == {r for r in replaced if 0 <= r - bits_start < 24}
    assert result == (stop, len(model), last)
    out = np.empty(20, dtype=np.int64)
    kernels.get_offsets(found, hashes_of(list(range(1, 21))), out)
    assert out.tolist() == [model.get(number, -1) for number in range(1, 21)]


# --- keep_records --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_keep_records_keeps_what_kafka_keeps(seed: int) -> None:
    rng = random.Random(seed)
    n, batches = 60, 6
    keys = [rng.choice([-1, 0, 3, 3, 3]) for _ in range(n)]
    values = [rng.choice([-1, 0, 5]) for _ in range(n)]
    batch = sorted(rng.randrange(batches) for _ in range(n))
    obsolete = [rng.random() < 0.5 for _ in range(n)]
    expired = [rng.random() < 0.5 for _ in range(batches)]
    control = [rng.random() < 0.2 for _ in range(batches)]
    latest = rng.randrange(n)
    keep, kept, tombstones, keyless = [], [0] * batches, [0] * batches, 0
    for i in range(n):
        stay = True
        if i <= latest and not control[batch[i]]:
            if keys[i] < 0:
                stay = False
                keyless += 1
            elif obsolete[i] or (values[i] < 0 and expired[batch[i]]):
                stay = False
        keep.append(stay)
        kept[batch[i]] += stay
        tombstones[batch[i]] += stay and values[i] < 0 and not control[batch[i]]
    out: list[Any] = [np.empty(n, np.bool_), np.zeros(batches, int), np.zeros(batches, int)]
    count = kernels.keep_records(
        np.array(obsolete), integers(keys), integers(values), np.arange(n),
        np.array(batch, dtype=np.int32), np.array(control), np.array(expired), latest, *out,
    )  # fmt: skip
    assert (count, *(array.tolist() for array in out)) == (keyless, keep, kept, tombstones)


# --- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_test_bits_and_find_covered_look_at_the_bits_of_offsets(seed: int) -> None:
    rng = random.Random(seed)
    start, count = rng.randrange(100), 8 * rng.randrange(1, 12)
    known = {start + place for place in range(count) if rng.random() < 0.8}
    bits = np.packbits([start + place in known for place in range(count)], bitorder="little")
    offsets = list(range(max(0, start - 9), start + count + 20))
    flags = np.ones(len(offsets), dtype=np.bool_)
    kernels.test_bits(bits, start, integers(offsets), flags)
    assert flags.tolist() == [offset in known for offset in offsets]
    ranges = [(first, min(first + rng.randrange(20), offsets[-1])) for first in offsets[:-20]]
    counts = [sum(o in known for o in range(a, b + 1)) - rng.choice([0, 0, 1]) for a, b in ranges]
    flags = np.ones(len(ranges), dtype=np.bool_)
    kernels.find_covered(
        bits, start, integers([a for a, _ in ranges]), integers([b for _, b in ranges]),
        integers(counts), flags,
    )  # fmt: skip
    assert flags.tolist() == [
        start <= a and b < start + count and sum(o in known for o in range(a, b + 1)) == n
        for (a, b), n in zip(ranges, counts, strict=True)
    ]


# --- the spilled keys ----------------------------------------------------------------------------


def rows_of(pairs: list[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    """Rows (hash, hash, offset + 1) of (number, offset) pairs."""
    rows = np.empty((len(pairs), 3), dtype=np.uint64)
    rows[:, :2] = hashes_of([number for number, _ in pairs]).reshape(-1, 2)
    rows[:, 2] = [offset + 1 for _, offset in pairs]
    return rows


def turned(hashes: npt.NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Both words of hashes (n, 2 or 3), the first one turned left by 8 bits."""
    return [
        ((int(row[0]) << 8 | int(row[0]) >> 56) % 2**64, int(row[1])) for row in hashes.tolist()
    ]


def random_pairs(rng: random.Random, count: int, keys: int) -> list[tuple[int, int]]:
    return [(rng.randrange(keys), offset) for offset in rng.sample(range(10 * count), count)]


@pytest.mark.parametrize("seed", range(5))
def test_mark_obsolete_marks_records_of_which_the_table_knows_a_newer_one(seed: int) -> None:
    rng = random.Random(seed)
    known = {n: rng.randrange(100) for n in rng.sample(range(40), 20)}
    numbers = [rng.randrange(50) for _ in range(100)]
    sizes = [rng.choice([-1, 0, 5]) for _ in numbers]
    offsets = [rng.randrange(120) for _ in numbers]
    flags = np.ones(100, dtype=np.bool_)
    kernels.mark_obsolete(
        table(known), hashes_of(numbers), integers(sizes), integers(offsets), 90, flags
    )
    assert flags.tolist() == [
        size >= 0 and offset <= 90 and known.get(number, -1) > offset
        for number, size, offset in zip(numbers, sizes, offsets, strict=True)
    ]


def test_compact_slots_moves_what_is_there_to_the_front() -> None:
    slots = table({n: n + 5 for n in range(30)}, slots=64)
    expected = [row for row in slots.tolist() if row[2]]
    assert kernels.compact_slots(slots) == 30
    assert slots[:30].tolist() == expected
    assert kernels.compact_slots(np.zeros((4, 3), dtype=np.uint64)) == 0


@pytest.mark.parametrize("count", [0, 1, 2, 300, 5000])
def test_group_rows_orders_by_the_top_byte_and_loses_nothing(count: int) -> None:
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 2**64, (count, 3), dtype=np.uint64)
    if count == 300:
        rows[:, 0] &= np.uint64(2**56 - 1)  # all of them in one bucket
    before = sorted(map(tuple, rows.tolist()))
    starts, heads = np.empty(257, dtype=np.int64), np.empty(256, dtype=np.int64)
    kernels.group_rows(rows, starts, heads)
    assert sorted(map(tuple, rows.tolist())) == before
    assert (starts[0], starts[256]) == (0, count)
    for bucket in range(256):
        assert (rows[starts[bucket] : starts[bucket + 1], 0] >> np.uint64(56) == bucket).all()


@pytest.mark.parametrize("seed", range(5))
def test_put_rows_keeps_the_highest_offset_of_each_key_in_limited_room(seed: int) -> None:
    rng = random.Random(seed)
    pairs = random_pairs(rng, 200, 60)
    capacity = rng.randrange(10, 70)
    slots = np.zeros((80, 3), dtype=np.uint64)
    first, size = rng.randrange(3), 0
    bits, bits_start = np.zeros(200, dtype=np.uint8), rng.choice([0, 7])
    place, size = kernels.put_rows(slots, rows_of(pairs), first, size, capacity, bits, bits_start)
    model: dict[int, int] = {}
    losers: set[int] = set()
    for index, (number, offset) in enumerate(pairs[first:], first):
        if number not in model and len(model) == capacity:
            assert place == index
            break
        if number in model:
            losers.add(min(offset, model[number]))
        model[number] = max(offset, model.get(number, -1))
    else:
        assert place == 200
    assert size == len(model)
    assert set_bits(bits, bits_start) == {n for n in losers if 0 <= n - bits_start < 1600}
    found = {(row[0], row[1]): row[2] - 1 for row in slots.tolist() if row[2]}
    numbers = sorted(model)
    assert found == dict(zip(turned(hashes_of(numbers)), [model[n] for n in numbers], strict=True))


def test_put_rows_ends_at_a_table_without_a_free_slot() -> None:
    slots = np.zeros((2, 3), dtype=np.uint64)
    assert kernels.put_rows(slots, rows_of([(1, 1), (2, 2), (3, 3)]), 0, 0, 9, *NO_BITS) == (2, 2)


@pytest.mark.parametrize("seed", range(5))
def test_probe_rows_and_drain_offsets_read_what_put_rows_wrote(seed: int) -> None:
    rng = random.Random(seed)
    pairs = random_pairs(rng, 100, 50)
    slots = np.zeros((64, 3), dtype=np.uint64)
    kernels.put_rows(slots, rows_of(pairs), 0, 0, 60, *NO_BITS)
    latest_records: dict[int, int] = {}
    for number, offset in pairs:
        latest_records[number] = max(offset, latest_records.get(number, -1))
    asked = random_pairs(rng, 100, 70)
    out = np.empty(100, dtype=np.int64)
    count = kernels.probe_rows(slots, rows_of(asked), out)
    assert out[:count].tolist() == [o for number, o in asked if latest_records.get(number, -1) > o]
    drained: list[int] = []
    slot, room = 0, np.empty(rng.randrange(1, 20), dtype=np.int64)
    while slot < 64:
        slot, count = kernels.drain_offsets(slots, slot, room)
        drained += room[:count].tolist()
    assert sorted(drained) == sorted(latest_records.values())


@pytest.mark.parametrize("seed", range(20))
def test_mark_present_intersects_two_rising_lists_piece_by_piece(seed: int) -> None:
    rng = random.Random(seed)
    offsets = sorted(rng.sample(range(500), rng.choice([0, 1, 20, 400])))
    window = sorted(rng.sample(range(500), rng.choice([0, 1, 30, 450])))
    place, found = 0, []
    step = rng.randrange(1, 60)
    for first in range(0, len(offsets), step):
        piece = offsets[first : first + step]
        flags = np.zeros(len(piece), dtype=np.bool_)
        place = kernels.mark_present(integers(piece), integers(window), place, flags)
        found += flags.tolist()
        assert place == sum(o <= piece[-1] for o in window)
    assert found == [offset in set(window) for offset in offsets]


# --- find_key ------------------------------------------------------------------------------------


def test_find_key_is_the_last_record_of_that_key_in_range() -> None:
    dice = random.Random(5)
    for _ in range(200):
        keys = [
            None if dice.random() < 0.1 else bytes(dice.choices(b"ab", k=dice.randrange(4)))
            for _ in range(dice.randrange(30))
        ]
        data = b"".join(key or b"" for key in keys)
        sizes = integers([-1 if key is None else len(key) for key in keys])
        room = np.maximum(sizes, 0)
        positions = np.cumsum(room) - room
        offsets = integers(sorted(dice.sample(range(100), len(keys))))
        wanted = bytes(dice.choices(b"ab", k=dice.randrange(4)))
        start, end = dice.randrange(50), dice.randrange(50, 101)
        expected = [
            row for row, key in enumerate(keys) if key == wanted and start <= offsets[row] < end
        ]
        found = kernels.find_key(
            np.frombuffer(data, dtype=np.uint8), positions, sizes, offsets,
            np.frombuffer(wanted, dtype=np.uint8), start, end,
        )  # fmt: skip
        assert found == max(expected, default=-1)


def test_find_key_looks_at_no_byte_outside_of_the_arena() -> None:
    arena, key = np.frombuffer(b"abab", dtype=np.uint8), np.frombuffer(b"ab", dtype=np.uint8)
    for position, found in ((0, 0), (2, 0), (3, -1), (4, -1), (-1, -1), (2**62, -1)):
        place = (integers([position]), integers([2]), integers([7]))
        assert kernels.find_key(arena, *place, key, 0, 100) == found
