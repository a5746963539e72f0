"""A streaming query's `view=latest`: the newest record of each key first, then every change.

A partition that the query has not read yet begins with its view as of the end of that micro-batch,
one task each and whatever `maxOffsetsPerTrigger` says, for half a view is none. From there on the
query reads the changelog, deletions included, so that whoever applies it to the view has the table.

The end is pinned, so a cleaner that comes meanwhile leaves the view alone. A query that died in
such a batch may repeat it when the pin has ended and a cleaner has gone further. Then keys are
missing that have newer records, and those follow in the next batches: the table comes out the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kafkalog.datasource.offsets import EARLIEST, Offsets
from kafkalog.datasource.pin import pin_ends
from kafkalog.datasource.range_reader import SnapshotPartition

if TYPE_CHECKING:
    from kafkalog.datasource.offset_range import OffsetRange
    from kafkalog.storage_engine.engine import Engine

__all__ = ["has_snapshot", "split_off_snapshots"]


def has_snapshot(begin: Offsets) -> bool:
    """Whether the micro-batch that begins there is a query's first one, with its view."""
    return EARLIEST in begin.values()


def split_off_snapshots(
    engine: Engine, begin: Offsets, ranges: Sequence[OffsetRange]
) -> tuple[list[SnapshotPartition], list[OffsetRange]]:
    """Return the partitions of which a view is read, with their ends pinned, and the other ranges.

    `begin` is where the micro-batch begins; partitions that it lacks are new.
    """
    views: list[OffsetRange] = []
    changes: list[OffsetRange] = []
    for range_ in ranges:
        is_unread = begin.get(range_.partition, EARLIEST) == EARLIEST
        (views if is_unread else changes).append(range_)
    path = pin_ends(engine, {range_.partition: range_.end for range_ in views}) if views else None
    snapshots = [SnapshotPartition(dataclasses.replace(r, from_earliest=True), path) for r in views]
    return snapshots, changes
