"""A segment object's filter of keys: it tells of most absent keys without reading the key index.

A lookup goes from segment to segment until one has the key. In an object store each key index would
cost a request, so readers keep the filters, which take two bytes per key. It is a Bloom filter of
split blocks, as Parquet's, over the 33 bits of the hash that the key index has, under the same
secret. A key of the segment always passes; of others about one in 900 does.

A cleaning makes it from the key index when it writes both to the segment's side object.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.dedup.offset_map import Uint64s
from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    import numpy.typing as npt

    from kafkalog.storage_engine.fs.files import Buffer

_AT_ONCE: Final = 16
"""Blocks of the key index, so that little memory is needed besides the filter."""
_MIXED: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_WORD: Final = np.dtype(">u4")


class KeyFilter:
    """The filter of one segment."""

    def __init__(self, words: Buffer) -> None:
        """Take the bytes that `encoded` has returned."""
        self._words = np.frombuffer(words, dtype=_WORD).reshape(-1, layout.FILTER_WORDS)

    def may_hold(self, hashes: Uint64s) -> npt.NDArray[np.bool_]:
        """Return which keys the segment may have, by their hashes (k) as `KeyIndex` has them."""
        blocks, bits = _blocks_and_bits(hashes, len(self._words))
        may: npt.NDArray[np.bool_] = (self._words[blocks] & bits == bits).all(axis=1)
        return may


def encoded(key_index: Buffer) -> bytes:
    """Return the filter of the keys in a sound key index, given as its bytes."""
    table = np.frombuffer(key_index, dtype=">u8").reshape(-1, layout.KEYS_BLOCK // 8)
    count = layout.KEYS_HEADER.unpack_from(key_index)[4]
    size = -(-count * layout.FILTER_BITS_PER_KEY // (32 * layout.FILTER_WORDS))
    words = np.zeros((size, layout.FILTER_WORDS), dtype=np.uint32)
    for first in range(1, len(table), _AT_ONCE):
        entries = table[first : first + _AT_ONCE, :-1].astype(np.uint64).ravel()
        left = count - (first - 1) * layout.KEYS_BLOCK_ENTRIES
        blocks, bits = _blocks_and_bits(entries[:left], size)
        starts = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1]))  # they ascend
        words[blocks[starts]] |= np.bitwise_or.reduceat(bits, starts)
    if sys.byteorder == "little":
        words.byteswap(inplace=True)
    return words.tobytes()


def _blocks_and_bits(
    hashes: Uint64s, size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Return for hashes (h) the block of a filter of `size` blocks, and the bits of each word."""
    known = hashes >> np.uint64(layout.KEYS_POSITION_BITS)
    blocks = (known * np.uint64(size) >> np.uint64(64 - layout.KEYS_POSITION_BITS)).astype(np.int64)
    mixed = (known ^ known >> np.uint64(30)) * _MIXED[0]
    mixed = (mixed ^ mixed >> np.uint64(27)) * _MIXED[1]
    low = (mixed ^ mixed >> np.uint64(31)).astype(np.uint32)
    salts = np.array(layout.FILTER_SALTS, dtype=np.uint32)
    return blocks, np.uint32(1) << (low[:, None] * salts >> np.uint32(27))
