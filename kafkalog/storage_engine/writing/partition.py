"""The write side of one partition within one commit: cut, roll, append, adopt, sync.

Nothing an `Appender` does is visible before the journal says so. What a process left that died in
the middle lies above the recorded state, and the next appender cuts it off: opening never does.

Invariants
----------
- Only the active segment is appended to; its valid bytes are those the journal records.
- After the cut, the partition's files end where the recorded state ends: its segments, their
  indexes, its leader epochs, its producer snapshots and the gaps that raw appends have listed.
- The snapshot that the journal names stays, whatever is cut. Where somebody else has removed or
  damaged it, the producers are told from the log.
- While a transaction is open, the last stable offset stays where that begins.

Kafka: UnifiedLog.append, UnifiedLog.roll, UnifiedLog.truncateTo.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from kafkalog.errors import CorruptLogError, LockedByBrokerError, StorageError
from kafkalog.storage_engine.format import batch, layout, leader_epochs
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment import gaps, partition_directory
from kafkalog.storage_engine.segment.staged_batch import (
    check_log_end,
    read_staged_header,
    stamp_staged_file,
)
from kafkalog.storage_engine.transactions import producer_snapshot
from kafkalog.storage_engine.transactions.producers import Producers
from kafkalog.storage_engine.writing.active_segment import ActiveSegment

_logger = logging.getLogger(__name__)
_WRITE_SIZE = 1 << 20
"""Bytes of stamped batches that are written at once; many tasks bring a few of each partition."""


def check_canary(directory: Path) -> frozenset[str]:
    """Return the names in the directory of a partition of ours.

    Raises LockedByBrokerError where a broker has loaded it, or removed it.
    """
    try:
        names = frozenset(files.list_names(directory))
    except (FileNotFoundError, NotADirectoryError):
        raise LockedByBrokerError(
            f"{directory}: the directory of the partition is missing, removed by a Kafka broker or "
            "by hand; put it back, or let `kafkalog adopt` take the log without it"
        ) from None
    if layout.CANARY not in names:
        raise LockedByBrokerError(
            f"{directory}: {layout.CANARY} is missing, so a Kafka broker has loaded this "
            "partition since kafkalog last wrote it; take it back with `kafkalog adopt`"
        )
    return names


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
        self._names_changed = False
        self._producers: Producers | None = None
        self.lost_snapshot = -1
        """Offset of the snapshot that the journal names, once that was found gone or damaged."""
        self._has_lost_producers = False
        self._is_held_back: bool | None = None
        # Every commit comes here for each of its partitions: one listing says what to look into.
        names = check_canary(directory)
        partition_directory.check_topic_id(directory, topic_id)
        self._epochs = self._truncate_epochs() if layout.LEADER_EPOCH_CHECKPOINT in names else []
        if layout.RAW_GAPS in names:
            gaps.truncate_raw_gaps(directory, state.high_watermark)
        self._active = self._truncate(names)

    # --- the cut ---------------------------------------------------------------------------------

    def _truncate(self, names: Collection[str]) -> ActiveSegment:
        """Bring the files, of these names, to the recorded state and open the active segment."""
        later = self._later_segments(names)
        if later:
            with locks.SegmentsLock(self.directory).exclusive():
                self._remove_later(later)
            files.sync_directory(self.directory)
        high_watermark = self.state.high_watermark
        if high_watermark in later:
            # It alone may carry the log end, where the tail before it was cleaned away
            # (KAFKA-17076): so it is emptied, and appended to. The one before it is cut, indexed
            # and synced, since nobody cuts it later.
            self._open_active(names).finish_truncation()
            self._take_snapshot(high_watermark)
            self.state = replace(self.state, active_base=high_watermark, active_size=0)
        return self._open_active(names)

    def _later_segments(self, names: Iterable[str]) -> list[int]:
        """Return the base offsets above the recorded active segment, of any file, ascending."""
        found = set()
        # A partition has many files, and every commit comes here: few are worth a closer look.
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

    # --- append ----------------------------------------------------------------------------------

    def append(self, runs: Iterable[tuple[int, Iterable[batch.Buffer]]]) -> None:
        """Append runs of finished batches: stamp, roll, write.

        A run is the number of its rows and its bytes, in pieces of whole batches; its base offsets
        count from 0. Only headers are read. A batch larger than `segment.bytes` gets a segment of
        its own. Raises StorageError for bytes that are no batch or leave offsets out, for other
        rows than announced, and where offsets end; what was appended before that is for the next
        holder to cut.
        """
        self._note_own_epoch()
        next_offset = self.state.high_watermark
        pending = bytearray()
        for rows, pieces in runs:
            first_offset = next_offset
            for piece in pieces:
                start = len(pending)
                pending += piece
                next_offset = self._stamp(pending, start, first_offset, next_offset)
                if len(pending) >= _WRITE_SIZE:
                    self._active.write(pending)
                    pending = bytearray()
            self._check_rows(rows, next_offset - first_offset)
        self.write(memoryview(pending), next_offset)

    def _check_rows(self, announced: int, found: int) -> None:
        if found != announced:
            what = f"a task announced {announced} rows, its batches hold {found}"
            raise StorageError(f"{self.directory}: {what}; run the batch again")

    def _stamp(self, pending: bytearray, start: int, first_offset: int, next_offset: int) -> int:
        """Stamp the batches of `pending` from `start` on; return the offset after the last one.

        Where one begins a new segment, all before it are written, and removed from `pending`.
        """
        position, written, epoch = start, 0, self.state.leader_epoch
        while True:
            position, next_offset = self._active.stamp(
                pending, position, first_offset, next_offset, epoch
            )
            rest = len(pending) - position
            if not rest:
                break
            header = read_staged_header(pending, position, rest, next_offset - first_offset)
            if header is None:
                raise StorageError(
                    f"{self.directory}: a staged run ends in {rest} bytes that are no batch from "
                    f"offset {next_offset - first_offset} on (after {position - start}): the "
                    "staged file is damaged; write the batch again"
                )
            check_log_end(self.directory, next_offset + header.last_offset_delta + 1)
            with memoryview(pending) as view:
                self._active.write(view[written:position])
            written = position
            self.roll(first_offset + header.base_offset)
        del pending[:written]
        return next_offset

    def place(self, header: batch.BatchHeader, pending: memoryview) -> bool:
        """Make room for a batch that comes with its offsets; False if that took no new segment.

        `pending` are the bytes of the batches before it that are not written yet: they are where a
        new segment is begun. The caller brings batches with rising offsets, from the high watermark
        on, and their bytes by `write`.
        """
        size, time = header.size, header.max_timestamp
        is_new = not self._active.has_room(size, time, header.base_offset, header.last_offset)
        if is_new:
            self._active.write(pending)
            self.roll(header.base_offset)
        self._active.add(size, time, header.last_offset)
        return is_new

    def write(self, data: memoryview, next_offset: int) -> None:
        """Write the next bytes of the batches that have their place, and move the log end."""
        active = self._active
        active.write(data)
        self._advance(next_offset, active_base=active.base_offset, active_size=active.size)

    def _advance(self, next_offset: int, **active: int) -> None:
        """Move the log end; the last stable offset goes with it unless a transaction is open."""
        stable = self.state.last_stable_offset if self._holds_back() else next_offset
        self.state = replace(
            self.state, high_watermark=next_offset, last_stable_offset=stable, **active
        )

    @property
    def active(self) -> ActiveSegment:
        """The segment that is appended to now; another one after a roll."""
        return self._active

    # --- producers and their transactions --------------------------------------------------------

    def _holds_back(self) -> bool:
        """Tell whether a transaction was open when the commit began.

        The stable offset lies below the log's end then, unless the log start, which it is never
        below, has been raised up to the end: only the producers know of a transaction there.
        """
        if self._is_held_back is None:
            state = self._recorded
            self._is_held_back = state.last_stable_offset < state.high_watermark
            if state.log_start_offset == state.high_watermark and state.producer_snapshot >= 0:
                unstable = self.producers().first_unstable_offset()
                self._is_held_back = unstable is not None
        return self._is_held_back

    def producers(self) -> Producers:
        """Return the producers' state at the log end as recorded; changes to it are the caller's.

        Raises CorruptLogError where the snapshot that the journal names is gone, and the log that
        says the same is damaged; StorageError, OSError.
        """
        if self._producers is None:
            from kafkalog.storage_engine.transactions.producer_replay import recorded_producers

            self._producers, is_rebuilt = recorded_producers(
                self.directory, self._recorded, now_ms=self._now_ms
            )
            if is_rebuilt:
                self.lost_snapshot = self._recorded.producer_snapshot
        return self._producers

    def note_producers(self) -> None:
        """Write the producers' snapshot at the log end, and see what is stable now.

        Their state, `producers()`, must have followed every batch that was appended.
        """
        state, producers = self.state, self.producers()
        end = producers.end_offset = state.high_watermark
        if len(producers):
            producer_snapshot.write_snapshot(self.directory, producers)
        self.state = replace(
            state,
            last_stable_offset=producers.last_stable_offset(end, log_start=state.log_start_offset),
            producer_snapshot=end if len(producers) else -1,
        )

    def _take_snapshot(self, base_offset: int) -> None:
        """Write the producers' snapshot where a segment begins, if there are any (rule R7)."""
        named = self._recorded.producer_snapshot
        if self._has_lost_producers or (self._producers is None and named < 0):
            return
        try:
            producers = self.producers()
        except (CorruptLogError, StorageError, OSError) as fault:
            # A broker would do with the one before; no record is lost for want of this one.
            _logger.warning("%s: no snapshot at %d: %s", self.directory, base_offset, fault)
            self._has_lost_producers = True
            return
        if not len(producers) or (named == base_offset != self.lost_snapshot):
            return
        producers.end_offset = base_offset
        producer_snapshot.write_snapshot(self.directory, producers)
        if self.lost_snapshot == base_offset:
            self.lost_snapshot = -1

    # --- leader epochs ---------------------------------------------------------------------------

    def _truncate_epochs(self) -> list[tuple[int, int]]:
        """Drop the epochs that a commit that died has assigned; those it replaced come back."""
        found = checkpoints.read_leader_epochs(self.directory)
        kept = leader_epochs.committed(found, self.state.high_watermark)
        if kept != found:
            checkpoints.write_leader_epochs(self.directory, kept)
        return kept

    def note_epochs(self, epochs: list[tuple[int, int]]) -> None:
        """Let `leader-epoch-checkpoint` know epochs from the first offset that carries each.

        Those that they replace (Kafka's rule for an epoch below the last one) stay in the file
        until `write_epochs`: the commit may still die.
        """
        if not epochs:
            return
        self._epochs = [*self._epochs, *epochs]
        checkpoints.write_leader_epochs(self.directory, self._epochs)
        self.state = replace(self.state, leader_epoch=epochs[-1][0])

    def write_epochs(self) -> None:
        """Once the commit is recorded: drop the epochs that it has replaced."""
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
        """The last leader epoch that is assigned; -1 for none."""
        return self._epochs[-1][0] if self._epochs else -1

    def _note_own_epoch(self) -> None:
        """Stamp what we append with the partition's epoch, never with one below its last."""
        epoch = max(self.state.leader_epoch, self.last_epoch)
        if epoch != self.last_epoch:
            self.note_epochs([(epoch, self.state.high_watermark)])
        elif epoch != self.state.leader_epoch:
            self.state = replace(self.state, leader_epoch=epoch)

    # --- gaps ------------------------------------------------------------------------------------

    def note_gaps(self, pairs: array[int]) -> None:
        """List the gaps that whole batches have left: from, to, from, to and so on, ascending."""
        if not pairs:
            return
        import numpy as np

        found = np.frombuffer(pairs, dtype=np.int64).reshape(-1, 2)
        bases = [
            parsed[0]
            for name in files.list_names(self.directory)
            if (parsed := layout.parse_segment_file(name)) and parsed[1:] == (layout.LOG, "")
        ]
        gaps.add_raw_gaps(self.directory, found, first_base=min(bases, default=0))

    # --- roll, adopt -----------------------------------------------------------------------------

    def roll(self, base_offset: int | None = None) -> None:
        """Close the active segment, synced with its indexes, and begin one at the log end.

        Or at the first offset of the batch that comes next, `base_offset` (rule R5). An active
        segment that is empty and begins there stays.
        """
        active = self._active
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
        self._begin(base_offset, 0)

    def _begin(self, base_offset: int, size: int) -> None:
        end = max(base_offset, self.state.high_watermark)
        self.state = replace(self.state, active_base=base_offset, active_size=size)
        self._active = ActiveSegment(
            self.directory,
            self._topic_id,
            self._config,
            base_offset=base_offset,
            size=size,
            end_offset=end,
            has_transactions=False,  # the cut has left none above the recorded active segment
        )

    def adopt(self, staged: Path, rows: int) -> None:
        """Make a staged file, with its indexes beside it, the active segment, by renaming it."""
        self._note_own_epoch()
        base_offset = self.state.high_watermark
        self._active.finish()
        self._names_changed |= self._active.has_new_name
        self._take_snapshot(base_offset)
        log = staged.with_name(staged.name + layout.STAGED)
        epoch = self.state.leader_epoch
        next_offset = stamp_staged_file(self.directory, log, base_offset, epoch)
        self._check_rows(rows, next_offset - base_offset)
        renames = {
            staged.with_name(staged.name + layout.STAGED_INDEX): layout.INDEX,
            staged.with_name(staged.name + layout.STAGED_TIME_INDEX): layout.TIME_INDEX,
            log: layout.LOG,
        }
        size = log.stat().st_size
        with locks.SegmentsLock(self.directory).exclusive():
            for source, suffix in renames.items():
                files.rename(source, self._path(base_offset, suffix))
        self._names_changed = True
        self._advance(next_offset)
        self._begin(base_offset, size)

    # --- durability ------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make all that was appended durable: the files, and the names that appeared."""
        self._active.sync()
        if self._names_changed or self._active.has_new_name:
            files.sync_directory(self.directory)
            self._names_changed = self._active.has_new_name = False

    def finish(self) -> None:
        """Close the files as a broker's clean shutdown leaves them: trimmed, indexed, synced."""
        self._active.finish()

    def close(self) -> None:
        """Close the files; nothing is undone."""
        self._active.close()

    def abandon(self) -> None:
        """After a failure before the commit point: cut, and go on in a new segment.

        When a sync has failed, the pages of the old file pretend to be clean and lie about the
        disk: so the next commit does not append to them.
        """
        self._active.close()
        self.state = self._recorded
        with locks.SegmentsLock(self.directory).exclusive():
            self._remove_later(self._later_segments(files.list_names(self.directory)))
            log = self._path(self.state.active_base, layout.LOG)
            if self.state.active_base == self.state.high_watermark:
                files.remove(log)
            elif log.exists():
                fd = files.open_to_write(log)
                try:
                    files.truncate(fd, self.state.active_size)
                finally:
                    os.close(fd)
            files.create(self._path(self.state.high_watermark, layout.LOG))
            files.sync_directory(self.directory)

    def _path(self, base_offset: int, suffix: str) -> Path:
        return self.directory / layout.segment_file(base_offset, suffix)
