"""A cleaned segment's key index: which batches may hold a key, for lookups without a scan.

The cleaner writes `kl-<base>.keys` for each segment that it writes. It has an entry for every
record with a key: 33 bits of the key's hash and the position of its batch, sorted. A lookup reads a
block or two of the file, then the batch, and compares the keys. A colliding hash costs one more
batch.

No key of the segment may be missing. An index is used only if it is whole and of this segment:

- It is renamed into place after its segment, and removed before the segment is replaced or retired,
  under the exclusive segments lock. `KeyIndex.open` holds the lock shared.
- It names the segment's base offset, its size, and the checksums of some batches, in case files
  were copied. Every block has a checksum.

If an index does not fit, lookups scan the segment, and the next cleaning writes a new one. Keys are
hashed by SipHash under a secret in the file, so that no writer can construct colliding keys. All
indexes of a partition share the secret, so that a cleaning can look its dirty keys up in all of
them (`unchanged_segments`). An old index is removed at once: an erased key leaves no hash.

Kafka has no such file, and a broker ignores it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.dedup import kernels
from kafkalog.cleaner.dedup.offset_map import Int64s, Uint64s
from kafkalog.cleaner.dedup.spill.spill_file import SpillFile
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
from kafkalog.storage_engine.segment.byte_source import ByteSource, FileBytes
from kafkalog.storage_engine.segment.locate import header_at

if TYPE_CHECKING:
    from kafkalog.cleaner.key_index.key_filter import KeyFilter
    from kafkalog.storage_engine.records.tables import Bytes, Integers, RecordTable
    from kafkalog.storage_engine.segment.open_segment import OpenSegment
    from kafkalog.storage_engine.segment.open_segment_file import OpenSegmentFile

RUN_ENTRIES: Final = 1 << 18
"""Entries held in memory before they are sorted and written to a temporary file: 2 MiB."""
_SLICES: Final = 256
"""Parts of the hash space; temporary runs are merged part by part in memory."""
_POSITION_MASK: Final = (1 << layout.KEYS_POSITION_BITS) - 1
_FILLING: Final = (1 << 64) - 1
_ENTRY: Final = np.dtype(">u8")
_BLOCKS_AT_ONCE: Final = 256
_GUESSES: Final = 8
_BLOCKS_PER_KEY: Final = 32
"""So many blocks are read in a row while those of one key are looked for (measured)."""


def key_hashes(records: RecordTable, rows: Integers, secret: bytes) -> Uint64s:
    """Return the top 33 bits of the hashes of valid keys, the other bits zero: uint64 (r)."""
    return _hashes(records.arena, records.key_positions[rows], records.key_sizes[rows], secret)


def hashes_of(keys: ChosenKeys, secret: bytes) -> Uint64s:
    """Return the `key_hashes` of keys, in their order: uint64 (k)."""
    return _hashes(keys.arena, keys.positions, keys.sizes, secret)


def _hashes(arena: Bytes, positions: Int64s, sizes: Int64s, secret: bytes) -> Uint64s:
    hashes: Uint64s = np.empty((len(sizes), 2), dtype=np.uint64)
    kernels.hash_keys(arena, positions, sizes, np.frombuffer(secret, dtype=np.uint64), hashes)
    return hashes[:, 0] & ~np.uint64(_POSITION_MASK)


class KeyIndexWriter:
    """Collect the entries of one segment; `finish` or `discard` it.

    More than `run_entries` entries go to a temporary file in sorted runs. The index has a temporary
    name, which the next cleaner removes if this one dies.
    """

    def __init__(
        self, directory: Path, base_offset: int, secret: bytes, *, run_entries: int = RUN_ENTRIES
    ) -> None:
        self.path = directory / layout.key_index_file(base_offset)
        """The name of the index once its segment is in place."""
        self.temporary = directory / f"{layout.SPILL}{self.path.name}"
        self.is_unchanged = False
        """Whether the segment is unchanged; set it before `finish`."""
        self._directory = directory
        self._base_offset = base_offset
        self._secret = secret
        self._run_entries = run_entries
        self._held: list[Uint64s] = []
        self._held_count = 0
        self._count = 0
        self._spilled: SpillFile | None = None
        self._runs: list[tuple[int, Int64s]] = []
        """The start of each run in the file, and of its slices in the run."""

    def add(self, hashes: Uint64s, positions: Int64s) -> None:
        """Add records: their `key_hashes` and their batches' positions, (r) each."""
        for first in range(0, len(hashes), self._run_entries):
            part = slice(first, first + self._run_entries)
            entries = hashes[part] | positions[part].astype(np.uint64)
            self._held.append(entries)
            self._held_count += len(entries)
            self._count += len(entries)
            if self._held_count >= self._run_entries:
                self._spill()

    def finish(self, log: Path, size: int, positions: Sequence[int]) -> None:
        """Write the index of the finished `.log` file; the caller syncs it.

        It has the checksums of up to eight of the batches at `positions`. Raises OSError,
        StorageError.
        """
        header = self._header(log, size, positions)
        files.create(self.temporary)
        fd = files.open_to_write(self.temporary)
        try:
            files.write_at(fd, header, 0)
            place = layout.KEYS_BLOCK
            for entries in _full_blocks(self._sorted()):
                data = _blocks(entries)
                files.write_at(fd, data, place)
                place += len(data)
        finally:
            os.close(fd)
            self._close_spilled()

    def discard(self) -> None:
        """Remove all files."""
        self._held.clear()
        with files.ignoring():
            self._close_spilled()
        with files.ignoring():
            files.remove(self.temporary)

    def _header(self, log: Path, size: int, positions: Sequence[int]) -> bytes:
        chosen = sorted({positions[place] for place in _spread(len(positions))})
        source = FileBytes(files.open_to_read(log))
        try:
            samples = b""
            for position in chosen:
                header = header_at(source, position, size)
                assert header is not None
                samples += layout.KEYS_SAMPLE.pack(position, header.crc)
        finally:
            source.close()
        content = layout.KEYS_HEADER.pack(
            layout.KEYS_MAGIC, layout.KEYS_VERSION, self._base_offset, size, self._count,
            self._secret, layout.KEYS_UNCHANGED if self.is_unchanged else 0, len(chosen),
        ) + samples  # fmt: skip
        content = content.ljust(layout.KEYS_BLOCK - layout.CHECKSUM.size, b"\0")
        return content + layout.CHECKSUM.pack(crc32c(content))

    def _take_held(self) -> Uint64s:
        entries: Uint64s = np.concatenate([np.empty(0, dtype=np.uint64), *self._held])
        entries.sort()
        self._held.clear()
        self._held_count = 0
        return entries

    def _spill(self) -> None:
        if self._spilled is None:
            self._spilled = SpillFile(self._directory, f"{self.path.name}-runs")
        entries = self._take_held()
        edges = np.arange(_SLICES, dtype=np.uint64) << np.uint64(56)
        bounds = np.append(np.searchsorted(entries, edges), len(entries)).astype(np.int64)
        self._runs.append((self._spilled.count, bounds))
        self._spilled.append(entries)

    def _sorted(self) -> Iterator[Uint64s]:
        last = self._take_held()
        if self._spilled is None:
            yield last
            return
        edges = np.arange(_SLICES, dtype=np.uint64) << np.uint64(56)
        held = np.append(np.searchsorted(last, edges), len(last))
        for place in range(_SLICES):
            parts = [last[held[place] : held[place + 1]]]
            for start, bounds in self._runs:
                first, stop = int(bounds[place]), int(bounds[place + 1])
                parts.append(self._spilled.read(start + first, stop - first))
            entries = np.concatenate(parts)
            entries.sort()
            yield entries

    def _close_spilled(self) -> None:
        if self._spilled is not None:
            self._spilled.close()
            self._spilled = None


