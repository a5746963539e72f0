"""A segment that a cleaning writes: its `.cleaned` files, from the first byte to the last sync.

Nobody else looks at `.cleaned` files; a crash leaves them, and the next holder of the partition's
cleaner lock removes them. Index entries follow Kafka's rule for an append, one decision per batch.

Kafka: Cleaner.createNewCleanedSegment, LogSegment.append, LogSegment.onBecomeInactiveSegment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kafkalog.cleaner.offset_map import Int64s, load_kernels
from kafkalog.storage_engine import files, layout
from kafkalog.storage_engine.config import TopicConfig
from kafkalog.storage_engine.files import Buffer
from kafkalog.storage_engine.gaps import GapCollector, Section
from kafkalog.storage_engine.index import offset_entry, time_entry

__all__ = ["CleanedSegment"]


class CleanedSegment:
    """One output segment; append batches, then `finish` or `discard`."""

    def __init__(self, directory: Path, base_offset: int, config: TopicConfig) -> None:
        self.directory = directory
        self.base_offset = base_offset
        self.size = 0
        self._gaps = GapCollector(base_offset)
        self._config = config
        self._offset_entries: list[bytes] = []
        self._time_entries: list[bytes] = []
        self._since_entry = 0
        self._top_timestamp = layout.NO_TIMESTAMP
        self._top_offset = base_offset
        self._last_timestamp = layout.NO_TIMESTAMP
        self._transaction_entries = bytearray()
        for suffix in layout.SEGMENT_SUFFIXES:
            files.remove(self.path(suffix))
        files.create(self.path(layout.LOG))
        self._fd = os.open(self.path(layout.LOG), os.O_WRONLY | os.O_CLOEXEC)

    @property
    def next_offset(self) -> int:
        """One past the last offset that was appended."""
        return self._gaps.next_offset

    def path(self, suffix: str) -> Path:
        """Where one of the segment's files is until the swap."""
        return self.directory / layout.segment_file(self.base_offset, suffix, layout.CLEANED)

    def count_fitting(self, sizes: Int64s, last_offsets: Int64s) -> int:
        """Return how many of the next batches keep within Kafka's 2^31-1 bytes and offsets (C118).

        `sizes` and `last_offsets` are theirs (b).
        """
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
    ) -> None:
        """Append whole batches: their bytes in pieces of any cut, and four figures of each."""
        kernels = load_kernels()
        if not len(sizes):
            return
        files.write_at(self._fd, pieces[0] if len(pieces) == 1 else b"".join(pieces), self.size)
        rows = np.empty(len(sizes), dtype=np.int64)
        tops = np.empty(len(sizes), dtype=np.int64)
        top_offsets = np.empty(len(sizes), dtype=np.int64)
        count, self._since_entry, self._top_timestamp, self._top_offset = map(
            int,
            kernels.choose_index_entries(
                sizes, last_offsets, max_timestamps,
                self._since_entry, self._config.index_interval_bytes,
                self._top_timestamp, self._top_offset, rows, tops, top_offsets,
            ),
        )  # fmt: skip
        rows = rows[:count]
        positions = self.size + np.cumsum(sizes) - sizes
        for offset, position in zip(
            last_offsets[rows].tolist(), positions[rows].tolist(), strict=True
        ):
            self._index(offset, position)
        for timestamp, offset in zip(
            tops[:count].tolist(), top_offsets[:count].tolist(), strict=True
        ):
            self._index_time(timestamp, offset)
        self.size += int(sizes.sum())
        self._gaps.add(base_offsets, last_offsets)

    def section(self, end: int) -> Section:
        """Return the gaps of the segment, which is followed by offset `end`."""
        return Section(self.base_offset, self.size, self._gaps.gaps(end))

    def append_transactions(self, entries: Buffer) -> None:
        """Carry over entries of a source's transaction index, as they are."""
        self._transaction_entries += entries

    def finish(self, mtime_ns: int) -> None:
        """Write the indexes, give all files the time of their last source, sync them (C109)."""
        self._index_time(self._top_timestamp, self._top_offset)
        os.close(self._fd)
        self._fd = -1
        files.create(self.path(layout.INDEX), b"".join(self._offset_entries))
        files.create(self.path(layout.TIME_INDEX), b"".join(self._time_entries))
        if self._transaction_entries:
            files.create(self.path(layout.TRANSACTION_INDEX), self._transaction_entries)
            files.sync_path(self.path(layout.TRANSACTION_INDEX))
        for suffix in (layout.LOG, layout.INDEX, layout.TIME_INDEX):
            files.set_times(self.path(suffix), mtime_ns)
            files.sync_path(self.path(suffix))

    def discard(self) -> None:
        """Close and remove everything; what cannot be removed now goes before the next cleaning."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        for suffix in layout.SEGMENT_SUFFIXES:
            with contextlib.suppress(OSError):
                files.remove(self.path(suffix))

    def _index(self, offset: int, position: int) -> None:
        entry = offset_entry(self.base_offset, offset, position)
        if (len(self._offset_entries) + 1) * len(entry) <= self._config.segment_index_bytes:
            self._offset_entries.append(entry)

    def _index_time(self, timestamp: int, offset: int) -> None:
        if timestamp <= self._last_timestamp:
            return
        entry = time_entry(self.base_offset, timestamp, offset)
        self._time_entries.append(entry)
        self._last_timestamp = timestamp
