"""The write side of one partition within one commit: truncate, roll, append, adopt, sync.

The work of an `Appender` is invisible until the journal records it. The bytes of a process that
died lie above the recorded state; the next appender truncates them, opening the log does not.

Invariants
----------

- Only the active segment is appended to; its valid bytes are those in the journal.
- After the truncation, the partition's files end at the recorded state: its segments, their
  indexes, its leader epochs, its producer snapshots and the listed gaps of raw appends.
- A truncation never removes the producer snapshot that the journal names. If that is removed or
  damaged by others, the producers are rebuilt from the log.
- While a transaction is open, the last stable offset stays at its begin.

Kafka: UnifiedLog.append, UnifiedLog.roll, UnifiedLog.truncateTo.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.directory.active_segment import ActiveSegment
from kafkalog.storage_engine.directory.staged_segment import (
    read_staged_header,
    stamp_staged_segment,
)
from kafkalog.storage_engine.format import batch, layout, leader_epochs
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState, check_log_end
from kafkalog.storage_engine.segment import gaps, partition_directory
from kafkalog.storage_engine.transactions import producer_snapshot
from kafkalog.storage_engine.transactions.producers import Producers

_logger = logging.getLogger(__name__)
_WRITE_SIZE = 1 << 20
"""Bytes of stamped batches to write at once; many tasks have a few for each partition."""


class Appender:
    """Append to one partition; the caller holds the commit lock and the root lock.

    `state` is the partition's state after the commit.
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
        self._topic_id = topic_id
        self._config = config
        self._begin(now_ms)
        self._mark = partition_directory.owner_mark(str(directory))
        # Every commit runs this for each of its partitions, so one listing has to suffice.
        names = partition_directory.check_canary(directory)
        partition_directory.check_topic_id(directory, topic_id)
        self._epochs = self._truncate_epochs() if layout.LEADER_EPOCH_CHECKPOINT in names else []
        if layout.RAW_GAPS in names:
            gaps.truncate_raw_gaps(directory, state.high_watermark)
        self.active = self._truncate(names)
        """The active segment; a roll replaces it."""

    def _begin(self, now_ms: int) -> None:
        """Begin a commit upon the recorded state."""
        self._recorded = self.state
        self._now_ms = now_ms
        self._names_changed = False
        self._producers: Producers | None = None
        self.lost_snapshot = -1
        """Offset of the journal's producer snapshot if it is missing or damaged."""
        self._has_lost_producers = False
        self._is_held_back: bool | None = None

    def resume(
        self, topic_id: str, state: PartitionState, config: TopicConfig, now_ms: int
    ) -> bool:
        """Begin another commit, if the partition is as this appender left it: else return False.

        The caller knows that nobody has worked in the log since, so nothing is left to truncate.
        """
        known = self._topic_id, self.state, self._config
        if known != (topic_id, state, config) or self._mark is None:
            return False
        is_ours = partition_directory.owner_mark(str(self.directory)) == self._mark
        if not is_ours or not self.active.resume():
            return False
        self._begin(now_ms)
        return True

    def _truncate(self, names: Collection[str]) -> ActiveSegment:
        """Truncate the files, of these names, to the recorded state and open the active segment."""
        later = self._later_segments(names)
        if later:
            with locks.SegmentsLock(self.directory).exclusive():
                self._remove_later(later)
            files.sync_directory(self.directory)
        high_watermark = self.state.high_watermark
        if high_watermark in later:
            # Empty it and append to it: it alone may carry the log end if a cleaning removed the
            # tail before it (KAFKA-17076). Truncate, index and sync the segment before it now,
            # because no later commit does.
            self._open_active(names).finish_truncation()
            self._take_snapshot(high_watermark)
            self.state = replace(self.state, active_base=high_watermark, active_size=0)
        return self._open_active(names)

    def _later_segments(self, names: Iterable[str]) -> list[int]:
        """Return the base offsets, ascending, of files above the recorded active segment."""
        found = set()
        # A partition has many files, and every commit runs this, so skip most by name.
        lowest = layout.segment_file(min(self.state.active_base, self.state.high_watermark), "")
        for name in [name for name in names if name > lowest and name[0].isdecimal()]:
            parsed = layout.parse_segment_file(name)
            if parsed is None or parsed[2] == layout.DELETED:
                continue
            base_offset, suffix, _ = parsed
            limit = (
                self.state.high_watermark if suffix == layout.SNAPSHOT else self.state.active_base
            )
            if base_offset > limit and not (self.directory / name).is_dir():
                found.add(base_offset)
        return sorted(found)

    def _remove_later(self, later: list[int]) -> None:
        for base_offset in reversed(later):
            for suffix in layout.SEGMENT_SUFFIXES:
                path = self._path(base_offset, suffix)
                if suffix == layout.LOG and base_offset == self.state.high_watermark:
                    files.create(path)  # emptied
                else:
                    files.remove(path)
            if base_offset > self.state.high_watermark:
                files.remove(self._path(base_offset, layout.SNAPSHOT))

    def _open_active(self, names: Collection[str]) -> ActiveSegment:
        state = self.state
        index = layout.segment_file(state.active_base, layout.TRANSACTION_INDEX)
        return ActiveSegment(
            self.directory,
            self._topic_id,
            self._config,
            base_offset=state.active_base,
            size=state.active_size,
            end_offset=state.high_watermark,
            has_transactions=index in names,
        )

    def append(self, runs: Iterable[tuple[int, Iterable[batch.Buffer]]]) -> None:
        """Append runs of finished batches: stamp, roll, write.

        A run is its number of rows and its bytes, in pieces of whole batches; its base offsets
        count from 0. A piece that can be changed is stamped where it is. Only headers are read. A
        batch larger than `segment.bytes` gets its own segment. Raises StorageError for bytes that
        are not a batch or that omit offsets, for a wrong number of rows, and at the largest offset.
        The next holder of the lock truncates what was appended before.
        """
        self._note_own_epoch()
        next_offset = self.state.high_watermark
        pending = bytearray()
        for rows, pieces in runs:
            first_offset = next_offset
            for piece in pieces:
                if _is_writable(piece):  # so large that it is stamped where it is
                    self.active.write(pending)
                    pending = bytearray()
                    written, next_offset = self._stamp(piece, 0, first_offset, next_offset)
                    self.active.write(memoryview(piece)[written:])
                    continue
                start = len(pending)
                pending += piece
                written, next_offset = self._stamp(pending, start, first_offset, next_offset)
                del pending[:written]
                if len(pending) >= _WRITE_SIZE:
                    self.active.write(pending)
                    pending = bytearray()
            self._check_rows(rows, next_offset - first_offset)
        self.write(memoryview(pending), next_offset)

    def _check_rows(self, announced: int, found: int) -> None:
        if found != announced:
            what = f"a task announced {announced} rows, its batches hold {found}"
            raise StorageError(f"{self.directory}: {what}; run the batch again")

    def _stamp(
        self, pending: bytearray | memoryview, start: int, first_offset: int, next_offset: int
    ) -> tuple[int, int]:
        """Stamp the batches of `pending` from `start` on.

        Writes the batches before a new segment. Returns how many bytes these are, and the offset
        after the last batch.
        """
        position, written, epoch = start, 0, self.state.leader_epoch
        end = len(pending)
        while True:
            position, next_offset = self.active.stamp(
                pending, position, first_offset, next_offset, epoch
            )
            rest = end - position
            if not rest:
                return written, next_offset
            header = read_staged_header(pending, position, rest, next_offset - first_offset)
            if header is None:
                raise StorageError(
                    f"{self.directory}: a staged run ends in {rest} bytes that are no batch from "
                    f"offset {next_offset - first_offset} on (after {position - start}): the "
                    "staged file is damaged; write the batch again"
                )
            check_log_end(self.directory, next_offset + header.last_offset_delta + 1)
            with memoryview(pending) as view:
                self.active.write(view[written:position])
            written = position
            self.roll(first_offset + header.base_offset)

    def place(self, header: batch.BatchHeader, pending: memoryview) -> bool:
        """Make room for a batch with given offsets; return whether that began a new segment.

        `pending` has the unwritten bytes of the batches before it, which are written before a new
        segment. The caller passes batches with rising offsets, from the high watermark on, and
        their bytes to `write`.
        """
        size, time = header.size, header.max_timestamp
        is_new = not self.active.has_room(size, time, header.base_offset, header.last_offset)
        if is_new:
            self.active.write(pending)
            self.roll(header.base_offset)
        self.active.add(size, time, header.last_offset)
        return is_new

    def write(self, data: memoryview, next_offset: int) -> None:
        """Write the next bytes of the placed batches, and move the log end."""
        active = self.active
        active.write(data)
        self._advance(next_offset, active.base_offset, active.size)

    def _advance(self, next_offset: int, active_base: int, active_size: int) -> None:
        stable = self.state.last_stable_offset if self._holds_back() else next_offset
        self.state = self.state.grown_to(next_offset, stable, active_base, active_size)

    def _holds_back(self) -> bool:
        """Return whether a transaction was open when the commit began.

        The last stable offset is then below the log end. If the log start, its lower bound, was
        raised to the end, only the producers know of the transaction.
        """
        if self._is_held_back is None:
            state = self._recorded
            self._is_held_back = state.last_stable_offset < state.high_watermark
            if state.log_start_offset == state.high_watermark and state.producer_snapshot >= 0:
                unstable = self.producers().first_unstable_offset()
                self._is_held_back = unstable is not None
        return self._is_held_back

    def producers(self) -> Producers:
        """Return the producers at the recorded log end; the caller may change them.

        Raises CorruptLogError if the journal's producer snapshot is missing and the log is damaged;
        StorageError, OSError.
        """
        if self._producers is None:
            from kafkalog.storage_engine.transactions.producer_replay import recorded_producers

            self._producers, is_rebuilt = recorded_producers(
                self.directory, self._recorded, now_ms=self._now_ms
            )
            if is_rebuilt:
                self.lost_snapshot = self._recorded.producer_snapshot
        return self._producers

    def note_producers(self, *, stable: int = layout.INT64_MAX) -> None:
        """Write the producer snapshot at the log end, and compute the last stable offset.

        The caller has applied every appended batch to `producers()`. The offset is `stable` at
        most.
        """
        state, producers = self.state, self.producers()
        end = producers.end_offset = state.high_watermark
        if len(producers):
            producer_snapshot.write_snapshot(self.directory, producers)
        most, start = min(stable, end), state.log_start_offset
        self.state = replace(
            state,
            last_stable_offset=producers.last_stable_offset(most, log_start=start),
            producer_snapshot=end if len(producers) else -1,
        )

    def _take_snapshot(self, base_offset: int) -> None:
        """Write the producer snapshot where a segment begins, if there are producers (rule R7)."""
        named = self._recorded.producer_snapshot
        if self._has_lost_producers or (self._producers is None and named < 0):
            return
        try:
            producers = self.producers()
        except (CorruptLogError, StorageError, OSError) as fault:
            files.pass_on(fault)
            # A broker can use the snapshot before; no record is lost without this one.
            _logger.warning("%s: no snapshot at %d: %s", self.directory, base_offset, fault)
            self._has_lost_producers = True
            return
        if not len(producers) or (named == base_offset != self.lost_snapshot):
            return
        producers.end_offset = base_offset
        producer_snapshot.write_snapshot(self.directory, producers)
        if self.lost_snapshot == base_offset:
            self.lost_snapshot = -1

    def _truncate_epochs(self) -> list[tuple[int, int]]:
        """Drop the epochs of a dead commit; those it replaced come back."""
        found = checkpoints.read_leader_epochs(self.directory)
        kept = leader_epochs.committed(found, self.state.high_watermark, self.state.leader_epoch)
        if kept != found:
            checkpoints.write_leader_epochs(self.directory, kept)
        return kept

    def note_epochs(self, epochs: list[tuple[int, int]]) -> None:
        """Add epochs to `leader-epoch-checkpoint`, each with its first offset.

        The epochs that they replace (Kafka's rule for an epoch below the last one) stay in the file
        until `write_epochs`, because the commit may still fail.
        """
        if not epochs:
            return
        self._epochs = [*self._epochs, *epochs]
        checkpoints.write_leader_epochs(self.directory, self._epochs)
        self.state = replace(self.state, leader_epoch=epochs[-1][0])

    def write_epochs(self) -> None:
        """Drop the replaced epochs; call it once the commit is recorded."""
        epochs = leader_epochs.in_order(self._epochs)
        if epochs != self._epochs:
            _logger.warning(
                "%s: a batch of leader epoch %d came after one of a later epoch; the epochs are %s",
                self.directory,
                self.state.leader_epoch,
                epochs,
            )
            self._epochs = epochs
            checkpoints.write_leader_epochs(self.directory, epochs)

    @property
    def last_epoch(self) -> int:
        """The last assigned leader epoch; -1 for none."""
        return self._epochs[-1][0] if self._epochs else -1

    def _note_own_epoch(self) -> None:
        """Use the partition's epoch for our batches, but never one below its last."""
        epoch = max(self.state.leader_epoch, self.last_epoch)
        if epoch != self.last_epoch:
            self.note_epochs([(epoch, self.state.high_watermark)])
        elif epoch != self.state.leader_epoch:
            self.state = replace(self.state, leader_epoch=epoch)

    def note_gaps(self, pairs: array[int]) -> None:
        """List the gaps between raw batches: from, to, from, to and so on, ascending."""
        if not pairs:
            return
        import numpy as np

        found = np.frombuffer(pairs, dtype=np.int64).reshape(-1, 2)
        bases = layout.base_offsets(files.list_names(self.directory), layout.LOG)
        gaps.add_raw_gaps(self.directory, found, first_base=bases[0] if bases else 0)

    def roll(self, base_offset: int | None = None) -> None:
        """Finish the active segment and begin a new one at the log end.

        Or at `base_offset`, the first offset of the next batch (rule R5). Keeps an empty active
        segment that begins there.
        """
        active = self.active
        if base_offset is None:
            base_offset = self.state.high_watermark
        if active.size == 0 and active.base_offset == base_offset:
            return
        active.finish()
        self._names_changed |= active.has_new_name
        self._take_snapshot(base_offset)
        with locks.SegmentsLock(self.directory).exclusive():
            files.create(self._path(base_offset, layout.LOG))
            self._names_changed = True
        self._open_segment(base_offset, 0)

    def _open_segment(self, base_offset: int, size: int) -> None:
        end = max(base_offset, self.state.high_watermark)
        self.state = replace(self.state, active_base=base_offset, active_size=size)
        self.active = ActiveSegment(
            self.directory,
            self._topic_id,
            self._config,
            base_offset=base_offset,
            size=size,
            end_offset=end,
            has_transactions=False,  # none above the recorded active segment after the truncation
            is_begun_here=True,
        )

    def adopt(self, staged: Path, rows: int) -> None:
        """Rename a staged file, with its indexes, to become the active segment."""
        self._note_own_epoch()
        base_offset = self.state.high_watermark
        self.active.finish()
        self._names_changed |= self.active.has_new_name
        self._take_snapshot(base_offset)
        log = staged.with_name(staged.name + layout.STAGED)
        epoch = self.state.leader_epoch
        next_offset = stamp_staged_segment(self.directory, log, base_offset, epoch)
        self._check_rows(rows, next_offset - base_offset)
        renames = {
            staged.with_name(staged.name + layout.STAGED_INDEX): layout.INDEX,
            staged.with_name(staged.name + layout.STAGED_TIME_INDEX): layout.TIME_INDEX,
            log: layout.LOG,
        }
        size = files.size_of(log)
        with locks.SegmentsLock(self.directory).exclusive():
            for source, suffix in renames.items():
                files.rename(source, self._path(base_offset, suffix))
        self._names_changed = True
        self._advance(next_offset, self.state.active_base, self.state.active_size)
        self._open_segment(base_offset, size)

    def end_at(self, offset: int) -> None:
        """Let the log end at a higher offset, behind a gap, in a new segment."""
        self.roll(offset)
        self._advance(offset, offset, 0)

    def raise_log_start(self, offset: int) -> None:
        """Let the log begin at `offset`, or later."""
        state = self.state
        self.state = replace(
            state,
            log_start_offset=max(state.log_start_offset, offset),
            first_dirty_offset=max(state.first_dirty_offset, offset),
            last_stable_offset=max(state.last_stable_offset, offset),
        )

    def note_deletions_gone(self, offset: int) -> None:
        """Note that deletions below `offset` may not be in the log."""
        gone_to = max(self.state.deletions_gone_to, offset)
        self.state = replace(self.state, deletions_gone_to=gone_to)

    def sync(self) -> None:
        """Make all appended data durable: the files, and the new names."""
        self.active.sync()
        if self._names_changed or self.active.has_new_name:
            files.sync_directory(self.directory)
            self._names_changed = self.active.has_new_name = False

    def finish(self) -> None:
        """Close the files as a broker does at a clean shutdown: trimmed, indexed, synced."""
        self.active.finish()

    def close(self) -> None:
        """Close the files; undo nothing."""
        self.active.close()

    def abandon(self) -> None:
        """Truncate after a failure before the commit point, and continue in a new segment.

        After a failed sync, the pages of the old file look clean but may not be on disk. The next
        commit must not append to them.
        """
        self.active.close()
        self.state = self._recorded
        with locks.SegmentsLock(self.directory).exclusive():
            self._remove_later(self._later_segments(files.list_names(self.directory)))
            log = self._path(self.state.active_base, layout.LOG)
            if self.state.active_base == self.state.high_watermark:
                files.remove(log)
            elif log.exists():
                with files.closing(files.open_to_write(log)) as fd:
                    files.truncate(fd, self.state.active_size)
            files.create(self._path(self.state.high_watermark, layout.LOG))
            files.sync_directory(self.directory)

    def _path(self, base_offset: int, suffix: str) -> Path:
        return self.directory / layout.segment_file(base_offset, suffix)


def _is_writable(piece: batch.Buffer) -> TypeGuard[bytearray | memoryview]:
    return isinstance(piece, bytearray) or (isinstance(piece, memoryview) and not piece.readonly)
