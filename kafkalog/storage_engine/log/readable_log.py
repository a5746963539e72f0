"""The seam below all readers and tasks: a log's state, snapshots, and where tasks write.

`ReadableDirectory` offers it for a log directory, `ObjectLog` for a log in an object store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs.change_signal import ChangeSignal
from kafkalog.storage_engine.metadata.state import State, TopicState

if TYPE_CHECKING:
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
    from kafkalog.storage_engine.transactions.producers import Producers
    from kafkalog.storage_engine.writing.staging_target import AttemptName, StagingTarget


class ReadableLog(ABC):
    """One process's access to a log; a context manager."""

    root: Path | str
    """The directory, or the address in an object store."""
    read_only: bool
    is_brokers: bool
    """Whether a Kafka broker owns the log."""

    @abstractmethod
    def state(self) -> State:
        """Return the published state; costs one small read when nothing has changed."""

    def with_internal_topics(self) -> ReadableLog:
        """Return the log that has Kafka's own topics of this place, if one has."""
        return self

    def check_is_here(self) -> None:  # noqa: B027
        """Raise LogMovedError if the log is no longer where it was opened; asked after a fault."""

    def change_signal(self) -> ChangeSignal:
        """Return what tells of the next commit; close it after use."""
        return ChangeSignal(None)

    def is_live(self, topic: str, partition: int) -> bool:
        """Return whether a broker that runs has the partition."""
        return False

    @abstractmethod
    def check_writable(self) -> None:
        """Raise InvalidInputError where the log is a broker's, read-only, or closed."""

    @abstractmethod
    def snapshot(
        self,
        topic: str,
        partition: int,
        *,
        whole: bool = False,
        start: int | None = None,
        known_end: int = 0,
        check: Callable[[TopicState], None] = lambda topic: None,
    ) -> PartitionSnapshot:
        """Open a snapshot of a partition; close it after use.

        Args:
            topic: The topic.
            partition: The partition.
            whole: Whether all segments are opened at once.
            start: The offset at which reading will begin.
            known_end: A high watermark that a broker may not know after a restart.
            check: Called with the state of a log of ours, which it may refuse.
        """

    @abstractmethod
    def size_of(self, topic: str, partition: int) -> int:
        """Return the bytes of a partition's committed batches, as far as they can be listed."""

    @abstractmethod
    def leader_epoch_at(self, topic: str, partition: int, offset: int) -> int:
        """Return the leader epoch of an existing or future offset, or -1."""

    @abstractmethod
    def producers(self, topic: str, partition: int) -> Producers | None:
        """Return the producers at a partition's high watermark, if they are known without a scan.

        Raises UnknownTopicError, StorageError.
        """

    @abstractmethod
    def staging_target(self, name: AttemptName) -> StagingTarget:
        """Return where a task attempt writes; nothing of it is visible before the commit."""

    @abstractmethod
    def close(self) -> None:
        """Refuse writes from now on."""

    def describe(self, name: str) -> TopicState:
        """Return a topic's id, config and partitions; raises UnknownTopicError."""
        return self.state().topic(name)

    def has_topic(self, name: str, topic_id: str) -> bool:
        """Tell whether the topic of that name is (still) the one of that id."""
        known = self.state().topics.get(name)
        return known is not None and known.topic_id == topic_id

    def check_partition(self, topic: str, partition: int) -> str:
        """Return the topic's id; raises InvalidInputError for a partition it does not have."""
        known = self.describe(topic)
        known.check_has(partition)
        if partition in known.absent:
            raise InvalidInputError(self.why_absent(topic, partition))
        return known.topic_id

    def cleaned_to(self, topic: str, partition: int) -> int:
        """Return the offset below which a cleaning may have removed records."""
        return self.describe(topic).partitions[partition].cleaned_to

    def deletions_gone_to(self, topic: str, partition: int) -> int:
        """Return the offset below which a deletion may be gone without a later record of its key.

        A reader who has followed the partition up to a lower offset may have missed it.
        """
        return self.describe(topic).partitions[partition].deletions_gone_to

    def why_absent(self, topic: str, partition: int) -> str:
        """Return why a partition that the topic has cannot be read here."""
        return (
            f"partition {partition} of topic {topic!r} is not in {self.root}: "
            "another broker has it, or another log directory"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
