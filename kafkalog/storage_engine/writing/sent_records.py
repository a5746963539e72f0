"""The records of one commit of a producer: collected, committed, and then their offsets."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import Integers
    from kafkalog.storage_engine.writing.single_record import SingleRecord

UNKNOWN: Final = -1
_STATE_OF_A_FUTURE: Final = frozenset(vars(Future()))
_growing: Final = threading.Lock()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordMetadata:
    """The place of a record in the log, and its time in epoch ms.

    The offset, and a time that the log assigns, are -1 if a commit that seemed to fail was in the
    log after all. The record is there once, but its offset is unknown.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int


class SentRecords:
    """The records of one commit, in the order in which they were sent.

    Changes require the producer's lock.
    """

    def __init__(
        self, topic: str, number: int, wait: Callable[[SentRecords, float | None], None]
    ) -> None:
        """`wait` returns when the records are committed; see `SentRecord.result`."""
        self.number = number
        """Identifies the commit if it is repeated."""
        self.size = 0
        """Upper bound of the records' bytes before compression."""
        self.since_s = 0.0
        """When the first record came, in seconds of the monotonic clock."""
        self.records: list[SingleRecord] = []
        self.is_committed = False
        self.fault: BaseException | None = None
        """Why they are given up, if they are."""
        self._topic = topic
        self._calls: deque[Callable[[], None]] = deque()
        self._wait = wait
        self._partitions: Integers
        self._timestamps: Integers
        self._starts: Mapping[int, int]

    def __len__(self) -> int:
        return len(self.records)

    def add(self, record: SingleRecord, size: int) -> int:
        """Add a record, and return its place."""
        self.records.append(record)
        self.size += size
        return len(self.records) - 1

    def note_committed(
        self, partitions: Integers, timestamps: Integers, starts: Mapping[int, int]
    ) -> None:
        """Drop the records, and keep their places.

        partitions, timestamps: int64 (n,); starts: by partition, the offset of its first record
        """
        self._partitions, self._timestamps, self._starts = partitions, timestamps, starts
        self.records = []
        self.is_committed = True

    @property
    def is_ended(self) -> bool:
        """Whether they are committed, or given up."""
        return self.is_committed or self.fault is not None

    def at_end(self, call: Callable[[], None]) -> None:
        """Make a call once they are committed or given up: now, if they are. Needs no lock."""
        self._calls.append(call)
        if self.is_ended:
            self.tell_end()

    def tell_end(self) -> None:
        """Make the calls that wait for the end; not under the producer's lock."""
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread took it
                return
            try:
                call()
            except Exception:
                _log.exception("what was to be called after a commit failed")

    def metadata(self, place: int, timeout: float | None) -> RecordMetadata:
        """Wait for the commit, and return the metadata of the record with this index."""
        if not self.is_committed:
            self._wait(self, timeout)
        return RecordMetadata(
            self._topic,
            int(self._partitions[place]),
            int(self._offsets[place]),
            int(self._timestamps[place]),
        )

    @cached_property
    def _offsets(self) -> Integers:
        """int64 (n,), computed on demand."""
        import numpy as np

        offsets = np.full(len(self._partitions), UNKNOWN, dtype=np.int64)
        for partition, start in self._starts.items():
            places = np.flatnonzero(self._partitions == partition)
            offsets[places] = start + np.arange(len(places))
        return offsets


class SentRecord(Future[RecordMetadata]):
    """A record that `Producer.send` has accepted: a future, also for `asyncio.wrap_future`.

    It is done once the record is committed, or the closed producer gives it up. It cannot be
    cancelled.
    """

    __slots__ = ("_place", "_records")

    def __init__(self, records: SentRecords, place: int) -> None:
        # Most records are never waited for: what a future needs comes when it is asked for.
        self._records = records
        self._place = place

    def done(self) -> bool:
        """Return whether the record is committed, or given up."""
        return self._records.is_ended

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait until the record is committed, and return its metadata.

        Does not speed the commit up: the record waits for the rest of `linger_ms`. Raises
        TimeoutError after `timeout` seconds, and the error of the producer's last failed commit.
        The producer retries that commit until it is closed, so the record may still be written.
        """
        return self._records.metadata(self._place, timeout)

    def cancel(self) -> bool:
        """Return False: a record that was sent cannot be taken back."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Become a whole future, whose state has this name."""
        if name not in _STATE_OF_A_FUTURE:
            raise AttributeError(f"SentRecord has no attribute {name!r}")
        with _growing:
            is_first = "_condition" not in vars(self)
            if is_first:
                super().__init__()
        if is_first:
            self._records.at_end(self._end)
        return vars(self)[name]

    def _end(self) -> None:
        if self._records.fault is not None:
            self.set_exception(self._records.fault)
        else:
            self.set_result(self.result())
