"""The times of a segment, as the headers of its batches say them.

A time index has no checksum. It may be lost, short, old, or that of another file, and each of its
entries may still name a batch that exists. Only the batches themselves say that none of them is
younger, so whoever decides by the age of a segment asks here. Reading all headers of a large file
takes a moment. Therefore this process keeps what it found for as long as the file stays the same,
and reads only what is new when it grows.

Kafka: LogSegment.largestTimestamp, which believes the last entry of the time index.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import ByteSource, FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex
from kafkalog.storage_engine.segment.locate import confirmed, header_at, headers
from kafkalog.storage_engine.segment.segments import SegmentFiles

_READ_SIZE: Final = 64 << 10
"""Bytes to read at once among small batches."""
_LARGE_BATCH: Final = 8 << 10
"""From a batch of this size on, only the next header is read."""
_MARK_DISTANCE: Final = 1 << 20
"""Bytes of a log between two marks."""
_LEAST: Final = -layout.INT64_MAX - 1
_KEPT_MAX: Final = 4096
"""Files whose times this process keeps."""


@dataclass(slots=True)
class SegmentTimes:
    """The times of the batches up to byte `end`, in epoch milliseconds; -1 for none."""

    end: int = 0
    """The byte after the last whole batch; a damaged log may have more."""
    largest: int = layout.NO_TIMESTAMP
    largest_offset: int = -1
    """The last offset of the first batch with that time."""
    largest_position: int = 0
    """Where that batch begins."""
    _ceiling: int = _LEAST
    """No record is younger. The time of a compressed message v0 or v1 says nothing of those in it,
    so after one every time is possible."""
    _positions: array[int] = field(default_factory=lambda: array("q", [0]))
    _ceilings: array[int] = field(default_factory=lambda: array("q", [_LEAST]))
    """The ceiling of all batches before each of the positions."""
    _last: tuple[int, bytes] = (0, b"")
    """The position and the header of the last batch."""

    def position_since(self, source: ByteSource, timestamp: int) -> int:
        """Return the position of the first batch that may have a record of that time or later.

        All batches before have only older records. It is `end` if no batch has such a record.
        """
        if self._ceiling < timestamp:
            return self.end
        position = self._positions[bisect_left(self._ceilings, timestamp) - 1]
        for place, header in headers(source, position, self.end):
            if header.max_timestamp >= timestamp or header.is_wrapper:
                return place
            position = place + header.size
        return position

    def begins(self, source: ByteSource) -> bool:
        """Return whether a source still has the last batch where it was."""
        position, header = self._last
        return source.read_at(len(header), position) == header

    def extended(self, source: ByteSource, limit: int) -> SegmentTimes:
        """Return the times of all whole batches below byte `limit`."""
        found = replace(self, _positions=self._positions[:], _ceilings=self._ceilings[:])
        last = found._last[0]
        for position, size, last_offset, timestamp, is_wrapper in _batches(source, self.end, limit):
            found._add_mark(position)
            found._ceiling = max(found._ceiling, layout.INT64_MAX if is_wrapper else timestamp)
            if timestamp > found.largest:
                found.largest, found.largest_offset = timestamp, last_offset
                found.largest_position = position
            last, found.end = position, position + size
        found._last = last, source.read_at(min(layout.BATCH_OVERHEAD, found.end - last), last)
        return found

    def _add_mark(self, position: int) -> None:
        if position - self._positions[-1] < _MARK_DISTANCE:
            return
        if self._ceiling == self._ceilings[-1]:
            self._positions[-1] = position
        else:
            self._positions.append(position)
            self._ceilings.append(self._ceiling)


def _batches(
    source: ByteSource, position: int, limit: int
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield (position, size, last offset, timestamp, is a wrapper) of whole batches, unchecked.

    These are the batches of `headers`, without the fields that nobody needs here.
    """
    unpack, overhead = layout.BATCH_PLACE.unpack_from, layout.BATCH_OVERHEAD
    wanted = _READ_SIZE
    while position < limit:
        data = source.read_at(min(wanted, limit - position), position)
        place, room = 0, limit - position
        while len(data) - place >= overhead:
            base_offset, length, magic, delta, timestamp = unpack(data, place)
            last_offset, size = base_offset + delta, length + layout.LOG_OVERHEAD
            if magic != layout.MAGIC or not overhead <= size <= room - place:
                break
            if delta < 0 or last_offset > layout.INT64_MAX:
                return
            yield position + place, size, last_offset, timestamp, False
            place += size
            wanted = overhead if size > _LARGE_BATCH else _READ_SIZE
        if place:
            position += place
            continue
        header = header_at(source, position, limit)
        if header is None or header.magic == layout.MAGIC:
            return
        yield position, header.size, header.last_offset, header.max_timestamp, header.is_wrapper
        position, wanted = position + header.size, overhead


