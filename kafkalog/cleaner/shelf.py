"""A log as the cleaner sees it, wherever it lies.

What is due and why, and what `status` and `explain` say, is decided once. A kind of log only
answers what is asked here; `shelves` knows which kind it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kafkalog.cleaner.plan import Plan
    from kafkalog.storage_engine.metadata.state import State
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot


class PartitionNotes(Protocol):
    """The small notes that cleanings of a partition leave, by name (`layout`)."""

    @property
    def place(self) -> str:
        """Where they are, for messages."""

    def read(self, name: str) -> str | bytes | None:
        """Return a note; None for none. Raises OSError."""

    def write(self, name: str, text: str, *, or_remember: bool = False) -> None:
        """Replace a note; raises OSError.

        With `or_remember`, what the disk refuses holds in this process instead.
        """

    def remove(self, name: str) -> None:
        """Remove a note, if there is one; raises OSError."""


class Piece(NamedTuple):
    """Consecutive records of a partition, in one file or object."""

    base_offset: int
    next_offset: int
    size: int
    """Committed bytes."""
    object_name: str | None = None
    """None for a file."""
    is_fresh: bool = False
    """Whether they wait for a regroup."""


class Moment(Protocol):
    """One view of a whole log at one time; it writes nothing."""

    @property
    def root(self) -> str:
        """The directory, or the address."""

    @property
    def state(self) -> State:
        """Its topics and partitions."""

    @property
    def now_ms(self) -> int:
        """The time."""

    @property
    def owner(self) -> str:
        """OURS, BROKERS or COPY (`plan`)."""

    @property
    def is_cleaner_running(self) -> bool | None:
        """Whether any process cleans it in the background; None if that cannot be known."""

    def has_topic(self, name: str, topic_id: str) -> bool:
        """Return whether a topic exists still."""

    def plan(self, topic: str, partition: int) -> Plan:
        """Return a partition's plan; raises OSError, KafkaLogError if it cannot be read."""

    def notes(self, topic: str, partition: int) -> PartitionNotes:
        """Return what the cleanings of a partition have left."""

    def is_paused(self, topic: str, partition: int) -> bool:
        """Return whether a process keeps cleaners away."""

    def is_being_cleaned(self, topic: str, partition: int) -> bool:
        """Return whether a process is known to clean it now."""

    def may_clean(self, topic: str, partition: int) -> bool:
        """Return whether this process may clean it."""

    def snapshot(self, topic: str, partition: int, start: int) -> PartitionSnapshot:
        """Open a snapshot of a partition, to read from an offset on; raises KafkaLogError."""

    def pieces(self, plan: Plan) -> Sequence[Piece]:
        """Return the files or objects that hold a partition's records, ascending."""

    def leftovers(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the bytes that a running cleaning has written, and those of what was replaced."""
