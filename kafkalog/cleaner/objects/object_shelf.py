"""The partitions of a log in an object store, for the cleaner: claims, and notes in commits.

Any number of processes may clean at once, on any hosts. A claim spares double work; the commit log
decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafkalog.cleaner.objects.object_round import (
    closed_extents,
    is_as_it_was,
    open_round,
)
from kafkalog.cleaner.objects.store_plan import may_be_cleaned, note_of
from kafkalog.cleaner.state.uncleanable import fault_reason, next_mark, uncleanable_of
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.store_state import Cleaned

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import Round, RoundOrder, Turn
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_draft import StoreDraft
    from kafkalog.storage_engine.object_store.store_state import StoreState


@dataclass(frozen=True, slots=True)
class ObjectShelf:
    """A log in an object store; its last known state is what a turn begins with."""

    log: ObjectLog
    _states: dict[tuple[str, int], StoreState] = field(default_factory=dict)
    """The state that the last turn at a partition read."""

    def topic_id(self, topic: str, partition: int) -> str | None:
        """Return the id of a topic that has the partition here; None if there is none."""
        known = self.log.known_state.log.topics.get(topic)
        return known.topic_id if known is not None and known.is_here(partition) else None

    def has_topic(self, topic: str, topic_id: str) -> bool:
        """Return whether the topic of that name is still the one of that id."""
        return self.log.has_topic(topic, topic_id)

    def check(self, topic: str, partition: int) -> None:
        """A partition in a store is never paused."""

    @contextlib.contextmanager
    def turn(
        self, topic: str, partition: int, *, now_ms: int, force: bool, waits: bool
    ) -> Iterator[Turn | None]:
        """Claim the partition; None if another cleaner has, unless with `force`."""
        topic_id = self.topic_id(topic, partition)
        with self.log.claim(f"{topic_id}-{partition}", now_ms=now_ms) as is_mine:
            yield _Turn(self, topic, partition) if is_mine or force else None

    def mark(self, topic: str, partition: int, fault: Exception, *, now_ms: int) -> str | None:
        """Commit the mark, unless the log is no longer what the cleaning failed on."""
        reason = fault_reason(fault)
        state = self._states.get((topic, partition), self.log.known_state)
        known = state.log.topic(topic)
        text = note_of(state, topic, partition, layout.UNCLEANABLE)
        mark = next_mark(
            uncleanable_of(text) if text else None,
            reason,
            known.config,
            now_ms=now_ms,
            is_disk_fault=isinstance(fault, OSError) or isinstance(fault.__cause__, OSError),
        )
        names = [name for name, _ in closed_extents(state, topic, partition)]

        def draft_mark(draft: StoreDraft) -> bool:
            if not is_as_it_was(draft, topic, known.topic_id, names):
                return False
            keep_notes(draft, topic, partition, {layout.UNCLEANABLE: mark.told()}, now_ms)
            return True

        return reason if self.log.change(draft_mark, now_ms=now_ms) else None

    def begun(self, topic: str, partition: int) -> None:
        """Remember the state that a round begins with."""
        self._states[topic, partition] = self.log.known_state


def keep_notes(
    draft: StoreDraft, topic: str, partition: int, notes: Mapping[str, str | None], now_ms: int
) -> None:
    """Change some notes of a partition; None takes one away."""
    known = draft.topic(topic)
    before = draft.store.cleaned_of(known.topic_id, partition)
    kept = {**({} if before is None else before.notes), **notes}
    found = {name: text for name, text in kept.items() if text is not None}
    offset = known.partitions[partition].first_dirty_offset
    draft.set_cleaned(known.topic_id, partition, Cleaned(offset, now_ms, found))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A partition is claimed."""

    shelf: ObjectShelf
    topic: str
    partition: int

    def prepare(self, now_ms: int) -> None:
        """Nobody leaves anything behind in a partition."""

    def is_due(self, now_ms: int) -> bool:
        return may_be_cleaned(self.shelf.log.known_state, self.topic, self.partition, now_ms)

    def first_dirty_offset(self) -> int:
        state = self.shelf.log.known_state
        return state.log.topic(self.topic).partitions[self.partition].first_dirty_offset

    def close_active(self, now_ms: int) -> None:
        """Do nothing: those of all partitions were closed in one commit."""

    def round(self, order: RoundOrder) -> contextlib.AbstractContextManager[Round | None]:
        self.shelf.begun(self.topic, self.partition)
        return open_round(self.shelf.log, order)

    def end(self, order: RoundOrder) -> None:
        """Take away a mark that no round's commit took; the figures are in that one."""
        log = self.shelf.log
        if note_of(log.known_state, self.topic, self.partition, layout.UNCLEANABLE):
            at_ms = order.time_ms()
            gone = {layout.UNCLEANABLE: None}
            log.change(
                lambda draft: keep_notes(draft, self.topic, self.partition, gone, at_ms),
                now_ms=at_ms,
            )
