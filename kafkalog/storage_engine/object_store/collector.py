"""Deletes what a log in an object store no longer needs; no clock decides what is safe.

Rules
-----
- A dropped object was dropped by a commit, and no later state names it. Only readers that planned
  before may want it, so it stays for `file.delete.delay.ms`. Then it is deleted, and a commit
  forgets it. Whoever tries an old commit again then asks whether its objects are still there.
- An orphan is named by no commit. The commit `swept: E` declares every unnamed object dropped whose
  writer had seen no commit after E. A later commit has read it, and refuses such an object. The
  orphan is deleted after that. Its age is a courtesy to living queries.
- An unnamed object stays if its writer had seen a later commit than the newest one. Commits were
  lost, and it may have their records.
- The boundary moves before the commits below it are deleted. A process that was stopped meanwhile
  reads it, and opens the log again.

Any number of collectors may run at once. Each may be killed anywhere, because the next one
continues. The model `tests/unit/storage_engine/collector_model.py` checks all interleavings.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.store_state import (
    SNAPSHOT_COMMITS,
    DataObject,
    DroppedObject,
    StoreState,
    stored_names,
)

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.client import ObjectClient, ObjectEntry
    from kafkalog.storage_engine.object_store.store_draft import StoreDraft

_log = logging.getLogger(__name__)
DELETE_DELAY_MS: Final = 3_600_000
"""`file.delete.delay.ms` of a topic in a store that does not set it."""
COMMITS_KEPT_MS: Final = 86_400_000
"""The age at which commits behind a snapshot may go."""
_FORGOTTEN_MAX: Final = 1000
"""Names that one commit forgets."""
_DELETE_DELAY: Final = "file.delete.delay.ms"
_PASSING: Final = (layout.STORED_CLAIMS, layout.STORED_PROBE)
"""Folders of objects that no commit ever names."""


_Result = TypeVar("_Result")


class CollectedLog(Protocol):
    """The part of the log that a collector needs: an `ObjectLog`."""

    client: ObjectClient

    def check_writable(self) -> None:
        """Raise InvalidInputError where the log is read-only, or closed."""

    def store_state(self) -> StoreState:
        """Return the newest state."""

    def change(self, work: Callable[[StoreDraft], _Result], *, now_ms: int) -> _Result:
        """Make the changes that `work` drafts, in one commit."""

    def boundary(self) -> int:
        """Return up to which number commits may have been deleted."""

    def move_boundary(self, number: int) -> None:
        """Announce that commits up to a number may be deleted."""


@dataclass(frozen=True, slots=True)
class Collected:
    """How many objects were deleted."""

    dropped: int
    orphans: int
    commits: int
    """Commits and snapshots."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.dropped + self.orphans + self.commits


def collect(log: CollectedLog, *, now_ms: int) -> Collected:
    """Delete dropped objects, orphans and old commits, as far as their time has come.

    Raises StorageError; what was done stays done.
    """
    return Collected(
        delete_dropped(log, now_ms=now_ms),
        sweep(log, now_ms=now_ms),
        cut_commit_log(log, now_ms=now_ms),
    )


def deleted_after(state: StoreState) -> Callable[[str, DroppedObject], int]:
    """Return what tells from when on a dropped object may be deleted (epoch ms).

    A segment object has the delay of its topic, a mixed object the longest one of all topics.
    """
    topics = state.log.topics.values()
    delays = {
        topic.topic_id: TopicConfig.parse(topic.config).file_delete_delay_ms
        if _DELETE_DELAY in topic.config
        else DELETE_DELAY_MS
        for topic in topics
    }
    longest = max(delays.values(), default=DELETE_DELAY_MS)

    def of(name: str, dropped: DroppedObject) -> int:
        if layout.is_stored_segment(name):
            return dropped.time_ms + delays.get(layout.topic_of_stored(name), DELETE_DELAY_MS)
        return dropped.time_ms + longest

    return of


def delete_dropped(log: CollectedLog, *, now_ms: int, names: Iterable[str] | None = None) -> int:
    """Delete dropped objects whose delay has passed, or those of `names` at once; count them."""
    log.check_writable()
    state = log.store_state()
    if names is None:
        after = deleted_after(state)
        names = [name for name, dropped in state.dropped.items() if after(name, dropped) <= now_ms]
    rest = iter([name for name in names if name in state.dropped])
    count = 0
    while part := [*itertools.islice(rest, _FORGOTTEN_MAX)]:
        log.client.delete(each for name in part for each in stored_names(name, state.dropped[name]))
        log.change(_forgetting(part), now_ms=now_ms)
        count += len(part)
    return count


