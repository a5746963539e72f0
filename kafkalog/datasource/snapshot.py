"""A streaming query's `view=latest`: the latest record of each key first, then every change.

The first micro-batch of a partition reads its view as of the end of that micro-batch, one task
each, whatever `maxOffsetsPerTrigger` says, since half a view is useless. From there the query reads
the changelog. A stream has the deletions that are still in the log, also in its view: a deletion
counts against an earlier record of the key in another partition.

The driver pins the end when it chooses it, and holds the pin until it plans the next micro-batch.
Therefore not even a forced cleaning removes a record of the view. A query that died repeats its
micro-batch, and a cleaner may have passed the end meanwhile. Then the view lacks keys with later
records. Those follow in the next micro-batches, so the table is the same in the end.
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
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory

_LOGGER = logging.getLogger(__name__)


def has_snapshot(begin: Offsets) -> bool:
    """Whether a micro-batch from `begin` is a query's first one, with its view."""
    return EARLIEST in begin.values()


class HeldViews:
    """The ends of the views with which a micro-batch begins, pinned by the driver."""

    def __init__(self) -> None:
        self.pin: Path | None = None
        self.are_passed = False
        """Whether a cleaner had passed one of the ends when they were pinned."""
        self._ends: Offsets = {}
        self._held = contextlib.ExitStack()

    def hold(self, log: ReadableDirectory, begin: Offsets, ends: Offsets) -> None:
        """Pin the ends of the partitions that a micro-batch from `begin` is the first to read.

        Earlier ends are released. Nothing is held if the log cannot be pinned.
        """
        self.release()
        self._ends = {p: end for p, end in ends.items() if is_unread(p, begin)}
        if self._ends:
            self.pin = pin_ends(log, self._ends, self._held)
            self.are_passed = are_passed(log.state(), self._ends)

    def holds(self, ends: Offsets) -> bool:
        """Return whether all these ends are held."""
        return ends.items() <= self._ends.items()

    def release(self) -> None:
        """Release the ends."""
        self._held.close()
        self._ends, self.pin, self.are_passed = {}, None, False


def split_off_snapshots(
    log: ReadableDirectory, held: HeldViews, begin: Offsets, ranges: Sequence[OffsetRange]
) -> tuple[list[SnapshotPartition], list[OffsetRange]]:
    """Return the partitions whose view is read, with their ends held, and the other ranges.

    The micro-batch starts at `begin`; partitions that it lacks are new.
    """
    views = [range_ for range_ in ranges if is_unread(range_.partition, begin)]
    changes = [range_ for range_ in ranges if not is_unread(range_.partition, begin)]
    ends = {range_.partition: range_.end for range_ in views}
    if not held.holds(ends):  # a repeated micro-batch of an earlier run
        held.hold(log, begin, ends)
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


def is_unread(partition: TopicPartition, begin: Offsets) -> bool:
    """Return whether a micro-batch from `begin` is the first one that reads a partition."""
    return begin.get(partition, EARLIEST) == EARLIEST
