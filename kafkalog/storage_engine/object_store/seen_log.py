"""A log in an object store as a driver has seen it: all that a task needs that writes to it.

A task sends no request but its PUTs. The commit checks that the topics are still those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kafkalog.storage_engine.metadata.state import State
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import shared_client
from kafkalog.storage_engine.object_store.staged_objects import StagedObjects

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.writing.staging_target import AttemptName, StagingTarget


@dataclass(frozen=True, slots=True)
class SeenLog:
    """The address, the number of the commit that was seen, and the topics; plain data."""

    address: StoreAddress
    number: int
    topics: Mapping[str, Any]
    """The change that leads from an empty log to these topics."""

    @classmethod
    def of(cls, log: ObjectLog, topic: str | None) -> Self:
        """Return the log as it is known, with one topic, or with all if the topic is None."""
        state = log.known_state.log
        topics = {name: each for name, each in state.topics.items() if topic in (None, name)}
        seen = dataclasses.replace(
            state, topics=topics, writers={}, deleting={}, forgotten_writers={}
        )
        return cls(log.address, state.number, seen.snapshot())

    def state(self) -> State:
        """Return the state that was seen, with these topics; no request."""
        return State().apply(self.number, self.topics)

    def staging_target(self, name: AttemptName) -> StagingTarget:
        """Return where a task attempt writes: mixed objects."""
        return StagedObjects(shared_client(self.address), self.number, name)
