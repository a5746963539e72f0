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


# --- mark_obsolete ------------------------------------------------------------------------------


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
