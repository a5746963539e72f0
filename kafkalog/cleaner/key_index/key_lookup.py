"""Look up the latest record of one key without reading the log, for a table's `lookup`.

The segments of the key's partition are searched from the last to the first, until one has the key.
A cleaned segment is searched through its key index: two or three small reads, and one batch. A
segment without an index is scanned. In an object store each read is a request, so a filter of the
keys of each segment is fetched once, and kept (`key_filter`).

The result is that of `view=latest`: only committed records count, and a tombstone means no record.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from kafkalog.cleaner.key_index.key_filter import KeyFilter
from kafkalog.cleaner.key_index.key_index import KeyIndex
from kafkalog.errors import InvalidInputError, KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs.locks import SegmentsLock
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.object_snapshot import ObjectSnapshot
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot
from kafkalog.storage_engine.reading.partition_snapshot import CHUNK_SIZE
from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
from kafkalog.storage_engine.records.murmur2 import partition_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from kafkalog.storage_engine.log.log_store import LogStore
    from kafkalog.storage_engine.metadata.state import TopicState
    from kafkalog.storage_engine.object_store.side_object import SideObject
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
    from kafkalog.storage_engine.records.tables import Integers, RecordTable
    from kafkalog.storage_engine.segment.open_segment import OpenSegment
    from kafkalog.storage_engine.transactions.transaction_index import IndexedTransactions
    from kafkalog.storage_engine.transactions.transaction_outcomes import TransactionOutcomes

_ABORTED_MAX: Final = 1 << 20
"""Aborted transactions of a partition kept between lookups: 24 MiB."""
_FILTERS_MAX: Final = 64 << 20
"""Bytes of key filters of a partition that are kept: those of 32 million keys."""
_INDEXED_SIZE: Final = 1 << 16
"""Estimated bytes of one index lookup: some blocks and a batch."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a topic."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    """Epoch milliseconds; -1 if the record has none."""
    key: bytes
    value: bytes | None
    """None for a tombstone."""
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def is_tombstone(self) -> bool:
        """Whether the record deletes its key."""
        return self.value is None


class KeyLookup:
    """Look up keys of one topic; a context manager.

    Each call sees what is committed. The files of a partition stay open until something is
    committed to it. Calls from several threads are safe.
    """

    def __init__(self, store: LogStore, topic: str) -> None:
        """Name the topic; raises UnknownTopicError."""
        store.describe(topic)
        self._store = store
        self._topic = topic
        self._open: dict[int, tuple[str, PartitionLookup]] = {}
        self._mutex = threading.Lock()
        self.is_closed = False
        """Whether `close` was called."""
        self.scanned_bytes = 0
        """Bytes of segments without a key index that were scanned."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files, for good."""
        with self._mutex:
            self.is_closed = True
            for number in list(self._open):
                self._close(number)

    def get(self, key: bytes | str, *, partition: int | None = None) -> Record | None:
        """Return the latest record of a key; None if it has no record, or a tombstone.

        Text is encoded as UTF-8. The key is searched where Kafka's default partitioner puts it, or
        in `partition`. Raises InvalidInputError for an invalid key or partition, and after `close`;
        CorruptLogError, StorageError.
        """
        data = key_bytes(key)
        partition = None if partition is None else _partition_number(partition)
        with self._mutex:
            if self.is_closed:
                raise InvalidInputError("this lookup of keys is closed: create another one")
            topic = self._store.describe(self._topic)
            if partition is None:
                partition = partition_of(data, len(topic.partitions))
            held = self._partition(topic, partition)
            record = held.latest(data)
            self.scanned_bytes += held.take_scanned_bytes()
            return record

    def _partition(self, topic: TopicState, number: int) -> PartitionLookup:
        sides: Mapping[str, SideObject] = {}
        if number in self._open:
            topic_id, held = self._open[number]
            is_there = topic_id == topic.topic_id and 0 <= number < len(topic.partitions)
            is_same = is_there and held.snapshot.state == topic.partitions[number]
            if is_same and not self._is_replaced(held.snapshot):
                return held
            if isinstance(held.snapshot, ObjectSnapshot):
                sides = held.snapshot.sides
            self._close(number)
        snapshot = self._store.snapshot(topic.name, number, whole=True)
        if isinstance(snapshot, ObjectSnapshot):
            snapshot.keep(sides)
        try:
            held = PartitionLookup(snapshot)
        except BaseException:
            snapshot.close()
            raise
        self._open[number] = topic.topic_id, held
        return held

    def _is_replaced(self, snapshot: PartitionSnapshot) -> bool:
        """Return whether a regrouping took the objects of a snapshot, which may be deleted soon."""
        if isinstance(self._store, ObjectLog) and isinstance(snapshot, ObjectSnapshot):
            return not snapshot.is_of(self._store.known_state)
        return False

    def _close(self, number: int) -> None:
        _, held = self._open.pop(number)
        held.close()
        held.snapshot.close()


