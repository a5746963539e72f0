"""The keys to erase: find them among the keys of records, and as bytes in files.

There may be a million keys, so they are compared like the cleaner's: by 16 bytes of SipHash under a
secret, in one table. Files without records are searched for the bytes. Short keys would be found
anywhere, so only keys of at least eight bytes are searched, six of them neither 00 nor FF. This
also excludes most numbers: offsets, times and ids.
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
from kafkalog.storage_engine.fs.files import users_items

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.records.tables import BatchTable, Bytes, Integers, RecordTable

Flags: TypeAlias = npt.NDArray[np.bool_]

BYTES_MIN: Final = 8
_DISTINCT_MIN: Final = 6
_HEAD: Final = np.dtype("<u8")
_MENTION_MIN: Final = 4
"""Shorter keys occur in any value."""
_MENTIONED_MAX: Final = 256
_PATTERN_KEYS: Final = 64
"""Keys in one regular expression; more of them make it many times slower."""


class ErasedKeys:
    """Distinct keys, numbered from 0 in the order given; `repr` shows only how many there are."""

    def __init__(self, keys: Iterable[bytes | str]) -> None:
        """Take keys; text is UTF-8. Raises InvalidInputError for no keys, or for an invalid one."""
        if isinstance(keys, bytes | bytearray | memoryview | str):
            raise InvalidInputError("keys: expected several of them, such as [key], found one")
        if not isinstance(keys, Iterable):
            raise InvalidInputError(
                f"keys: expected several of them, such as [key], found {type(keys).__name__}"
            )
        self.keys: Sequence[bytes] = tuple(
            dict.fromkeys(key_bytes(key) for key in users_items(keys))
        )
        if not self.keys:
            raise InvalidInputError("no key is given: there is nothing to erase")
        mentioned = [key for key in self.keys if len(key) >= _MENTION_MIN]
        self.is_mention_searched = 0 < len(mentioned) <= _MENTIONED_MAX
        """Whether `mentions` searches at all."""
        self.mention_gap = _mention_gap(len(mentioned), len(self.keys))
        """Which keys `mentions` does not search, and why; empty if it searches all."""
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
        """The numbers of the keys that are searched as bytes."""
        return [number for number, key in enumerate(self.keys) if _is_searched(key)]

    def find(self, records: RecordTable, rows: Integers | None = None) -> tuple[Integers, Integers]:
        """Return which of the records `rows` have a key, and its number: int64 (r) each.

        Without `rows` all records are compared. The caller leaves control records out.
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
        """The lengths of keys, ascending."""
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
        """Return which key is at each of the positions (n), -1 for none: int64 (n)."""
        return self._numbers.get(self._hashes(arena, positions, sizes))

    def _hashes(self, arena: Bytes, positions: Integers, sizes: Integers) -> Uint64s:
        """Return the hash of each key, uint64 (n, 2); all must lie within the arena."""
        hashes: Uint64s = np.empty((len(sizes), 2), dtype=np.uint64)
        outside = kernels.hash_keys(arena, positions, sizes, self._secret, hashes)
        if outside >= 0:  # the keys after it have no hash, and would not be found
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
        """Yield (key's number, first position) of each key that occurs in the bytes.

        In our text files (`is_text`), keys of digits alone are ignored, because numbers are digits
        too.
        """
        array = np.frombuffer(data, dtype=np.uint8)
        places = self._places_of_heads(array)
        for size in self._lengths[self._lengths >= BYTES_MIN].tolist():
            places = places[places <= len(array) - size]
            numbers = self._at(array, places, np.full(len(places), size, dtype=np.int64))
            for number, first in zip(*np.unique(numbers, return_index=True), strict=True):
                key = self.keys[number]
                if number >= 0 and _is_searched(key) and not (is_text and key.isdigit()):
                    yield int(number), int(places[first])

    def _places_of_heads(self, array: Bytes) -> Integers:
        """Return where the first bytes of a searched key are: int64 (m)."""
        count = len(array) - BYTES_MIN + 1
        if count < 1 or not self.searched:
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
        """The first bytes of all searched keys, ascending."""
        heads = b"".join(self.keys[number][:BYTES_MIN] for number in self.searched)
        return np.unique(np.frombuffer(heads, dtype=_HEAD))

    @functools.cached_property
    def _begins(self) -> Flags:
        """Whether a searched key begins with these two bytes: bool (65536)."""
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
