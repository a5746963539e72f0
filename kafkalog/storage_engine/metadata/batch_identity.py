"""Decides which batch of a writer comes: the next, the last one again, or one that doesn't fit.

A batch is its id and, if they are known, the ends of its sources. A sink of a log and a table that
an upsert keeps decide by the same function; they differ in what they do then.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple


class BatchIdentity(NamedTuple):
    """A batch: its id, counted from 0, and where its sources end."""

    batch_id: int
    ends: Any = None
    """Comparable by `==`; None if they are unknown."""


class Comes(Enum):
    """How a batch relates to the last one that its writer committed."""

    NEXT = auto()
    """Its id follows."""
    SKIPPING = auto()
    """Its id is higher than the next one."""
    AGAIN = auto()
    """It is the last one: the same id and, if both are known, the same ends."""
    PLANNED_ANEW = auto()
    """It has the id of the last one, and other ends."""
    EARLIER = auto()
    """Its id is lower."""

    @classmethod
    def of(cls, batch: BatchIdentity, last: BatchIdentity | None) -> Comes:
        """Compare a batch with the last one; None if the writer is unknown."""
        last_id = -1 if last is None else last.batch_id
        if batch.batch_id > last_id:
            return cls.NEXT if batch.batch_id == last_id + 1 else cls.SKIPPING
        if last is None or batch.batch_id < last_id:
            return cls.EARLIER
        is_known = batch.ends is not None and last.ends is not None
        return cls.PLANNED_ANEW if is_known and batch.ends != last.ends else cls.AGAIN