def times_after(
    source: ByteSource, limit: int, index: OffsetIndex, entry: tuple[int, int] | None
) -> SegmentTimes | None:
    """Return the times if the last entry of a time index is true; None if no batch confirms it.

    It is what a broker believes, and what holds if an index has lost entries at its end. Only the
    batches from there on are looked at.
    """
    position = 0 if entry is None else confirmed(source, limit, index, entry)
    return None if position is None else SegmentTimes(end=position).extended(source, limit)


class _Known(NamedTuple):
    seal: tuple[int, int, int]
    """Size and times of change of the file."""
    limit: int
    times: SegmentTimes


known_times: dict[tuple[int, int], _Known] = {}
"""What this process has read, by device and number of the file."""


def segment_times(fd: int, limit: int) -> SegmentTimes:
    """Return what the batches below byte `limit` of an open `.log` file say of time.

    All headers are read once, and of a file that has grown only the new ones.
    """
    found = os.fstat(fd)
    key, seal = (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    known = known_times.get(key)
    if known is not None and (known.seal, known.limit) == (seal, limit):
        return known.times
    source = FileBytes(fd)
    times = SegmentTimes()
    if known is not None and known.times.end <= limit and known.seal[0] < found.st_size:
        times = known.times if known.times.begins(source) else times
    times = times.extended(source, limit)
    if len(known_times) >= _KEPT_MAX:
        known_times.pop(next(iter(known_times)), None)
    known_times[key] = _Known(seal, limit, times)
    return times


def largest_timestamp(segment: SegmentFiles, limit: int) -> int:
    """Return the largest timestamp (ms) of a segment's batches below byte `limit`.

    If the batches have no timestamps, or not all are readable, the file's modification time counts
    too.
    """
    with files.closing(files.open_to_read(segment.log)) as fd:
        times = segment_times(fd, limit)
        if times.end == limit and times.largest >= 0:
            return times.largest
        return max(times.largest, os.fstat(fd).st_mtime_ns // 1_000_000)


def has_time(segment: SegmentFiles, limit: int, timestamp: int) -> bool:
    """Return whether a segment has a record from a time (ms) on, or later.

    Its time index may show the batch of one. If the index says so and no batch does, the checksums
    of the batches decide: damage may have made a header older.
    """
    entry = TimeIndex(segment.time_index, segment.base_offset).last_entry()
    has_entry = entry is not None and entry[0] >= timestamp
    if entry is not None and has_entry:
        index = OffsetIndex(segment.index, segment.base_offset)
        with files.closing(files.open_to_read(segment.log)) as fd:
            if confirmed(FileBytes(fd), limit, index, entry) is not None:
                return True
    if largest_timestamp(segment, limit) >= timestamp:
        return True
    return has_entry and not _is_sound(segment, limit)


def _is_sound(segment: SegmentFiles, limit: int) -> bool:
    from kafkalog.storage_engine.segment.log_scanner import RECOVER, LogScanner

    with files.closing(files.open_to_read(segment.log)) as fd:
        scan = LogScanner(
            FileBytes(fd), segment.log, RECOVER, limit=limit, next_offset=segment.base_offset
        )
        for _ in scan:
            pass
        return scan.fault is None