def _spread(count: int) -> list[int]:
    """Return up to eight evenly spread places below `count`, with the first and the last."""
    if count == 0:
        return []
    number = min(count, layout.KEYS_SAMPLES_MAX)
    return [place * (count - 1) // max(1, number - 1) for place in range(number)]


def _full_blocks(pieces: Iterator[Uint64s]) -> Iterator[Uint64s]:
    """Rearrange pieces so that each but the last fills whole blocks."""
    step = layout.KEYS_BLOCK_ENTRIES
    rest: Uint64s = np.empty(0, dtype=np.uint64)
    for piece in pieces:
        rest = np.concatenate((rest, piece))
        whole = len(rest) // step * step
        for first in range(0, whole, step * _BLOCKS_AT_ONCE):
            yield rest[first : min(whole, first + step * _BLOCKS_AT_ONCE)]
        rest = rest[whole:]
    if len(rest):
        yield rest


def _blocks(entries: Uint64s) -> bytes:
    """Return entries as blocks; fill up the last one."""
    step = layout.KEYS_BLOCK_ENTRIES
    count = -(-len(entries) // step)
    filled = np.full(count * step, _FILLING, dtype=_ENTRY)
    filled[: len(entries)] = entries
    table = np.zeros((count, step + 1), dtype=_ENTRY)
    table[:, :step] = filled.reshape(count, step)
    data = memoryview(table.data.cast("B"))
    covered = layout.KEYS_BLOCK - layout.CHECKSUM.size
    table[:, step] = [
        crc32c(data[start : start + covered]) for start in range(0, len(data), layout.KEYS_BLOCK)
    ]
    return table.tobytes()


class KeyIndex:
    """The key index of an open segment; `close` it."""

    def __init__(
        self,
        source: ByteSource,
        count: int,
        secret: bytes,
        *,
        is_unchanged: bool = False,
        keys: KeyFilter | None = None,
    ) -> None:
        self.count = count
        """Number of entries: one per record with a key."""
        self.secret = secret
        self.is_unchanged = is_unchanged
        """Whether the segment is unchanged; see `unchanged_segments`."""
        self._source = source
        self._filter = keys
        self._block_count = -(-count // layout.KEYS_BLOCK_ENTRIES)
        self._held: Uint64s | None = None

    @classmethod
    def open(cls, directory: Path, segment: OpenSegmentFile) -> KeyIndex | None:
        """Open the index of a segment; None if it has no valid one. Hold the segments lock."""
        if not segment.is_live:
            return None
        try:
            fd = files.open_to_read(directory / layout.key_index_file(segment.base_offset))
        except OSError as raised:
            files.pass_on(raised)
            return None
        source = FileBytes(fd)
        found = cls.of(source, segment, has_samples=True)
        if found is None:
            source.close()
        return found

    @classmethod
    def of(
        cls,
        source: ByteSource,
        segment: OpenSegment,
        *,
        has_samples: bool = False,
        keys: KeyFilter | None = None,
    ) -> KeyIndex | None:
        """Return the index with these bytes; None if they are not a valid index of the segment.

        It reads no block for a key that its filter `keys` does not pass.

        With `has_samples`, compare the batches of which the index has the checksums: the file of
        another segment may have got the name. An object of a store never has another's.
        """
        found = _read_header(source, segment, has_samples=has_samples)
        if found is None:
            return None
        count, secret, is_unchanged = found
        return cls(source, count, secret, is_unchanged=is_unchanged, keys=keys)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if isinstance(self._source, FileBytes):
            self._source.close()

    def hashes(self, keys: ChosenKeys) -> Uint64s:
        """Return the `key_hashes` of keys, in their order: uint64 (k)."""
        return hashes_of(keys, self.secret)

    def hold(self) -> bool:
        """Keep all entries in memory, 8 bytes each; False if one is damaged, or if they are."""
        if self._held is not None:
            return False
        self._held = self._blocks(0, self._block_count)
        return self._held is not None

    def is_worth_reading(self, key_count: int) -> bool:
        """Return whether reading all blocks is faster than to look for those of so many keys."""
        return key_count * _BLOCKS_PER_KEY > self._block_count

    def places_of(self, hashes: Uint64s) -> tuple[Int64s, Int64s] | None:
        """Return the batches that may hold one of many keys, as (key, position) pairs: int64 (m).

        The argument is the keys' `key_hashes`, ascending; a key is its place there. No pair comes
        twice. Returns None if the index is damaged.
        """
        passed: Int64s = np.arange(len(hashes))
        if self._filter is not None:
            passed = np.flatnonzero(self._filter.may_hold(hashes))
        keys: list[Int64s] = [np.empty(0, dtype=np.int64)]
        positions: list[Int64s] = [np.empty(0, dtype=np.int64)]
        for first, some, entries in self._read_for(hashes[passed]):
            if entries is None:
                return None
            starts = np.searchsorted(entries, some)
            counts = np.searchsorted(entries, some | np.uint64(_POSITION_MASK), "right") - starts
            found = np.repeat(np.arange(len(some)), counts)
            within = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
            chosen = entries[np.repeat(starts, counts) + within] & np.uint64(_POSITION_MASK)
            keys.append(passed[found + first])
            positions.append(chosen.astype(np.int64))
        every, places = np.concatenate(keys), np.concatenate(positions)
        order = np.lexsort((places, every))
        every, places = every[order], places[order]
        is_new = np.ones(len(every), dtype=np.bool_)
        is_new[1:] = (np.diff(every) != 0) | (np.diff(places) != 0)
        return every[is_new], places[is_new]

    def positions(self, key: bytes) -> list[int] | None:
        """Return the ascending positions of batches that may hold a key; None if damaged."""
        found = self.places_of(self.hashes(ChosenKeys([key])))
        return None if found is None else found[1].tolist()

    def positions_of(self, hashes: Uint64s) -> Int64s | None:
        """Return the ascending positions of batches that may hold one of many keys.

        The argument is their `key_hashes`, ascending. Returns None if the index is damaged.
        """
        found = self.places_of(hashes)
        return None if found is None else np.unique(found[1])

    def _read_for(self, hashes: Uint64s) -> Iterator[tuple[int, Uint64s, Uint64s | None]]:
        """Yield entries, with the hashes that may be among them and the place of the first."""
        if self._held is not None:
            yield 0, hashes, self._held
        elif self.is_worth_reading(len(hashes)):
            for block in range(0, self._block_count, _BLOCKS_AT_ONCE):
                entries = self._blocks(block, _BLOCKS_AT_ONCE)
                if entries is None:
                    yield 0, hashes, None
                    return
                low = entries[[0, -1]] & ~np.uint64(_POSITION_MASK)
                first = int(np.searchsorted(hashes, low[0]))
                yield first, hashes[first : np.searchsorted(hashes, low[1], "right")], entries
        else:
            for place in range(len(hashes)):
                for entries in self._blocks_of(int(hashes[place])):
                    yield place, hashes[place : place + 1], entries

    def _blocks_of(self, low: int) -> Iterator[Uint64s | None]:
        """Yield the entries of the blocks that may have those of a hash; None for a damaged one."""
        block = self._first_block(low)
        if block is None:
            yield None
            return
        for each in range(block, self._block_count):
            entries = self._blocks(each, 1)
            yield entries
            if entries is None or int(entries[-1]) > low | _POSITION_MASK:
                return

    def _blocks(self, first: int, count: int) -> Uint64s | None:
        """Return the entries of some blocks, uint64 ascending; None if one is damaged."""
        count = min(count, self._block_count - first)
        try:
            data = self._source.read_at(count * layout.KEYS_BLOCK, (first + 1) * layout.KEYS_BLOCK)
        except OSError as raised:
            files.pass_on(raised)
            return None
        with memoryview(data) as view:
            for start in range(0, count * layout.KEYS_BLOCK, layout.KEYS_BLOCK):
                if not _is_sound(view[start : start + layout.KEYS_BLOCK]):
                    return None
        table = np.frombuffer(data, dtype=_ENTRY).reshape(
            count, layout.KEYS_BLOCK // _ENTRY.itemsize
        )
        entries = table[:, : layout.KEYS_BLOCK_ENTRIES].astype(np.uint64).ravel()
        entries = entries[: self.count - first * layout.KEYS_BLOCK_ENTRIES]
        return entries if (entries[:-1] <= entries[1:]).all() else None

    def _first_block(self, low: int) -> int | None:
        """Return the first block that ends at or above `low`; hashes are even, so guess it."""
        first, last = 0, max(0, self._block_count - 1)
        guess = (low * self.count >> 64) // layout.KEYS_BLOCK_ENTRIES
        guesses = 0
        while first < last:
            place = min(max(guess, first), last - 1)
            entries = self._blocks(place, 1)
            if entries is None:
                return None
            if int(entries[-1]) < low:
                first = place + 1
            elif int(entries[0]) < low:
                return place
            else:
                last = place
            guesses += 1
            distance = (low - int(entries[0])) * self.count >> 64
            guess = place + distance // layout.KEYS_BLOCK_ENTRIES
            if guesses > _GUESSES:
                guess = (first + last) // 2
        return first


def _is_sound(data: files.Buffer) -> bool:
    if len(data) < layout.KEYS_BLOCK:
        return False
    (crc,) = layout.CHECKSUM.unpack_from(data, layout.KEYS_BLOCK - layout.CHECKSUM.size)
    return bool(crc32c(data[: -layout.CHECKSUM.size]) == crc)


def _read_header(
    source: ByteSource, segment: OpenSegment, *, has_samples: bool
) -> tuple[int, bytes, bool] | None:
    """Return (count, secret, is_unchanged) of an index of this segment; None if it is another's."""
    try:
        data = source.read_at(layout.KEYS_BLOCK, 0)
        size = source.size()
    except OSError as raised:
        files.pass_on(raised)
        return None
    if not _is_sound(data):
        return None
    fields = layout.KEYS_HEADER.unpack_from(data)
    magic, version, base_offset, log_size, count, secret, flags, samples = fields
    if (magic, version) != (layout.KEYS_MAGIC, layout.KEYS_VERSION):
        return None
    if (base_offset, log_size) != (segment.base_offset, segment.limit):
        return None
    blocks = 1 + -(-count // layout.KEYS_BLOCK_ENTRIES)
    if count < 0 or samples > layout.KEYS_SAMPLES_MAX or size != blocks * layout.KEYS_BLOCK:
        return None
    for place in range(samples if has_samples else 0):
        position, crc = layout.KEYS_SAMPLE.unpack_from(
            data, layout.KEYS_HEADER.size + place * layout.KEYS_SAMPLE.size
        )
        header = segment.header_at(position)
        if header is None or header.crc != crc:
            return None
    return count, secret, bool(flags & layout.KEYS_UNCHANGED)
