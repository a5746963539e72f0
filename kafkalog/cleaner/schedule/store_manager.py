"""The steps of a cleaner of a log in an object store: regroup, clean, retain, sweep.

They are those of `manager` for a directory. Any number of processes may take them at once, on any
hosts. A claim spares double work; the commit log decides.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.objects.object_moment import ObjectMoment, live_extents
from kafkalog.cleaner.objects.regroup_plan import merges_of
from kafkalog.cleaner.plan import Schedule
from kafkalog.cleaner.schedule.partition_cleaner import never, unwatched
from kafkalog.cleaner.schedule.scheduler import choose
from kafkalog.cleaner.schedule.stored_cleaning import StoredCleaning
from kafkalog.cleaner.schedule.throttle import Throttler
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.errors import CorruptLogError, UnknownTopicError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.collector import collect, delete_dead
from kafkalog.storage_engine.object_store.failure import ObjectMissingError
from kafkalog.storage_engine.object_store.regroup import (
    Regrouped,
    fresh_objects,
    is_replaced,
    regroup,
)
from kafkalog.storage_engine.object_store.side_object import SideObject

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.results import RetentionStats
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_draft import StoreDraft
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState

_log = logging.getLogger(__name__)
_DEFAULT: Final = CleanerConfig()
_COLLECTION_MS: Final = 3_600_000
_REGROUP: Final = "regroup"


def regroup_due(
    log: ObjectLog,
    *,
    now_ms: int,
    force: bool = False,
    chosen: Callable[[StoreState], list[str]] = fresh_objects,
    check_abort: Callable[[], None] = never,
) -> list[Regrouped]:
    """Regroup the fresh objects, if they are due or with `force`; return what was done.

    With `force` it takes only those that are `chosen` of a state, in the order of their commits. A
    damaged or missing object is left as it is, with a warning, and so is not cleaned. Raises
    StorageError.
    """
    done: list[Regrouped] = []
    damaged: set[str] = set()
    state = log.store_state()
    if not (chosen(state) if force else ObjectMoment(log, state, now_ms).regroup.is_due):
        return done
    with log.claim(_REGROUP, now_ms=now_ms) as is_mine:
        while is_mine or force:
            names = [name for name in chosen(log.known_state) if name not in damaged]
            if not names:
                break
            try:
                found = regroup(log, names, now_ms=now_ms, check_abort=check_abort)
            except (CorruptLogError, ObjectMissingError) as fault:
                told = str(fault.path) if isinstance(fault, CorruptLogError) else str(fault)
                wrong = {name for name in names if f"/{name}:" in f"{told}:"}
                if not wrong:
                    raise
                damaged |= wrong
                _log.warning("%s: an object cannot be regrouped: %s", log.root, fault)
                continue
            done.append(found)
            if found.is_lost and not force:
                break
    return done


def merge_due(
    log: ObjectLog, *, now_ms: int, check_abort: Callable[[], None] = never
) -> list[Regrouped]:
    """Merge small segment objects of one segment, eight of a size at a time; return what was done.

    Damaged ones are left as they are, with a warning. Raises StorageError.
    """
    done: list[Regrouped] = []
    for topic, known in sorted(log.known_state.log.topics.items()):
        for number, _ in known.present():
            state = log.known_state  # it has changed if a merge met another commit
            found = state.log.topics.get(topic)
            if found is None or found.topic_id != known.topic_id:
                break
            names = merges_of(state, topic, number)
            if not names:
                continue
            placed = [each for each in live_extents(state, topic, number) if each[0] in names]
            with log.claim(f"{known.topic_id}-{number}", now_ms=now_ms) as is_mine:
                try:
                    if is_mine and not any(_has_gaps(log, each) for each in placed):
                        done.append(regroup(log, names, now_ms=now_ms, check_abort=check_abort))
                except CorruptLogError as fault:
                    _log.warning("%s: an object cannot be merged: %s", log.root, fault)
                except ObjectMissingError as fault:
                    if not is_replaced(log, names, fault):
                        _log.warning("%s: an object cannot be merged: %s", log.root, fault)
    return done


def _has_gaps(log: ObjectLog, placed: PlacedExtent) -> bool:
    """Return whether offsets are left out in a segment object, which was imported then."""
    name, extent = placed
    if extent.gaps < 0:
        return len(SideObject(log.client, layout.stored_side(name)).gaps()) > 0
    return extent.gaps > 0


def roll_active(
    log: ObjectLog,
    topic: str | None = None,
    partitions: Sequence[int] | None = None,
    *,
    now_ms: int,
) -> None:
    """Close the active segments of compacted topics, in one commit if any has records.

    A cleaning by force does so first, as in a directory. The last known state is the newest one.
    """

    def roll(draft: StoreDraft) -> None:
        for name, known in draft.state.topics.items():
            if topic in (None, name) and TopicConfig.parse(known.config).is_compacted:
                for number, held in known.present():
                    if held.active_size and (partitions is None or number in partitions):
                        draft.roll(name, number)

    log.change(roll, now_ms=now_ms)


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
        merge_due(log, now_ms=now_ms, check_abort=check_abort)
    else:
        log.store_state()
    if force:
        partitions = None if partition is None else [partition]
        roll_active(log, topic, partitions, now_ms=now_ms)
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
    moment = ObjectMoment(log, log.known_state, now_ms)
    for name, number in choose(moment, topic, partition, force=force).partitions:
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
    merge_due(log, now_ms=now_ms, check_abort=check_abort)
    schedule = choose(ObjectMoment(log, log.known_state, now_ms))
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
    state = cleaning.log.known_state
    known = state.log.topics.get(topic)
    if known is None:
        return None
    if not ObjectMoment(cleaning.log, state, cleaning.now_ms).plan(topic, partition).is_ready:
        return None  # a claim costs requests
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
    """Delete objects that nobody needs any more; return how many.

    A process that comes often looks for orphans and old commits once an hour, as lists cost.
    """
    last_ms = log.collected_ms
    if last_ms is not None and 0 <= now_ms - last_ms < _COLLECTION_MS:
        return delete_dead(log, now_ms=now_ms)
    found = collect(log, now_ms=now_ms)
    log.collected_ms = now_ms
    return found.count
