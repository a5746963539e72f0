"""A log as the cleaner sees it, wherever it lies.

What is due and why, and what `status` and `explain` say, is decided once. A kind of log only
answers what is asked here; `shelves` knows which kind it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kafkalog.cleaner.plan import OURS

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


class Moment(ABC):
    """One view of a whole log at one time; it writes nothing. What only a directory has is here.

    `root` is the directory, or the address. Each plan is made on first use.
    """

    def __init__(self, root: str, state: State, now_ms: int) -> None:
        self.root: Final = root
        self.state: Final = state
        self.now_ms: Final = now_ms
        self._made: dict[tuple[str, int], Plan] = {}

    @property
    def owner(self) -> str:
        """OURS, BROKERS or COPY (`plan`)."""
        return OURS

    @property
    def is_cleaner_running(self) -> bool | None:
        """Whether any process cleans it in the background; None if that cannot be known."""
        return None

    def has_topic(self, name: str, topic_id: str) -> bool:
        """Return whether a topic exists still."""
        known = self.state.topics.get(name)
        return known is not None and known.topic_id == topic_id

    def plan(self, topic: str, partition: int) -> Plan:
        """Return a partition's plan; raises OSError, KafkaLogError if it cannot be read."""
        made = self._made.get((topic, partition))
        if made is None:
            made = self._made[topic, partition] = self._plan(topic, partition)
        return made

    @abstractmethod
    def _plan(self, topic: str, partition: int) -> Plan:
        """Make a plan."""

    @abstractmethod
    def notes(self, topic: str, partition: int) -> PartitionNotes:
        """Return what the cleanings of a partition have left."""

    @abstractmethod
    def snapshot(self, topic: str, partition: int, start: int) -> PartitionSnapshot:
        """Open a snapshot of a partition, to read from an offset on; raises KafkaLogError."""

    @abstractmethod
    def pieces(self, plan: Plan) -> Sequence[Piece]:
        """Return the files or objects that hold a partition's records, ascending."""

    def is_paused(self, topic: str, partition: int) -> bool:
        """Return whether a process keeps cleaners away."""
        return False

    def is_being_cleaned(self, topic: str, partition: int) -> bool:
        """Return whether a process is known to clean it: a claim may be of one that has died."""
        return False

    def may_clean(self, topic: str, partition: int) -> bool:
        """Return whether this process may clean it; a store says no when it is asked."""
        return True

    def leftovers(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the bytes that a running cleaning has written, and those of what was replaced."""
        return 0, 0
