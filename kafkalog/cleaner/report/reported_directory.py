"""A log in a directory as `status` and `explain` see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.cleaner.dedup.presence import is_being_cleaned, is_cleaner_running, may_clean
from kafkalog.cleaner.directory.pause import is_paused
from kafkalog.cleaner.report.reported_log import BROKERS, COPY, OURS, ReportedPartition, header_of
from kafkalog.cleaner.schedule.scheduler import Plans
from kafkalog.cleaner.state.last_cleaning import LastCleaning, read_last_cleaning
from kafkalog.cleaner.state.uncleanable import Uncleanable, read_uncleanable
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.directory_signs import is_copy

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.batch import BatchHeader


@dataclass(frozen=True, slots=True)
class _Directory:
    """A partition's directory."""

    path: Path

    @property
    def place(self) -> str:
        return str(self.path)

    def mark(self) -> Uncleanable | None:
        return read_uncleanable(self.path)

    def last_cleaning(self) -> LastCleaning | None:
        return read_last_cleaning(self.path)

    def is_being_cleaned(self) -> bool:
        return is_being_cleaned(self.path)

    def is_paused(self) -> bool:
        return is_paused(self.path)

    def may_clean(self) -> bool:
        return may_clean(self.path)


class ReportedDirectory(Plans):
    """A log in a directory."""

    @property
    def root(self) -> str:
        """The directory."""
        return str(self.engine.root)

    @cached_property
    def owner(self) -> str:
        """OURS, BROKERS or COPY."""
        if is_copy(self.engine.root):
            return COPY
        return OURS if (self.engine.root / layout.COMMIT).exists() else BROKERS

    @cached_property
    def is_cleaner_running(self) -> bool | None:
        """Whether any process cleans it in the background; None if that cannot be known."""
        return is_cleaner_running(self.engine.root)

    def has_topic(self, name: str, topic_id: str) -> bool:
        """Return whether a topic exists still."""
        return self.engine.has_topic(name, topic_id)

    def partition(self, topic: str, partition: int) -> ReportedPartition:
        """Return what else is known of a partition."""
        return _Directory(self.engine.partition_directory(topic, partition))

    def pin(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the offset that a reader has pinned, and until when (epoch ms)."""
        return self.pins.holder(topic, self.engine.describe(topic).topic_id, partition)

    def batch_at(self, topic: str, partition: int, offset: int) -> BatchHeader | None:
        """Return the header of the batch at an offset, if it can be read."""
        opened = partial(self.engine.snapshot, topic, partition, start=offset)
        return header_of(opened, offset)
