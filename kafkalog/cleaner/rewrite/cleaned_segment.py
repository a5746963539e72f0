"""A segment that a cleaning writes, as `.cleaned` files.

No other process reads `.cleaned` files. The next holder of the partition's cleaner lock removes
those of a crash. Index entries follow Kafka's rule for an append, one decision per batch.

Kafka: Cleaner.createNewCleanedSegment, LogSegment.append, LogSegment.onBecomeInactiveSegment.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kafkalog.cleaner.dedup.offset_map import Int64s, Uint64s
from kafkalog.cleaner.key_index.key_index import KeyIndexWriter
from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.fs.files import Buffer
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.gaps import GapCollector, Section
from kafkalog.storage_engine.segment.index_builder import IndexBuilder

_log = logging.getLogger(__name__)

_SAMPLED_MAX: Final = 1024
"""Positions of batches remembered for the key index."""


class CleanedSegment:
    """One output segment; append batches, then `finish` or `discard`."""

    def __init__(
        self, directory: Path, base_offset: int, config: TopicConfig, *, key_secret: bytes = b""
    ) -> None:
        """Create the `.log` file; a `key_secret` (16 bytes) adds a key index."""
        self.directory = directory
        self.base_offset = base_offset
        self.size = 0
        self._gaps = GapCollector(base_offset)
        self._index = IndexBuilder(
            base_offset,
            config.index_interval_bytes,
            offset_entries_max=config.segment_index_bytes // layout.OFFSET_INDEX_ENTRY.size,
        )
        self._transaction_entries = bytearray()
        self._sampled: list[int] = []
        self._last_position = 0
        self._suffixes: tuple[str, ...] = ()
        """Suffixes of the finished files."""
        self.keys = KeyIndexWriter(directory, base_offset, key_secret) if key_secret else None
        """The key index, under a temporary name until the swap; None after it failed."""
        for suffix in layout.SEGMENT_SUFFIXES:
            files.remove(self.path(suffix))
        files.create(self.path(layout.LOG))
        self._fd = files.open_to_write(self.path(layout.LOG))

    @property
    def next_offset(self) -> int:
        """One past the last appended offset."""
        return self._gaps.next_offset

    def path(self, suffix: str) -> Path:
        """Return the path of one of the segment's files before the swap."""
        return self.directory / layout.segment_file(self.base_offset, suffix, layout.CLEANED)

    def count_fitting(self, sizes: Int64s, last_offsets: Int64s) -> int:
        """Return how many of the next batches (b) keep within 2^31-1 bytes and offsets (C118)."""
        is_within = self.size + np.cumsum(sizes) <= layout.INT32_MAX
        is_within &= last_offsets - self.base_offset <= layout.INT32_MAX
        return len(sizes) if is_within.all() else int(is_within.argmin())

    def append(
        self,
        pieces: Sequence[Buffer],
        sizes: Int64s,
        base_offsets: Int64s,
        last_offsets: Int64s,
        max_timestamps: Int64s,
        *,
        keys: tuple[Uint64s, Int64s] | None = None,
    ) -> None:
        """Append whole batches: their bytes in any pieces, and four figures of each.

        The key index gets `keys`, the hashes and offsets (r) of their records with keys.
        """
        if not len(sizes):
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._in_room(lambda: files.write_at(self._fd, data, self.size))
        positions = self.size + np.cumsum(sizes) - sizes
        rows = self._index.add_batches(positions, last_offsets, max_timestamps)
        self._last_position = int(positions[-1])
        self._sampled += positions[rows].tolist()
        if len(self._sampled) > _SAMPLED_MAX:
            self._sampled = self._sampled[::2]
        if self.keys is not None and keys is not None:
            ends = np.searchsorted(keys[1], last_offsets, side="right")
            with self._dispensable_keys():
                self.keys.add(keys[0], np.repeat(positions, np.diff(ends, prepend=0)))
        self.size += int(sizes.sum())
        self._gaps.add(base_offsets, last_offsets)

    def section(self, end: int) -> Section:
        """Return the gaps of the segment; the next one begins at offset `end`."""
        return Section(self.base_offset, self.size, self._gaps.gaps(end))

    def append_transactions(self, entries: Buffer) -> None:
        """Add packed entries of a source's transaction index."""
        self._transaction_entries += entries

    def finish(self, mtime_ns: int) -> None:
        """Write the indexes, and set the times of all files but the transaction index (C109).

        The files are not synced yet (`syncs`). `finish_keys` writes the key index.
        """
        index = self._index
        index.add_time()
        self._close()
        contents = {
            layout.INDEX: bytes(index.offset_entries),
            layout.TIME_INDEX: bytes(index.time_entries),
        }
        index.offset_entries.clear()  # many finished segments may wait for their swap
        index.time_entries.clear()
        if self._transaction_entries:
            contents[layout.TRANSACTION_INDEX] = bytes(self._transaction_entries)
        for suffix, content in contents.items():
            self._in_room(partial(_write, self.path(suffix), content))
        self._suffixes = (layout.LOG, *contents)
        for suffix in self._suffixes:
            if suffix != layout.TRANSACTION_INDEX:
                files.set_times(self.path(suffix), mtime_ns)

    def finish_keys(self, *, is_unchanged: bool = False) -> None:
        """Write the key index, and whether the segment is unchanged (`unchanged_segments`)."""
        if self.keys is not None:
            self.keys.is_unchanged = is_unchanged
            sampled = [0, *self._sampled, self._last_position] if self.size else []
            with self._dispensable_keys():
                self.keys.finish(self.path(layout.LOG), self.size, sorted(set(sampled)))
            self._sampled.clear()

    def syncs(self) -> list[Callable[[], None]]:
        """Return functions that sync the finished files, to call once each, in any order.

        A failed sync must not be repeated: the kernel may have dropped the pages.
        """
        of_files = [partial(files.sync_path, self.path(suffix)) for suffix in self._suffixes]
        return [*of_files, self.sync_keys]

    def sync_keys(self) -> None:
        """Sync the key index under its temporary name."""
        if self.keys is not None:
            with self._dispensable_keys():
                files.sync_path(self.keys.temporary)

    def place_keys(self) -> None:
        """Rename the key index to its final name; the caller syncs the directory.

        The caller holds the segments lock exclusively.
        """
        if self.keys is not None:
            with self._dispensable_keys():
                files.rename(self.keys.temporary, self.keys.path)

    def discard(self) -> None:
        """Close and remove all files; the next cleaning removes what is left."""
        with files.ignoring():
            self._close()
        if self.keys is not None:
            self.keys.discard()
        for suffix in layout.SEGMENT_SUFFIXES:
            with files.ignoring():
                files.remove(self.path(suffix))

    def _close(self) -> None:
        fd, self._fd = self._fd, -1  # first, because a close that fails has closed too

        if fd >= 0:
            os.close(fd)

    def _in_room(self, act: Callable[[], None]) -> None:
        """Write a file; if the disk is full, drop the key index and try again."""
        try:
            act()
        except OSError as fault:
            files.pass_on(fault)
            if self.keys is None or fault.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._give_keys_up(fault)
            act()

    @contextlib.contextmanager
    def _dispensable_keys(self) -> Iterator[None]:
        """Drop the key index if it fails: a segment without one is scanned."""
        try:
            yield
        except (OSError, StorageError) as fault:
            files.pass_on(fault)
            self._give_keys_up(fault)

    def _give_keys_up(self, fault: Exception) -> None:
        if self.keys is not None:
            path = self.keys.path
            _log.warning("%s: no key index, lookups scan the segment instead: %s", path, fault)
            self.keys.discard()
            self.keys = None


def _write(path: Path, data: bytes) -> None:
    """Write a new file, without a sync."""
    files.create(path)
    fd = files.open_to_write(path)
    try:
        files.write_at(fd, data, 0)
    finally:
        os.close(fd)
