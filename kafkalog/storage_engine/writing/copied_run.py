"""A run of whole batches that one log takes from another, with what belongs to the same commit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState, State
from kafkalog.storage_engine.transactions.producers import ProducerEntry


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """Records that follow the log of one partition, from its high watermark on."""

    topic: str
    topic_id: str
    partition: int
    start: int
    """The high watermark that it continues."""
    end: int
    """The high watermark after it. The last batches before it may be missing, as cleaned ones."""
    log_start: int
    """The offset at which the log begins after it."""
    data: bytes
    """Batches v2 with the offsets of [start, end), ascending, their checksums compared."""
    producers: Collection[ProducerEntry] | None = None
    """The producers at `end`, if the source knows them. It also knows those whose batches are gone,
    and times of records that a cleaning has taken."""
    stable: int = layout.INT64_MAX
    """The source's last stable offset; the source knows of open transactions that it has cut."""
    deletions_gone_to: int = 0
    """That of the source when the batches were read (`PartitionState`)."""
    source: str = "the given batches"
    """Where the batches come from, for errors."""

    @property
    def name(self) -> str:
        """The name of the partition."""
        return f"{self.topic}-{self.partition}"

    def continued(self, state: State) -> PartitionState:
        """Return the partition's state; raises StorageError if this does not follow its log."""
        known = state.topics.get(self.topic)
        if known is None or known.topic_id != self.topic_id:
            raise StorageError(
                f"topic {self.topic!r} was deleted or created again meanwhile (expected id "
                f"{self.topic_id}). Copy again."
            )
        held = known.partitions[self.partition]
        if held.high_watermark != self.start:
            raise StorageError(
                f"{self.name}: another process has written to it meanwhile (expected the log end "
                f"{self.start}, found {held.high_watermark}). Copy again."
            )
        return held
