"""The records of one commit of a producer: collected, committed, and then their offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import Integers
    from kafkalog.storage_engine.writing.single_record import SingleRecord

UNKNOWN: Final = -1


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
        """Drop the records, and keep their places.

        partitions, timestamps: int64 (n,); starts: by partition, the offset of its first record
        """
        self._partitions, self._timestamps, self._starts = partitions, timestamps, starts
        self.records = []
        self.is_committed = True

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


class SentRecord:
    """A record that `Producer.send` has accepted."""

    __slots__ = ("_place", "_records")

    def __init__(self, records: SentRecords, place: int) -> None:
        self._records = records
        self._place = place

    def done(self) -> bool:
        """Return whether the record is committed."""
        return self._records.is_committed

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait until the record is committed, and return its metadata.

        Does not speed the commit up: the record waits for the rest of `linger_ms`. Raises
        TimeoutError after `timeout` seconds, and the error of the producer's last failed commit.
        The producer retries that commit until it is closed, so the record may still be written.
        """
        return self._records.metadata(self._place, timeout)
