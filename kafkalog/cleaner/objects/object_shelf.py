"""A log in an object store, for the cleaner: claims, notes in commits, and the upkeep of objects.

Any number of processes may clean at once, on any hosts. A claim spares double work; the commit log
decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.objects.object_moment import ObjectMoment, live_extents
from kafkalog.cleaner.objects.object_round import closed_extents, is_as_it_was, open_round
from kafkalog.cleaner.plan import may_be_tried
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.cleaner.state.uncleanable import (
    fault_reason,
    mark_uncleanable,
    read_uncleanable,
)
from kafkalog.errors import CorruptLogError, KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.store_draft import is_live
from kafkalog.storage_engine.object_store.store_state import Cleaned

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import Round, RoundOrder, Turn
    from kafkalog.cleaner.state.notes import StoredNotes
    from kafkalog.storage_engine.object_store.address import StoreAddress
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_draft import StoreDraft
    from kafkalog.storage_engine.object_store.store_state import Extent, StoreState


@dataclass(slots=True)
class ObjectShelf:
    """A log in an object store; what it last knew of the log is what a turn begins with."""

    log: ObjectLog
    begun: dict[tuple[str, int], StoreState] = field(default_factory=dict)
    """The state that the last round of a partition has read."""
    _known: ObjectMoment | None = None

    @property
    def place(self) -> str | StoreAddress:
        """The address."""
        return self.log.address

    def check_cleanable(self) -> None:
        """Raise InvalidInputError where the log is only read; a store says no when it is asked."""
        self.log.check_writable()

    def announced(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: a store has no lock to hold."""
        return contextlib.nullcontext()

    def moment(self, now_ms: int) -> ObjectMoment:
        """Return the last known state; no request. It is the same until anything changes."""
        state, known = self.log.known_state, self._known
        if known is None or known.store is not state or known.now_ms != now_ms:
            known = self._known = ObjectMoment(self.log, state, now_ms)
        return known

    def topic_id(self, topic: str, partition: int) -> str | None:
        """Return the id of the topic if it has the partition, else None."""
        known = self.log.known_state.log.topics.get(topic)
        return known.topic_id if known is not None and known.is_here(partition) else None

    def prepare(
        self,
        topic: str | None = None,
        partition: int | None = None,
        *,
        force: bool = False,
        now_ms: int,
        check_abort: Callable[[], None] = lambda: None,
    ) -> list[CleanerStats]:
        """Load the newest state; regroup and merge, unless for one partition alone.

        With `force` all fresh objects are regrouped, and active segments closed.
        """
        log, damaged = self.log, dict[str, KafkaLogError]()
        log.store_state()
        if partition is None:
            upkeep.regroup_due(
                log,
                moment=self.moment(now_ms),
                now_ms=now_ms,
                force=force,
                check_abort=check_abort,
                on_damaged=damaged.__setitem__,
            )
            upkeep.merge_due(log, now_ms=now_ms, check_abort=check_abort)
        if force:
            partitions = None if partition is None else [partition]
            upkeep.roll_active(log, topic, partitions, now_ms=now_ms)
        return [*self._failed(damaged, topic, force=force, now_ms=now_ms)]

    def _failed(
        self, damaged: dict[str, KafkaLogError], topic: str | None, *, force: bool, now_ms: int
    ) -> Iterator[CleanerStats]:
        """Mark the partitions that may be tried and have damaged records in a fresh object.

        If the damage is in nobody's records, or the object is missing, they are all that have some.
        """
        found: set[tuple[str, int]] = set()
        for name, fault in damaged.items():
            held = self.log.known_state.objects.get(name)
            topics = {one.topic_id: one for one in self.log.known_state.log.topics.values()}
            for extent in () if held is None else _harmed(held.extents, fault):
                known, number = topics.get(extent.topic_id), extent.partition
                if known is None or (known.name, number) in found or not is_live(extent, topics):
                    continue
                if topic not in (None, known.name):
                    continue
                if not TopicConfig.parse(known.config).is_compacted:
                    continue
                notes = self.moment(now_ms).notes(known.name, number)
                if force or may_be_tried(read_uncleanable(notes), known, now_ms):
                    found.add((known.name, number))
                    reason = self.mark(known.name, number, fault, now_ms=now_ms)
                    if reason is not None:
                        yield CleanerStats(known.name, number, error=reason)

    def check(self, topic: str, partition: int) -> None:
        """Do nothing: objects have no pause."""

    @contextlib.contextmanager
    def turn(
        self, topic: str, partition: int, *, now_ms: int, force: bool, waits: bool
    ) -> Iterator[Turn | None]:
        """Claim the partition; None if another cleaner has, unless with `force`.

        None, and no request, if it is gone, or has neither records nor a mark to take away.
        """
        topic_id = self.topic_id(topic, partition)
        if topic_id is None or self._is_bare(topic, partition, now_ms):
            yield None
            return
        with self.log.claim(f"{topic_id}-{partition}", now_ms=now_ms) as is_mine:
            yield _Turn(self, topic, partition) if is_mine or force else None

    def _is_bare(self, topic: str, partition: int, now_ms: int) -> bool:
        moment = self.moment(now_ms)
        if live_extents(moment.store, topic, partition):
            return False
        return read_uncleanable(moment.notes(topic, partition)) is None

    def mark(self, topic: str, partition: int, fault: Exception, *, now_ms: int) -> str | None:
        """Commit the mark, unless the log is no longer what the cleaning failed on."""
        state = self.begun.get((topic, partition), self.log.known_state)
        reason = fault_reason(fault)
        if isinstance(fault, OSError):
            reason = f"{self.log.root}: {topic}-{partition}: temporary files here: {reason}"

        def mark(notes: StoredNotes) -> None:
            config = state.log.topic(topic).config
            mark_uncleanable(notes, fault, config, now_ms=now_ms, reason=reason)

        return reason if self.change_notes(state, topic, partition, mark, now_ms=now_ms) else None

    def change_notes(
        self,
        state: StoreState,
        topic: str,
        partition: int,
        change: Callable[[StoredNotes], None],
        *,
        now_ms: int,
    ) -> bool:
        """Commit changed notes, and nothing else; return False if an object of `state` is gone."""
        topic_id = state.log.topic(topic).topic_id
        names = [name for name, _ in closed_extents(state, topic, partition)]

        def draft_notes(draft: StoreDraft) -> bool:
            if not is_as_it_was(draft, topic, topic_id, names):
                return False
            offset = draft.topic(topic).partitions[partition].first_dirty_offset
            notes = ObjectMoment(self.log, draft.store, now_ms).notes(topic, partition)
            change(notes)
            draft.set_cleaned(topic_id, partition, Cleaned(offset, now_ms, notes.texts))
            return True

        return self.log.change(draft_notes, now_ms=now_ms)

    def tidy(self, *, now_ms: int) -> int:
        """Delete objects that nobody needs any more."""
        return upkeep.sweep(self.log, now_ms=now_ms)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A partition is claimed."""

    shelf: ObjectShelf
    topic: str
    partition: int

    def begin(self, *, force: bool, now_ms: int) -> None:
        """Close the active segment by the plan; with `force` that was done in one commit."""
        plan = self.shelf.moment(now_ms).plan(self.topic, self.partition)
        if not force and plan.closing_bytes:
            self._close_active(now_ms)

    def _close_active(self, now_ms: int) -> None:
        """Close the active segment, if the plan of the newest state still says so."""
        log, place = self.shelf.log, (self.topic, self.partition)
        topic_id = self.shelf.topic_id(*place)

        def close(draft: StoreDraft) -> None:
            is_same = topic_id is not None and is_as_it_was(draft, self.topic, topic_id, ())
            if is_same and ObjectMoment(log, draft.store, now_ms).plan(*place).closing_bytes:
                draft.roll(*place)

        log.change(close, now_ms=now_ms)

    def round(self, order: RoundOrder) -> contextlib.AbstractContextManager[Round | None]:
        """Plan and begin a round by the last known state."""
        moment = self.shelf.moment(order.now_ms)
        self.shelf.begun[self.topic, self.partition] = moment.store
        return open_round(moment, order)

    def end(self, order: RoundOrder) -> None:
        """Take away a mark that no round's commit took; the figures are in that one.

        It stays where all records are fresh: nothing was tried.
        """
        moment, place = self.shelf.moment(order.now_ms), (self.topic, self.partition)
        state = moment.store
        if live_extents(state, *place) and not closed_extents(state, *place):
            return
        if read_uncleanable(moment.notes(*place)) is not None:

            def clear(notes: StoredNotes) -> None:
                notes.remove(layout.UNCLEANABLE)

            self.shelf.change_notes(state, *place, clear, now_ms=order.time_ms())


def _harmed(extents: Sequence[Extent], fault: KafkaLogError) -> Sequence[Extent]:
    """Return the extents of an object in which a fault is; all of them if it is in none."""
    at = fault.position if isinstance(fault, CorruptLogError) else -1
    return [each for each in extents if each.position <= at < each.position + each.size] or extents
