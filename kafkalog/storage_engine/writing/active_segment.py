"""The segment that is appended to: its files, cut to what is committed, and its index entries.

Invariants
----------
- Nothing beyond the recorded size is ever read: there lies what a dead commit left, or, with
  `preallocate`, room for what comes.
- What is cut off an index is cut off durably: nobody syncs the entries that come in its place, and
  what a power cut brought back would be believed of the batches that have those offsets by then.
- A `.txnindex` file exists only where a transaction was aborted.

Kafka: LogSegment.append, LogSegment.shouldRoll, LogSegment.onBecomeInactiveSegment.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kafkalog.errors import CorruptBatchError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import Buffer, check_batch
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.index_builder import IndexBuilder
from kafkalog.storage_engine.segment.segments import header_at, headers, locate
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    size_kept,
    transaction_entry,
)

__all__ = ["ActiveSegment"]

_BLOCK = 4096
"""Index entries that are looked at together where the last one is not one to keep."""


class ActiveSegment:
    """The open files of one segment: `add` and `write` batches, then `sync`, `finish` or `close`.

    `size` counts the bytes of all batches that were added, written or not.
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
    ) -> None:
        """Open the segment, and cut its files to its bytes and to the log's end.

        `has_transactions` says that there may be a `.txnindex`. Raises StorageError where the log
        has fewer bytes, and OSError.
        """
        self.base_offset, self.size = base_offset, size
        self.has_new_name = size == 0
        """Whether names in the directory wait for its sync: one has come or gone since this was
        opened. Or, of an empty segment, before: whoever made its file may have died, or failed."""
        self._stem = f"{directory}/{layout.segment_file(base_offset, '')}"
        self._config = config
        self._index_slots = config.segment_index_bytes // layout.OFFSET_INDEX_ENTRY.size
        # The last one is for the roll.
        self._time_slots = config.segment_index_bytes // layout.TIME_INDEX_ENTRY.size - 1
        self._name = f"{topic_id}/{directory.name}/{self.base_offset}"
        self._written = self._opened_size = self.size
        self._is_dirty = False
        self._lifetime_ms: int | None = None
        self._index = IndexBuilder(
            base_offset, config.index_interval_bytes, find_largest=self._largest_on_disk
        )
        self._transaction_entries = bytearray()
        self._log_fd = self._index_fd = self._time_index_fd = self._transaction_fd = -1
        self._first_timestamp: int | None = None
        self._transactions_size = 0
        self._open(end_offset, has_transactions)

    # --- the cut ---------------------------------------------------------------------------------

    def _open(self, end_offset: int, has_transactions: bool) -> None:
        log = self._stem + layout.LOG
        try:
            try:
                self._log_fd = _open(log, create=not self.size)
            except FileNotFoundError:
                what = f"the journal records {self.size} bytes, the file is missing"
                raise StorageError(f"{log}: {what}") from None
            self._index_fd = _open(self._stem + layout.INDEX, create=True)
            self._time_index_fd = _open(self._stem + layout.TIME_INDEX, create=True)
            self._truncate_log()
            self._truncate_indexes(end_offset - self.base_offset)
            if has_transactions:
                self._truncate_transactions(end_offset)
        except BaseException:
            self.close()
            raise

    def _truncate_log(self) -> None:
        found = os.fstat(self._log_fd).st_size
        if found < self.size:
            raise StorageError(
                f"{self._path(layout.LOG)}: the journal records {self.size} bytes, the file has "
                f"{found}: it was cut by something other than kafkalog"
            )
        if not self._config.preallocate:
            if found > self.size:
                files.truncate(self._log_fd, self.size)
            return
        # Room that a dead commit began to fill is made anew; the rest is room already.
        if found > self.size and any(files.read_at(self._log_fd, layout.BATCH_OVERHEAD, self.size)):
            files.truncate(self._log_fd, self.size)
            found = self.size
        if found < self._config.segment_bytes:
            files.preallocate(self._log_fd, self._config.segment_bytes)

    def _truncate_indexes(self, end: int) -> None:
        """Drop index entries at or above the cut, and torn ones; remember the last that stay."""
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
        self._last_time = (last[0], self.base_offset + last[1]) if last else None
        """What the last time index entry says that stayed when the segment was opened."""
        timestamp = last[0] if last else layout.NO_TIMESTAMP
        self._index.resume((offset_count, indexed_position), (time_count, timestamp))

    def _truncate_transactions(self, end_offset: int) -> None:
        """Drop entries without their marker: of a commit that died, in whatever form they came."""
        path = self._path(layout.TRANSACTION_INDEX)
        self._transactions_size, found = size_kept(
            path, lambda entry: self._has_marker(entry, end_offset)
        )
        if found > self._transactions_size:
            if self._transactions_size == 0:
                files.remove(path)
                self.has_new_name = True
                return
            fd = _open(path)
            try:
                _truncate_durably(fd, self._transactions_size)
            finally:
                os.close(fd)

    def _has_marker(self, entry: AbortedTransaction, end_offset: int) -> bool:
        """Tell whether the producer of an entry has a control batch where that says.

        Of half an entry, too: its offset may be below the cut, but the producer's markers that are
        there lie before the transaction's begin. Of a damaged log it may have, wherever the damage
        could hide it: without its entry, what was aborted would be read.
        """
        offset, next_offset = entry.last_offset, self.base_offset
        if not entry.first_offset < offset < end_offset:
            return False
        index = OffsetIndex(self._path(layout.INDEX), self.base_offset)
        end = locate(self._log_fd, self.size, index, offset)
        for position, header in headers(self._log_fd, end, self.size):
            end = position + header.size
            if header.last_offset < next_offset:
                return True
            next_offset = header.next_offset
            if header.base_offset <= offset < next_offset:
                is_producers = header.is_control and header.producer_id == entry.producer_id
                return is_producers or not self._is_sound(position, header.size)
        return end < self.size or next_offset > end_offset

    def _is_sound(self, position: int, size: int) -> bool:
        data = files.read_at(self._log_fd, size, position)
        try:
            check_batch(data, 0, path=self._path(layout.LOG), file_position=position)
        except CorruptBatchError:
            return False
        return True

    # --- append ----------------------------------------------------------------------------------

    def stamp(
        self, batches: bytearray, position: int, first_offset: int, next_offset: int, epoch: int
    ) -> tuple[int, int]:
        """Give finished batches from `position` on their places, as far as they belong here.

        Their base offsets count from `first_offset`, and one begins where the last has ended.
        Returns the position and the offset that come next: of a batch that needs a new segment, or
        of what is no whole batch v2 with such offsets. The bytes follow by `write`.
        """
        unpack, pack = layout.BATCH_PLACE.unpack_from, layout.STAMP.pack_into
        while (remaining := len(batches) - position) >= layout.BATCH_OVERHEAD:
            base_offset, length, magic, delta, max_timestamp = unpack(batches, position)
            size = length + layout.LOG_OVERHEAD
            if magic != layout.MAGIC or not layout.BATCH_OVERHEAD <= size <= remaining:
                break
            base_offset += first_offset
            last_offset = base_offset + delta
            if base_offset != next_offset or not base_offset <= last_offset < layout.INT64_MAX:
                break
            if not self.has_room(size, max_timestamp, base_offset, last_offset):
                break
            pack(batches, position, base_offset, length, epoch)
            self.add(size, max_timestamp, last_offset)
            position += size
            next_offset = last_offset + 1
        return position, next_offset

    def has_room(self, size: int, max_timestamp: int, base_offset: int, last_offset: int) -> bool:
        """Tell whether a batch of those offsets belongs here, and not into a new segment.

        Decided by size, time, full indexes and offset span (conformance R1 to R5). An empty segment
        takes everything whose offsets it can count.
        """
        if last_offset - self.base_offset > layout.INT32_MAX:
            return self.size == 0 and base_offset == self.base_offset
        if self.size == 0:
            return True
        if self.size > self._config.segment_bytes - size:
            return False
        index = self._index
        if index.offset_count >= self._index_slots or index.time_count >= self._time_slots:
            return False
        first = self._read_first_timestamp(max_timestamp)
        waited = max_timestamp - first if first >= 0 else 0
        return waited <= self._read_lifetime_ms()

    def add(self, size: int, max_timestamp: int, last_offset: int) -> None:
        """Take the next batch into account, and give it an index entry if it is to have one.

        The bytes follow by `write`.
        """
        position = self.size
        self.size += size
        if self._first_timestamp is None and position == 0:
            self._first_timestamp = max_timestamp
        self._index.add(position, last_offset, max_timestamp)

    def add_aborted(self, transaction: AbortedTransaction) -> None:
        """Note a transaction whose ABORT marker was added; written with the next `write`."""
        self._transaction_entries += transaction_entry(transaction)

    def write(self, data: Buffer) -> None:
        """Write the next bytes of the batches that were added, and the entries they got."""
        if data:
            files.write_at(self._log_fd, data, self._written)
            self._written += len(data)
            self._is_dirty = True
        self._write_entries()

    def _write_entries(self) -> None:
        index = self._index
        end = index.offset_count * layout.OFFSET_INDEX_ENTRY.size
        _write_up_to(self._index_fd, index.offset_entries, end)
        end = index.time_count * layout.TIME_INDEX_ENTRY.size
        _write_up_to(self._time_index_fd, index.time_entries, end)
        if self._transaction_entries:
            if self._transaction_fd < 0:
                path = self._path(layout.TRANSACTION_INDEX)
                self.has_new_name |= not path.exists()
                self._transaction_fd = _open(path, create=True)
            self._transactions_size += len(self._transaction_entries)
            _write_up_to(self._transaction_fd, self._transaction_entries, self._transactions_size)

    # --- time ------------------------------------------------------------------------------------

    def _read_lifetime_ms(self) -> int:
        if self._lifetime_ms is None:
            config = self._config
            lifetime_ms = config.segment_ms
            if config.is_compacted:
                lifetime_ms = min(lifetime_ms, config.max_compaction_lag_ms)
            self._lifetime_ms = lifetime_ms - self._jitter_ms()
        return self._lifetime_ms

    def _jitter_ms(self) -> int:
        """Draw from [0, jitter), once per segment and the same in every process: by its name."""
        jitter = min(self._config.segment_jitter_ms, self._config.segment_ms)
        if jitter == 0:
            return 0
        digest = hashlib.blake2b(self._name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % jitter

    def _read_first_timestamp(self, otherwise: int) -> int:
        if self._first_timestamp is None:
            header = header_at(self._log_fd, 0, self._written)
            self._first_timestamp = otherwise if header is None else header.max_timestamp
        return self._first_timestamp

    def _largest_on_disk(self) -> tuple[int, int]:
        """Find the largest timestamp as opened: the time index's last, or of a batch after it.

        Asked for once at most, before an entry is added.
        """
        largest = self._last_time or (layout.NO_TIMESTAMP, self.base_offset)
        start = self._index.indexed_position
        for _, header in headers(self._log_fd, start, self._opened_size):
            if header.max_timestamp > largest[0]:
                largest = header.max_timestamp, header.last_offset
        return largest

    # --- durability ------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make the log durable, and what it says of aborted transactions; indexes are hints."""
        if self._is_dirty:
            files.sync_file(self._log_fd)
            self._is_dirty = False
        if self._transaction_fd >= 0:
            files.sync_file(self._transaction_fd)

    def finish(self) -> None:
        """Make the segment one that is only read: its last time index entry, no room, synced."""
        if self.size:
            self._index.add_time()
        self._write_entries()
        if os.fstat(self._log_fd).st_size > self.size:
            files.truncate(self._log_fd, self.size)
        for fd in (self._log_fd, self._index_fd, self._time_index_fd, self._transaction_fd):
            if fd >= 0:
                files.sync_file(fd)
        self._is_dirty = False
        self.close()

    def finish_truncation(self) -> None:
        """Do `finish` after a cut; where that fails, it is to be cut again by the next holder.

        Its sync is not to be repeated alone, and what is cut already nobody would cut.
        """
        try:
            self.finish()
        except OSError:
            try:
                files.write_at(self._log_fd, b"\0", self.size)
            finally:
                self.close()
            raise

    def reopen(self) -> None:
        """Open the files once more after `close`, in the same commit: so they are as they were.

        A `.txnindex` is opened when it is written to.
        """
        self._log_fd = _open(self._stem + layout.LOG)
        self._index_fd = _open(self._stem + layout.INDEX)
        self._time_index_fd = _open(self._stem + layout.TIME_INDEX)

    def close(self) -> None:
        """Close the files; nothing is undone."""
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
    """Write entries so that the file ends at byte `end` with them; none are pending then."""
    if pending:
        files.write_at(fd, pending, end - len(pending))
        pending.clear()


def _truncate_entries(
    fd: int,
    entry_size: int,
    unpack: Callable[[bytes], Iterable[tuple[Any, ...]]],
    is_kept: Callable[..., bool],
) -> tuple[int, tuple[Any, ...] | None]:
    """Cut an index file behind its last entry that is kept; return how many stay, and that one."""
    size = os.fstat(fd).st_size
    count = size // entry_size
    last = None
    block = 1  # mostly the last one stays; a file that is padded with zeros ends far before
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
    """Cut an index, and sync it; where that fails it is as it was, so that the next holder cuts."""
    tail = files.read_at(fd, os.fstat(fd).st_size - size, size)
    files.truncate(fd, size)
    try:
        files.sync_file(fd)
    except OSError:
        files.write_at(fd, tail, size)
        raise
