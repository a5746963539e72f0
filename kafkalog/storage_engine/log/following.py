"""The records of a topic as they are committed, without end.

One small read of the log's state tells whether there are new records. Kafka: KafkaConsumer.poll.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from kafkalog.errors import DataLossError, OffsetOutOfRangeError, UnknownTopicError
from kafkalog.storage_engine.reading import time_offsets

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

_KEPT_MAX: Final = 16
"""Partitions whose active segment stays open until the next commit."""
Read: TypeAlias = "Callable[[PartitionSnapshot, int, int], Iterator[pa.RecordBatch]]"


@dataclass(frozen=True, slots=True)
class Following:
    """A reader that follows a topic, and what it does when there is nothing to read."""

    log: ReadableLog
    topic: TopicState
    isolation_level: str
    read: Read
    """Yields the records of `[start, end)` of a snapshot, by ascending offsets."""
    wait: Callable[[], bool]
    """Called when there is nothing new; the following ends where it returns False."""
    lose: Callable[[int, int, int], None]
    """Called with (partition, start, end) of offsets that were deleted before they were read."""

    def batches(self, starts: Mapping[int, int], *, is_all: bool) -> Iterator[pa.RecordBatch]:
        """Yield records from `starts` {partition: offset} on, in the order of commits.

        With `is_all`, partitions that the topic gets later are followed too. Raises
        OffsetOutOfRangeError for a start that a partition does not have, and DataLossError if the
        topic is deleted, even if another one has its name. Raises CorruptBatchError, StorageError.
        """
        for number, start in starts.items():
            self.topic.check_has(number)
            held = self.topic.partitions[number]
            first, last = held.log_start_offset, held.high_watermark
            if not first <= start <= last:
                raise OffsetOutOfRangeError(self.topic.name, number, start, first, last)
        return self._batches(dict(starts), is_all)

    def _batches(self, following: dict[int, int], is_all: bool) -> Iterator[pa.RecordBatch]:
        kept: dict[int, PartitionSnapshot] = {}
        try:
            yield from self._all_batches(following, kept, is_all)
        finally:
            for snapshot in kept.values():
                snapshot.close()

    def _all_batches(
        self, following: dict[int, int], kept: dict[int, PartitionSnapshot], is_all: bool
    ) -> Iterator[pa.RecordBatch]:
        seen = None
        while True:
            state = self.log.state()
            if state is seen:
                if not self.wait():
                    return
                continue
            seen = state
            topic = state.topics.get(self.topic.name)
            if topic is None or topic.topic_id != self.topic.topic_id:
                self._raise_gone()
            for number, snapshot in list(kept.items()):
                if snapshot.state.active_base != topic.partitions[number].active_base:
                    kept.pop(number).close()  # it was closed, and a cleaner may remove it
            for number, held in topic.present():
                if is_all:
                    following.setdefault(number, held.log_start_offset)
                if number in following and not self._is_read(topic, number, following[number]):
                    try:
                        yield from self._new_records(number, held, following, kept)
                    except UnknownTopicError:
                        self._raise_gone()

    def _raise_gone(self) -> NoReturn:
        raise DataLossError(
            f"{self.log.root}: topic {self.topic.name!r} was deleted while it was followed"
        )

    def _is_read(self, topic: TopicState, number: int, offset: int) -> bool:
        held = topic.partitions[number]
        end = time_offsets.end_offset(held, self.isolation_level)
        return held.log_start_offset <= offset <= held.high_watermark and end <= offset

    @contextlib.contextmanager
    def _snapshot(
        self, number: int, held: PartitionState, start: int, kept: dict[int, PartitionSnapshot]
    ) -> Iterator[PartitionSnapshot]:
        """Yield a snapshot of a partition: the last one, grown to the state `held`, or another."""
        snapshot = kept.pop(number, None)
        if snapshot is not None and not snapshot.grow(held, start):
            snapshot.close()
            snapshot = None
        if snapshot is None:
            snapshot = self.log.snapshot(self.topic.name, number, start=start)
        with contextlib.ExitStack() as opened:
            opened.callback(snapshot.close)
            yield snapshot
            if len(kept) < _KEPT_MAX and snapshot.keep_active():
                kept[number] = snapshot
                opened.pop_all()

    def _new_records(
        self,
        number: int,
        held: PartitionState,
        following: dict[int, int],
        kept: dict[int, PartitionSnapshot],
    ) -> Iterator[pa.RecordBatch]:
        """Yield the visible records, and move `following` behind them."""
        start = following[number]
        try:
            with self._snapshot(number, held, start, kept) as snapshot:
                first = snapshot.state.log_start_offset
                if start < first:
                    self.lose(number, start, first)
                    start = following[number] = first
                end = max(start, time_offsets.end_offset(snapshot.state, self.isolation_level))
                for batch in self.read(snapshot, start, end):
                    following[number] = batch["offset"][-1].as_py() + 1
                    yield batch
                following[number] = end
        except OffsetOutOfRangeError as fault:
            # Retention deleted it while it was read, in a log with very many segments.
            if not following[number] <= fault.offset < fault.log_start:
                raise
            self.lose(number, fault.offset, fault.log_start)
            following[number] = fault.log_start
            yield from self._new_records(number, held, following, kept)
