"""A streaming query's `view=latest`: the latest record of each key first, then every change.

A partition that the query has not read yet begins with its view as of the end of that micro-batch,
one task each and whatever `maxOffsetsPerTrigger` says, for half a view is none. From there on the
query reads the changelog, deletions included, so that whoever applies it to the view has the table.

The driver pins the end when it chooses it, and holds the pin until it plans the next micro-batch:
so no cleaner, also a forced one, takes a record of the view. A query that died in that micro-batch
repeats it, and a cleaner may have gone beyond the end meanwhile. Then the view lacks keys that have
newer records. Those follow in the next micro-batches, so the table comes out the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.datasource.offsets import EARLIEST, Offsets, TopicPartition
from kafkalog.datasource.pin import are_passed, pin_ends
from kafkalog.datasource.range_reader import SnapshotPartition

if TYPE_CHECKING:
    from kafkalog.datasource.offset_range import OffsetRange
    from kafkalog.storage_engine.store import Store

__all__ = ["HeldViews", "has_snapshot", "split_off_snapshots"]

_LOGGER = logging.getLogger(__name__)


def has_snapshot(begin: Offsets) -> bool:
    """Whether the micro-batch that begins there is a query's first one, with its view."""
    return EARLIEST in begin.values()


class HeldViews:
    """The ends of the views with which a micro-batch begins, pinned and held by the driver."""

    def __init__(self) -> None:
        self.pin: Path | None = None
        self.are_passed = False
        """Whether a cleaner was beyond one of the ends when they were pinned."""
        self._ends: Offsets = {}
        self._held = contextlib.ExitStack()

    def hold(self, store: Store, begin: Offsets, ends: Offsets) -> None:
        """Hold the ends of the partitions that a micro-batch from `begin` is the first to read.

        What was held before is let go. Nothing is held where nothing can be pinned.
        """
        self.release()
        self._ends = {p: end for p, end in ends.items() if _is_unread(p, begin)}
        if self._ends:
            self.pin = pin_ends(store, self._ends, self._held)
            self.are_passed = are_passed(store.state(), self._ends)

    def holds(self, ends: Offsets) -> bool:
        """Tell whether these ends are among those that are held."""
        return ends.items() <= self._ends.items()

    def release(self) -> None:
        """Let the ends go."""
        self._held.close()
        self._ends, self.pin, self.are_passed = {}, None, False


def split_off_snapshots(
    store: Store, held: HeldViews, begin: Offsets, ranges: Sequence[OffsetRange]
) -> tuple[list[SnapshotPartition], list[OffsetRange]]:
    """Return the partitions of which a view is read, with their ends held, and the other ranges.

    `begin` is where the micro-batch begins; partitions that it lacks are new.
    """
    views = [range_ for range_ in ranges if _is_unread(range_.partition, begin)]
    changes = [range_ for range_ in ranges if not _is_unread(range_.partition, begin)]
    ends = {range_.partition: range_.end for range_ in views}
    if not held.holds(ends):  # a micro-batch of an earlier run, which is repeated
        held.hold(store, begin, ends)
    if held.are_passed:
        _LOGGER.warning(
            "view=latest: a cleaner has gone beyond the end of this micro-batch, so keys with "
            "newer records follow in the next ones"
        )
    snapshots = [
        SnapshotPartition(
            dataclasses.replace(range_, from_earliest=True), held.pin, held.are_passed
        )
        for range_ in views
    ]
    return snapshots, changes


def _is_unread(partition: TopicPartition, begin: Offsets) -> bool:
    return begin.get(partition, EARLIEST) == EARLIEST
