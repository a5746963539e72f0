"""A log as the cleaner sees it, wherever it lies.

The cleaner decides once what is due and why, and what a cleaning does. A directory and an object
store differ in how a moment is read, how finished segments are published, and who takes turns:
`directory` and `objects` say how. `shelves` knows which kind a log is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from kafkalog.cleaner.plan import OURS

if TYPE_CHECKING:
    from pathlib import Path

    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.key_index.key_index import KeyIndex
    from kafkalog.cleaner.plan import Plan
    from kafkalog.cleaner.rewrite.active_producers import ActiveProducers
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.cleaner.rewrite.groups import RewrittenGroup, Source
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.storage_engine.metadata.state import State
    from kafkalog.storage_engine.object_store.address import StoreAddress
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
    from kafkalog.storage_engine.segment.open_segment import OpenSegment
    from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction


class CleaningAborted(Exception):
    """A cleaning stops: it was asked to, others were quicker, or its topic is gone.

    Finished swaps stay.
    """


class PartitionNotes(Protocol):
    """The small notes that cleanings of a partition leave, by name (`layout`)."""

    @property
    def place(self) -> str:
        """Their place, for messages."""

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
    """A whole log at one time, only read; it makes each partition's plan on first use.

    `root` is the directory, or the address. Where only a directory can answer a question, this
    class has the answer of a store.
    """

    verify: ClassVar = "`kafkalog verify {path} {topic}`"
    """What shows damage of a topic."""

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

    @property
    @abstractmethod
    def closing_min(self) -> int:
        """The least bytes for which the cleaner closes an active segment (`plan.closing_min`)."""

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


class LostRaceError(CleaningAborted):
    """Others have changed the log first; the round may be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """The order of one round, and who hears of it."""

    now_ms: int
    """The time of the round, but for leases of pins (C41)."""
    config: CleanerConfig
    stats: CleanerStats
    """The figures that it adds to; they name the partition."""
    check_abort: Callable[[], None]
    """Called with every chunk; it may raise."""
    time_ms: Callable[[], int]
    """Returns the time of what the round publishes."""
    ended_ms: Callable[[], int]
    """Notes in the figures how long the cleaning took so far; returns the time of its end."""
    is_forced: bool = False
    """Whether only pins of active readers hold the round back."""
    only_if_due: bool = False
    """Whether the plan under the lock must find the partition due."""
    erased: ErasedKeys | None = None
    """Keys whose tombstones wait for no delete horizon."""

    def is_wanted(self, plan: Plan) -> bool:
        """Return whether a round with this plan is to be made."""
        if self.only_if_due:
            return plan.is_eligible
        return plan.has_work or self.erased is not None


class Round(ABC):
    """One round of cleaning one partition: what it reads, and where its outputs go."""

    def __init__(
        self,
        order: RoundOrder,
        plan: Plan,
        *,
        snapshot: PartitionSnapshot,
        scratch: Path,
        sources: Sequence[Source],
        sources_end: int,
    ) -> None:
        """`scratch` is the directory for new segments and for temporary files.

        `sources` are the closed segments that reach above the log start, ascending, and
        `sources_end` is where the last of them ends.
        """
        self.order: Final = order
        self.plan: Final = plan
        self.snapshot: Final = snapshot
        self.scratch: Final = scratch
        self.sources: Final = sources
        self.sources_end: Final = sources_end
        self.end = plan.first_dirty_offset
        """Where the cleaning ends; known after the first pass."""

    def check(self) -> None:
        """Raise CleaningAborted if the round has to stop."""
        self.order.check_abort()

    @abstractmethod
    def active_producers(self) -> ActiveProducers:
        """Return the active producers as of now (C50)."""

    @abstractmethod
    def aborted_entries(self, base_offset: int) -> Iterable[AbortedTransaction]:
        """Return the transaction index of a segment; raises CorruptLogError."""

    @abstractmethod
    def key_index_of(self, segment: OpenSegment) -> AbstractContextManager[KeyIndex | None]:
        """Open the key index of a segment of the snapshot; None if it has no valid one."""

    @abstractmethod
    def add_finished(self, group: RewrittenGroup) -> None:
        """Take the finished outputs of a group, and discard those that nobody needs."""

    def swap_finished(self) -> None:  # noqa: B027
        """After a failure, publish what is finished, if a part of a round may be published."""

    @abstractmethod
    def finish(self, earliest_delete_horizon_ms: int | None) -> None:
        """Publish all outputs, and record that everything below `end` is clean."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the outputs that were not published."""


class Turn(Protocol):
    """One cleaner's turn at one partition, which no other cleaner takes meanwhile."""

    def begin(self, *, force: bool, now_ms: int) -> None:
        """Finish what a dead cleaner left; close the active segment by the plan, or `force`."""

    def round(self, order: RoundOrder) -> AbstractContextManager[Round | None]:
        """Plan and begin a round; None if nothing is to do."""

    def end(self, order: RoundOrder) -> None:
        """Note the success: the partition is not uncleanable, and what its rounds did."""


class Shelf(Protocol):
    """A log of either kind, as the cleaner works on it; partitions are those of here."""

    @property
    def place(self) -> str | StoreAddress:
        """The place at which another process finds the log; it holds no secret."""

    def check_cleanable(self) -> None:
        """Raise InvalidInputError where the log is only read, StorageError where it cannot be.

        Raises LockedByBrokerError while a broker holds it.
        """

    def announced(self) -> AbstractContextManager[None]:
        """Let other processes see, as far as they can, that a cleaner runs in the background."""

    def moment(self, now_ms: int) -> Moment:
        """Return the log as this process last knew it."""

    def topic_id(self, topic: str, partition: int) -> str | None:
        """Return the id of the topic if it has the partition here, else None."""

    def prepare(
        self,
        topic: str | None = None,
        partition: int | None = None,
        *,
        force: bool = False,
        now_ms: int,
        check_abort: Callable[[], None] = ...,
    ) -> list[CleanerStats]:
        """Make ready for a choice of what to clean; return the partitions that failed already.

        With `force` a topic, or all, are to be cleaned whole.
        """

    def check(self, topic: str, partition: int) -> None:
        """Raise CleaningAborted if the partition is paused."""

    def turn(
        self, topic: str, partition: int, *, now_ms: int, force: bool, waits: bool
    ) -> AbstractContextManager[Turn | None]:
        """Take the turn at a partition; None if another cleaner has it, or if it is paused.

        `waits` says whether to wait for another cleaner.
        """

    def mark(self, topic: str, partition: int, fault: Exception, *, now_ms: int) -> str | None:
        """Mark a partition uncleanable; return the reason, or None if it is another log now."""

    def tidy(self, *, now_ms: int) -> int:
        """Remove what nobody needs any more; return how many."""
