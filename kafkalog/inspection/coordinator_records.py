"""Replay a partition of an internal topic as Kafka's coordinator does when it loads it.

A coordinator reads the whole partition, from the log start to its end, beyond open transactions
too. It keeps the latest record of each key. A record of a transaction is *pending* until the
producer's marker. A commit makes it count, unless a record of its key that is later in the log
counts by then; an abort drops it. A tombstone removes what counts and what is pending.

Memory holds the latest record of each key, and no more.

Kafka: CoordinatorLoaderImpl, OffsetMetadataManager.replay and replayEndTransactionMarker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.transactions.transaction_outcomes import control_types

if TYPE_CHECKING:
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
    from kafkalog.storage_engine.records.tables import RecordTable

_TYPE_SIZE: Final = 2
_NO_PRODUCER: Final = -1


class CoordinatorRecord(NamedTuple):
    """The latest record of a key: its offset in the partition, and its value."""

    offset: int
    value: bytes


_Records: TypeAlias = dict[bytes, CoordinatorRecord]


class CoordinatorReplay:
    """The records of one partition, as far as they were replayed.

    `latest` has the latest record of each key, without the types that `is_wanted` refuses. A type
    is the number in the first two bytes of a key. To find the key that means the same and counts,
    call `same_as`. The records are counted by type in `seen`. Records without a type have the
    number None.
    """

    def __init__(
        self, is_wanted: Callable[[int], bool], same_as: Callable[[bytes], bytes] = bytes
    ) -> None:
        self.latest: _Records = {}
        self.seen: Counter[int | None] = Counter()
        self._is_wanted = is_wanted
        self._same_as = same_as
        self._pending: dict[int, _Records] = {}

    def replay(self, snapshot: PartitionSnapshot) -> None:
        """Replay a partition; raises CorruptBatchError, StorageError."""
        state = snapshot.state
        start, end = state.log_start_offset, state.high_watermark
        snapshot.check_not_lost(start, end)
        for chunk in snapshot.chunks(start, end):
            self._chunk(chunk)

    def _chunk(self, chunk: Chunk) -> None:
        markers = list(_markers(chunk))
        for run, records in chunk.runs(~chunk.table.is_control):
            if not len(records):
                continue
            producers = run.table.producer_ids[records.batch_index].tolist()
            for offset, key, value, producer in _rows(records, producers):
                while markers and markers[0][0] < offset:
                    self._end(*markers.pop(0)[1:])
                if chunk.start <= offset < chunk.end:
                    self._record(offset, key, value, producer)
        for _, producer, type_number in markers:
            self._end(producer, type_number)

    def _record(self, offset: int, key: bytes | None, value: bytes | None, producer: int) -> None:
        if key is None or len(key) < _TYPE_SIZE:
            self.seen[None] += 1
            return
        number = int.from_bytes(key[:_TYPE_SIZE], "big", signed=True)
        self.seen[number] += 1
        if not self._is_wanted(number):
            return
        key = self._same_as(key)
        if value is None:
            self.latest.pop(key, None)
            for pending in self._pending.values():
                pending.pop(key, None)
        elif producer == _NO_PRODUCER:
            self.latest[key] = CoordinatorRecord(offset, value)
        else:
            self._pending.setdefault(producer, {})[key] = CoordinatorRecord(offset, value)

    def _end(self, producer: int, type_number: int) -> None:
        pending = self._pending.pop(producer, {})
        if type_number != layout.CONTROL_COMMIT:
            return
        for key, record in pending.items():
            counting = self.latest.get(key)
            if counting is None or record.offset > counting.offset:
                self.latest[key] = record


def _markers(chunk: Chunk) -> Iterator[tuple[int, int, int]]:
    """Yield (offset, producer, type) of each marker of a chunk."""
    table = chunk.table
    batches = np.flatnonzero(table.is_control & (table.counts > 0))
    if len(batches):
        for batch, number in zip(batches.tolist(), control_types(chunk, batches), strict=True):
            if number in (layout.CONTROL_ABORT, layout.CONTROL_COMMIT):
                yield int(table.base_offsets[batch]), int(table.producer_ids[batch]), number


def _rows(
    records: RecordTable, producers: list[int]
) -> Iterator[tuple[int, bytes | None, bytes | None, int]]:
    """Yield (offset, key, value, producer) of each record."""
    data = records.arena.tobytes()
    columns = (
        records.offsets,
        records.key_positions,
        records.key_sizes,
        records.value_positions,
        records.value_sizes,
    )
    rows = zip(*(column.tolist() for column in columns), producers, strict=True)
    for offset, key_at, key_size, value_at, value_size, producer in rows:
        key = None if key_size < 0 else data[key_at : key_at + key_size]
        value = None if value_size < 0 else data[value_at : value_at + value_size]
        yield offset, key, value, producer
