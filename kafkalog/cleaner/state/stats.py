"""The figures of a cleaning, and the state of a partition; returned, never logged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CleanerStats:
    """The figures of cleaning one partition, summed over its rounds.

    Bytes are those of `.log` files, times are milliseconds. Clean segments that are left alone
    (`unchanged_segments`) count only as segments. Kafka: CleanerStats (rule C139).
    """

    topic: str
    partition: int
    start_offset: int = 0
    """First dirty offset before."""
    end_offset: int = 0
    """First dirty offset after; equal to `start_offset` if only horizons were due."""
    rounds: int = 0
    """Fillings of the offset map."""
    records_read: int = 0
    records_kept: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    records_removed: int = 0
    bytes_removed: int = 0
    """Removed by finished swaps, also if the round then failed or was aborted."""
    map_records_read: int = 0
    map_bytes_read: int = 0
    tombstones_kept: int = 0
    """Tombstones that wait for their delete horizon after the last round."""
    deletions_gone_to: int = 0
    """The offset after the last tombstone that was removed as its time had come; 0 for none."""
    keyless_records: int = 0
    """Records removed because they have no key; Kafka: invalidMessagesRead."""
    batches_rewritten: int = 0
    segments_before: int = 0
    segments_after: int = 0
    buffer_utilization: float = 0.0
    """Share of the offset map's slots taken in the last round."""
    spilled_bytes: int = 0
    """Keys written to temporary files, because they exceeded the memory budget."""
    spill_bytes_moved: int = 0
    """Bytes written to and read from these files."""
    map_ms: float = 0.0
    """Time to fill the offset map."""
    elapsed_ms: float = 0.0
    compaction_delay_ms: int = 0
    """Time since max.compaction.lag.ms demanded the cleaning; 0 if it did not."""
    error: str | None = None
    """Why the cleaning failed and the partition is uncleanable; None after success."""

    @property
    def left_out(self) -> tuple[int, int]:
        """Records and bytes that the second pass has read and not written."""
        return self.records_read - self.records_kept, self.bytes_read - self.bytes_written

    def add_spill_bytes_moved(self, size: int) -> None:
        """Count bytes that were written to the temporary files, or read from them."""
        self.spill_bytes_moved += size
