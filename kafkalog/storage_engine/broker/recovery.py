"""Brings a loaded partition to the disk: it writes what the loader found in memory.

`repair_partition` truncates the log at its end, retires later segments, and rebuilds the indexes of
every recovered segment, entry by entry, like a broker. If it dies at any step, the next process
that loads the partition finds the same state and repairs it:

- later segments go before the one that they follow is truncated, the last one first, so there is
  never a gap;
- an index is put in place whole, `.index` last, because its absence asks for recovery;
- the snapshot of the producers comes before the indexes, because it alone tells of them then;
- everything of a recovered segment is synced, because nothing says that it was.

Kafka: LogLoader.load, LogSegment.recover, LocalLog.splitOverflowedSegment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kafkalog.errors import StorageError
from kafkalog.storage_engine.broker.loader import LoadedPartition
from kafkalog.storage_engine.broker.overflowed_segment import is_overflowed, split_segment
from kafkalog.storage_engine.format import layout, leader_epochs
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.segment import segments, swaps
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index_builder import IndexBuilder
from kafkalog.storage_engine.segment.log_scanner import FRAMES, LogScanner, ScannedBatches
from kafkalog.storage_engine.segment.segments import SegmentFiles
from kafkalog.storage_engine.transactions import producer_snapshot
from kafkalog.storage_engine.transactions.producer_replay import ProducerHistory
from kafkalog.storage_engine.transactions.producers import Producers
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    transaction_entry,
)

INDEX_INTERVAL_BYTES = 4096
"""Kafka's default of `index.interval.bytes`."""


def repair_partition(
    loaded: LoadedPartition, *, index_interval_bytes: int = INDEX_INTERVAL_BYTES
) -> LoadedPartition:
    """Make the disk say what was loaded; returns the partition as it is then.

    The caller holds the root exclusively, and `loaded` is what it has loaded since. Nothing is
    written where nothing is wrong, but for the snapshot of the producers at the end. Raises
    StorageError, OSError.
    """
    return _Repair(loaded, index_interval_bytes).run()


