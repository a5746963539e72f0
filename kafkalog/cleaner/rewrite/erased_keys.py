"""The keys that are to be erased: found among the keys of records, and as bytes in files.

A record has a key if its key is the same bytes, and no others. There may be a million keys, so they
are compared as the cleaner compares keys: by 16 bytes of SipHash under a secret, in one table.
Where there are no records to compare, in an index or in a stranger's file, only bytes can be looked
for, and short ones occur anywhere: so a key is looked for as bytes only if it has at least eight,
six of them neither 00 nor FF. The numbers that a log is full of (offsets, times, ids) are not like
that.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.dedup import kernels
from kafkalog.cleaner.dedup.offset_map import OffsetMap, Uint64s
from kafkalog.cleaner.key_index.key_lookup import key_bytes
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.records.tables import BatchTable, Bytes, Integers, RecordTable

__all__ = ["BYTES_MIN", "ErasedKeys"]

Flags: TypeAlias = npt.NDArray[np.bool_]

BYTES_MIN: Final = 8
_DISTINCT_MIN: Final = 6
_ONE_BY_ONE: Final = 16
_HEAD: Final = np.dtype("<u8")
_MENTION_MIN: Final = 4
"""A shorter key is in any value."""
_MENTIONED_MAX: Final = 256
_PATTERN_KEYS: Final = 64
"""Keys in one regular expression: with more of them it is many times slower."""


class ErasedKeys:
    """Distinct keys, in the order given; numbers of keys below count from 0 in it.

    Never shown in the clear: `repr` tells how many there are.
    """

    def __init__(self, keys: Iterable[bytes | str]) -> None:
        """Take keys; text is UTF-8. Raises InvalidInputError for none, and for what is no key."""
        if isinstance(keys, bytes | bytearray | memoryview | str):
            raise InvalidInputError("keys: expected several of them, such as [key], found one")
        self.keys: Sequence[bytes] = tuple(dict.fromkeys(key_bytes(key) for key in keys))
        if not self.keys:
            raise InvalidInputError("no key is given: there is nothing to erase")
        mentioned = [key for key in self.keys if len(key) >= _MENTION_MIN]
        self.is_mention_searched = 0 < len(mentioned) <= _MENTIONED_MAX
        """Whether `mentions` looks at all."""
        self.mention_gap = _mention_gap(len(mentioned), len(self.keys))
        """Which keys `mentions` does not look for, and why; empty where it looks for all."""
        if not self.is_mention_searched:
            mentioned = []
        self._patterns = [
            "|".join(map(_pattern, mentioned[first : first + _PATTERN_KEYS]))
            for first in range(0, len(mentioned), _PATTERN_KEYS)
        ]
        self._secret = np.frombuffer(secrets.token_bytes(16), dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"

    @property
    def digests(self) -> list[str]:
        """The SHA-256 of each key, in hexadecimal digits."""
        return [hashlib.sha256(key).hexdigest() for key in self.keys]

    @functools.cached_property
    def searched(self) -> Sequence[int]:
        """The numbers of the keys that are looked for as bytes."""
        return [number for number, key in enumerate(self.keys) if _is_searched(key)]

    def find(self, records: RecordTable, rows: Integers | None = None) -> tuple[Integers, Integers]:
        """Return which of the records `rows` (None: all) have a key, and the number of each key.

        Both int64 (r). A record without a key has none of them. Control records are the caller's
        to leave out.
        """
        sizes = records.key_sizes if rows is None else records.key_sizes[rows]
        is_likely = np.isin(sizes, self._lengths)
        rows = np.flatnonzero(is_likely) if rows is None else rows[is_likely]
        numbers = self._at(records.arena, records.key_positions[rows], sizes[is_likely])
        return rows[numbers >= 0], numbers[numbers >= 0]

    @functools.cached_property
    def _sizes(self) -> Integers:
        return np.fromiter(map(len, self.keys), dtype=np.int64, count=len(self.keys))

    @functools.cached_property
    def _lengths(self) -> Integers:
        """How long keys are, ascending."""
        return np.unique(self._sizes)

    @functools.cached_property
    def _numbers(self) -> OffsetMap:
        """The number of each key, by its hash."""
        count = len(self.keys)
        numbers = OffsetMap(2 * count)
        arena = np.frombuffer(b"".join(self.keys), dtype=np.uint8)
        hashes = self._hashes(arena, np.cumsum(self._sizes) - self._sizes, self._sizes)
        numbers.put(hashes, self._sizes, np.arange(count, dtype=np.int64))
        return numbers

    def _at(self, arena: Bytes, positions: Integers, sizes: Integers) -> Integers:
        """Return which key lies at each of the positions (n), -1 for none of them: int64 (n)."""
        return self._numbers.get(self._hashes(arena, positions, sizes))

    def _hashes(self, arena: Bytes, positions: Integers, sizes: Integers) -> Uint64s:
        """Return the hash of each key, uint64 (n, 2); all lie within the arena."""
        hashes: Uint64s = np.empty((len(sizes), 2), dtype=np.uint64)
        outside = kernels.hash_keys(arena, positions, sizes, self._secret, hashes)
        if outside >= 0:  # then those behind it have no hash, and a trace of a key would be missed
            raise AssertionError(f"key {outside} of {len(sizes)} does not lie within its arena")
        return hashes

    def mentions(self, records: RecordTable, table: BatchTable, rows: Integers) -> int:
        """Count the records `rows` that have a key's bytes within their key, value or headers."""
        if not self.is_mention_searched or not len(rows):
            return 0
        keys, values, headers = _columns(records, table, rows, ["key", "value", "headers"])
        is_found = self._matches(keys) | self._matches(values)
        if headers.null_count < len(headers):
            pairs = headers.flatten()
            in_header = self._matches(pairs.field("key").cast("binary"))
            in_header |= self._matches(pairs.field("value"))
            is_found[headers.value_parent_indices().to_numpy()[in_header]] = True
        return int(np.count_nonzero(is_found))

    def _matches(self, column: pa.Array) -> Flags:
        import pyarrow.compute as pc

        found = np.zeros(len(column), dtype=np.bool_)
        for pattern in self._patterns:
            matches = pc.match_substring_regex(column, pattern).fill_null(False)
            found |= matches.to_numpy(zero_copy_only=False)
        return found

    def find_bytes(self, data: bytes, *, is_text: bool) -> Iterator[tuple[int, int]]:
        """Yield (key's number, position) of the first place of each key that stands in bytes.

        In a text of ours (`is_text`), where numbers are written in digits, a key of digits alone
        is not looked for.
        """
        is_few = len(self.searched) <= _ONE_BY_ONE
        for number, position in self._one_by_one(data) if is_few else self._all_at_once(data):
            if not (is_text and self.keys[number].isdigit()):
                yield number, position

    def _one_by_one(self, data: bytes) -> Iterator[tuple[int, int]]:
        for number in self.searched:
            position = data.find(self.keys[number])
            if position >= 0:
                yield number, position

    def _all_at_once(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Compare what lies where the first bytes of any key stand, as long as each key is."""
        array = np.frombuffer(data, dtype=np.uint8)
        places = self._places_of_heads(array)
        for size in self._lengths[self._lengths >= BYTES_MIN].tolist():
            places = places[places <= len(array) - size]
            numbers = self._at(array, places, np.full(len(places), size, dtype=np.int64))
            for number, first in zip(*np.unique(numbers, return_index=True), strict=True):
                if number >= 0 and _is_searched(self.keys[number]):
                    yield int(number), int(places[first])

    def _places_of_heads(self, array: Bytes) -> Integers:
        count = len(array) - BYTES_MIN + 1
        if count < 1:
            return np.empty(0, dtype=np.int64)
        pairs = (array[:count].astype(np.uint16) << 8) | array[1 : count + 1]
        places = np.flatnonzero(self._begins[pairs])
        windows = np.lib.stride_tricks.sliding_window_view(array, BYTES_MIN)
        found = np.ascontiguousarray(windows[places]).view(_HEAD).reshape(-1)
        nearest = np.searchsorted(self._heads[:-1], found)
        is_head: Flags = self._heads[nearest] == found
        return places[is_head]

    @functools.cached_property
    def _heads(self) -> Uint64s:
        """The first bytes of all keys that are looked for, ascending."""
        heads = b"".join(self.keys[number][:BYTES_MIN] for number in self.searched)
        return np.unique(np.frombuffer(heads, dtype=_HEAD))

    @functools.cached_property
    def _begins(self) -> Flags:
        """Whether one of them begins with these two bytes: bool (65536)."""
        begins = np.zeros(1 << 16, dtype=np.bool_)
        begins[((self._heads & 0xFF) << 8) | (self._heads >> 8 & 0xFF)] = True
        return begins


def _mention_gap(mentioned: int, keys: int) -> str:
    if mentioned > _MENTIONED_MAX:
        return f"there are more than {_MENTIONED_MAX} keys to look for"
    if mentioned < keys:
        some = f"{keys - mentioned} of {keys} keys" if keys > 1 else "the key"
        verb = "have" if keys - mentioned > 1 else "has"
        return f"{some} {verb} fewer than {_MENTION_MIN} bytes"
    return ""


def _is_searched(key: bytes) -> bool:
    distinct = len(key) - key.count(0x00) - key.count(0xFF)
    return len(key) >= BYTES_MIN and distinct >= _DISTINCT_MIN


def _pattern(key: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in key)


def _columns(
    records: RecordTable, table: BatchTable, rows: Integers, names: list[str]
) -> list[pa.Array]:
    from kafkalog.schema import chosen_columns
    from kafkalog.storage_engine.records.records import to_arrow

    schema = chosen_columns(names)
    batch = to_arrow(records, table, rows, schema=schema, topic="", partition=0)
    return [batch.column(name) for name in names]
