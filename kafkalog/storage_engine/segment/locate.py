"""Walk the headers of a `.log`, and find an offset or a time in it by its indexes."""

from __future__ import annotations

from collections.abc import Iterator

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader, iterate_headers, read_header
from kafkalog.storage_engine.segment.byte_source import ByteSource
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex

_HEADERS_SIZE = 64 << 10
"""Bytes to read at once when skipping small batches."""
_SMALL_BATCH = 8 << 10
"""Above this size, only the header of a batch is read to skip it."""
_TIME_HINTS = 3
"""Entries of a time index to try before scanning the whole segment."""


def header_at(source: ByteSource, position: int, limit: int) -> BatchHeader | None:
    """Return the header of the whole batch at `position` of a `.log` file, or None.

    The log ends at byte `limit`. Does not compare the checksum. A message v0 or v1 counts as a
    batch.
    """
    size = min(layout.BATCH_OVERHEAD, limit - position)
    if position < 0 or size <= 0:
        return None
    data = source.read_at(size, position)
    if len(data) < size:
        return None
    header = read_header(data, 0, limit - position)
    return None if header is None or header.last_offset_delta < 0 else header


def headers(source: ByteSource, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of the batches from `position` up to byte `limit` of a `.log` file.

    Stops early, like `batch.iterate_headers`, before bytes that are not a whole batch.
    """
    while (header := header_at(source, position, limit)) is not None:
        if header.size > _SMALL_BATCH:
            yield position, header
            position += header.size
            continue
        data = source.read_at(min(_HEADERS_SIZE, limit - position), position)
        start = position
        for place, found in iterate_headers(data):
            yield start + place, found
            position = start + place + found.size
        if position == start:
            return  # the file was truncated meanwhile


def locate(source: ByteSource, limit: int, index: OffsetIndex, offset: int) -> int:
    """Return the position of a batch such that all earlier batches lie wholly below `offset`.

    It comes from the closest index entry that its batch confirms, or is 0.
    """
    for last_offset, position in index.hints(offset):
        header = header_at(source, position, limit)
        if header is not None and header.last_offset == last_offset:
            return position
    return 0


def confirmed(
    source: ByteSource, limit: int, index: OffsetIndex, entry: tuple[int, int]
) -> int | None:
    """Return the position of the batch that confirms a time index entry, or None without one.

    It has the entry's offset, and its largest timestamp is the entry's. Earlier batches may still
    be younger: the entries between may be lost.
    """
    largest, offset = entry
    for position, header in headers(source, locate(source, limit, index, offset), limit):
        if header.last_offset >= offset:
            is_its = header.base_offset <= offset and header.max_timestamp == largest
            return position if is_its else None
    return None


def locate_time(
    source: ByteSource, limit: int, index: OffsetIndex, times: TimeIndex, timestamp: int
) -> int:
    """Return the position of a batch that a time index names for a time (ms), or 0.

    If the entry is true, all batches before are older than `timestamp`. Its batch confirms it.
    """
    for tried, entry in enumerate(times.hints(timestamp)):
        if tried == _TIME_HINTS:
            break
        position = confirmed(source, limit, index, entry)
        if position is not None:
            return position
    return 0
