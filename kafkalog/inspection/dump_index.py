"""Dump an `.index` or `.timeindex`, and compare each entry with the `.log` beside it.

In an offset index, the batch at the entry's position must end with its offset. In a time index, a
batch must end with the entry's offset and have its timestamp. A zero entry ends the file
(preallocation). Kafka's tool compares with the records' timestamps, and so complains about batches
that cleaning has emptied; here the timestamp of the header is compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kafkalog.inspection.dump_entry import DumpOptions, Entry, finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.segments import header_at, headers, locate

__all__ = ["entries"]

_READ_ENTRIES = 8192


def entries(path: Path, options: DumpOptions) -> Iterator[Entry]:
    """Yield the entries of an index file, and the mismatches with the log beside it."""
    parsed = layout.parse_segment_file(path.name)
    assert parsed is not None
    base_offset, suffix, stage = parsed
    is_time_index = suffix == layout.TIME_INDEX
    layout_entry = layout.TIME_INDEX_ENTRY if is_time_index else layout.OFFSET_INDEX_ENTRY
    size = path.stat().st_size
    if size < layout_entry.size and not is_time_index:
        yield {"type": "empty index", "path": str(path)}
    elif options.index_sanity_check:
        yield _sanity(path, base_offset, layout_entry.size, is_time_index=is_time_index)
        return
    if size % layout_entry.size:
        whole = size - size % layout_entry.size
        expected = f"a multiple of {layout_entry.size} bytes"
        yield finding(path, "index size", whole, expected, f"{size} bytes")
    log = _log_beside(path, base_offset, stage)
    if log is None:
        name = layout.segment_file(base_offset, layout.LOG)
        yield finding(path, "no log", 0, f"{name} beside it, to be compared with", "none")
    fd = None if log is None else files.open_to_read(log)
    try:
        if is_time_index:
            index = path.with_name(layout.segment_file(base_offset, layout.INDEX, stage))
            yield from _time_entries(path, base_offset, fd, OffsetIndex(index), options)
        else:
            yield from _offset_entries(path, base_offset, fd, options)
    finally:
        if fd is not None:
            os.close(fd)


def _log_beside(path: Path, base_offset: int, stage: str) -> Path | None:
    for wanted in (stage, "", layout.SWAP, layout.CLEANED, layout.DELETED):
        log = path.with_name(layout.segment_file(base_offset, layout.LOG, wanted))
        if log.exists():
            return log
    return None


def _unpacked(path: Path, *, is_time_index: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (position, first field, second field) of each entry up to the first zero entry."""
    entry = layout.TIME_INDEX_ENTRY if is_time_index else layout.OFFSET_INDEX_ENTRY
    position = 0
    with files.open_stream(path) as file:
        while data := file.read(entry.size * _READ_ENTRIES):
            for first, second in entry.iter_unpack(data[: len(data) - len(data) % entry.size]):
                if first == 0 and second == 0:
                    return
                yield position, first, second
                position += entry.size


def _offset_entries(
    path: Path, base_offset: int, fd: int | None, options: DumpOptions
) -> Iterator[Entry]:
    limit = 0 if fd is None else os.fstat(fd).st_size
    for place, relative_offset, position in _unpacked(path, is_time_index=False):
        offset = base_offset + relative_offset
        if not options.verify_index_only:
            yield {"type": "index entry", "offset": offset, "position": position}
        if fd is None:
            continue
        header = header_at(fd, position, limit)
        last_offset = -1 if header is None else header.last_offset
        if last_offset != offset:
            expected = f"the last offset of the batch at byte {position}, {last_offset}"
            found = f"offset {offset}"
            if header is None:
                expected = "the position of a batch"
                found = f"{position}"
            yield {
                **finding(path, "index mismatch", place, expected, found),
                "indexOffset": offset,
                "logOffset": last_offset,
            }


def _time_entries(
    path: Path, base_offset: int, fd: int | None, index: OffsetIndex, options: DumpOptions
) -> Iterator[Entry]:
    before = layout.NO_TIMESTAMP
    batches = None if fd is None else _Batches(fd, index)
    for place, timestamp, relative_offset in _unpacked(path, is_time_index=True):
        offset = base_offset + relative_offset
        if not options.verify_index_only:
            yield {"type": "time index entry", "timestamp": timestamp, "offset": offset}
        if timestamp <= before:
            yield {
                **finding(path, "time order", place, f"a timestamp above {before}", timestamp),
                "indexTimestamp": timestamp,
                "previousTimestamp": before,
            }
        before = timestamp
        if batches is None:
            continue
        header = batches.at_or_after(offset)
        if header is None or header.last_offset != offset:
            last_offset = -1 if header is None else header.last_offset
            expected = f"the last offset of a batch, such as {last_offset}"
            yield {
                **finding(path, "time offset", place, expected, f"offset {offset}"),
                "indexOffset": offset,
                "logOffset": last_offset,
            }
        elif header.max_timestamp != timestamp:
            expected = f"{header.max_timestamp}, the largest timestamp of the batch of {offset}"
            yield {
                **finding(path, "time mismatch", place, expected, timestamp),
                "indexTimestamp": timestamp,
                "logTimestamp": header.max_timestamp,
            }


class _Batches:
    """The headers of a log, for ascending offsets; a lower offset restarts the scan."""

    def __init__(self, fd: int, index: OffsetIndex) -> None:
        self._fd = fd
        self._index = index
        self._limit = os.fstat(fd).st_size
        self._headers = headers(fd, 0, self._limit)
        self._last: BatchHeader | None = None

    def at_or_after(self, offset: int) -> BatchHeader | None:
        if self._last is not None and self._last.last_offset > offset:
            position = locate(self._fd, self._limit, self._index, offset)
            self._headers = headers(self._fd, position, self._limit)
            self._last = None
        while self._last is None or self._last.last_offset < offset:
            found = next(self._headers, None)
            if found is None:
                return None
            self._last = found[1]
        return self._last


def _sanity(path: Path, base_offset: int, entry_size: int, *, is_time_index: bool) -> Entry:
    size = path.stat().st_size
    if size % entry_size:
        expected = f"a multiple of {entry_size} bytes"
        return finding(path, "index size", size - size % entry_size, expected, f"{size} bytes")
    passed: Entry = {"type": "sanity check", "path": str(path), "passed": True}
    if not size:
        return passed
    with files.open_stream(path) as file:
        first = file.read(entry_size)
        file.seek(size - entry_size)
        last = file.read(entry_size)
    if is_time_index:
        timestamp, relative_offset = layout.TIME_INDEX_ENTRY.unpack(last)
        first_timestamp, _ = layout.TIME_INDEX_ENTRY.unpack(first)
        if timestamp < first_timestamp:
            expected = f"a last timestamp of at least the first, {first_timestamp}"
            return finding(path, "time order", size - entry_size, expected, timestamp)
    else:
        relative_offset, _ = layout.OFFSET_INDEX_ENTRY.unpack(last)
    if relative_offset < 0:
        expected = f"an offset of at least {base_offset}"
        found = base_offset + relative_offset
        return finding(path, "index offset", size - entry_size, expected, found)
    return passed
