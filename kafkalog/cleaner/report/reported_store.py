"""A log in an object store as `status` and `explain` see it.

It is a state of the commit log. Only the header of an open transaction's first batch is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kafkalog.cleaner.objects.store_plan import note_of, plan_of, recorded
from kafkalog.cleaner.report.reported_log import OURS, ReportedPartition, header_of
from kafkalog.cleaner.state.last_cleaning import LastCleaning, cleanings_of
from kafkalog.cleaner.state.uncleanable import Uncleanable, uncleanable_of
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.object_snapshot import open_snapshot

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.log_to_clean import CleaningPlan
    from kafkalog.storage_engine.format.batch import BatchHeader
    from kafkalog.storage_engine.metadata.state import PartitionState, State
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_state import StoreState


@dataclass(frozen=True, slots=True)
class _Stored:
    """A partition's notes in the commit log."""

    place: str
    store: StoreState
    topic: str
    partition: int

    def mark(self) -> Uncleanable | None:
        text = note_of(self.store, self.topic, self.partition, layout.UNCLEANABLE)
        return uncleanable_of(text) if text else None

    def last_cleaning(self) -> LastCleaning | None:
        text = note_of(self.store, self.topic, self.partition, layout.LAST_CLEANING)
        return next(iter(cleanings_of(text)), None)

    def is_being_cleaned(self) -> bool:
        return False  # a claim is no lock: it may be of a process that has died

    def is_paused(self) -> bool:
        return False

    def may_clean(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ReportedStore:
    """A state of a log in an object store."""

    log: ObjectLog
    store: StoreState
    now_ms: int
    owner: str = OURS
    is_cleaner_running: bool | None = None

    @property
    def root(self) -> str:
        """The address."""
        return str(self.log.root)

    @property
    def state(self) -> State:
        """Its topics and partitions."""
        return self.store.log

    def has_topic(self, name: str, topic_id: str) -> bool:
        """Return whether a topic exists in this state."""
        known = self.state.topics.get(name)
        return known is not None and known.topic_id == topic_id

    def of(self, topic: str, partition: int) -> tuple[CleaningPlan, PartitionState]:
        """Return plan and state."""
        plan = plan_of(self.store, topic, partition, self.now_ms)
        return plan, recorded(self.store, topic, partition)

    def partition(self, topic: str, partition: int) -> ReportedPartition:
        """Return what else is known of a partition."""
        return _Stored(self.root, self.store, topic, partition)

    def pin(self, topic: str, partition: int) -> tuple[int, int]:
        """Return that no reader holds a cleaning back: objects are immutable."""
        return layout.INT64_MAX, 0

    def batch_at(self, topic: str, partition: int, offset: int) -> BatchHeader | None:
        """Return the header of the batch at an offset, by a request, if it can be read."""
        opened = partial(open_snapshot, self.log.client, self.store, topic, partition)
        return header_of(opened, offset)