def _forgetting(names: Iterable[str]) -> Callable[[StoreDraft], None]:
    def forget(draft: StoreDraft) -> None:
        for name in names:
            if name in draft.store.dropped:  # another collector may have forgotten it
                draft.forget_dropped(name)

    return forget


def sweep(log: CollectedLog, *, now_ms: int, age_ms: int = STAGED_RETENTION_MS) -> int:
    """Delete objects of that age that no commit names; return how many.

    Claims and what a probe of the store has left are older than their use then, and go too.
    """
    log.check_writable()
    before_ms = now_ms - age_ms
    passing = [each.name for folder in _PASSING for each in _old(log, folder, before_ms)]
    listed = [
        each.name
        for folder in (layout.STORED_DATA, layout.STORED_SEGMENTS)
        for each in _old(log, folder, before_ms)
        if layout.is_stored_data(each.name)
    ]
    log.client.delete(passing)
    return delete_orphans(log, listed, now_ms=now_ms) + len(passing)


def delete_orphans(log: CollectedLog, names: list[str], *, now_ms: int) -> int:
    """Delete those objects, of whatever age, that no commit names; return how many.

    Whoever still wants to commit an object that is as old as one of them is refused.
    """
    orphans: list[str] = []
    state = log.store_state()
    if beyond := [*filter(state.is_before, unnamed(state, names))]:
        _log.warning(
            "%s/%s: its writer had seen a later commit than the last one, %d, so commits are "
            "missing; %d such objects stay. Restore the log.",
            log.client.address,
            beyond[0],
            state.number,
            len(beyond),
        )
    if _orphans(state, names):
        orphans = log.change(_sweeping(names), now_ms=now_ms)
    log.client.delete(orphans)
    return len(orphans)


def unnamed(state: StoreState, names: Iterable[str]) -> list[str]:
    """Return the objects that no entry of a state stands for."""
    entries: Iterable[tuple[str, DataObject | DroppedObject]] = itertools.chain(
        state.objects.items(), state.dropped.items()
    )
    named = {each for name, entry in entries for each in stored_names(name, entry)}
    return [name for name in names if name not in named]


def _orphans(state: StoreState, names: Iterable[str]) -> list[str]:
    """Return the unnamed objects that no lost commit can have named."""
    return [name for name in unnamed(state, names) if not state.is_before(name)]


def _old(log: CollectedLog, folder: str, before_ms: int) -> Iterator[ObjectEntry]:
    return (each for each in log.client.list(folder) if each.modified_ms < before_ms)


def _sweeping(listed: list[str]) -> Callable[[StoreDraft], list[str]]:
    def sweep_unnamed(draft: StoreDraft) -> list[str]:
        orphans = _orphans(draft.store, listed)
        seen = max(map(layout.seen_by_stored, orphans), default=-1)
        if seen > draft.store.swept:
            draft.sweep(seen)
        return orphans

    return sweep_unnamed


def cut_commit_log(log: CollectedLog, *, now_ms: int) -> int:
    """Delete commits and snapshots below the last snapshot but one, a day old; count them.

    Three requests as long as it finds nothing.
    """
    log.check_writable()
    before_ms = now_ms - COMMITS_KEPT_MS
    boundary = last = log.boundary()
    while _is_old(log, last + SNAPSHOT_COMMITS, before_ms):
        last += SNAPSHOT_COMMITS
    listed = [*log.client.list(layout.STORED_COMMITS, after=layout.stored_commit(last + 1))]
    old = (each.name for each in listed if each.modified_ms < before_ms)
    to = boundary
    if found := [number for number in _snapshots(old) if number > boundary]:
        names = (each.name for each in log.client.newest(layout.STORED_COMMITS, 1000))
        newest = max(_snapshots(names), default=0)
        to = max((number for number in found if number < newest), default=boundary)
    if to > boundary:
        log.move_boundary(to)
    kept = layout.stored_snapshot(to)
    below = [each.name for each in listed if _is_up_to(each.name, to) and each.name != kept]
    log.client.delete(below)
    return len(below)


def _snapshots(names: Iterable[str]) -> Iterator[int]:
    """Yield the numbers of the snapshots among objects of the commit log."""
    for name in names:
        parsed = layout.parse_stored_name(name)
        if parsed is not None and parsed[1]:
            yield parsed[0]


def _is_old(log: CollectedLog, number: int, before_ms: int) -> bool:
    entry = log.client.head(layout.stored_commit(number))
    return entry is not None and entry.modified_ms < before_ms


def _is_up_to(name: str, number: int) -> bool:
    parsed = layout.parse_stored_name(name)
    return parsed is not None and parsed[0] <= number