def key_bytes(key: bytes | str) -> bytes:
    """Return the bytes of a key; raises InvalidInputError for another type or invalid text."""
    if not isinstance(key, bytes | bytearray | memoryview | str):
        raise InvalidInputError(f"a key is bytes or text, found {type(key).__name__}")
    try:
        return key.encode() if isinstance(key, str) else bytes(key)
    except UnicodeEncodeError:
        raise InvalidInputError(
            f"the key {key!r} cannot be encoded as UTF-8: give its bytes"
        ) from None


def _partition_number(partition: int) -> int:
    try:
        if not isinstance(partition, bool):
            return operator.index(partition)
    except TypeError:
        pass
    raise InvalidInputError(f"a partition is a whole number, found {partition!r}")


class PartitionLookup:
    """Look up keys in a snapshot, opened whole, that stays open; `close` it."""

    def __init__(self, snapshot: PartitionSnapshot) -> None:
        self.snapshot = snapshot
        self._indexes: dict[int, KeyIndex] = {}
        self._aborted: IndexedTransactions | None = None
        """The transaction indexes, loaded on first use."""
        self._scanned_bytes = 0
        self._filters_left = _FILTERS_MAX
        try:
            if not isinstance(snapshot, DirectorySnapshot):
                return  # an object store's are opened when they are asked
            if snapshot.state.listed_from == layout.INT64_MAX:
                return  # a broker's log: it has no index, and the broker ignores our locks
            with SegmentsLock(snapshot.directory).shared():
                for segment in snapshot.whole_segments():
                    index = KeyIndex.open(snapshot.directory, segment)
                    if index is not None:
                        self._indexes[segment.base_offset] = index
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the key indexes."""
        for index in self._indexes.values():
            index.close()

    def take_scanned_bytes(self) -> int:
        """Return the bytes that were scanned since the last call."""
        count, self._scanned_bytes = self._scanned_bytes, 0
        return count

    def is_less_work(self, key_count: int) -> bool:
        """Return whether `key_count` lookups read less than the whole partition."""
        segments = self.snapshot.whole_segments()
        size = sum(segment.limit for segment in segments)
        scanned = sum(s.limit for s in segments if s.base_offset not in self._indexes)
        return key_count * (scanned + len(self._indexes) * _INDEXED_SIZE) < size

    def latest(self, key: bytes, end: int = layout.INT64_MAX) -> Record | None:
        """Return the latest record of a key below `end`; None for no record, or a tombstone."""
        found = self.latest_or_tombstone(key, end)
        return None if found is None or found.is_tombstone else found

    def latest_or_tombstone(self, key: bytes, end: int = layout.INT64_MAX) -> Record | None:
        """Return the latest record of a key below `end`; None for no record."""
        try:
            return self._latest(key, min(end, self.snapshot.state.last_stable_offset))
        except KafkaLogError:
            self._aborted = None  # the indexes may be at fault, and be repaired later
            raise

    def _latest(self, key: bytes, end: int) -> Record | None:
        start = self.snapshot.state.log_start_offset
        for segment in reversed(self.snapshot.whole_segments()):
            if segment.base_offset >= end or segment.end_offset <= start:
                continue
            found = self._of_segment(segment, key, start, end)
            if found is not None:
                return found
        return None

    def _of_segment(self, segment: OpenSegment, key: bytes, start: int, end: int) -> Record | None:
        base_offset = segment.base_offset
        index = self._index(segment)
        positions = None if index is None else index.positions(key)
        for position in reversed(positions or ()):
            chunk = segment.batch_at(position)
            if chunk is None:
                positions = None
                break
            with self._outcomes() as outcomes:
                found = self._of_chunk(chunk, outcomes, key, start, end)
            if found is not None:
                return found
        if positions is not None:
            return None
        if index is not None:  # it is damaged: the segment itself may be whole
            del self._indexes[base_offset]
            index.close()
        return self._scanned(segment, key, start, end)

    def _index(self, segment: OpenSegment) -> KeyIndex | None:
        """Return the index of a segment; that of a segment object is asked for by a request."""
        found = self._indexes.get(segment.base_offset)
        if found is not None or not isinstance(self.snapshot, ObjectSnapshot):
            return found
        side = self.snapshot.side(segment)
        if side is not None:
            keys = self._filter(side)
            found = KeyIndex.of(side.source(layout.KEYS), segment, keys=keys)
        if found is not None:
            self._indexes[segment.base_offset] = found
        return found

    def _filter(self, side: SideObject) -> KeyFilter | None:
        """Return the filter of a segment object; None if there is none, or no more are kept.

        Without another segment it would spare nothing.
        """
        if len(self.snapshot.whole_segments()) < 2:
            return None
        size = side.size_of(layout.FILTER)
        if not 0 < size <= self._filters_left:
            return None
        self._filters_left -= size
        return KeyFilter(side.kept_section(layout.FILTER))

    def _scanned(self, segment: OpenSegment, key: bytes, start: int, end: int) -> Record | None:
        latest: Record | None = None
        first = max(start, segment.base_offset)
        with self._outcomes() as outcomes:
            for chunk in segment.chunks(first, min(end, segment.end_offset), CHUNK_SIZE):
                self._scanned_bytes += int(chunk.table.sizes.sum())
                latest = self._of_chunk(chunk, outcomes, key, start, end) or latest
        return latest

    def _outcomes(self) -> TransactionOutcomes:
        if self._aborted is None:
            self._aborted = self.snapshot.indexed_transactions(kept_max=_ABORTED_MAX)
        return self.snapshot.transaction_outcomes(self._aborted)

    def _of_chunk(
        self, chunk: Chunk, outcomes: TransactionOutcomes, key: bytes, start: int, end: int
    ) -> Record | None:
        """Return the last record of a key in a chunk, possibly a tombstone."""
        is_wanted: npt.NDArray[np.bool_] = (chunk.table.attributes & layout.CONTROL_BIT) == 0
        is_wanted &= ~outcomes.is_aborted(chunk)
        found: Record | None = None
        chosen = ChosenKeys([key])
        for run, records in chunk.runs(is_wanted):
            is_within = (records.offsets >= start) & (records.offsets < end)
            rows = chosen.rows(records, np.flatnonzero(is_within))
            if len(rows):
                found = self._record(run, records, int(rows[-1]))
        return found

    def _record(self, run: Chunk, records: RecordTable, row: int) -> Record:
        def field(positions: Integers, sizes: Integers) -> bytes:
            start = int(positions[row])
            return records.arena[start : start + int(sizes[row])].tobytes()

        is_tombstone = int(records.value_sizes[row]) < 0
        return Record(
            self.snapshot.topic,
            self.snapshot.partition,
            int(records.offsets[row]),
            int(records.timestamps[row]),
            field(records.key_positions, records.key_sizes),
            None if is_tombstone else field(records.value_positions, records.value_sizes),
            self._headers(run, records, row),
        )

    def _headers(
        self, run: Chunk, records: RecordTable, row: int
    ) -> tuple[tuple[str, bytes | None], ...]:
        position = int(records.header_positions[row])
        if position < 0 or records.arena[position] == 0:
            return ()
        from kafkalog.schema import chosen_columns
        from kafkalog.storage_engine.records.records import to_arrow

        batch = to_arrow(
            records,
            run.table,
            np.array([row], dtype=np.int64),
            schema=chosen_columns(["headers"]),
            topic=self.snapshot.topic,
            partition=self.snapshot.partition,
        )
        (headers,) = batch["headers"].to_pylist()
        return tuple((header["key"], header["value"]) for header in headers or ())