class _Repair:
    def __init__(self, loaded: LoadedPartition, index_interval_bytes: int) -> None:
        self._loaded = loaded
        self._interval = index_interval_bytes
        self.directory = loaded.directory
        self.state = loaded.state
        self._recovered = set(loaded.recovered)
        self._damage = list(loaded.damage)

    def run(self) -> LoadedPartition:
        swaps.finish_swaps(self.directory)
        # Make durable what a dead run has retired, before the segment below is truncated.
        files.sync_directory(self.directory)
        live = self._drop_later(segments.list_segments(self.directory))
        if live:
            self._truncate(live[-1])
            live = self._split_overflowed(live)
            self._write_producers()
            self._rebuild_indexes(live)
        else:
            self._begin_anew()
        self._retire_orphans({segment.base_offset for segment in live})
        self._repair_rest()
        return replace(
            self._loaded, state=self.state, aborted=None, recovered=(), damage=tuple(self._damage)
        )

    def _drop_later(self, found: list[SegmentFiles]) -> list[SegmentFiles]:
        """Retire the segments above the active one; all of them if the log begins again."""
        active_base = self.state.active_base
        live = [segment for segment in found if segment.base_offset <= active_base]
        is_there = bool(live) and live[-1].base_offset == active_base
        if self.state.active_size and not is_there:
            raise StorageError(
                f"{self.directory}: the segment of offset {active_base} is gone since the "
                "partition was loaded; nothing was repaired"
            )
        is_empty = self.state.high_watermark == self.state.log_start_offset == active_base
        if is_empty and not (is_there and live[-1].size == 0):
            live = []  # what lies below the start is nobody's any more
        for segment in reversed(found[len(live) :]):
            swaps.retire(self.directory, [segment.base_offset])
        return live

    def _truncate(self, active: SegmentFiles) -> None:
        """Cut the log where it ends."""
        size = self.state.active_size
        if active.size == size:
            return
        with files.closing(files.open_to_write(active.log)) as fd:
            if os.fstat(fd).st_size < size:
                raise StorageError(
                    f"{active.log}: shorter than the {size} bytes it had when it was loaded"
                )
            files.truncate(fd, size)
            files.sync_file(fd)
        self._recovered.add(active.base_offset)

    def _begin_anew(self) -> None:
        """Make the one empty segment of a log without records."""
        for suffix in (layout.LOG, layout.TIME_INDEX, layout.INDEX):
            files.create(self.directory / layout.segment_file(self.state.active_base, suffix))
        files.sync_directory(self.directory)

    def _split_overflowed(self, live: list[SegmentFiles]) -> list[SegmentFiles]:
        """Split recovered segments whose offsets an index cannot tell (L5, KAFKA-6264)."""
        ends = [*(segment.base_offset for segment in live[1:]), self.state.high_watermark]
        wanted = [
            segment
            for segment, end in zip(live, ends, strict=True)
            if segment.base_offset in self._recovered
            and end - segment.base_offset > layout.INT32_MAX  # else it need not be looked at
            and is_overflowed(segment)
        ]
        if not wanted:
            return live
        for segment in wanted:
            self._recovered.remove(segment.base_offset)
            self._recovered.update(split_segment(self.directory, segment))
        live = segments.list_segments(self.directory)
        self.state = replace(
            self.state,
            active_base=live[-1].base_offset,
            active_size=live[-1].size,
            log_start_offset=max(self.state.log_start_offset, live[0].base_offset),
        )
        return live

    def _write_producers(self) -> None:
        """Write the snapshot of the producers at the end.

        It comes before the indexes: without it, only a missing index asks for a replay.
        """
        end = self.state.high_watermark
        if self.state.producer_snapshot != end > self.state.log_start_offset:
            producer_snapshot.write_snapshot(self.directory, self._loaded.producers)
            self.state = replace(self.state, producer_snapshot=end)

    def _rebuild_indexes(self, live: Sequence[SegmentFiles]) -> None:
        history = ProducerHistory(
            self.directory, live, log_start=self._loaded.state.log_start_offset
        )
        producers: Producers | None = None
        for segment in live:
            if segment.base_offset not in self._recovered:
                producers = None
                if not segment.time_index.exists():
                    files.create(segment.time_index)
                continue
            if producers is None:
                producers = history.at(segment.base_offset)
            self._rebuild(segment, history, producers)
        if self._recovered:
            files.sync_directory(self.directory)

    def _rebuild(
        self, segment: SegmentFiles, history: ProducerHistory, producers: Producers
    ) -> None:
        builder = IndexBuilder(segment.base_offset, self._interval)

        def index(found: ScannedBatches) -> None:
            table = found.table
            positions = table.positions + found.file_position
            builder.add_batches(positions, table.last_offsets, table.max_timestamps)

        aborted, scan = history.check(segment, producers, index)
        size = segment.log.stat().st_size
        if scan.position < size:
            # An older segment that had no index; a broker cuts it as well, and keeps later ones.
            self._damage.append(
                f"{scan.end_fault().damage}; the {size - scan.position} bytes from there on were "
                "truncated"
            )
        with files.closing(files.open_to_write(segment.log)) as fd:
            if scan.position < size:
                files.truncate(fd, scan.position)
            files.sync_file(fd)
        self._write_indexes(segment, builder, aborted)

    def _write_indexes(
        self, segment: SegmentFiles, builder: IndexBuilder, aborted: Sequence[AbortedTransaction]
    ) -> None:
        if aborted or segment.transaction_index.exists():
            data = b"".join(map(transaction_entry, aborted))
            files.write_atomically(segment.transaction_index, data)
        builder.add_time()
        files.write_atomically(segment.time_index, builder.time_entries)
        files.write_atomically(segment.index, builder.offset_entries)

    def _retire_orphans(self, live: set[int]) -> None:
        """Retire index files without a log, and snapshots that are not of the log."""
        stray = [
            base
            for base in segments.bases_below(self.directory, layout.INT64_MAX + 1)
            if base not in live and base != self.state.active_base
        ]
        indexes = (layout.INDEX, layout.TIME_INDEX, layout.TRANSACTION_INDEX)
        swaps.retire(self.directory, stray, suffixes=indexes)
        state = self.state
        outside = [
            offset
            for offset in producer_snapshot.snapshot_offsets(self.directory)
            if not state.log_start_offset < offset <= state.high_watermark
        ]
        swaps.retire(self.directory, outside, suffixes=(layout.SNAPSHOT,))

    def _epochs_of_batches(self) -> leader_epochs.Epochs:
        """Return the leader epochs that the batches have, for a damaged checkpoint of them.

        Kafka: LogSegment.recover.
        """
        epochs: leader_epochs.Epochs = []
        for segment in segments.list_segments(self.directory):
            with files.closing(files.open_to_read(segment.log)) as fd:
                scan = LogScanner(FileBytes(fd), segment.log, FRAMES, limit=segment.size)
                for found in scan:
                    table = found.table
                    changed = np.flatnonzero(np.diff(table.leader_epochs, prepend=-1))
                    for row in changed.tolist():
                        epoch, start = int(table.leader_epochs[row]), int(table.base_offsets[row])
                        if epoch > (epochs[-1][0] if epochs else -1):
                            epochs = leader_epochs.assigned(epochs, epoch, start)
        return leader_epochs.trimmed(epochs, self.state.log_start_offset)

    def _repair_rest(self) -> None:
        epochs = self._loaded.leader_epochs
        found, fault = checkpoints.known_leader_epochs(self.directory)
        if fault is not None:
            checkpoints.write_leader_epochs(self.directory, self._epochs_of_batches())
        elif tuple(found) != epochs:
            checkpoints.write_leader_epochs(self.directory, epochs)
        bases = [s.base_offset for s in segments.list_segments(self.directory)]
        producer_snapshot.sweep_snapshots(self.directory, {*bases, self.state.high_watermark})
