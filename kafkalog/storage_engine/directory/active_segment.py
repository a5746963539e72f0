"""The active segment: its files, truncated to the committed size, and its index entries.

Invariants
----------
- No reader reads beyond the recorded size. Bytes there are those of a dead commit, or preallocated.
- The truncation of an index is synced, because the entries that follow are not. Otherwise a power
  cut could bring old entries back, and readers would apply them to new batches.
- A `.txnindex` file exists only if a transaction was aborted.

Kafka: LogSegment.append, LogSegment.shouldRoll, LogSegment.onBecomeInactiveSegment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader, Buffer
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.format.stamping import stamp
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.fs.early_sync import EarlySync
from kafkalog.storage_engine.metadata import segment_end
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.index_builder import IndexBuilder
from kafkalog.storage_engine.segment.locate import header_at, headers, locate
from kafkalog.storage_engine.segment.segment_times import segment_times, times_after
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    size_kept,
    transaction_entry,
)

_BLOCK = 4096
"""Index entries read at once if the last one is not kept."""


class ActiveSegment:
    """The open files of one segment: `add` and `write` batches, then `sync`, `finish` or `close`.

    `size` counts the bytes of all added batches, written or not.
    """

    def __init__(
        self,
        directory: Path,
        topic_id: str,
        config: TopicConfig,
        *,
        base_offset: int,
        size: int,
        end_offset: int,
        has_transactions: bool,
        is_begun_here: bool = False,
    ) -> None:
        """Open the segment, and truncate its files to `size` and `end_offset`.

        `has_transactions` is True if a `.txnindex` may exist, `is_begun_here` if the commit has put
        the segment there. Raises StorageError if the log is
        shorter, and OSError.
        """
        self.base_offset, self.size = base_offset, size
        self.has_new_name = size == 0
        """Whether a new or removed name waits for the directory's sync. True from the start for an
        empty segment, because the process that made its file may have died or failed."""
        self._stem = f"{directory}/{layout.segment_file(base_offset, '')}"
        self._config = config
        self._index_slots = config.segment_index_bytes // layout.OFFSET_INDEX_ENTRY.size
        # The roll needs the last slot.
        self._time_slots = config.segment_index_bytes // layout.TIME_INDEX_ENTRY.size - 1
        self._name = topic_id, directory.name, self.base_offset
        self._written = self.size
        self._is_begun_here = is_begun_here or not size
        self._identity = (0, 0)
        self._early: EarlySync | None = None
        self._is_dirty = False
        self._lifetime_ms: int | None = None
        self._index = IndexBuilder(base_offset, config.index_interval_bytes)
        self._transaction_entries = bytearray()
        self._log_fd = self._index_fd = self._time_index_fd = self._transaction_fd = -1
        self._first_timestamp: int | None = None
        self._transactions_size = 0
        self._open(end_offset, has_transactions)

    def _open(self, end_offset: int, has_transactions: bool) -> None:
        log = self._stem + layout.LOG
        try:
            try:
                self._log_fd = _open(log, create=not self.size)
            except FileNotFoundError:
                what = f"the journal records {self.size} bytes, the file is missing"
                raise StorageError(f"{log}: {what}") from None
            self._open_indexes(create=True)
            self._truncate_log(end_offset)
            self._truncate_indexes(end_offset - self.base_offset)
            if has_transactions:
                self._truncate_transactions(end_offset)
        except BaseException:
            self.close()
            raise

    def _open_indexes(self, *, create: bool = False) -> None:
        if self._index_fd < 0:
            self._index_fd = _open(self._stem + layout.INDEX, create=create)
        if self._time_index_fd < 0:
            self._time_index_fd = _open(self._stem + layout.TIME_INDEX, create=create)

    def _check_end(self, end_offset: int) -> None:
        """Raise StorageError if no batch ends where the log would be truncated.

        In a copy of a live log the file may be another one, which was cleaned since.
        """
        index = OffsetIndex(self._path(layout.INDEX), self.base_offset)
        source, end, next_offset = FileBytes(self._log_fd), 0, self.base_offset
        for position, header in headers(
            source, locate(source, self.size, index, layout.INT64_MAX), self.size
        ):
            end, next_offset = position + header.size, header.next_offset
        if self.size and (end, next_offset) != (self.size, end_offset):
            raise StorageError(
                f"{self._path(layout.LOG)}: expected a batch that ends at byte {self.size} and "
                f"offset {end_offset}, as the journal records, found one that ends at byte {end} "
                f"and offset {next_offset}: the file is not of the journal's moment, so nothing is "
                "changed; restore it from a copy"
            )

    def _truncate_log(self, end_offset: int) -> None:
        opened = os.fstat(self._log_fd)
        found, self._identity = opened.st_size, (opened.st_dev, opened.st_ino)
        if found < self.size:
            raise StorageError(
                f"{self._path(layout.LOG)}: the journal records {self.size} bytes, the file has "
                f"{found}: something other than kafkalog truncated it"
            )
        if not self._config.preallocate:
            if found > self.size:
                self._check_end(end_offset)
                files.truncate(self._log_fd, self.size)
            return
        # Allocate again what a dead commit began to fill; the rest is still preallocated.
        if found > self.size and any(files.read_at(self._log_fd, layout.BATCH_OVERHEAD, self.size)):
            self._check_end(end_offset)
            files.truncate(self._log_fd, self.size)
            found = self.size
        if found < self._config.segment_bytes:
            files.preallocate(self._log_fd, self._config.segment_bytes)

    def _truncate_indexes(self, end: int) -> None:
        """Drop torn index entries and those at or above the end; remember the last ones kept."""
        offset_count, last = _truncate_entries(
            self._index_fd,
            layout.OFFSET_INDEX_ENTRY.size,
            layout.OFFSET_INDEX_ENTRY.iter_unpack,
            lambda relative, position: relative < end and 0 < position < self.size,
        )
        indexed_position = last[1] if last else 0
        time_count, last = _truncate_entries(
            self._time_index_fd,
            layout.TIME_INDEX_ENTRY.size,
            layout.TIME_INDEX_ENTRY.iter_unpack,
            lambda timestamp, relative: relative < end and (timestamp, relative) != (0, 0),
        )
        entry = (last[0], self.base_offset + last[1]) if last else None
        self._resume_indexes((offset_count, indexed_position), time_count, entry)

    def _resume_indexes(
        self, offsets: tuple[int, int], time_count: int, entry: tuple[int, int] | None
    ) -> None:
        """Continue the indexes; give the time index what it has lost, with the next write.

        A time index that ends in an entry without its batch isn't this segment's, so it is made
        again.
        """
        source = FileBytes(self._log_fd)
        hints = OffsetIndex(self._path(layout.INDEX), self.base_offset)
        known = times_after(source, self.size, hints, entry)
        if known is None:
            self._index.resume(offsets, (0, layout.NO_TIMESTAMP), (layout.NO_TIMESTAMP, 0))
            self._rebuild_times()
            return
        timestamp = entry[0] if entry else layout.NO_TIMESTAMP
        largest = known.largest, known.largest_offset
        self._index.resume(offsets, (time_count, timestamp), largest)
        if known.largest <= timestamp or not offsets[1]:
            return
        # Every batch up to the last one with an offset entry counts in the last time entry.
        header = header_at(source, offsets[1], self.size)
        indexed_end = offsets[1] + (0 if header is None else header.size)
        indexed = times_after(source, indexed_end, hints, entry)
        if indexed is not None and indexed.largest > timestamp:
            self._index.add_time()

    def _rebuild_times(self) -> None:
        """Make the time index again from the batches, with the next write."""
        _truncate_durably(self._time_index_fd, 0)
        rebuilt = IndexBuilder(self.base_offset, self._config.index_interval_bytes)
        for position, header in headers(FileBytes(self._log_fd), 0, self.size):
            rebuilt.add(position, header.last_offset, header.max_timestamp)
        self._index.take_times(rebuilt)

    def _truncate_transactions(self, end_offset: int) -> None:
        """Drop entries without a marker: those of a dead commit, whole or torn."""
        path = self._path(layout.TRANSACTION_INDEX)
        self._transactions_size, found = size_kept(
            path, lambda entry: self._has_marker(entry, end_offset)
        )
        if found > self._transactions_size:
            if self._transactions_size == 0:
                files.remove(path)
                self.has_new_name = True
                return
            with files.closing(_open(path)) as fd:
                _truncate_durably(fd, self._transactions_size)

    def _has_marker(self, entry: AbortedTransaction, end_offset: int) -> bool:
        """Return whether the entry's producer has a control batch at the entry's offset.

        The test also rejects a torn entry: its offset may lie below the end, but the producer's
        existing markers lie before the transaction's begin. In a damaged log, an entry is kept
        wherever the damage could hide its marker; without it, aborted records would be read.
        """
        offset, next_offset = entry.last_offset, self.base_offset
        if not entry.first_offset < offset < end_offset:
            return False
        index = OffsetIndex(self._path(layout.INDEX), self.base_offset)
        source = FileBytes(self._log_fd)
        end = locate(source, self.size, index, offset)
        for position, header in headers(source, end, self.size):
            end = position + header.size
            if header.last_offset < next_offset:
                return True
            next_offset = header.next_offset
            if header.base_offset <= offset < next_offset:
                is_producers = header.is_control and header.producer_id == entry.producer_id
                return is_producers or not self._is_sound(position, header)
        return end < self.size or next_offset > end_offset

    def _is_sound(self, position: int, header: BatchHeader) -> bool:
        data = files.read_at(self._log_fd, header.size, position)
        is_whole = header.magic == layout.MAGIC and len(data) == header.size
        return is_whole and crc32c(data[layout.ATTRIBUTES_POSITION :]) == header.crc

    def stamp(
        self,
        batches: bytearray | memoryview,
        position: int,
        first_offset: int,
        next_offset: int,
        epoch: int,
    ) -> tuple[int, int]:
        """Stamp finished batches from `position` on, as far as they belong into this segment.

        Their base offsets count from `first_offset`, and each must begin where the last one ended.
        Returns the next position and offset: of a batch that needs a new segment, or of bytes that
        are not a whole batch v2 with such offsets. Pass the bytes to `write`.
        """
        unpack = layout.BATCH_PLACE.unpack_from
        end = len(batches)
        while end - position >= layout.BATCH_OVERHEAD:
            base_offset, length, magic, delta, max_timestamp = unpack(batches, position)
            size = length + layout.LOG_OVERHEAD
            if magic != layout.MAGIC or not layout.BATCH_OVERHEAD <= size <= end - position:
                break
            base_offset += first_offset
            last_offset = base_offset + delta
            if base_offset != next_offset or not base_offset <= last_offset < layout.INT64_MAX:
                break
            if not self.has_room(size, max_timestamp, base_offset, last_offset):
                break
            stamp(batches, position, base_offset, epoch)
            self.add(size, max_timestamp, last_offset)
            position += size
            next_offset = last_offset + 1
        return position, next_offset

    def has_room(self, size: int, max_timestamp: int, base_offset: int, last_offset: int) -> bool:
        """Return whether a batch with these offsets belongs here, not into a new segment.

        Size, time, full indexes and the span of offsets decide (conformance R1 to R5). An empty
        segment accepts every batch whose offsets fit its indexes.
        """
        if last_offset - self.base_offset > layout.INT32_MAX:
            return self.size == 0 and base_offset == self.base_offset
        if self.size == 0:
            return True
        if not segment_end.has_bytes(self._config, self.size, size):
            return False
        index = self._index
        if index.offset_count >= self._index_slots or index.time_count >= self._time_slots:
            return False
        first = self._read_first_timestamp(max_timestamp)
        return segment_end.has_time(first, max_timestamp, self._read_lifetime_ms())

    def add(self, size: int, max_timestamp: int, last_offset: int) -> None:
        """Count the next batch, and index it if due. Pass the bytes to `write`."""
        position = self.size
        self.size += size
        if self._first_timestamp is None and position == 0:
            self._first_timestamp = max_timestamp
        self._index.add(position, last_offset, max_timestamp)

    def add_aborted(self, transaction: AbortedTransaction) -> None:
        """Note a transaction whose ABORT marker was added, for the next `write`."""
        self._transaction_entries += transaction_entry(transaction)

    def write(self, data: Buffer) -> None:
        """Write the next bytes of the added batches, and their index entries."""
        if data:
            files.write_at(self._log_fd, data, self._written)
            self._written += len(data)
            self._is_dirty = True
            if self._early is None:
                self._early = EarlySync(self._log_fd)
            self._early.note_written(len(data))
        self._write_entries()

    def _write_entries(self) -> None:
        index = self._index
        if index.offset_entries or index.time_entries:
            self._open_indexes()
            offsets_end, times_end = self._index_sizes()
            _write_up_to(self._index_fd, index.offset_entries, offsets_end)
            _write_up_to(self._time_index_fd, index.time_entries, times_end)
        if self._transaction_entries:
            if self._transaction_fd < 0:
                path = self._path(layout.TRANSACTION_INDEX)
                self.has_new_name |= not path.exists()
                self._transaction_fd = _open(path, create=True)
            self._transactions_size += len(self._transaction_entries)
            _write_up_to(self._transaction_fd, self._transaction_entries, self._transactions_size)

    def _index_sizes(self) -> tuple[int, int]:
        """Return the bytes of all entries, of offsets and of times."""
        index = self._index
        return (
            index.offset_count * layout.OFFSET_INDEX_ENTRY.size,
            index.time_count * layout.TIME_INDEX_ENTRY.size,
        )

    def _read_lifetime_ms(self) -> int:
        if self._lifetime_ms is None:
            self._lifetime_ms = segment_end.lifetime_ms(self._config, *self._name)
        return self._lifetime_ms

    def _read_first_timestamp(self, otherwise: int) -> int:
        if self._first_timestamp is None:
            header = header_at(FileBytes(self._log_fd), 0, self._written)
            self._first_timestamp = otherwise if header is None else header.max_timestamp
        return self._first_timestamp

    def sync(self) -> None:
        """Sync the log and the aborted transactions; indexes are only hints."""
        if self._early is not None:
            self._early.wait()
        if self._is_dirty:
            files.sync_file(self._log_fd)
            self._is_dirty = False
        if self._transaction_fd >= 0:
            files.sync_file(self._transaction_fd)

    def finish(self) -> None:
        """Make the segment read-only: add its last time index entry, trim and sync it.

        Entries that this process did not write may hide a younger batch, so all headers are read.
        """
        self._open_indexes()  # earlier commits have left their entries unsynced
        if self.size:
            if not self._is_begun_here:
                largest = segment_times(self._log_fd, self.size).largest
                if largest > self._index.largest_timestamp:
                    self._rebuild_times()
            self._index.add_time()
        self._write_entries()
        if self._early is not None:
            self._early.wait()
        if os.fstat(self._log_fd).st_size > self.size:
            files.truncate(self._log_fd, self.size)
        for fd in (self._log_fd, self._index_fd, self._time_index_fd, self._transaction_fd):
            if fd >= 0:
                files.sync_file(fd)
        self._is_dirty = False
        self.close()

    def finish_truncation(self) -> None:
        """Do `finish` after a truncation; if it fails, make the next holder truncate again.

        Repeating the sync alone is not enough, and a holder that finds nothing to truncate syncs
        nothing. Therefore it writes a byte beyond the end.
        """
        try:
            self.finish()
        except OSError as raised:
            files.pass_on(raised)
            try:
                files.write_at(self._log_fd, b"\0", self.size)
            finally:
                self.close()
            raise

    def reopen(self) -> None:
        """Open the log again after `close`, in the same commit, so its files are unchanged.

        Other files are opened on their next write.
        """
        self._log_fd = _open(self._stem + layout.LOG)

    def resume(self) -> bool:
        """Do the same in a later commit; return False if the files are not as `close` left them."""
        try:
            self.reopen()
            found = os.fstat(self._log_fd)
            offsets_end, times_end = self._index_sizes()
            is_same = (
                (found.st_dev, found.st_ino) == self._identity
                and found.st_size == self.size
                and os.stat(self._stem + layout.INDEX).st_size == offsets_end
                and os.stat(self._stem + layout.TIME_INDEX).st_size == times_end
            )
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self.close()
            return False
        self.has_new_name, self._is_dirty = self.size == 0, False
        return True

    def close(self) -> None:
        """Close the files; undo nothing."""
        if self._early is not None:
            self._early.end()
            self._early = None
        fds = (self._log_fd, self._index_fd, self._time_index_fd, self._transaction_fd)
        self._log_fd = self._index_fd = self._time_index_fd = self._transaction_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _path(self, suffix: str) -> Path:
        return Path(self._stem + suffix)


def _open(path: str | Path, *, create: bool = False) -> int:
    """Open a file of a segment; at the limit of open files the transaction closes other segments.

    Raises OSError.
    """
    return files.open_to_write(path, create=create, within_limit=True)


def _write_up_to(fd: int, pending: bytearray, end: int) -> None:
    if pending:
        files.write_at(fd, pending, end - len(pending))
        pending.clear()


def _truncate_entries(
    fd: int,
    entry_size: int,
    unpack: Callable[[bytes], Iterable[tuple[Any, ...]]],
    is_kept: Callable[..., bool],
) -> tuple[int, tuple[Any, ...] | None]:
    """Truncate an index file after its last kept entry; return the number kept, and that entry."""
    size = files.whole_size(fd)
    count = size // entry_size
    last = None
    block = 1  # usually the last entry stays, except in a file padded with zeros
    while count and last is None:
        first = max(0, count - block)
        data = files.read_at(fd, (count - first) * entry_size, first * entry_size)
        for fields in reversed(list(unpack(data))):
            if is_kept(*fields):
                last = fields
                break
            count -= 1
        block = _BLOCK
    if count * entry_size != size:
        _truncate_durably(fd, count * entry_size)
    return count, last


def _truncate_durably(fd: int, size: int) -> None:
    """Truncate and sync an index; on failure restore it, so that the next holder truncates."""
    tail = files.read_at(fd, files.whole_size(fd) - size, size)
    files.truncate(fd, size)
    try:
        files.sync_file(fd)
    except OSError as raised:
        files.pass_on(raised)
        files.write_at(fd, tail, size)
        raise
