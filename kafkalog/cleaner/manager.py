"""Chooses what to clean, keeps cleaners apart, and lets no partition's fault touch another.

One cleaner works on a partition at a time, in any process: who does not get its cleaner lock goes
on to the next partition. A partition that fails is marked uncleanable, with its reason.

Kafka: LogCleanerManager, LogCleaner.CleanerThread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kafkalog.cleaner.clean import CleaningAborted, clean_round
from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.log_to_clean import LogToClean, log_to_clean
from kafkalog.cleaner.stats import CleanerStats, PartitionStatus
from kafkalog.cleaner.uncleanable import clear_uncleanable, mark_uncleanable, read_uncleanable
from kafkalog.errors import (
    InvalidInputError,
    KafkaLogError,
    LockedByBrokerError,
    StorageError,
    UnknownTopicError,
)
from kafkalog.storage_engine import files, layout
from kafkalog.storage_engine.config import TopicConfig
from kafkalog.storage_engine.retention import RetentionStats, apply_retention
from kafkalog.storage_engine.segments import finish_swaps, list_segments, sweep_deleted
from kafkalog.storage_engine.topic_deletion import finish_deletions

if TYPE_CHECKING:
    from kafkalog.storage_engine.engine import Engine

__all__ = ["CleanerConfig", "clean", "clean_filthiest", "status"]

_log = logging.getLogger(__name__)
_DEFAULT = CleanerConfig()


def _never() -> None:
    pass


def clean(
    engine: Engine,
    topic: str | None = None,
    *,
    force: bool = False,
    now_ms: int,
    config: CleanerConfig = _DEFAULT,
    check_abort: Callable[[], None] = _never,
) -> list[CleanerStats]:
    """Clean what is due, the filthiest partition first, until nothing is left; or all of it.

    With `force` every partition is cleaned, whatever its dirty ratio: its active segment is rolled
    first, and rounds follow one another until all that may be cleaned is clean. Partitions that
    another cleaner works on are passed over, and staged files that no query can name any more are
    removed. Returns one entry per partition that was cleaned, or could not be: then its `error`
    says why, and the partition is marked uncleanable. Raises
    InvalidInputError for a topic that is not compacted, LockedByBrokerError.
    """
    if topic is not None and not TopicConfig.parse(engine.describe(topic).config).is_compacted:
        raise InvalidInputError(
            f"{topic}: cleanup.policy does not include compact, so there is nothing to clean; "
            "alter the topic first"
        )
    results: list[CleanerStats] = []
    for name, partition in _order(engine, topic, force=force, now_ms=now_ms):
        stats = _clean_partition(
            engine,
            name,
            partition,
            force=force,
            until_clean=True,
            now_ms=now_ms,
            config=config,
            check_abort=check_abort,
        )
        if stats is not None:
            results.append(stats)
    _sweep_staged(engine, now_ms)
    return results


def clean_filthiest(
    engine: Engine,
    *,
    now_ms: int,
    config: CleanerConfig = _DEFAULT,
    check_abort: Callable[[], None] = _never,
) -> CleanerStats | None:
    """Clean one round of the filthiest partition that is due; None when there is none."""
    for topic, partition in _order(engine, None, force=False, now_ms=now_ms):
        stats = _clean_partition(
            engine,
            topic,
            partition,
            force=False,
            until_clean=False,
            now_ms=now_ms,
            config=config,
            check_abort=check_abort,
        )
        if stats is not None:
            return stats
    return None


def retain(
    engine: Engine,
    topic: str | None = None,
    *,
    now_ms: int,
    is_skipped: Callable[[TopicConfig], bool] = lambda config: not config.is_compacted,
) -> list[RetentionStats]:
    """Delete what the retention of compacted topics does not keep (C133, C134).

    Left alone, as in Kafka, are partitions that are uncleanable (C125). Unlike in Kafka, one whose
    retention fails does not become so: its entry says why, and the next run tries again. With
    `is_skipped` other topics than the compacted ones are taken.
    """

    def skip(name: str, partition: int, config: TopicConfig) -> bool:
        if is_skipped(config):
            return True
        mark = read_uncleanable(engine.partition_directory(name, partition))
        return config.is_compacted and mark is not None

    return apply_retention(engine, topic, now_ms=now_ms, is_skipped=skip)


def sweep(engine: Engine, *, now_ms: int) -> int:
    """Remove files that nobody needs; returns how many.

    Replaced and expired segments go when they are older than their topic's file.delete.delay.ms,
    and so do the directories of deleted topics; what was staged long ago goes too.
    """
    count = _sweep_staged(engine, now_ms)
    for name, topic in sorted(engine.state().topics.items()):
        delay_ms = TopicConfig.parse(topic.config).file_delete_delay_ms
        for partition, _ in topic.present():
            directory = engine.partition_directory(name, partition)
            with contextlib.suppress(OSError):
                count += sweep_deleted(directory, older_than_ms=delay_ms, now_ms=now_ms)
    finish_deletions(engine, now_ms=now_ms)
    return count


def _sweep_staged(engine: Engine, now_ms: int) -> int:
    with contextlib.suppress(OSError):
        return engine.sweep_staged(now_ms=now_ms)
    return 0


def status(engine: Engine, now_ms: int) -> list[PartitionStatus]:
    """Say how every partition stands with the cleaner; reads names, sizes and index ends only."""
    found: list[PartitionStatus] = []
    for name, topic in sorted(engine.state().topics.items()):
        for partition, state in topic.present():
            try:
                mark = read_uncleanable(engine.partition_directory(name, partition))
                log = _plan(engine, name, partition, now_ms=now_ms)
            except (OSError, KafkaLogError) as fault:
                if not engine.has_topic(name, topic.topic_id):
                    break  # it was deleted meanwhile
                found.append(
                    PartitionStatus(
                        name,
                        partition,
                        state.log_start_offset,
                        state.first_dirty_offset,
                        state.first_dirty_offset,
                        state.high_watermark,
                        0,
                        0,
                        0,
                        0.0,
                        "uncleanable",
                        _reason(fault),
                    )
                )
                continue
            if not log.config.is_compacted:
                word = "not compacted"
            elif mark is not None:
                word = "uncleanable"
            else:
                word = "dirty" if log.is_eligible else "clean"
            found.append(
                PartitionStatus(
                    topic=name,
                    partition=partition,
                    log_start_offset=state.log_start_offset,
                    first_dirty_offset=log.first_dirty_offset,
                    first_uncleanable_offset=log.first_uncleanable_offset,
                    high_watermark=state.high_watermark,
                    clean_bytes=log.clean_bytes,
                    dirty_bytes=log.cleanable_bytes,
                    uncleanable_bytes=log.uncleanable_bytes,
                    dirty_ratio=log.dirty_ratio,
                    state=word,
                    reason=None if mark is None else mark.reason,
                )
            )
    return found


# --- choosing ------------------------------------------------------------------------------------


def _compacted(engine: Engine, topic: str | None) -> Iterator[tuple[str, int]]:
    for name, state in sorted(engine.state().topics.items()):
        if topic in (None, name) and TopicConfig.parse(state.config).is_compacted:
            for partition, _ in state.present():
                yield name, partition


def _order(engine: Engine, topic: str | None, *, force: bool, now_ms: int) -> list[tuple[str, int]]:
    """The partitions to clean, the filthiest first (C33 to C35); with `force` all of them."""
    candidates = list(_compacted(engine, topic))
    if force:
        return candidates
    ratios: list[tuple[float, str, int]] = []
    topics = engine.state().topics
    for name, partition in candidates:
        known = topics.get(name)
        if known is None:
            continue
        mark = read_uncleanable(engine.partition_directory(name, partition))
        if mark is not None and not mark.is_due(known.config, now_ms):
            continue
        try:
            log = _plan(engine, name, partition, now_ms=now_ms)
        except (
            Exception
        ) as fault:  # a partition that cannot be planned is one that cannot be cleaned
            if not engine.has_topic(name, known.topic_id):
                continue
            _log.debug("%s-%d cannot be planned: %s", name, partition, fault)
            ratios.append((1.0, name, partition))  # the last one; its cleaning says why
            continue
        if log.is_eligible:
            ratios.append((-log.dirty_ratio, name, partition))
    return [(name, partition) for _, name, partition in sorted(ratios)]


def _plan(engine: Engine, topic: str, partition: int, *, now_ms: int) -> LogToClean:
    """Plan from a listing and a state of one moment."""
    directory = engine.partition_directory(topic, partition)
    with engine.listing_lock(directory):
        described = engine.describe(topic)
        segments = list_segments(directory)
    config = TopicConfig.parse(described.config)
    state = described.partitions[partition]
    return log_to_clean(
        topic,
        partition,
        directory=directory,
        config=config,
        state=state,
        segments=segments,
        now_ms=now_ms,
    )


# --- one partition -------------------------------------------------------------------------------


def _clean_partition(
    engine: Engine,
    topic: str,
    partition: int,
    *,
    force: bool,
    until_clean: bool,
    now_ms: int,
    config: CleanerConfig,
    check_abort: Callable[[], None],
) -> CleanerStats | None:
    """Clean one partition under its cleaner lock; None when another has it, or nothing was done."""
    known = engine.state().topics.get(topic)
    if known is None:
        return None
    directory = engine.partition_directory(topic, partition)
    stats = CleanerStats(topic, partition)
    started = time.perf_counter()
    try:
        with (
            files.FileLock(directory / layout.CLEANER_LOCK).exclusive(wait=False) as is_held,
            files.RootLock(engine.root).shared(),
        ):
            if not is_held:
                return None
            _prepare(engine, topic, partition, now_ms, force=force)
            stats.start_offset = engine.describe(topic).partitions[partition].first_dirty_offset
            stats.end_offset = stats.start_offset
            while True:
                log = clean_round(
                    engine,
                    topic,
                    partition,
                    now_ms=now_ms,
                    config=config,
                    stats=stats,
                    check_abort=check_abort,
                )
                if log is None or not until_clean or stats.end_offset >= log.end:
                    break
            clear_uncleanable(directory)
    except CleaningAborted:
        pass
    except LockedByBrokerError:
        raise
    except Exception as fault:  # whatever it is: the other partitions go on
        if not engine.has_topic(topic, known.topic_id):
            return None
        stats.error = _mark(engine, topic, partition, fault, now_ms)
    stats.elapsed_ms = (time.perf_counter() - started) * 1e3
    return stats if stats.rounds or stats.error else None


def _prepare(engine: Engine, topic: str, partition: int, now_ms: int, *, force: bool) -> None:
    """Finish what a dead cleaner left, sweep, and roll the active segment if that is asked for."""
    directory = engine.partition_directory(topic, partition)
    described = engine.describe(topic)
    leftovers = (layout.CLEANED, layout.SWAP)
    if any(path.name.endswith(leftovers) for path in directory.iterdir()):
        with files.SegmentsLock(directory).exclusive():
            finish_swaps(directory)
    delay_ms = TopicConfig.parse(described.config).file_delete_delay_ms
    sweep_deleted(directory, older_than_ms=delay_ms, now_ms=now_ms)
    if force and described.partitions[partition].active_size > 0:
        with engine.transaction() as transaction:
            transaction.roll(topic, partition, now_ms)
            transaction.publish(now_ms)


def _mark(engine: Engine, topic: str, partition: int, fault: Exception, now_ms: int) -> str:
    """Mark a partition uncleanable; returns the reason."""
    reason = _reason(fault)
    is_ordinary = isinstance(fault, KafkaLogError | OSError)
    _log.log(
        logging.WARNING if is_ordinary else logging.ERROR,
        "%s-%d cannot be cleaned: %s",
        topic,
        partition,
        reason,
        exc_info=None if is_ordinary else fault,
    )
    # A full disk takes no mark either, nor does a topic that was deleted meanwhile; the reason then
    # is in the log and in the statistics.
    with contextlib.suppress(OSError, UnknownTopicError, StorageError):
        mark_uncleanable(
            engine.partition_directory(topic, partition),
            reason,
            dict(engine.describe(topic).config),
            now_ms=now_ms,
        )
    return reason


def _reason(fault: Exception) -> str:
    if isinstance(fault, OSError) and fault.filename and fault.strerror:
        return f"{fault.filename}: {fault.strerror}"
    text = " ".join(str(fault).split())
    return text if text else type(fault).__name__
