"""Load a partition's directory that a broker left, as the broker would.

Nothing is written. The result of `load_partition` says where the log begins and ends, which part is
damaged or lost, and which transactions were aborted or are open. Then `recovery.repair_partition`
applies the result to the disk. The rules are those of Kafka's LogLoader:

- Half a swap of segments counts as its file names say (`segments.list_segments`).
- After a clean shutdown only the tail after the last index entry is scanned.
- Otherwise every batch from the segment of the *recovery point* on is read and its checksum
  compared. The log ends before the first wrong batch, and all later segments are dropped.
- A segment without `.index`, or with a damaged `.txnindex`, is always recovered.
- A log that ends below its checkpointed start is empty.
- The producers' state is that of the latest sound snapshot, plus the batches above it.

A live broker's partition ends at its checkpointed high watermark. Nothing is checked then, because
everything below was acknowledged and the files still change.

Differences from Kafka: what is lost counts (`losses`). The log ends where it ended before, and a
reader of the lost offsets gets an error, while Kafka would continue without a word. A log is
truncated before a batch whose offsets do not rise, while Kafka empties the segment. Bytes after the
last whole batch are never appended to, even after a clean shutdown.

Kafka: LogLoader, LogManager.loadLog, UnifiedLog.rebuildProducerState.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from kafkalog.errors import CorruptBatchError, CorruptLogError
from kafkalog.storage_engine.broker.checkpointed import Checkpointed
from kafkalog.storage_engine.broker.losses import find_losses
from kafkalog.storage_engine.format import layout, leader_epochs
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.locate import headers, locate
from kafkalog.storage_engine.segment.log_scanner import ScannedBatches
from kafkalog.storage_engine.segment.loss import Loss
from kafkalog.storage_engine.segment.segments import SegmentFiles, list_segments
from kafkalog.storage_engine.transactions import producer_snapshot
from kafkalog.storage_engine.transactions.producer_replay import ProducerHistory
from kafkalog.storage_engine.transactions.producers import Producers
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    aborted_transactions,
)


@dataclass(frozen=True)
class LoadedPartition:
    """A partition as a broker would find it; offsets and sizes are those of the sound log."""

    directory: Path
    topic: str
    partition: int
    topic_id: str | None
    """From `partition.metadata`; None without one."""
    state: PartitionState
    producers: Producers
    """All producers at the high watermark."""
    aborted: tuple[AbortedTransaction, ...] | None
    """All aborted transactions, if some `.txnindex` is unreliable; None: read the files."""
    recovered: tuple[int, ...]
    """Base offsets of the segments whose indexes must be rebuilt."""
    damage: tuple[str, ...]
    """The dropped data, and why."""
    leader_epochs: tuple[tuple[int, int], ...] = ()
    """(epoch, its first offset), within the log."""
    notices: tuple[str, ...] = ()
    """What the directory does not say, and what it says besides."""
    lost: tuple[Loss, ...] = ()
    """The records that are gone although the broker had them safe, ascending."""


def load_partition(
    directory: Path,
    topic: str,
    partition: int,
    *,
    log_start: int | None,
    recovery_point: int | None,
    is_clean: bool,
    first_dirty: int = 0,
    end: int | None = None,
    now_ms: int,
    earlier: LoadedPartition | None = None,
    checkpointed: Checkpointed | None = None,
) -> LoadedPartition:
    """Load a partition; see the module.

    From the root's checkpoints come `log_start` (None: the first segment's), `recovery_point`
    (None: unknown, check everything) and `first_dirty`. After a clean shutdown `is_clean` is true.
    The checkpointed high watermark of a live broker is `end`. An earlier call for the same live
    partition gave `earlier`, whose producers are reused. With `checkpointed`, what the root says,
    losses are found too. Raises StorageError, and FileNotFoundError if a live broker removes a
    file.
    """
    loading = _Loading(directory, log_start, now_ms)
    if end is not None:
        loading.load_live(end, first_dirty, earlier)
    else:
        loading.load(is_clean=is_clean, recovery_point=recovery_point or 0)
    if checkpointed is not None:
        loading.find_losses(checkpointed)
        first = loading.bases[0] if loading.bases else 0
        if checkpointed.is_tiered and log_start is not None and log_start < first:
            found = remote_notice(log_start, first)
            loading.notices.append(
                f"{directory}: expected the log start {log_start}, found {found}"
            )
        stable = loading.producers.last_stable_offset(loading.end_offset)
        if end is None and stable < loading.end_offset:
            found = open_notice(stable, loading.end_offset)
            loading.notices.append(f"{directory}: {found}")
    return LoadedPartition(
        directory,
        topic,
        partition,
        checkpoints.known_topic_id(directory)[0],
        loading.state(first_dirty),
        loading.producers,
        loading.aborted,
        tuple(sorted(loading.recovered)),
        (*loading.damage, *loading.history.damage),
        tuple(loading.epochs),
        tuple(loading.notices),
        tuple(loading.lost),
    )


class _Loading:
    def __init__(self, directory: Path, log_start: int | None, now_ms: int) -> None:
        self.directory = directory
        self.segments = list_segments(directory)
        self.bases = [segment.base_offset for segment in self.segments]
        self.log_start = max(log_start or 0, 0, *self.bases[:1])
        self.history = ProducerHistory(
            directory, self.segments, log_start=self.log_start, now_ms=now_ms
        )
        self.end_offset = self.active_base = self.log_start
        self.active_size = 0
        self.producers = Producers(end_offset=self.log_start)
        self.snapshot_offset = -1
        """Offset of the snapshot with the producers at the end; -1 none."""
        self.aborted: tuple[AbortedTransaction, ...] | None = None
        self.recovered: set[int] = set()
        self.damage: list[str] = []
        self.epochs, fault = checkpoints.known_leader_epochs(directory)
        self.notices = [] if fault is None else [fault]
        self.lost: list[Loss] = []
        self.last_epoch = -1

    def load(self, *, is_clean: bool, recovery_point: int) -> None:
        first = len(self.bases)
        if not is_clean:
            first = max(0, bisect_right(self.bases, recovery_point) - 1)
        found: dict[int, list[AbortedTransaction]] = {}
        for segment in self.segments[:first]:
            if not segment.index.exists():
                self.recovered.add(segment.base_offset)
            if not _is_sound(segment):
                self.recovered.add(segment.base_offset)
                producers = self.history.at(segment.base_offset)
                found[segment.base_offset], _ = self.history.check(segment, producers, _ignore)
        is_checked = first < len(self.bases)
        if is_checked:
            self._check_from(first, found)
        is_recovered = bool(self.recovered)
        if not is_checked and self.segments:
            self._look_at_tail()
            if self.active_base in self.recovered:
                # Its indexes will be rebuilt, and that needs batches whose checksums are right.
                self._check_from(len(self.segments) - 1, found)
        if self.segments and self.end_offset < self.log_start:
            self._begin_anew()
        elif not is_checked:
            self._load_producers(is_clean=is_clean and not is_recovered)
        self._gather_aborted(found)
        self._truncate_epochs()

    def load_live(self, end: int, first_dirty: int, earlier: LoadedPartition | None) -> None:
        self.end_offset = max(end, self.log_start)
        if self.bases and first_dirty <= self.bases[-1]:
            # The cleaner stays below the high watermark, and its checkpoint may be newer.
            self.end_offset = max(self.end_offset, first_dirty)
        place = bisect_right(self.bases, self.end_offset) - 1
        if place >= 0:
            self._look_at_tail(place, self.end_offset)
        if earlier is not None and (
            self.log_start <= earlier.producers.end_offset <= self.end_offset
        ):
            self.producers = earlier.producers.copy()
            self.history.extend(self.producers, self.end_offset)
        else:
            self._load_producers(is_clean=False)
        self._truncate_epochs()

    def _look_at_tail(self, place: int = -1, end: int | None = None) -> None:
        """Find the end of the whole batches that begin below `end`, in one segment."""
        segment = self.segments[place]
        wanted = layout.INT64_MAX if end is None else end
        with files.closing(files.open_to_read(segment.log)) as fd:
            index = OffsetIndex(segment.index, segment.base_offset)
            # The batch of `wanted` may have the index entry, so begin below it.
            source = FileBytes(fd)
            position = locate(source, segment.size, index, wanted - 1)
            following = segment.base_offset
            for start, header in headers(source, position, segment.size):
                if header.known_first_offset >= wanted:
                    break
                following = header.next_offset
                self.last_epoch = header.leader_epoch
                position = start + header.size
        self.active_base, self.active_size = segment.base_offset, position
        if end is None or segment is self.segments[-1]:
            self.end_offset = min(wanted, following)
        if end is None and position < segment.size:
            self.recovered.add(segment.base_offset)

    def _check_from(self, first: int, found: dict[int, list[AbortedTransaction]]) -> None:
        """Read and check every batch from a segment on; the log ends with the last sound one."""
        self.producers = self.history.at(self.bases[first])
        for place in range(first, len(self.segments)):
            segment = self.segments[place]
            self.recovered.add(segment.base_offset)
            aborted, scan = self.history.check(segment, self.producers, self._note_epochs)
            found[segment.base_offset] = aborted
            self.active_base, self.active_size = segment.base_offset, scan.position
            self.end_offset = scan.next_offset
            if scan.position < segment.size:
                self._report(segment, scan.end_fault(), later=len(self.segments) - place - 1)
                del self.segments[place + 1 :]
                break
        self.producers.end_offset = self.end_offset

    def _report(self, segment: SegmentFiles, fault: CorruptBatchError, *, later: int) -> None:
        also = f", and {later} later segments," if later else ""
        self.damage.append(
            f"{fault.damage}; the {segment.size - fault.position} bytes from there on{also} "
            "do not count"
        )

    def _begin_anew(self) -> None:
        """Empty the log: it ends below its start, because files were deleted or lost."""
        self.damage.append(
            f"{self.directory}: the log ends at offset {self.end_offset}, below its checkpointed "
            f"start {self.log_start}: its {len(self.segments)} segments do not count"
        )
        self.segments.clear()
        self.recovered.clear()
        self.epochs.clear()
        self.end_offset = self.active_base = self.log_start
        self.active_size = 0
        self.producers = Producers(end_offset=self.log_start)

    def _load_producers(self, *, is_clean: bool) -> None:
        """Find the producers' state at the end, unless the replay has found it."""
        if is_clean and not producer_snapshot.snapshot_offsets(self.directory):
            # The broker is too old to write snapshots; like Kafka, assume no producers.
            self.producers = Producers(end_offset=self.end_offset)
            return
        self.producers = self.history.snapshot(self.end_offset)
        if self.log_start < self.producers.end_offset == self.end_offset:
            self.snapshot_offset = self.end_offset
        self.history.extend(self.producers, self.end_offset)

    def _gather_aborted(self, found: dict[int, list[AbortedTransaction]]) -> None:
        if not found:
            return
        aborted: list[AbortedTransaction] = []
        for segment in self.segments:
            if segment.base_offset in found:
                aborted += found[segment.base_offset]
            else:
                aborted += aborted_transactions(segment.transaction_index)
        self.aborted = tuple(aborted)

    def find_losses(self, checkpointed: Checkpointed) -> None:
        """Find what is lost; the log keeps the offsets of it, so that a reader learns of it."""
        found = find_losses(self.directory, self.segments, checkpointed, end_offset=self.end_offset)
        self.lost = [loss for loss in found if not loss.is_unsynced]
        self.damage += [str(loss) for loss in found if loss.is_unsynced]
        if self.lost:
            self.log_start = min(self.log_start, max(self.lost[0].start, 0))
            if not checkpointed.is_live:
                self.end_offset = max(self.end_offset, self.lost[-1].end)

    def _note_epochs(self, found: ScannedBatches) -> None:
        """Add leader epochs that begin in some batches and exceed all known ones.

        Kafka: LogSegment.recover.
        """
        table = found.table
        self.last_epoch = int(table.leader_epochs[-1])
        latest = self.epochs[-1][0] if self.epochs else -1
        if int(table.leader_epochs.max()) <= latest:
            return
        starts = zip(table.leader_epochs.tolist(), table.base_offsets.tolist(), strict=True)
        for epoch, base_offset in starts:
            if epoch > latest:
                latest = epoch
                self.epochs = leader_epochs.assigned(self.epochs, epoch, base_offset)

    def _truncate_epochs(self) -> None:
        self.epochs = leader_epochs.trimmed(
            leader_epochs.truncated(self.epochs, self.end_offset), self.log_start
        )

    def state(self, first_dirty: int) -> PartitionState:
        """Return the partition's state; a first dirty offset outside it becomes the log start."""
        end = self.end_offset
        dirty = first_dirty if self.log_start <= first_dirty <= end else self.log_start
        known = [epoch for epoch, _ in self.epochs[-1:]]
        return PartitionState(
            high_watermark=end,
            active_base=self.active_base,
            active_size=self.active_size,
            log_start_offset=self.log_start,
            last_stable_offset=self.producers.last_stable_offset(end, log_start=self.log_start),
            first_dirty_offset=dirty,
            leader_epoch=max(self.last_epoch, 0, *known),
            producer_snapshot=self.snapshot_offset,
            listed_from=layout.INT64_MAX,
            deletions_gone_to=dirty,
        )


def open_notice(first: int, end: int) -> str:
    """Return what it means that a stopped broker's log ends with an open transaction."""
    return (
        f"a transaction is open from offset {first} on, and no broker is here to end it: "
        f"read_committed ends there, and read_uncommitted reads on up to offset {end}"
    )


def remote_notice(log_start: int, first_base: int) -> str:
    """Return what it means that a tiered log's first segment begins above its log start."""
    return (
        f"a first segment that begins at offset {first_base}: the broker has tiered storage "
        f"(KIP-405), so records from {log_start} on may be there, which kafkalog does not read"
    )


def _ignore(_: ScannedBatches) -> None:
    """Ignore these batches."""


def _is_sound(segment: SegmentFiles) -> bool:
    """Return whether a segment's `.txnindex` is plausible. Kafka: TransactionIndex.sanityCheck."""
    try:
        entries = aborted_transactions(segment.transaction_index)
    except CorruptLogError:
        return False
    return all(entry.last_offset >= segment.base_offset for entry in entries)
