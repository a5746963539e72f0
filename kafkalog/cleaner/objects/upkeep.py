"""The upkeep of a log in an object store: regroup fresh objects, merge small ones, collect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.objects.object_moment import ObjectMoment, live_extents
from kafkalog.cleaner.objects.regroup_plan import merges_of
from kafkalog.errors import CorruptLogError, KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.collector import collect, delete_dropped
from kafkalog.storage_engine.object_store.failure import ObjectMissingError
from kafkalog.storage_engine.object_store.regroup import (
    Regrouped,
    fresh_objects,
    is_replaced,
    regroup,
)
from kafkalog.storage_engine.object_store.side_object import SideObject

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_draft import StoreDraft
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState

_log = logging.getLogger(__name__)
_COLLECTION_MS: Final = 3_600_000
_REGROUP: Final = "regroup"


def regroup_due(
    log: ObjectLog,
    *,
    now_ms: int,
    moment: ObjectMoment | None = None,
    force: bool = False,
    chosen: Callable[[StoreState], list[str]] = fresh_objects,
    check_abort: Callable[[], None] = lambda: None,
    on_damaged: Callable[[str, KafkaLogError], None] = lambda name, fault: None,
) -> list[Regrouped]:
    """Regroup the fresh objects, if they are due or with `force`; return what was done.

    With `force` it takes only those that are `chosen` of a state, in the order of their commits. A
    damaged or missing object is left as it is, and `on_damaged` receives its name and the fault. If
    the log as of now is known already, it is `moment`. Raises StorageError.
    """
    done: list[Regrouped] = []
    damaged: set[str] = set()
    moment = moment or ObjectMoment(log, log.store_state(), now_ms)
    if not (chosen(moment.store) if force else moment.regroup.is_due):
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
                for name in sorted(wrong):
                    on_damaged(name, fault)
                _log.warning("%s: an object cannot be regrouped: %s", log.root, fault)
                continue
            done.append(found)
            if found.is_lost and not force:
                break
    return done


def merge_due(
    log: ObjectLog, *, now_ms: int, check_abort: Callable[[], None] = lambda: None
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


def sweep(log: ObjectLog, *, now_ms: int) -> int:
    """Delete objects that nobody needs any more; return how many.

    A process that comes often looks for orphans and old commits once an hour, as lists cost.
    """
    last_ms = log.collected_ms
    if last_ms is not None and 0 <= now_ms - last_ms < _COLLECTION_MS:
        return delete_dropped(log, now_ms=now_ms)
    found = collect(log, now_ms=now_ms)
    log.collected_ms = now_ms
    return found.count
