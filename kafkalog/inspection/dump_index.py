"""Dump an `.index` or `.timeindex`, and compare each entry with its `.log`.

In an offset index, the batch at the entry's position must end with its offset. In a time index, a
batch must end with the entry's offset and have its timestamp. A zero entry ends the file
(preallocation). Kafka's tool compares with the records' timestamps, and so complains about batches
that cleaning has emptied; here the timestamp of the header is compared.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from kafkalog.inspection.dump_entry import DumpOptions, Entry, finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.locate import header_at, headers, locate

Found: TypeAlias = Iterable[tuple[int, int]]
"""The two fields of each entry of an index."""


def entries(path: Path, options: DumpOptions) -> Iterator[Entry]:
    """Yield the entries of an index file, and its mismatches with the log."""
    parsed = layout.parse_segment_file(path.name)
    assert parsed is not None
    base_offset, suffix, stage = parsed
    is_time_index = suffix == layout.TIME_INDEX
    entry = layout.TIME_INDEX_ENTRY if is_time_index else layout.OFFSET_INDEX_ENTRY
    data = files.read_file(path)
    whole = len(data) - len(data) % entry.size
    if len(data) < entry.size and not is_time_index:
        yield {"type": "empty index", "path": str(path)}
    elif options.index_sanity_check and whole == len(data):
        yield _sanity(path, base_offset, data, is_time_index=is_time_index)
        return
    if whole < len(data):
        expected = f"a multiple of {entry.size} bytes"
        yield finding(path, "index size", whole, expected, f"{len(data)} bytes")
        if options.index_sanity_check and whole:
            return
    found = itertools.takewhile(any, entry.iter_unpack(data[:whole]))  # zeros are preallocated
    log = _log_beside(path, base_offset, stage)
    if log is None:
        name = layout.segment_file(base_offset, layout.LOG)
        yield finding(path, "no log", 0, f"{name} next to it, to be compared with", "none")
    fd = None if log is None else files.open_to_read(log)
    try:
        if is_time_index:
            index = path.with_name(layout.segment_file(base_offset, layout.INDEX, stage))
            batches = None if fd is None else _Batches(fd, OffsetIndex(index, base_offset))
            yield from _time_entries(path, base_offset, found, batches, options)
        else:
            yield from _offset_entries(path, base_offset, found, fd, options)
    finally:
        if fd is not None:
            os.close(fd)


def _log_beside(path: Path, base_offset: int, stage: str) -> Path | None:
    for wanted in (stage, "", layout.SWAP, layout.CLEANED, layout.DELETED):
        log = path.with_name(layout.segment_file(base_offset, layout.LOG, wanted))
        if log.exists():
            return log
    return None


def _offset_entries(
    path: Path, base_offset: int, found: Found, fd: int | None, options: DumpOptions
) -> Iterator[Entry]:
    limit = 0 if fd is None else os.fstat(fd).st_size
    for number, (relative_offset, position) in enumerate(found):
        place = number * layout.OFFSET_INDEX_ENTRY.size
        offset = base_offset + relative_offset
        if not options.verify_index_only:
            yield {"type": "index entry", "offset": offset, "position": position}
        if fd is None:
            continue
        header = header_at(FileBytes(fd), position, limit)
        last_offset = -1 if header is None else header.last_offset
        if last_offset != offset:
            expected = f"the last offset of the batch at byte {position}, {last_offset}"
            instead = f"offset {offset}"
            if header is None:
                expected, instead = "the position of a batch", f"{position}"
            yield {
                **finding(path, "index mismatch", place, expected, instead),
                "indexOffset": offset,
                "logOffset": last_offset,
            }


def _time_entries(
    path: Path, base_offset: int, found: Found, batches: _Batches | None, options: DumpOptions
) -> Iterator[Entry]:
    before = layout.NO_TIMESTAMP
    for number, (timestamp, relative_offset) in enumerate(found):
        place = number * layout.TIME_INDEX_ENTRY.size
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
        self._headers = headers(FileBytes(fd), 0, self._limit)
        self._last: BatchHeader | None = None

    def at_or_after(self, offset: int) -> BatchHeader | None:
        if self._last is not None and self._last.last_offset > offset:
            position = locate(FileBytes(self._fd), self._limit, self._index, offset)
            self._headers = headers(FileBytes(self._fd), position, self._limit)
            self._last = None
        while self._last is None or self._last.last_offset < offset:
            found = next(self._headers, None)
            if found is None:
                return None
            self._last = found[1]
        return self._last


def _sanity(path: Path, base_offset: int, data: bytes, *, is_time_index: bool) -> Entry:
    """Look at the last entry of a file of whole entries."""
    passed: Entry = {"type": "sanity check", "path": str(path), "passed": True}
    if not data:
        return passed
    entry_size = (layout.TIME_INDEX_ENTRY if is_time_index else layout.OFFSET_INDEX_ENTRY).size
    place = len(data) - entry_size
    if is_time_index:
        timestamp, relative_offset = layout.TIME_INDEX_ENTRY.unpack_from(data, place)
        first_timestamp, _ = layout.TIME_INDEX_ENTRY.unpack_from(data)
        if timestamp < first_timestamp:
            expected = f"a last timestamp of at least the first, {first_timestamp}"
            return finding(path, "time order", place, expected, timestamp)
    else:
        relative_offset, _ = layout.OFFSET_INDEX_ENTRY.unpack_from(data, place)
    if relative_offset < 0:
        expected = f"an offset of at least {base_offset}"
        found = base_offset + relative_offset
        return finding(path, "index offset", place, expected, found)
    return passed
