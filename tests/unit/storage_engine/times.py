"""Lookups of times in a partition snapshot, for tests that want the offset alone."""

from __future__ import annotations

from kafkalog.storage_engine.reading import time_offsets
from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot


def offset_since(snapshot: PartitionSnapshot, ms: int) -> int | None:
    """Return the first offset whose record is as young as `ms` (epoch ms), or younger."""
    found = time_offsets.first_since(snapshot, ms)
    return None if found is None else found.offset
