"""The objects of a log in an object store that had erased keys: regroup and delete them.

Fresh objects with records of these partitions are regrouped, since only segment objects are
cleaned. The swaps drop the objects that had the keys. A collector deletes them after
`file.delete.delay.ms`; an erasure that waits for that time, or must not wait, does it itself.

A cleaner that was killed before its swap leaves orphans, and so does an erasure before its commit.
A sweep deletes them after seven days. An erasure that must not wait sweeps those with the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kafkalog.cleaner.objects import upkeep
from kafkalog.erasure.topic_files import FileKind
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.collector import (
    delete_dropped,
    delete_orphans,
    deleted_after,
)
from kafkalog.storage_engine.object_store.object_log import APPEND
from kafkalog.storage_engine.object_store.regroup import fresh_objects

if TYPE_CHECKING:
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_state import StoreState


class StoreErasure:
    """The steps of one erasure that differ from those in a directory."""

    def __init__(
        self,
        log: ObjectLog,
        topic: str,
        before: Sequence[FileOccurrences],
        *,
        clock: Callable[[], int],
    ) -> None:
        """`before` are the occurrences that were found first; the clock returns epoch ms."""
        self._log = log
        self._topic = topic
        self._topic_id = log.describe(topic).topic_id
        self._clock = clock
        self._holders = {str(one.file.path) for one in before if not one.is_clear}
        """Objects that have the keys, or may have them."""
        self._orphans = {*_left_by_cleaners(before), *_left_by_erasures(before)}

    def prepare(self, partitions: Sequence[int]) -> None:
        """Close the active segments, and regroup the fresh objects; raises StorageError."""

        def chosen(state: StoreState) -> list[str]:
            found = [name for name in fresh_objects(state) if self._is_chosen(state, name, wanted)]
            self._holders.update(found)
            return found

        wanted = {(self._topic_id, number) for number in partitions}
        upkeep.roll_active(self._log, self._topic, partitions, now_ms=self._clock())
        upkeep.regroup_due(self._log, now_ms=self._clock(), force=True, chosen=chosen)

    def _is_chosen(self, state: StoreState, name: str, wanted: set[tuple[str, int]]) -> bool:
        places = {(each.topic_id, each.partition) for each in state.objects[name].extents}
        return name in self._holders or not wanted.isdisjoint(places)

    def remove_replaced(
        self, partitions: Sequence[int], *, now: bool, wait: Callable[[int], None] | None
    ) -> None:
        """Delete dropped objects that had the keys: with `now` at once, or after their time.

        `wait` receives the time until which they stay, and returns then; without it they stay.
        With `now`, orphans of cleaners and erasures that had the keys go too. Raises StorageError.
        """
        state = self._log.store_state()
        cleaned = tuple(f"{self._topic_id}-{number}-" for number in partitions)
        dropped = {
            name: dropped
            for name, dropped in state.dropped.items()
            if name in self._holders
            or (layout.is_stored_segment(name) and name.rpartition("/")[2].startswith(cleaned))
        }
        if dropped and not now and wait is not None:
            after = deleted_after(state)
            wait(max(after(name, dropped) for name, dropped in dropped.items()))
        if dropped and (now or wait is not None):
            delete_dropped(self._log, now_ms=self._clock(), names=dropped)
        if now and self._orphans:
            sides = [layout.stored_side(n) for n in self._orphans if layout.is_stored_segment(n)]
            delete_orphans(self._log, [*self._orphans, *sides], now_ms=self._clock())


def _left_by_cleaners(found: Sequence[FileOccurrences]) -> Iterator[str]:
    """Yield the segment objects with the keys that no commit names."""
    for one in found:
        if one.found and one.file.kind is FileKind.UNFINISHED:
            yield str(one.file.path)


def _left_by_erasures(found: Sequence[FileOccurrences]) -> Iterator[str]:
    """Yield the objects with nothing but tombstones of the keys that no commit names.

    No task wrote them: an erasure did, which was killed before its commit.
    """
    others = {str(one.file.path) for one in found if one.records > one.deletions}
    for one in found:
        is_staged = one.file.kind is FileKind.STAGED and one.file.path.name.startswith(f"{APPEND}-")
        if one.found and is_staged and str(one.file.path) not in others:
            yield str(one.file.path)
