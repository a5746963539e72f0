"""Find keys in one file: records with these keys, and bytes outside records.

Batches are decompressed, and every record's key is compared, whether it was aborted, became
obsolete or was never committed. Damaged batches cannot be decoded: they are reported and searched
as bytes. All other files are searched as bytes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import ByteSource, FileBytes, data_from

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.erasure.topic_files import TopicFile
    from kafkalog.storage_engine.records.tables import BatchTable, RecordTable
    from kafkalog.storage_engine.segment.log_scanner import ScannedBatches

_PIECE_SIZE: Final = 4 << 20


@dataclass(slots=True)
class FileOccurrences:
    """The occurrences in one file."""

    file: TopicFile
    size: int = 0
    """Bytes on disk that were scanned."""
    records: int = 0
    """Records whose key was compared."""
    found: dict[int, int] = field(default_factory=dict)
    """By number of a key: its records, including tombstones."""
    deletions: int = 0
    """How many of the records found are tombstones."""
    first_offset: int = layout.INT64_MAX
    last_offset: int = -1
    """The last offset of the records found."""
    horizon_ms: int | None = None
    """When the last tombstone may go; INT64_MAX if one has no delete horizon."""
    mentions: int = 0
    """Other records that have a key's bytes in their key, value or headers."""
    positions: dict[int, int] = field(default_factory=dict)
    """By number of a key: the first position of its bytes outside records."""
    faults: list[str] = field(default_factory=list)
    """The parts that could not be scanned, and why."""

    @property
    def record_count(self) -> int:
        """Number of records that have one of the keys."""
        return sum(self.found.values())

    def add(self, more: FileOccurrences) -> FileOccurrences:
        """Return these occurrences and `more`, which follow in the file."""
        horizons = [one for one in (self.horizon_ms, more.horizon_ms) if one is not None]
        return FileOccurrences(
            more.file,
            self.size + more.size,
            self.records + more.records,
            dict(Counter(self.found) + Counter(more.found)),
            self.deletions + more.deletions,
            min(self.first_offset, more.first_offset),
            max(self.last_offset, more.last_offset),
            max(horizons, default=None),
            self.mentions + more.mentions,
            {**more.positions, **self.positions},
            [*self.faults, *more.faults],
        )

    @property
    def is_clear(self) -> bool:
        """Whether nothing was found, and the whole file was scanned."""
        return not (self.found or self.positions or self.faults)


