"""Write one staged file: runs of finished batches, or one run that becomes a segment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.format.stamping import stamp
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.fs.early_sync import EarlySync
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.index_builder import IndexBuilder
from kafkalog.storage_engine.writing.pending_run import RunPart
from kafkalog.storage_engine.writing.staged_message import StagedFile

_JOINED_SIZE = 4 << 20
"""Up to this size, joining parts is cheaper than writing each."""


class StagedFileWriter:
    """Write one staged file, with its indexes if it becomes a segment."""

    def __init__(self, root: Path, name: str) -> None:
        """`name` is the file's path below the root, without its suffix."""
        self._root = root
        self._stem = name
        self._fd = files.open_empty(f"{root}/{name}{layout.STAGED}")
        self.size = 0
        self._crc = 0
        self._early: EarlySync | None = None
        self._config: TopicConfig | None = None
        self._index: IndexBuilder | None = None
        self._offset = 0

    def append(self, parts: Sequence[memoryview]) -> None:
        """Write bytes at the end, joining many small parts."""
        if not parts:
            return
        large = len(parts) == 1 or sum(map(len, parts)) > _JOINED_SIZE
        for data in parts if large else (b"".join(parts),):
            files.write_at(self._fd, data, self.size)
            self._crc = crc32c(data, self._crc)
            self.size += len(data)
            if self._early is not None:
                self._early.note_written(len(data))

    def begin_segment(self, config: TopicConfig) -> None:
        """Mark the file as a segment of a topic, which needs indexes."""
        self._early = EarlySync(self._fd)
        self._config = config
        self._index = IndexBuilder(0, config.index_interval_bytes)

    def append_batches(self, part: RunPart, first: int) -> tuple[int, int]:
        """Append batches from `first` on until the segment is full; return the next one, and rows.

        A batch larger than a segment gets its own.
        """
        assert self._config is not None and self._index is not None
        last, rows = first, 0
        ends = [*part.positions[1:], len(part.data)]
        size = self.size
        while last < len(part.positions):
            position = part.positions[last]
            batch_size = ends[last] - position
            if size and size + batch_size > self._config.segment_bytes:
                break
            stamp(part.data, position, self._offset)
            self._offset += part.counts[last]
            header = parse_header(part.data, position)
            self._index.add(size, self._offset - 1, header.max_timestamp)
            size += batch_size
            rows += part.counts[last]
            last += 1
        if last > first:
            self.append([part.data[part.positions[first] : ends[last - 1]]])
        return last, rows

    def finish(self) -> StagedFile:
        """Close the file; return the description for the commit.

        The commit renames a segment, so the task syncs it. It copies any other file, and syncs the
        copy. Raises StorageError if a segment's file is gone. The commit of another attempt has
        then removed it, and the indexes must not be left behind.
        """
        if self._index is not None and self._early is not None:
            self._index.add_time()
            for suffix, data in (
                (layout.STAGED_INDEX, self._index.offset_entries),
                (layout.STAGED_TIME_INDEX, self._index.time_entries),
            ):
                files.create(self._beside(suffix), data)
            if not self._beside(layout.STAGED).exists():
                raise StorageError(
                    f"{self._beside(layout.STAGED)}: the staged file was removed while it was "
                    "written; another attempt of this task, or run of this writer, was committed"
                )
            self._early.wait()
            files.sync_file(self._fd)
        os.close(self._fd)
        self._fd = -1
        return StagedFile(self._stem + layout.STAGED, self.size, self._crc)

    def discard(self) -> None:
        """Close and remove the file after a failed attempt."""
        if self._early is not None:
            self._early.end()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for suffix in (layout.STAGED, layout.STAGED_INDEX, layout.STAGED_TIME_INDEX):
            files.remove(self._beside(suffix))

    def _beside(self, suffix: str) -> Path:
        return self._root / (self._stem + suffix)
