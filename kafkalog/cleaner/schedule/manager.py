"""What a cleaner does of itself and on demand: it cleans what is due, retains, and sweeps.

Kafka: LogCleanerManager, LogCleaner.CleanerThread, LogManager.cleanupLogs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.dedup.presence import may_clean
from kafkalog.cleaner.schedule.partition_cleaner import PartitionCleaner
from kafkalog.cleaner.schedule.pause import is_paused
from kafkalog.cleaner.schedule.scheduler import Schedule, choose
from kafkalog.cleaner.schedule.throttle import Throttler
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.errors import InvalidInputError, KafkaLogError, StorageError
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.reading.pins import sweep_pins
from kafkalog.storage_engine.segment.segments import sweep_deleted
from kafkalog.storage_engine.writing.retention import RetentionStats, apply_retention
from kafkalog.storage_engine.writing.topic_deletion import finish_deletions

if TYPE_CHECKING:
    from kafkalog.storage_engine.engine import Engine

__all__ = [
    "CleanerConfig",
    "check_cleanable",
    "clean",
    "clean_and_retain",
    "clean_filthiest",
    "retain",
    "sweep",
]

_DEFAULT = CleanerConfig()


def _never() -> None:
    pass


def _unwatched(_: object) -> None:
    pass


def clean(
    engine: Engine,
    topic: str | None = None,
    *,
    partition: int | None = None,
    force: bool = False,
    now_ms: int,
    clock: Callable[[], int] | None = None,
    config: CleanerConfig = _DEFAULT,
    check_abort: Callable[[], None] = _never,
    progress: Callable[[CleanerStats], None] = _unwatched,
) -> list[CleanerStats]:
    """Clean what is due, the filthiest partition first, until nothing is left; or all of it.

    With `force` every partition is cleaned, whatever its dirty ratio: its active segment is rolled
    first, and rounds follow one another until all that may be cleaned is clean. Partitions that
    another cleaner works on, or that are paused, are passed over. Staged files that no query can
    name any more are removed, and so are pins that have ended. `partition` is the only one of that
    number; `progress` is shown the figures of the partition at work, time and again. A `clock`
    gives each round the epoch ms at which it begins; without one all happens at `now_ms`. Returns
    one entry per partition that was cleaned, or could not be: then its `error` says why, and the
    partition is marked uncleanable. Raises InvalidInputError for a topic that is not compacted,
    LockedByBrokerError.
    """
    if topic is not None and not TopicConfig.parse(engine.describe(topic).config).is_compacted:
        raise InvalidInputError(
            f"{topic}: cleanup.policy does not include compact, so there is nothing to clean; "
            "alter the topic first"
        )
    cleaner = PartitionCleaner(
        engine=engine,
        now_ms=now_ms,
        clock=clock,
        config=config,
        check_abort=check_abort,
        progress=progress,
        throttler=Throttler(config.io_max_bytes_per_second),
    )
    results: list[CleanerStats] = []
    for name, number in choose(engine, topic, partition, force=force, now_ms=now_ms).partitions:
        stats = cleaner.clean(name, number, force=force, until_clean=True)
        if stats is not None:
            results.append(stats)
    _sweep_root(engine, now_ms)
    return results


def clean_and_retain(
    engine: Engine,
    topic: str | None = None,
    *,
    force: bool = False,
    now_ms: int | None = None,
    config: CleanerConfig = _DEFAULT,
    progress: Callable[[CleanerStats], None] = _unwatched,
) -> list[CleanerStats]:
    """Clean as `clean` does, then apply the retention of the topics cleaned.

    Without `now_ms` each round begins at the time of the clock. Raises what `check_cleanable` and
    `clean` raise.
    """
    check_cleanable(engine)
    at_ms = clock.now_ms() if now_ms is None else now_ms
    results = clean(
        engine,
        topic,
        force=force,
        now_ms=at_ms,
        clock=clock.now_ms if now_ms is None else None,
        config=config,
        progress=progress,
    )
    retain(engine, topic, now_ms=at_ms)
    return results


def check_cleanable(engine: Engine) -> None:
    """Raise InvalidInputError where the log is only read, StorageError where the disk refuses."""
    engine.check_writable()
    if not may_clean(engine.root):
        raise StorageError(
            f"{engine.root}: may not be written here (a read-only mount, or no permission), and a "
            "cleaner writes; run it where, and as who, may"
        )


def clean_filthiest(
    engine: Engine,
    *,
    now_ms: int,
    config: CleanerConfig = _DEFAULT,
    check_abort: Callable[[], None] = _never,
    throttler: Throttler | None = None,
    watch: Callable[[Schedule], None] = _unwatched,
    on_aborted: Callable[[CleanerStats], None] = _unwatched,
) -> CleanerStats | None:
    """Clean one round of the filthiest partition that is due; None when there is none.

    `watch` is shown what was found to be due, `on_aborted` the figures of a round that was broken
    off: what it had swapped in by then stays.
    """
    schedule = choose(engine, now_ms=now_ms)
    watch(schedule)
    cleaner = PartitionCleaner(
        engine=engine,
        now_ms=now_ms,
        config=config,
        check_abort=check_abort,
        throttler=throttler,
        on_aborted=on_aborted,
    )
    for topic, partition in schedule.partitions:
        stats = cleaner.clean(topic, partition)
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

    Left alone, as in Kafka, are compacted partitions that are paused or uncleanable (C125); but not
    where the disk refused, be it full: retention makes room. Unlike in Kafka, one whose retention
    fails does not become so: its entry says why, and the next run tries again. With `is_skipped`
    other topics than the compacted ones are taken.
    """

    def skip(name: str, partition: int, config: TopicConfig) -> bool:
        if is_skipped(config):
            return True
        directory = engine.partition_directory(name, partition)
        if not config.is_compacted:
            return False
        mark = read_uncleanable(directory)
        return (mark is not None and not mark.is_disk_fault) or is_paused(directory)

    return apply_retention(engine, topic, now_ms=now_ms, is_skipped=skip)


def sweep(engine: Engine, *, now_ms: int) -> int:
    """Remove files that nobody needs; returns how many.

    Replaced and expired segments go when they are older than their topic's file.delete.delay.ms,
    and so do the directories of deleted topics; what was staged long ago goes too, and ended pins.
    """
    count = _sweep_root(engine, now_ms)
    for name, topic in sorted(engine.state().topics.items()):
        delay_ms = TopicConfig.parse(topic.config).file_delete_delay_ms
        for partition, _ in topic.present():
            directory = engine.partition_directory(name, partition)
            with contextlib.suppress(OSError):
                count += sweep_deleted(directory, older_than_ms=delay_ms, now_ms=now_ms)
    finish_deletions(engine, now_ms=now_ms)
    return count


def _sweep_root(engine: Engine, now_ms: int) -> int:
    """Remove what was staged long ago, and pins that have ended."""
    count = 0
    with contextlib.suppress(OSError):
        count += engine.sweep_staged(now_ms=now_ms)
    with contextlib.suppress(OSError, KafkaLogError):
        # A reader renews a pin by his clock, whatever time the caller gives.
        count += sweep_pins(engine.root, clock.now_ms())
    return count
