"""One staged file: runs of finished batches, or one that becomes a segment, with its indexes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from kafkalog.storage_engine import files, layout
from kafkalog.storage_engine.config import TopicConfig


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file the commit verifies: its name below the root, its size, its CRC-32C."""

    name: str
    size: int
    crc: int


class PendingRun:
    """Finished batches of one log partition, not yet written; base offsets count from 0."""

    def __init__(self) -> None:
        self.is_segment = False
        """It goes into a file that becomes a segment."""
        self.clear()

    def clear(self) -> None:
        """Forget the batches: they are written."""
        self.data = bytearray()
        self.positions: list[int] = []
        self.counts: list[int] = []
        self.timestamps: list[int] = []
        self.rows = 0


class StagedFileWriter:
    """Writes one staged file; a segment's has its indexes written beside it."""

    def __init__(self, root: Path, name: Path) -> None:
        self._root = root
        self._stem = name
        self._path = root / name.with_name(name.name + layout.STAGED)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self.size = 0
        self._crc = 0
        self._config: TopicConfig | None = None
        self._index = bytearray()
        self._time_index = bytearray()
        self._offset = 0
        self._indexed_position = 0
        self._largest = (layout.NO_TIMESTAMP, 0)
        self._time_indexed = layout.NO_TIMESTAMP

    def append(self, data: bytearray) -> int:
        """Write bytes at the end; returns where they begin."""
        position = self.size
        files.write_at(self._fd, data, position)
        self._crc = crc32c(data, self._crc)
        self.size += len(data)
        return position

    def begin_segment(self, config: TopicConfig) -> None:
        """Say that the file becomes a segment of a topic, and so wants indexes."""
        self._config = config

    def append_batches(self, run: PendingRun, first: int) -> tuple[int, int]:
        """Append batches of a run until the segment is full; return the next one, and the rows."""
        assert self._config is not None
        last, rows = first, 0
        ends = [*run.positions[1:], len(run.data)]
        size = self.size
        while last < len(run.positions):
            batch_size = ends[last] - run.positions[last]
            if size and size + batch_size > self._config.segment_bytes:
                break
            layout.STAMP_OFFSET.pack_into(run.data, run.positions[last], self._offset)
            self._offset += run.counts[last]
            self._index_batch(size, run.timestamps[last])
            size += batch_size
            rows += run.counts[last]
            last += 1
        if last > first:
            self.append(run.data[run.positions[first] : ends[last - 1]])
        return last, rows

    def _index_batch(self, position: int, timestamp: int) -> None:
        assert self._config is not None
        if timestamp > self._largest[0]:
            self._largest = timestamp, self._offset - 1
        if position - self._indexed_position > self._config.index_interval_bytes:
            self._index += layout.OFFSET_INDEX_ENTRY.pack(self._offset - 1, position)
            self._indexed_position = position
            self._index_time()

    def _index_time(self) -> None:
        if self._largest[0] > self._time_indexed:
            self._time_index += layout.TIME_INDEX_ENTRY.pack(*self._largest)
            self._time_indexed = self._largest[0]

    def finish(self) -> StagedFile:
        """Sync and close; returns what the commit verifies."""
        if self._config is not None:
            self._index_time()
            for suffix, data in (
                (layout.STAGED_INDEX, self._index),
                (layout.STAGED_TIME_INDEX, self._time_index),
            ):
                files.create(self._beside(suffix), data)
        files.sync_file(self._fd)
        os.close(self._fd)
        self._fd = -1
        return StagedFile(str(self._path.relative_to(self._root)), self.size, self._crc)

    def discard(self) -> None:
        """Close and remove the file: its attempt has failed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for suffix in (layout.STAGED, layout.STAGED_INDEX, layout.STAGED_TIME_INDEX):
            files.remove(self._beside(suffix))

    def _beside(self, suffix: str) -> Path:
        return self._root / self._stem.with_name(self._stem.name + suffix)
