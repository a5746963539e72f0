"""What a cleaning did: plain figures, returned and never logged."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CleanerStats"]


@dataclass(slots=True)
class CleanerStats:
    """What cleaning one partition read, kept and wrote, summed over its rounds.

    Kafka: CleanerStats (rule C139); bytes are those of `.log` files, times are milliseconds. Clean
    segments that are left alone (`unchanged_segments`) count only among the segments.
    """

    topic: str
    partition: int
    start_offset: int = 0
    """First dirty offset before."""
    end_offset: int = 0
    """First dirty offset after; equal to `start_offset` where only horizons were due."""
    rounds: int = 0
    """Fillings of the offset map."""
    records_read: int = 0
    records_kept: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    records_removed: int = 0
    bytes_removed: int = 0
    """What went for good: of the groups of segments that were swapped, also where the round then
    failed or was broken off."""
    map_records_read: int = 0
    map_bytes_read: int = 0
    tombstones_kept: int = 0
    """Tombstones that stayed in the last round: those that wait for their delete horizon."""
    keyless_records: int = 0
    """Records dropped because they have no key; Kafka: invalidMessagesRead."""
    batches_rewritten: int = 0
    segments_before: int = 0
    segments_after: int = 0
    buffer_utilization: float = 0.0
    """Share of the offset map's slots that were taken in the last round."""
    spilled_bytes: int = 0
    """Keys that were written to temporary files, since they did not fit the memory budget."""
    spill_bytes_moved: int = 0
    """What was written to these files, and read from them."""
    map_ms: float = 0.0
    """Time spent on filling the offset map."""
    elapsed_ms: float = 0.0
    compaction_delay_ms: int = 0
    """For how long max.compaction.lag.ms had demanded the cleaning; 0 when it did not."""
    error: str | None = None
    """Why the partition was left as it was and is now uncleanable; None after success."""

    @property
    def left_out(self) -> tuple[int, int]:
        """Records and bytes that were read in the second pass, and not written again."""
        return self.records_read - self.records_kept, self.bytes_read - self.bytes_written
