"""The steps of a cleaner of a log in an object store: regroup, clean, retain, sweep.

They are those of `manager` for a directory. Any number of processes may take them at once, on any
hosts. A claim spares double work; the commit log decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.dedup.delete_horizon import delete_horizon_of
from kafkalog.cleaner.schedule.partition_cleaner import never, unwatched
from kafkalog.cleaner.schedule.scheduler import Schedule
from kafkalog.cleaner.schedule.scratch_partition import closed_extents
from kafkalog.cleaner.schedule.stored_cleaning import StoredCleaning
from kafkalog.cleaner.schedule.throttle import Throttler
from kafkalog.cleaner.state.first_dirty_offset import valid_first_dirty_offset
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.cleaner.state.uncleanable import uncleanable_of
from kafkalog.errors import UnknownTopicError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.regroup import Regrouped, fresh_objects, regroup

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_state import StoreState
    from kafkalog.storage_engine.writing.retention import RetentionStats

_DEFAULT: Final = CleanerConfig()
_REGROUP_MS: Final = 60_000
"""Fresh objects are regrouped once the oldest one is so old, if there are several."""
_REGROUP: Final = "regroup"


def regroup_due(
    log: ObjectLog,
    *,
    now_ms: int,
    force: bool = False,
    check_abort: Callable[[], None] = never,
) -> list[Regrouped]:
    """Regroup the fresh objects, if they are due or with `force`; return what was done.

    Raises CorruptBatchError, StorageError.
    """
    done: list[Regrouped] = []
    state = log.store_state()
    if not (fresh_objects(state) if force else _is_regroup_due(state, now_ms)):
        return done
    with log.claim(_REGROUP, now_ms=now_ms) as is_mine:
        while (is_mine or force) and (names := fresh_objects(log.known_state)):
            found = regroup(log, names, now_ms=now_ms, check_abort=check_abort)
            done.append(found)
            if found.is_lost and not force:
                break
    return done


def _is_regroup_due(state: StoreState, now_ms: int) -> bool:
    fresh = fresh_objects(state)
    return len(fresh) > 1 and now_ms - state.objects[fresh[0]].added_ms >= _REGROUP_MS


def choose(
    state: StoreState,
    topic: str | None = None,
    partition: int | None = None,
    *,
    force: bool = False,
    now_ms: int,
) -> Schedule:
    """Choose the partitions that are due, the filthiest first; with `force` all that have segments.

    Of a partition only its segment objects count, as only they are cleaned. An uncleanable one is
    skipped before its retry, except with `force`.
    """
    schedule = Schedule()
    found: list[tuple[float, str, int]] = []
    for name, known in sorted(state.log.topics.items()):
        if topic not in (None, name) or not TopicConfig.parse(known.config).is_compacted:
            continue
        for number, _ in known.present():
            if partition not in (None, number) or not closed_extents(state, name, number):
                continue
            plan = _plan(state, name, number, now_ms)
            schedule.max_dirty_ratio = max(schedule.max_dirty_ratio, plan.dirty_ratio)
            delay_ms = max(schedule.max_compaction_delay_ms, plan.compaction_delay_ms)
            schedule.max_compaction_delay_ms = delay_ms
            if force or plan.is_due:
                found.append((-plan.dirty_ratio, name, number))
    schedule.partitions = [(name, number) for _, name, number in sorted(found)]
    return schedule


@dataclass(frozen=True, slots=True)
class _Plan:
    dirty_ratio: float
    compaction_delay_ms: int
    is_due: bool


def _plan(state: StoreState, topic: str, partition: int, now_ms: int) -> _Plan:
    """Plan by the sizes and times that the commit log has. Kafka: C32 to C37."""
    known = state.log.topics[topic]
    config = TopicConfig.parse(known.config)
    first_dirty = valid_first_dirty_offset(known.partitions[partition])
    clean = dirty = 0
    oldest_ms = layout.INT64_MAX
    for _, extent in closed_extents(state, topic, partition):
        if extent.next_offset <= first_dirty:
            clean += extent.size
            continue
        if 0 < config.min_compaction_lag_ms > now_ms - extent.max_timestamp:
            break
        dirty += extent.size
        if extent.max_timestamp > 0:
            oldest_ms = min(oldest_ms, extent.max_timestamp)
    ratio = dirty / (clean + dirty) if clean + dirty else 0.0
    delay_ms = max(0, now_ms - config.max_compaction_lag_ms - oldest_ms) if dirty else 0
    cleaned = state.cleaned_of(known.topic_id, partition)
    notes = {} if cleaned is None else cleaned.notes
    horizon_ms = delete_horizon_of(notes.get(layout.DELETE_HORIZON, ""), first_dirty)
    mark = uncleanable_of(notes[layout.UNCLEANABLE]) if layout.UNCLEANABLE in notes else None
    is_due = (
        (horizon_ms is not None and horizon_ms <= now_ms)
        or (dirty > 0 and delay_ms > 0)
        or ratio > config.min_cleanable_dirty_ratio
    )
    may_be = mark is None or mark.is_due(known.config, now_ms)
    return _Plan(ratio, delay_ms, is_due and may_be)


def clean(
    log: ObjectLog,
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
    """Clean what is due, or with `force` everything, after fresh objects are regrouped.

    The arguments and the result are those of `manager.clean`. For one `partition` nothing is
    regrouped.
    """
    if partition is None:
        regroup_due(log, now_ms=now_ms, force=force, check_abort=check_abort)
    cleaning = StoredCleaning(
        log=log,
        now_ms=now_ms,
        clock=clock,
        config=config,
        check_abort=check_abort,
        progress=progress,
        throttler=Throttler(config.io_max_bytes_per_second),
    )
    results: list[CleanerStats] = []
    state = log.store_state()
    for name, number in choose(state, topic, partition, force=force, now_ms=now_ms).partitions:
        stats = _claimed(cleaning, name, number, force=force)
        if stats is not None:
            results.append(stats)
    return results


def clean_filthiest(
    log: ObjectLog,
    *,
    now_ms: int,
    config: CleanerConfig = _DEFAULT,
    check_abort: Callable[[], None] = never,
    throttler: Throttler | None = None,
    watch: Callable[[Schedule], None] = unwatched,
    on_aborted: Callable[[CleanerStats], None] = unwatched,
) -> CleanerStats | None:
    """Regroup what is due, then clean the filthiest partition that is due; None if none is.

    The arguments are those of `manager.clean_filthiest`.
    """
    regroup_due(log, now_ms=now_ms, check_abort=check_abort)
    schedule = choose(log.store_state(), now_ms=now_ms)
    watch(schedule)
    cleaning = StoredCleaning(
        log=log,
        now_ms=now_ms,
        config=config,
        check_abort=check_abort,
        throttler=throttler,
        on_aborted=on_aborted,
    )
    for topic, partition in schedule.partitions:
        stats = _claimed(cleaning, topic, partition)
        if stats is not None:
            return stats
    return None


def _claimed(
    cleaning: StoredCleaning, topic: str, partition: int, *, force: bool = False
) -> CleanerStats | None:
    """Clean a partition, unless another cleaner is at work on it; with `force` also then."""
    known = cleaning.log.known_state.log.topics.get(topic)
    if known is None:
        return None
    work = f"{known.topic_id}-{partition}"
    with cleaning.log.claim(work, now_ms=cleaning.now_ms) as is_mine:
        return cleaning.clean(topic, partition, force=force) if is_mine or force else None


def retain(
    log: ObjectLog,
    topic: str | None = None,
    *,
    now_ms: int,
    is_skipped: Callable[[TopicConfig], bool] = lambda config: False,
) -> list[RetentionStats]:
    """Delete what the retention of a topic, or of all, does not keep; a commit for each topic.

    Topics for which `is_skipped` returns true are skipped.
    """
    found: list[RetentionStats] = []
    for name, known in sorted(log.store_state().log.topics.items()):
        config = TopicConfig.parse(known.config)
        if topic in (None, name) and config.is_deleted and not is_skipped(config):
            with contextlib.suppress(UnknownTopicError):  # it was deleted meanwhile
                found += log.apply_retention(name, now_ms=now_ms)
    return found


def sweep(log: ObjectLog, *, now_ms: int) -> int:
    """Delete objects that nobody needs any more; return how many."""
    return log.sweep_staged(now_ms=now_ms)
