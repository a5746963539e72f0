"""How far a materialized view is behind its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """One partition, in offsets."""

    applied: int
    """The table holds everything below this offset."""
    log_start: int
    log_end: int
    """The offset at which readable records end now."""

    @property
    def lag(self) -> int:
        """Offsets that are still to be applied."""
        return max(self.log_end - max(self.applied, self.log_start), 0)


@dataclass(frozen=True, slots=True)
class ViewProgress:
    """The progress of one view, as its table records it."""

    query_id: str | None
    """None before the first start."""
    batch_id: int | None
    """The last micro-batch in the table; None if this generation has none in it."""
    time_ms: int | None
    """When it was applied."""
    bad_records: int
    """Records that this generation has left out; see `on_bad_record` of the upsert."""
    partitions: Mapping[int, PartitionProgress]

    @property
    def lag(self) -> int:
        """Offsets of all partitions that are still to be applied."""
        return sum(partition.lag for partition in self.partitions.values())
