"""A segment in a log directory that is open for reading, with its indexes."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex
from kafkalog.storage_engine.segment.open_segment import OpenSegment
from kafkalog.storage_engine.segment.segment_times import SegmentTimes, segment_times, times_after
from kafkalog.storage_engine.segment.segments import SegmentFiles

if TYPE_CHECKING:
    from kafkalog.storage_engine.segment.offset_chain import GapLists, OffsetChain


class OpenSegmentFile(OpenSegment):
    """A segment whose `.log` file is open; `close` it."""

    def __init__(
        self,
        segment: SegmentFiles,
        *,
        end_offset: int,
        committed: int | None,
        high_watermark: int = layout.INT64_MAX,
        gaps: GapLists | None = None,
        listed_from: int = 0,
    ) -> None:
        """Open the file, to be read to its end or to `committed` bytes.

        No batch in these bytes begins at or above `high_watermark`. With `gaps`, batches from
        `listed_from` on have no other gaps.

        Raises StorageError, and FileNotFoundError when it is gone since it was listed. A file with
        fewer bytes is read as far as it goes; whoever reads past that gets a StorageError.
        """
        self.files = segment
        self._gaps = gaps
        self._listed_from = listed_from
        self._file = FileBytes(files.open_listed(segment.log, ", or clean the topic first"))
        base = segment.base_offset
        super().__init__(
            self._file,
            segment.log,
            base,
            end_offset=end_offset,
            committed=committed,
            high_watermark=high_watermark,
            begin_chain=None if gaps is None else self._chain_of_gaps,
            indexes=(OffsetIndex(segment.index, base), TimeIndex(segment.time_index, base)),
            load_times=self._times,
        )

    def close(self) -> None:
        """Close the file; whoever still reads meets a closed descriptor, not another file's."""
        self._file.close()

    @property
    def is_live(self) -> bool:
        """Whether the open file still is the one of its name: asked under the segments lock."""
        try:
            named = os.stat(self.files.log)
        except OSError as raised:
            files.pass_on(raised)
            return False
        return (named.st_dev, named.st_ino) == self.identity

    @property
    def identity(self) -> Hashable:
        """The file; as long as it is open, no other one has its inode."""
        held = os.fstat(self._file.fd)
        return held.st_dev, held.st_ino

    def has_whole_time_index(self) -> bool:
        """Return whether the last time index entry has its batch, and no later batch is younger."""
        segment, base = self.files, self.base_offset
        entry = TimeIndex(segment.time_index, base).last_entry()
        known = times_after(self._file, self.limit, OffsetIndex(segment.index, base), entry)
        largest = 0 if entry is None else entry[0]  # an entry of time 0 may look like padding
        return known is not None and known.largest <= largest

    def _times(self) -> SegmentTimes:
        return segment_times(self._file.fd, self.limit)

    def _chain_of_gaps(
        self, base_offset: int, size: int | None, next_offset: int | None
    ) -> OffsetChain:
        assert self._gaps is not None
        return self._gaps.chain(
            base_offset, size, next_offset=next_offset, listed_from=self._listed_from
        )
