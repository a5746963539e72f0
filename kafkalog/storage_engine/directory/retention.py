"""Retention: remove segments that are too old, too many, or below the log start.

Retention removes the oldest segments first, only whole ones, and none at or above the high
watermark. It first records the new log start in the journal; after that no reader sees the
records before it. Then it renames the files to `.deleted`, under the exclusive segments lock; they
are removed `file.delete.delay.ms` later. If the process dies in between, segments remain wholly
below the log start. Every later retention retires these, whatever the topic's policy.

Retention holds the partition's cleaner lock, so no cleaning restores what it removes.

Kafka: UnifiedLog.deleteOldSegments, UnifiedLog.maybeIncrementLogStartOffset.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import LockedByBrokerError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.log.results import RetentionStats
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.expiry import count_oldest
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.segment_times import has_time
from kafkalog.storage_engine.segment.segments import SegmentFiles, bases_below, list_segments
from kafkalog.storage_engine.segment.swaps import finish_swaps, retire, sweep_deleted
from kafkalog.storage_engine.transactions.producer_snapshot import sweep_snapshots

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.directory.transaction import Transaction

_logger = logging.getLogger(__name__)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def count_expired(
    segments: Sequence[SegmentFiles], state: PartitionState, config: TopicConfig, now_ms: int
) -> int:
    """Return how many of the oldest segments to remove (rules P1 to P5).

    `segments` are the committed ones, ascending. Every policy removes segments below the log start.
    The policy delete then removes by size, then by time. The result includes all segments only if
    the active one is expired too; it must then be rolled first.
    """
    sizes = _sizes(segments, state)
    ends = [segment.base_offset for segment in segments[1:]] + [state.high_watermark]

    def is_older(number: int, horizon_ms: int) -> bool:
        return not has_time(segments[number], sizes[number], horizon_ms)

    return count_oldest(sizes, ends, state, config, is_older=is_older, now_ms=now_ms)


def _sizes(segments: Sequence[SegmentFiles], state: PartitionState) -> list[int]:
    """Return the committed bytes of each segment; a file may have preallocated room after them."""
    return [s.size if s.base_offset != state.active_base else state.active_size for s in segments]


def _committed(directory: Path, state: PartitionState) -> list[SegmentFiles]:
    return [s for s in list_segments(directory) if s.base_offset <= state.active_base]


def apply_retention(
    log: ReadableDirectory,
    topic: str | None = None,
    *,
    now_ms: int,
    skips: Collection[tuple[str, int]] = (),
) -> list[RetentionStats]:
    """Apply the retention of a topic, or of every topic, but of the partitions `skips`.

    Partitions that a cleaner works on are left out. A fault in one does not stop the others.
    Returns one entry per partition that lost segments, or failed. Raises UnknownTopicError,
    LockedByBrokerError.
    """
    if topic is not None:
        log.describe(topic)
    found: list[RetentionStats] = []
    for name, known in sorted(log.state().topics.items()):
        if topic not in (None, name):
            continue
        config = TopicConfig.parse(known.config)
        for partition, _ in known.present():
            if (name, partition) in skips:
                continue
            try:
                stats = retain_partition(log, name, partition, now_ms=now_ms)
                delay_ms = config.file_delete_delay_ms
                directory = log.partition_directory(name, partition)
                sweep_deleted(directory, older_than_ms=delay_ms, now_ms=now_ms)
            except LockedByBrokerError:
                raise
            except Exception as fault:  # whatever it is, continue with the other partitions
                files.pass_on(fault)
                if not log.has_topic(name, known.topic_id):
                    break  # it was deleted meanwhile
                _logger.warning("%s-%d: retention failed: %s", name, partition, fault)
                reason = " ".join(str(fault).split()) or type(fault).__name__
                stats = RetentionStats(name, partition, error=reason)
            if stats is not None:
                found.append(stats)
    return found


def retain_partition(
    log: ReadableDirectory, topic: str, partition: int, *, now_ms: int
) -> RetentionStats | None:
    """Apply a partition's retention; return None if it removes nothing.

    Also returns None if a cleaner has the partition. Raises UnknownTopicError or OSError for a
    topic that is being deleted, StorageError, LockedByBrokerError.
    """
    directory = log.partition_directory(topic, partition)
    # Look first with a lock that blocks no writer: usually there is nothing to do.
    with locks.SegmentsLock(directory).shared():
        known = log.describe(topic)
        state = known.partitions[partition]
        segments = _committed(directory, state)
        first = segments[0].base_offset if segments else 0
        is_due = bool(bases_below(directory, first))
        is_due |= count_expired(segments, state, TopicConfig.parse(known.config), now_ms) > 0
    if not is_due:
        return None
    with (
        locks.FileLock(directory / layout.CLEANER_LOCK).exclusive(wait=False) as is_held,
        locks.RootLock(log.root).shared(),
    ):
        if not is_held:
            return None
        with locks.SegmentsLock(directory).exclusive():
            finish_swaps(directory)
        try:
            with log.transaction() as transaction:
                return _retain(transaction, directory, topic, partition, now_ms)
        except StorageError as fault:
            if not (isinstance(fault.__cause__, OSError) and fault.__cause__.errno in _NO_SPACE):
                raise
            _logger.warning("%s-%d: the active segment stays: %s", topic, partition, fault)
        # Closing it takes space; removing the other segments frees some.
        with log.transaction() as transaction:
            return _retain(transaction, directory, topic, partition, now_ms, may_roll=False)


def _retain(
    transaction: Transaction,
    directory: Path,
    topic: str,
    partition: int,
    now_ms: int,
    *,
    may_roll: bool = True,
) -> RetentionStats | None:
    """Raise the log start, then retire the segments below; under cleaner and commit lock.

    Without `may_roll`, the active segment stays.
    """
    known = transaction.topic(topic)
    state = known.partitions[partition]
    segments = _committed(directory, state)
    if not segments:
        return None
    count = count_expired(segments, state, TopicConfig.parse(known.config), now_ms)
    if not may_roll:
        count = min(count, len(segments) - 1)
    is_all = count == len(segments)
    first_kept = state.high_watermark if is_all else segments[count].base_offset
    log_start = max(state.log_start_offset, first_kept if count else 0)
    if is_all:
        transaction.roll(topic, partition, now_ms)
    if log_start > state.log_start_offset:
        transaction.raise_log_start(topic, partition, log_start)
    if is_all or log_start > state.log_start_offset or transaction.state.unsynced:
        # After a power cut the journal must not name an active segment that is gone.
        transaction.sync_on_publish()
        transaction.publish(now_ms)
    _trim_epochs(directory, log_start, state)
    transaction.check_lock()
    live = [segment.base_offset for segment in segments[count:]]
    with locks.SegmentsLock(directory).exclusive():
        # Sweep snapshots first. If this process then dies, segments remain below the log start,
        # so the next retention comes here again; for snapshots alone it would not.
        sweep_snapshots(directory, {*live, first_kept, state.producer_snapshot})
        # This also retires the indexes that a dead process left of a segment.
        retire(directory, bases_below(directory, first_kept))
    if count == 0:
        return None
    _logger.info(
        "%s-%d: retention removed %d segments, the log begins at %d",
        topic,
        partition,
        count,
        log_start,
    )
    size = sum(_sizes(segments, state)[:count])
    return RetentionStats(topic, partition, log_start, count, size)


def delete_records(
    log: ReadableDirectory, topic: str, partition: int, before: int, *, now_ms: int
) -> int:
    """Raise a partition's log start to `before` (rule P7); see `DirectoryLog.delete_records`."""
    with log.transaction() as transaction:
        state = transaction.topic(topic).partitions[partition]
        log_start = transaction.delete_records(topic, partition, before)
        if log_start > state.log_start_offset:
            transaction.publish(now_ms)
        directory = log.partition_directory(topic, partition)
        _trim_epochs(directory, log_start, state)
        return log_start


def _trim_epochs(directory: Path, log_start: int, state: PartitionState) -> None:
    """Drop the epochs of deleted records; only log a failure, so that a full disk frees space."""
    try:
        checkpoints.trim_leader_epochs(
            directory, log_start, state.high_watermark, state.leader_epoch
        )
    except OSError as fault:
        files.pass_on(fault)
        _logger.warning("%s: the leader epochs were not trimmed: %s", directory, fault)
