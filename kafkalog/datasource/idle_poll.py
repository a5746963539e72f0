"""The answer to a poll that found nothing, kept as long as the next poll must find the same."""

from __future__ import annotations

from dataclasses import dataclass

from kafkalog.datasource.offsets import OffsetJson
from kafkalog.storage_engine.metadata.state import State

__all__ = ["IdlePoll"]


@dataclass(frozen=True, slots=True)
class IdlePoll:
    """A query that had read everything in its log at `state`, up to `ends`."""

    state: State
    ends: OffsetJson

    def holds(self, start: OffsetJson, state: State) -> bool:
        """Return whether a poll from `start` finds nothing either."""
        return state is self.state and start == self.ends
