"""The records of one commit of a producer: gathered, committed, and then where each of them is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import Integers
    from kafkalog.storage_engine.writing.single_record import SingleRecord

__all__ = ["UNKNOWN", "RecordMetadata", "SentRecord", "SentRecords"]

UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class RecordMetadata:
    """Where a record is in the log, and its time in epoch ms.

    The offset, and the time where the log gives it, are -1 where a commit that seemed to fail
    turned out to be in the log: the record is there, once, and nobody was told where.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int


class SentRecords:
    """The records of one commit, in the order in which they were sent.

    Who changes it holds the lock of the producer.
    """

    def __init__(
        self, topic: str, number: int, wait: Callable[[SentRecords, float | None], None]
    ) -> None:
        """`wait` returns when the records are committed; see `SentRecord.result`."""
        self.number = number
        """By which the commit is known, should it come again."""
        self.size = 0
        """The most bytes that the records take, before compression."""
        self.since_s = 0.0
        """When the first of them came: seconds of a clock that nobody sets."""
        self.records: list[SingleRecord] = []
        self.is_committed = False
        self._topic = topic
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
        """Let go of the records, and keep where they are.

        partitions, timestamps: int64 (n,); starts: by partition, the offset of its first record
        """
        self._partitions, self._timestamps, self._starts = partitions, timestamps, starts
        self.records = []
        self.is_committed = True

    def metadata(self, place: int, timeout: float | None) -> RecordMetadata:
        """Wait for the commit, and return where the record is that has this place."""
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
        """int64 (n,); few ask."""
        import numpy as np

        offsets = np.full(len(self._partitions), UNKNOWN, dtype=np.int64)
        for partition, start in self._starts.items():
            places = np.flatnonzero(self._partitions == partition)
            offsets[places] = start + np.arange(len(places))
        return offsets


class SentRecord:
    """A record that `Producer.send` has taken."""

    __slots__ = ("_place", "_records")

    def __init__(self, records: SentRecords, place: int) -> None:
        self._records = records
        self._place = place

    def done(self) -> bool:
        """Tell whether the record is committed."""
        return self._records.is_committed

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait until the record is committed, and return where it is.

        Nothing is hurried by it: it takes the rest of `linger_ms`, and a commit. Raises
        TimeoutError after `timeout` seconds, and what the producer's last commit failed with: that
        is tried again until the producer is closed, so the record may yet be written.
        """
        return self._records.metadata(self._place, timeout)
