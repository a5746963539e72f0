"""A log as `status` and `explain` see it.

What they say is decided once, in `status` and `explain`. A kind of log only answers what is asked
here: `reported_directory` for a directory, `reported_store` for an object store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from collections.abc import Callable

    from kafkalog.cleaner.dedup.log_to_clean import CleaningPlan
    from kafkalog.cleaner.state.last_cleaning import LastCleaning
    from kafkalog.cleaner.state.uncleanable import Uncleanable
    from kafkalog.storage_engine.format.batch import BatchHeader
    from kafkalog.storage_engine.metadata.state import PartitionState, State
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

OURS, BROKERS, COPY = "ours", "broker's", "copy"
"""Whose a log is."""


class ReportedPartition(Protocol):
    """What one partition's cleaners have left, and what they do now."""

    @property
    def place(self) -> str:
        """The directory, or the address."""

    def mark(self) -> Uncleanable | None:
        """Return why it is uncleanable; None if it is not."""

    def last_cleaning(self) -> LastCleaning | None:
        """Return the last cleaning; None if there was none, or it is unknown."""

    def is_being_cleaned(self) -> bool:
        """Return whether a process is known to clean it now."""

    def is_paused(self) -> bool:
        """Return whether a process keeps cleaners away."""

    def may_clean(self) -> bool:
        """Return whether this process may clean it."""


class ReportedLog(Protocol):
    """A log at one time."""

    @property
    def root(self) -> str:
        """The directory, or the address."""

    @property
    def state(self) -> State:
        """Its topics and partitions."""

    @property
    def now_ms(self) -> int:
        """The time of the report."""

    @property
    def owner(self) -> str:
        """OURS, BROKERS or COPY."""

    @property
    def is_cleaner_running(self) -> bool | None:
        """Whether any process cleans it in the background; None if that cannot be known."""

    def has_topic(self, name: str, topic_id: str) -> bool:
        """Return whether a topic exists still."""

    def of(self, topic: str, partition: int) -> tuple[CleaningPlan, PartitionState]:
        """Return plan and state; raises OSError, KafkaLogError if it cannot be read."""

    def partition(self, topic: str, partition: int) -> ReportedPartition:
        """Return what else is known of a partition."""

    def pin(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the offset that a reader has pinned, and until when (epoch ms)."""

    def batch_at(self, topic: str, partition: int, offset: int) -> BatchHeader | None:
        """Return the header of the batch at an offset, if it can be read."""


def header_of(opened: Callable[[], PartitionSnapshot], offset: int) -> BatchHeader | None:
    """Return the header of the batch at an offset of a snapshot; None if it cannot be read."""
    try:
        with opened() as snapshot:
            for segment in snapshot.open_segments(offset, snapshot.state.high_watermark):
                for _, header in segment.batches_from(offset):
                    return header
    except (OSError, KafkaLogError) as raised:
        files.pass_on(raised)
    return None
