"""The steps of the background cleaner and of cleaning on demand: clean, retain, sweep.

Kafka: LogCleanerManager, LogCleaner.CleanerThread, LogManager.cleanupLogs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.plan import Schedule, may_be_retained
from kafkalog.cleaner.schedule.partition_cleaner import PartitionCleaner, never, unwatched
from kafkalog.cleaner.schedule.scheduler import choose
from kafkalog.cleaner.schedule.throttle import Throttler
from kafkalog.cleaner.shelves import moment_of, shelf_of
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.log.log import now_of
from kafkalog.storage_engine.metadata.config import TopicConfig

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.log.results import RetentionStats

__all__ = [
    "CleanerConfig",
    "check_compacted",
    "clean",
    "clean_and_retain",
    "clean_filthiest",
    "retain",
    "sweep",
]

_DEFAULT = CleanerConfig()


def clean(
    log: Log,
    topic: str | None = None,
    *,
    partition: int | None = None,
    force: bool = False,
    now_ms: int,
    clock: Callable[[], int] | None = None,
    config: CleanerConfig = _DEFAULT,
    check_abort: Callable[[], None] = never,
    progress: Callable[[CleanerStats], None] = unwatched,
) -> list[CleanerStats]:
    """Clean what is due, the filthiest partition first, until nothing is left.

    In an object store fresh objects are regrouped first, unless for one `partition`.

    With `force` every partition is cleaned, whatever its dirty ratio: its active segment is rolled,
    then rounds follow until all is clean. Partitions that are paused, or held by another cleaner,
    are skipped. A `clock` gives each round its time;
    by default all rounds have `now_ms`. The callback `progress` receives the figures of the current
    partition.

    Returns one entry per partition that was cleaned or failed. A failed one has an `error`, and is
    marked uncleanable. Raises InvalidInputError for a topic that is not compacted,
    LockedByBrokerError.
    """
    if topic is not None:
        check_compacted(log, topic)
    shelf = shelf_of(log)
    results = shelf.prepare(topic, partition, force=force, now_ms=now_ms, check_abort=check_abort)
    failed = {(stats.topic, stats.partition) for stats in results}
    cleaner = PartitionCleaner(
        shelf=shelf,
        now_ms=now_ms,
        clock=clock,
        config=config,
        check_abort=check_abort,
        progress=progress,
        throttler=Throttler(config.io_max_bytes_per_second),
    )
    for name, number in choose(shelf.moment(now_ms), topic, partition, force=force).partitions:
        if (name, number) not in failed:
            stats = cleaner.clean(name, number, force=force, until_clean=True)
            results += [] if stats is None else [stats]
    return results


def clean_and_retain(
    log: Log,
    topic: str | None = None,
    *,
    force: bool = False,
    now_ms: int | None = None,
    config: CleanerConfig = _DEFAULT,
    progress: Callable[[CleanerStats], None] = unwatched,
) -> list[CleanerStats]:
    """Clean as `clean` does, then apply the retention of the topic, or of every topic, and sweep.

    Without `now_ms` each round begins at the time of the clock. Raises what `clean` raises, and
    StorageError where the disk refuses.
    """
    shelf_of(log).check_cleanable()
    at_ms = now_of(now_ms)
    results = clean(
        log,
        topic,
        force=force,
        now_ms=at_ms,
        clock=clock.now_ms if now_ms is None else None,
        config=config,
        progress=progress,
    )
    retain(log, topic, now_ms=at_ms, is_skipped=lambda _: False)
    sweep(log, now_ms=at_ms)
    return results


def check_compacted(log: Log, topic: str) -> None:
    """Raise InvalidInputError for a topic that is not compacted."""
    if not TopicConfig.parse(log.describe(topic).config).is_compacted:
        raise InvalidInputError(
            f"{topic}: cleanup.policy does not include compact, so there is nothing to clean; "
            "alter the topic first"
        )


def clean_filthiest(
    log: Log,
    *,
    now_ms: int,
    config: CleanerConfig = _DEFAULT,
    check_abort: Callable[[], None] = never,
    throttler: Throttler | None = None,
    watch: Callable[[Schedule], None] = unwatched,
    on_failed: Callable[[CleanerStats], None] = unwatched,
    on_aborted: Callable[[CleanerStats], None] = unwatched,
) -> CleanerStats | None:
    """Clean one round of the filthiest partition that is due; return None if nothing is due.

    `watch` receives the schedule, `on_failed` each partition that cannot be made ready, and
    `on_aborted` the figures of an aborted round, whose swaps stay.
    """
    shelf = shelf_of(log)
    for failed in shelf.prepare(now_ms=now_ms, check_abort=check_abort):
        on_failed(failed)
    schedule = choose(shelf.moment(now_ms))
    watch(schedule)
    cleaner = PartitionCleaner(
        shelf=shelf,
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
    log: Log,
    topic: str | None = None,
    *,
    now_ms: int,
    is_skipped: Callable[[TopicConfig], bool] = lambda config: not config.is_compacted,
) -> list[RetentionStats]:
    """Delete what retention does not keep (C133, C134), by default of compacted topics.

    Topics for which `is_skipped` returns true are skipped. Compacted partitions that are paused or
    uncleanable are skipped too, as in Kafka (C125), except after a disk fault, because retention
    frees space. If retention of a partition fails, its entry has the error, and the next run tries
    again.
    """
    moment = moment_of(log, now_ms)

    def is_kept(place: tuple[str, int], config: TopicConfig) -> bool:
        if is_skipped(config) or not config.is_compacted:
            return is_skipped(config)
        mark = read_uncleanable(moment.notes(*place))
        return not may_be_retained(mark, is_paused=moment.is_paused(*place))

    skips = {
        (name, number)
        for name, known in moment.state.topics.items()
        if topic in (None, name)
        for config in [TopicConfig.parse(known.config)]
        for number in known.numbers()
        if is_kept((name, number), config)
    }
    return log.apply_retention(topic, now_ms=now_ms, skips=skips)


def sweep(log: Log, *, now_ms: int) -> int:
    """Remove what nobody needs any more; return how much.

    In a directory these are replaced and expired segments after file.delete.delay.ms, directories
    of deleted topics, stale staged files, and ended pins; in an object store, objects.
    """
    return shelf_of(log).tidy(now_ms=now_ms)
