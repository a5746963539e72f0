"""The filter of a key index: no key of it is missing, and few others pass."""

from __future__ import annotations

import numpy as np
import pytest

from kafkalog.cleaner.key_index import key_filter
from kafkalog.cleaner.key_index.key_filter import KeyFilter
from kafkalog.cleaner.key_index.key_index import _blocks
from kafkalog.storage_engine.format import layout


def index_of(entries: list[int]) -> bytes:
    """Return a key index with some entries, ascending."""
    header = layout.KEYS_HEADER.pack(
        layout.KEYS_MAGIC, layout.KEYS_VERSION, 0, 0, len(entries), bytes(16), 0, 0
    )
    return header.ljust(layout.KEYS_BLOCK, b"\0") + _blocks(np.array(entries, dtype=np.uint64))


def drawn(count: int, seed: int) -> list[int]:
    """Return entries: 33 bits of a hash, and a position."""
    dice = np.random.default_rng(seed)
    return sorted(dice.integers(0, 1 << 64, count, dtype=np.uint64).tolist())


@pytest.mark.parametrize("count", [1, 2, 511, 512, 3000, 70_000])
def test_every_key_of_the_index_passes_and_few_others_do(count: int) -> None:
    entries = drawn(count, 1)
    made = key_filter.encoded(index_of(entries))
    assert len(made) <= 2 * count + 32
    found = KeyFilter(made)
    position = (1 << layout.KEYS_POSITION_BITS) - 1
    known = np.array(entries[:2000] + entries[-10:], dtype=np.uint64) & ~np.uint64(position)
    assert found.may_hold(known).all()
    others = np.array(drawn(5000, 2), dtype=np.uint64) & ~np.uint64(position)
    assert found.may_hold(others).sum() < 5000 / 200


def test_keys_of_one_hash_take_one_place() -> None:
    entry = 0x123456789 << layout.KEYS_POSITION_BITS
    found = KeyFilter(key_filter.encoded(index_of([entry, entry + 61, entry + 122])))
    hashes = np.array([entry, entry ^ 1 << 40], dtype=np.uint64)
    assert found.may_hold(hashes).tolist() == [True, False]
