"""The write side of one partition within one commit: cut, roll, append, adopt, sync.

Nothing an `Appender` does is visible before the journal says so. What a process left that died in
the middle lies above the recorded state, and the next appender cuts it off: opening never does.

Invariants
----------
- Only the active segment is appended to; its valid bytes are those the journal records.
- After `cut`, the partition's files end where the recorded state ends.
- An index entry is decided by the distance to the entry before it, not by bytes since the file was
  opened, so that many small commits get the index one large one would get.

Kafka: UnifiedLog.append, LogSegment.append, LogSegment.shouldRoll.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kafkalog.errors import LockedByBrokerError, StorageError
from kafkalog.storage_engine import batch, checkpoints, files, layout
from kafkalog.storage_engine.config import TopicConfig
from kafkalog.storage_engine.state import PartitionState


@dataclass(slots=True)
class _Active:
    """The segment that is appended to, with what the next decisions need to know of it."""

    base_offset: int
    size: int
    log_fd: int
    index_fd: int
    time_index_fd: int
    opened_size: int = field(init=False)
    """The size when it was opened: what lies beyond was appended here, and is accounted for."""
    index_count: int = 0
    indexed_position: int = 0
    """Where the batch of the last offset index entry starts; 0 without one."""
    time_index_count: int = 0
    time_indexed: int = layout.NO_TIMESTAMP
    """The timestamp of the last time index entry; -1 without one."""
    first_timestamp: int | None = None
    largest: tuple[int, int] = (layout.NO_TIMESTAMP, 0)
    """The largest timestamp appended since, and the last offset of its batch."""
    knows_largest: bool = False
    """Whether `largest` speaks for the whole segment."""
    is_dirty: bool = False

    def __post_init__(self) -> None:
        self.opened_size = self.size


class Appender:
    """Appends to one partition; the caller holds the commit lock and the root lock.

    `state` is what the partition becomes if the commit is recorded.
    """

    def __init__(
        self,
        directory: Path,
        topic_id: str,
        state: PartitionState,
        config: TopicConfig,
        now_ms: int,
    ) -> None:
        self.directory = directory
        self.state = state
        self._recorded = state
        self._topic_id = topic_id
        self._config = config
        self._now_ms = now_ms
        self._lock = files.SegmentsLock(directory)
        self._names_changed = False
        if not (directory / layout.CANARY).exists():
            raise LockedByBrokerError(
                f"{directory}: {layout.CANARY} is missing, so a Kafka broker has loaded this "
                "partition since kafkalog last wrote it; this release cannot take it back"
            )
        self._active = self._cut()

    # --- the cut ---------------------------------------------------------------------------------

    def _cut(self) -> _Active:
        """Bring the files back to the recorded state and open the active segment."""
        later = self._later_segments()
        if later:
            with self._lock.exclusive():
                self._remove_later(later)
            files.sync_directory(self.directory)
        if self.state.high_watermark in later:
            # It alone may carry the log end, where the tail before it was cleaned away
            # (KAFKA-17076): so it is emptied, and appended to.
            self._close_recorded()
            self.state = replace(self.state, active_base=self.state.high_watermark, active_size=0)
        return self._open_active()

    def _close_recorded(self) -> None:
        """Close the recorded active segment: cut, indexed, synced, since nobody cuts it later."""
        self._active = self._open_active()
        try:
            self._finish_active()
        finally:
            self._close_active()

    def _later_segments(self) -> list[int]:
        """Return the base offsets above the recorded active segment, of any file, ascending."""
        found = set()
        for name in os.listdir(self.directory):
            parsed = layout.parse_segment_file(name)
            if parsed is None or parsed[2] == layout.DELETED:
                continue
            base_offset, suffix, _ = parsed
            limit = (
                self.state.high_watermark if suffix == layout.SNAPSHOT else self.state.active_base
            )
            if base_offset > limit:
                found.add(base_offset)
        return sorted(found)

    def _remove_later(self, later: list[int]) -> None:
        for base_offset in reversed(later):
            for suffix in (*layout.SEGMENT_SUFFIXES, layout.SNAPSHOT):
                path = self.directory / layout.segment_file(base_offset, suffix)
                if suffix == layout.LOG and base_offset == self.state.high_watermark:
                    files.create(path)  # emptied
                else:
                    files.remove(path)

    def _open_active(self) -> _Active:
        base_offset, size = self.state.active_base, self.state.active_size
        log = self._path(base_offset, layout.LOG)
        if size and not log.exists():
            raise StorageError(f"{log}: the journal records {size} bytes, the file is missing")
        with contextlib.ExitStack() as opened:
            fds = []
            for suffix in (layout.LOG, layout.INDEX, layout.TIME_INDEX):
                path = self._path(base_offset, suffix)
                fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
                opened.callback(os.close, fds[-1])
            log_fd, index_fd, time_index_fd = fds
            found = os.fstat(log_fd).st_size
            if found < size:
                raise StorageError(
                    f"{log}: the journal records {size} bytes, the file has {found}: "
                    "it was cut by something other than kafkalog"
                )
            if found > size:
                files.truncate(log_fd, size)
            active = _Active(base_offset, size, log_fd, index_fd, time_index_fd)
            self._cut_indexes(active)
            opened.pop_all()
        return active

    def _cut_indexes(self, active: _Active) -> None:
        """Drop index entries at or above the cut, and torn ones; remember the last that stay."""
        end = self.state.high_watermark - active.base_offset
        entry = layout.OFFSET_INDEX_ENTRY
        count = found = os.fstat(active.index_fd).st_size // entry.size
        while count:
            last = files.read_at(active.index_fd, entry.size, (count - 1) * entry.size)
            relative, position = entry.unpack(last)
            if relative < end and 0 < position < active.size:
                active.indexed_position = position
                break
            count -= 1
        if count != found or os.fstat(active.index_fd).st_size % entry.size:
            files.truncate(active.index_fd, count * entry.size)
        active.index_count = count
        entry = layout.TIME_INDEX_ENTRY
        count = found = os.fstat(active.time_index_fd).st_size // entry.size
        while count:
            last = files.read_at(active.time_index_fd, entry.size, (count - 1) * entry.size)
            timestamp, relative = entry.unpack(last)
            if relative < end and (timestamp, relative) != (0, 0):
                active.time_indexed = timestamp
                break
            count -= 1
        if count != found or os.fstat(active.time_index_fd).st_size % entry.size:
            files.truncate(active.time_index_fd, count * entry.size)
        active.time_index_count = count

    # --- append ----------------------------------------------------------------------------------

    def append(self, run: bytearray) -> None:
        """Append a run of finished batches whose base offsets count from 0: stamp, roll, write.

        Only headers are read; data is never decoded. A batch larger than `segment.bytes` gets a
        segment of its own (our records obey `max.message.bytes` when they are encoded).
        """
        first_offset = self.state.high_watermark
        self._note_epoch()
        epoch = self.state.leader_epoch
        start = 0  # of the slice not yet written
        slice_end = 0
        for position, header in batch.iterate_headers(run):
            if header.magic != layout.MAGIC:
                break  # a message v0 or v1 cannot be stamped; what follows is refused below
            base_offset = first_offset + header.base_offset
            last_offset = base_offset + header.last_offset_delta
            pending = slice_end - start
            if self._should_roll(header.size, pending, header.max_timestamp, last_offset):
                self._write(run, start, slice_end)
                start = slice_end
                self._advance(base_offset)
                self.roll()
            batch.stamp(run, position, base_offset, epoch)
            self._index(header, last_offset, self._active.size + position - start)
            slice_end = position + header.size
            self._advance(last_offset + 1)
        if slice_end != len(run):
            raise StorageError(
                f"{self.directory}: a staged run ends in {len(run) - slice_end} bytes that are no "
                f"batch (after {slice_end}): the staged file is damaged; write the batch again"
            )
        self._write(run, start, slice_end)

    def _advance(self, next_offset: int) -> None:
        self.state = replace(self.state, high_watermark=next_offset, last_stable_offset=next_offset)

    def _write(self, run: bytearray, start: int, end: int) -> None:
        if end == start:
            return
        active = self._active
        files.write_at(active.log_fd, memoryview(run)[start:end], active.size)
        active.size += end - start
        active.is_dirty = True
        self.state = replace(self.state, active_base=active.base_offset, active_size=active.size)

    def _should_roll(self, size: int, pending: int, timestamp: int, last_offset: int) -> bool:
        """Decide by size, time, full indexes and offset span (conformance R1 to R5)."""
        active = self._active
        filled = active.size + pending
        config = self._config
        if last_offset - active.base_offset > layout.INT32_MAX:
            return filled > 0
        if filled == 0:
            return False
        index_slots = config.segment_index_bytes // layout.OFFSET_INDEX_ENTRY.size
        time_slots = config.segment_index_bytes // layout.TIME_INDEX_ENTRY.size
        if filled > config.segment_bytes - size:
            return True
        if active.index_count >= index_slots or active.time_index_count >= time_slots - 1:
            return True
        first = self._first_timestamp(timestamp)
        waited = timestamp - first if first >= 0 else 0
        return waited > self._segment_ms() - self._jitter_ms()

    def _segment_ms(self) -> int:
        if self._config.is_compacted:
            return min(self._config.segment_ms, self._config.max_compaction_lag_ms)
        return self._config.segment_ms

    def _jitter_ms(self) -> int:
        """Draw from [0, jitter), once per segment and the same in every process: by its name."""
        jitter = min(self._config.segment_jitter_ms, self._config.segment_ms)
        if jitter == 0:
            return 0
        name = f"{self._topic_id}/{self.directory.name}/{self._active.base_offset}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % jitter

    def _first_timestamp(self, otherwise: int) -> int:
        active = self._active
        if active.first_timestamp is None:
            head = files.read_at(active.log_fd, layout.BATCH_OVERHEAD, 0)
            if len(head) < min(layout.BATCH_OVERHEAD, active.size) or active.size == 0:
                return otherwise
            header = batch.read_header(head, 0, active.size)
            active.first_timestamp = otherwise if header is None else header.max_timestamp
        return active.first_timestamp

    # --- indexes ---------------------------------------------------------------------------------

    def _index(self, header: batch.BatchHeader, last_offset: int, position: int) -> None:
        """Give the batch an index entry if the last one is `index.interval.bytes` behind."""
        active = self._active
        if header.max_timestamp > active.largest[0]:
            active.largest = header.max_timestamp, last_offset
        if active.first_timestamp is None and position == 0:
            active.first_timestamp = header.max_timestamp
        if position - active.indexed_position <= self._config.index_interval_bytes:
            return
        self._index_time()
        entry = layout.OFFSET_INDEX_ENTRY
        data = entry.pack(last_offset - active.base_offset, position)
        files.write_at(active.index_fd, data, active.index_count * entry.size)
        active.index_count += 1
        active.indexed_position = position

    def _index_time(self) -> None:
        """Add a time index entry if the largest timestamp has grown since the last one."""
        active = self._active
        if not active.knows_largest:
            active.largest = max(self._largest_on_disk(), active.largest, key=lambda pair: pair[0])
            active.knows_largest = True
        timestamp, offset = active.largest
        if timestamp <= active.time_indexed:
            return
        entry = layout.TIME_INDEX_ENTRY
        data = entry.pack(timestamp, offset - active.base_offset)
        files.write_at(active.time_index_fd, data, active.time_index_count * entry.size)
        active.time_index_count += 1
        active.time_indexed = timestamp

    def _largest_on_disk(self) -> tuple[int, int]:
        """Find the largest timestamp as opened: the time index's last, or of a batch after it."""
        active = self._active
        largest = layout.NO_TIMESTAMP, active.base_offset
        if active.time_index_count:
            entry = layout.TIME_INDEX_ENTRY
            position = (active.time_index_count - 1) * entry.size
            timestamp, relative = entry.unpack(
                files.read_at(active.time_index_fd, entry.size, position)
            )
            largest = timestamp, active.base_offset + relative
        for header in self._headers(active.indexed_position):
            if header.max_timestamp > largest[0]:
                largest = header.max_timestamp, header.last_offset
        return largest

    def _headers(self, position: int) -> Iterator[batch.BatchHeader]:
        while position < self._active.opened_size:
            remaining = self._active.opened_size - position
            size = min(layout.BATCH_OVERHEAD, remaining)
            head = files.read_at(self._active.log_fd, size, position)
            header = None if len(head) < size else batch.read_header(head, 0, remaining)
            if header is None:
                return
            yield header
            position += header.size

    # --- roll, adopt -----------------------------------------------------------------------------

    def roll(self) -> None:
        """Close the active segment, synced with its indexes, and begin one at the log end.

        An active segment that is empty and begins there stays.
        """
        active, base_offset = self._active, self.state.high_watermark
        if active.size == 0 and active.base_offset == base_offset:
            return
        self._finish_active()
        with self._lock.exclusive():
            files.create(self._path(base_offset, layout.LOG))
            self._names_changed = True
        self.state = replace(self.state, active_base=base_offset, active_size=0)
        self._active = self._open_active()

    def _finish_active(self) -> None:
        active = self._active
        if active.size:
            self._index_time()
        for fd in (active.log_fd, active.index_fd, active.time_index_fd):
            files.sync_file(fd)
        self._close_active()

    def adopt(self, staged: Path) -> None:
        """Make a staged file, with its indexes beside it, the active segment, by renaming it."""
        self._note_epoch()
        base_offset = self.state.high_watermark
        self._finish_active()
        next_offset = self._stamp_file(staged, base_offset)
        renames = {
            staged.with_name(staged.name + layout.STAGED_INDEX): layout.INDEX,
            staged.with_name(staged.name + layout.STAGED_TIME_INDEX): layout.TIME_INDEX,
            staged.with_name(staged.name + layout.STAGED): layout.LOG,
        }
        size = staged.with_name(staged.name + layout.STAGED).stat().st_size
        with self._lock.exclusive():
            for source, suffix in renames.items():
                files.rename(source, self._path(base_offset, suffix))
        self._names_changed = True
        self._advance(next_offset)
        self.state = replace(self.state, active_base=base_offset, active_size=size)
        self._active = self._open_active()

    def _stamp_file(self, staged: Path, base_offset: int) -> int:
        """Stamp every batch of a staged file in place, sync it, and return the next offset."""
        fd = os.open(staged.with_name(staged.name + layout.STAGED), os.O_RDWR | os.O_CLOEXEC)
        try:
            size, position, next_offset = os.fstat(fd).st_size, 0, base_offset
            while position < size:
                header = batch.parse_header(files.read_at(fd, layout.BATCH_OVERHEAD, position))
                first = base_offset + header.base_offset
                files.write_at(fd, layout.STAMP_OFFSET.pack(first), position)
                files.write_at(
                    fd,
                    layout.STAMP_EPOCH.pack(self.state.leader_epoch),
                    position + layout.EPOCH_POSITION,
                )
                next_offset = first + header.last_offset_delta + 1
                position += header.size
            files.sync_file(fd)
            return next_offset
        finally:
            os.close(fd)

    # --- durability ------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make all that was appended durable: the file, and the names that appeared."""
        if self._active.is_dirty:
            files.sync_file(self._active.log_fd)
            self._active.is_dirty = False
        if self._names_changed:
            files.sync_directory(self.directory)
            self._names_changed = False

    def close(self) -> None:
        """Close the files; nothing is undone."""
        self._close_active()

    def abandon(self) -> None:
        """After a failure before the commit point: cut, and go on in a new segment.

        When a sync has failed, the pages of the old file pretend to be clean and lie about the
        disk: so the next commit does not append to them.
        """
        self._close_active()
        self.state = self._recorded
        with self._lock.exclusive():
            self._remove_later(self._later_segments())
            log = self._path(self.state.active_base, layout.LOG)
            if self.state.active_base == self.state.high_watermark:
                files.remove(log)
            elif log.exists():
                fd = os.open(log, os.O_RDWR | os.O_CLOEXEC)
                try:
                    files.truncate(fd, self.state.active_size)
                finally:
                    os.close(fd)
            files.create(self._path(self.state.high_watermark, layout.LOG))
            files.sync_directory(self.directory)

    def _close_active(self) -> None:
        active = self._active
        for fd in (active.log_fd, active.index_fd, active.time_index_fd):
            if fd >= 0:
                os.close(fd)
        active.log_fd = active.index_fd = active.time_index_fd = -1

    def _note_epoch(self) -> None:
        """Let `leader-epoch-checkpoint` know the epoch from the first offset that carries it."""
        if self.state.high_watermark == 0 and not checkpoints.read_leader_epochs(self.directory):
            checkpoints.write_leader_epochs(self.directory, [(self.state.leader_epoch, 0)])

    def _path(self, base_offset: int, suffix: str) -> Path:
        return self.directory / layout.segment_file(base_offset, suffix)
