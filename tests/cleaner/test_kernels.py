"""Every kernel against a naive twin, on small random arrays."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kafkalog.cleaner import kernels
from tests.cleaner.naive import siphash_128

SECRET = np.frombuffer(bytes(range(16)), dtype=np.uint64)
NO_MASK = np.uint64(0)
EVER = 2**62
WRAPPING = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
"""SipHash adds modulo 2^64; run as plain Python, numpy warns of what the compiler does silently."""


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
        )  # fmt: skip
    return found


# --- hash_keys -----------------------------------------------------------------------------------


@WRAPPING
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


@WRAPPING
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
    stop, last = len(numbers), -1
    for i, number in enumerate(numbers):
        if sizes[i] < 0 or not start <= i < end or number & mask != prefix:
            continue
        if len(model) >= capacity:
            stop = i
            break
        model[number], last = i, i
    found = np.zeros((slots, 3), dtype=np.uint64)
    result = kernels.put_offsets(
        found, hashes_of(numbers), integers(sizes), np.arange(len(numbers)), 0, start, end,
        capacity, 0, np.uint64(mask), np.uint64(prefix),
    )  # fmt: skip
    assert result == (stop, len(model), last)
    out = np.empty(20, dtype=np.int64)
    kernels.get_offsets(found, hashes_of(list(range(1, 21))), out)
    assert out.tolist() == [model.get(number, -1) for number in range(1, 21)]


# --- retain_records ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_retain_records_keeps_what_kafka_keeps(seed: int) -> None:
    rng = random.Random(seed)
    n, batches = 60, 6
    numbers = [rng.randrange(1, 12) for _ in range(n)]
    keys = [rng.choice([-1, 0, 3, 3, 3]) for _ in range(n)]
    values = [rng.choice([-1, 0, 5]) for _ in range(n)]
    batch = sorted(rng.randrange(batches) for _ in range(n))
    expired = [rng.random() < 0.5 for _ in range(batches)]
    known = {number: rng.randrange(n) for number in range(1, 12) if rng.random() < 0.7}
    latest, tombstones_from = rng.randrange(n), rng.choice([EVER, rng.randrange(n)])
    keep, kept, tombstones, keyless = [], [0] * batches, [0] * batches, 0
    for i in range(n):
        stay = True
        if i <= latest and keys[i] < 0:
            stay = False
            keyless += 1
        elif i <= latest:
            is_dead = values[i] < 0 and expired[batch[i]] and i < tombstones_from
            stay = known.get(numbers[i], -1) <= i and not is_dead
        keep.append(stay)
        kept[batch[i]] += stay
        tombstones[batch[i]] += stay and values[i] < 0
    out: list[Any] = [np.empty(n, np.bool_), np.zeros(batches, int), np.zeros(batches, int)]
    count = kernels.retain_records(
        table(known), hashes_of(numbers), integers(keys), integers(values), np.arange(n),
        np.array(batch, dtype=np.int32), np.array(expired), latest, tombstones_from, *out,
    )  # fmt: skip
    assert (count, *(array.tolist() for array in out)) == (keyless, keep, kept, tombstones)


# --- select_latest -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_select_latest_marks_the_record_the_table_names(seed: int) -> None:
    rng = random.Random(seed)
    n = 50
    numbers = [rng.randrange(1, 12) for _ in range(n)]
    keys = [rng.choice([-1, 0, 3]) for _ in range(n)]
    values = [rng.choice([-1, 0, 5]) for _ in range(n)]
    known = {number: i for i, number in enumerate(numbers) if rng.random() < 0.8}
    start, end = sorted(rng.randrange(n + 1) for _ in range(2))
    mask, prefix = rng.choice([(0, 0), (1, 1), (3, 2)])
    expected = [
        keys[i] >= 0
        and values[i] >= 0
        and start <= i < end
        and numbers[i] & mask == prefix
        and known.get(numbers[i]) == i
        for i in range(n)
    ]
    keep = np.empty(n, dtype=np.bool_)
    kernels.select_latest(
        table(known), hashes_of(numbers), integers(keys), integers(values), np.arange(n),
        start, end, np.uint64(mask), np.uint64(prefix), keep,
    )  # fmt: skip
    assert keep.tolist() == expected


# --- choose_index_entries ------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0, 100, 10**6])
def test_choose_index_entries_decides_batch_by_batch_across_calls(interval: int) -> None:
    rng = random.Random(interval)
    n = 60
    sizes = [rng.randrange(61, 200) for _ in range(n)]
    lasts = sorted(rng.sample(range(1000), n))
    times = [rng.randrange(-1, 50) for _ in range(n)]
    expected, since, top, top_offset = [], 0, -1, 7
    for i in range(n):
        if times[i] > top:
            top, top_offset = times[i], lasts[i]
        if since > interval:
            expected.append((i, top, top_offset))
            since = 0
        since += sizes[i]
    found, state = [], (0, -1, 7)
    for first in range(0, n, 13):
        part = slice(first, first + 13)
        out = [np.empty(13, dtype=np.int64) for _ in range(3)]
        count, *state = kernels.choose_index_entries(  # type: ignore[assignment]
            integers(sizes[part]), integers(lasts[part]), integers(times[part]),
            state[0], interval, state[1], state[2], *out,
        )  # fmt: skip
        rows, tops, offsets = (array[:count].tolist() for array in out)
        found += [(first + r, t, o) for r, t, o in zip(rows, tops, offsets, strict=True)]
    assert found == expected
    assert tuple(state) == (since, top, top_offset)
