"""The keys that are to be erased: found among the keys of records, and as bytes in files.

A record has a key if its key is the same bytes, and no others. Where there are no records to
compare, in an index or in a stranger's file, only bytes can be looked for, and short ones occur
anywhere: so a key is looked for as bytes only if it has at least eight, six of them neither 00 nor
FF. The numbers that a log is full of (offsets, times, ids) are not like that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.key_lookup import key_bytes
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.tables import BatchTable, Integers, RecordTable

__all__ = ["BYTES_MIN", "ErasedKeys"]

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
        import pyarrow as pa

        self.keys: Sequence[bytes] = tuple(dict.fromkeys(key_bytes(key) for key in keys))
        if not self.keys:
            raise InvalidInputError("no key is given: there is nothing to erase")
        self._set = pa.array(self.keys, pa.binary())
        self._sizes = np.unique([len(key) for key in self.keys])
        self.searched = [n for n, key in enumerate(self.keys) if _is_searched(key)]
        """The numbers of the keys that are looked for as bytes."""
        heads = [self.keys[number][:BYTES_MIN] for number in self.searched]
        self._heads = np.frombuffer(b"".join(heads), dtype=_HEAD)
        self._pairs = np.array([(head[0] << 8) | head[1] for head in heads], dtype=np.int64)
        mentioned = [key for key in self.keys if len(key) >= _MENTION_MIN]
        self.is_mention_searched = 0 < len(mentioned) <= _MENTIONED_MAX
        """Whether `mentions` looks at all."""
        self.mention_gap = _mention_gap(len(mentioned), len(self.keys))
        """Which keys `mentions` does not look for, and why; empty where it looks for all."""
        self._patterns = [
            "|".join(map(_pattern, mentioned[first : first + _PATTERN_KEYS]))
            for first in range(0, len(mentioned), _PATTERN_KEYS)
        ]

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"

    @property
    def digests(self) -> list[str]:
        """The SHA-256 of each key, in hexadecimal digits."""
        return [hashlib.sha256(key).hexdigest() for key in self.keys]

    def find(
        self, records: RecordTable, table: BatchTable, rows: Integers | None = None
    ) -> tuple[Integers, Integers]:
        """Return which of the records `rows` (None: all) have a key, and the number of each key.

        Both int64 (r). A record without a key has none of them. Control records are the caller's
        to leave out.
        """
        is_likely = np.isin(
            records.key_sizes if rows is None else records.key_sizes[rows], self._sizes
        )
        rows = np.flatnonzero(is_likely) if rows is None else rows[is_likely]
        if not len(rows):
            return rows, rows
        import pyarrow.compute as pc

        numbers = pc.index_in(_columns(records, table, rows, ["key"])[0], value_set=self._set)
        found = numbers.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return rows[found >= 0], found[found >= 0]

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

    def _matches(self, column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
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
        for number in self._possible(data):
            key = self.keys[number]
            if is_text and key.isdigit():
                continue
            position = data.find(key)
            if position >= 0:
                yield number, position

    def _possible(self, data: bytes) -> Sequence[int]:
        """Leave out keys whose first bytes stand nowhere: one look for all, where they are many."""
        if len(self.searched) <= _ONE_BY_ONE:
            return self.searched
        if len(data) < BYTES_MIN:
            return []
        array = np.frombuffer(data, dtype=np.uint8)
        count = len(array) - BYTES_MIN + 1
        pairs = (array[:count].astype(np.uint16) << 8) | array[1 : count + 1]
        places = np.flatnonzero(np.isin(np.arange(1 << 16), self._pairs)[pairs])
        windows = np.lib.stride_tricks.sliding_window_view(array, BYTES_MIN)
        found = np.ascontiguousarray(windows[places]).view(_HEAD).reshape(-1)
        return [self.searched[n] for n in np.flatnonzero(np.isin(self._heads, found)).tolist()]


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
    from kafkalog.storage_engine.records import to_arrow

    schema = chosen_columns(names)
    batch = to_arrow(records, table, rows, schema=schema, topic="", partition=0)
    return [batch.column(name) for name in names]