def scan_file(
    file: TopicFile,
    keys: ErasedKeys,
    *,
    start: int = 0,
    end: int | None = None,
    names: Iterable[bytes] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> FileOccurrences:
    """Find keys in bytes [start, end) of a file, or to its end; raises FileNotFoundError.

    In a file of batches, `start` and `end` lie between two batches. In text files of ours, `names`
    are skipped. `progress` receives the number of bytes read. If the system refuses to read, the
    result has a fault.
    """
    occurrences = FileOccurrences(file)
    if file.fault:
        occurrences.faults.append(file.fault)
        return occurrences
    try:
        fd = files.open_to_read(file.path)
    except FileNotFoundError:
        raise
    except OSError as fault:
        files.pass_on(fault)
        occurrences.faults.append(f"it cannot be read: {fault.strerror}")
        return occurrences
    try:
        _scan(
            occurrences,
            FileBytes(fd),
            keys,
            start=start,
            end=end,
            names=names,
            progress=progress,
        )
    except OSError as fault:
        files.pass_on(fault)
        occurrences.faults.append(f"it cannot be read: {fault.strerror}")
    finally:
        os.close(fd)
    return occurrences


def scan_bytes(
    file: TopicFile,
    source: ByteSource,
    keys: ErasedKeys,
    *,
    start: int = 0,
    end: int | None = None,
    names: Iterable[bytes] = (),
) -> FileOccurrences:
    """Find keys in bytes [start, end) that are here, as `scan_file` does in a file."""
    occurrences = FileOccurrences(file)
    _scan(occurrences, source, keys, start=start, end=end, names=names)
    return occurrences


def _scan(
    occurrences: FileOccurrences,
    source: ByteSource,
    keys: ErasedKeys,
    *,
    start: int,
    end: int | None,
    names: Iterable[bytes],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    kind = occurrences.file.kind
    scan = _Scan(occurrences, keys, source, tuple(names) if kind.is_text else (), progress)
    size = source.size()
    limit = size if end is None else min(end, size)
    if kind.has_batches:
        scan.batches(start, limit)
    else:
        scan.bytes(start, limit)
    occurrences.size = max(0, limit - start)


@dataclass(frozen=True, slots=True)
class _Scan:
    occurrences: FileOccurrences
    keys: ErasedKeys
    source: ByteSource
    names: tuple[bytes, ...]
    progress: Callable[[int], None]

    def bytes(self, start: int, end: int) -> None:
        """Search [start, end) of the file as bytes; keep each key's first position.

        Of a hole the ends are searched: a key may begin or end with its zeros.
        """
        longest = max(map(len, self.keys.keys))
        rest, position = b"", start
        is_text = self.occurrences.file.kind.is_text
        while position < end:
            behind = data_from(self.source, position)
            is_hole = behind - position > 2 * longest
            size = longest if is_hole else _PIECE_SIZE
            piece = self.source.read_at(min(size, end - position), position)
            if not piece:
                return
            data = rest + piece
            for name in self.names:
                data = data.replace(name, b"\0" * len(name))
            for number, place in self.keys.find_bytes(data, is_text=is_text):
                self.occurrences.positions.setdefault(number, position - len(rest) + place)
            position += len(piece)
            self.progress(len(piece))
            rest = (rest + piece)[-(longest - 1) :] if longest > 1 else b""
            if is_hole:
                rest, position = b"", behind - longest

    def batches(self, start: int, limit: int) -> None:
        from kafkalog.storage_engine.segment.log_scanner import INSPECT, FaultKind, LogScanner

        path = self.occurrences.file.path
        scan = LogScanner(self.source, path, INSPECT, position=start, limit=limit)
        for chunk in scan:
            before = chunk.position_of(0)
            self._chunk(chunk)
            self.progress(scan.position - before)
        scan.look_at_tail()
        if scan.fault is not None and scan.kind is not FaultKind.ZEROS:
            self._undecodable(scan.position, limit, str(scan.fault.found))

    def _undecodable(self, start: int, end: int, fault: str) -> None:
        self.occurrences.faults.append(f"at byte {start}: expected a batch, found {fault}")
        self.bytes(start, end)

    def _chunk(self, chunk: ScannedBatches) -> None:
        for batch in np.flatnonzero(~chunk.is_valid).tolist():
            self._damaged(chunk, batch, "one with another checksum")
        left = np.flatnonzero(chunk.is_valid & ~chunk.table.is_control)
        try:
            for records in chunk.records(left):
                self._records(records, chunk.table)
                left = left[records.batch_count :]
        except CorruptBatchError:
            for batch in left.tolist():
                self._alone(chunk, batch)

    def _alone(self, chunk: ScannedBatches, batch: int) -> None:
        try:
            for records in chunk.records(np.array([batch])):
                self._records(records, chunk.table)
        except CorruptBatchError as fault:
            self._damaged(chunk, batch, str(fault.found))

    def _damaged(self, chunk: ScannedBatches, batch: int, found: str) -> None:
        start = chunk.position_of(batch)
        self._undecodable(start, start + int(chunk.table.sizes[batch]), found)

    def _records(self, records: RecordTable, table: BatchTable) -> None:
        occurrences = self.occurrences
        occurrences.records += len(records)
        rows, numbers = self.keys.find(records)
        others = np.ones(len(records), dtype=np.bool_)
        others[rows] = False
        occurrences.mentions += self.keys.mentions(records, table, np.flatnonzero(others))
        if not len(rows):
            return
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            occurrences.found[int(number)] = occurrences.found.get(int(number), 0) + int(count)
        offsets = records.offsets[rows]
        occurrences.first_offset = min(occurrences.first_offset, int(offsets.min()))
        occurrences.last_offset = max(occurrences.last_offset, int(offsets.max()))
        batches = records.batch_index[rows[records.value_sizes[rows] < 0]]
        if len(batches):
            occurrences.deletions += len(batches)
            has_horizon = (table.attributes[batches] & layout.DELETE_HORIZON_BIT) != 0
            horizons = np.where(has_horizon, table.base_timestamps[batches], layout.INT64_MAX)
            occurrences.horizon_ms = max(occurrences.horizon_ms or 0, int(horizons.max()))
