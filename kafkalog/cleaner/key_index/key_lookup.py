"""Look up the latest records of keys without reading the log, for a table's `lookup`.

The segments of a partition are searched from the last to the first, until each key is found. A
cleaned segment is searched through its key index: two or three small reads for a key, and one
batch. For many keys the index is read whole, and kept. The segments after the last cleaning get an
index in memory (`tail_index`). Any other segment is scanned. In an object store each read is a
request, so a filter of the keys of each segment is fetched once, and kept (`key_filter`).

The result is that of `view=latest`: only committed records count, and a tombstone means no record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

import numpy as np

from kafkalog.cleaner.key_index.key_filter import KeyFilter
from kafkalog.cleaner.key_index.key_index import KeyIndex
from kafkalog.cleaner.key_index.tail_index import OFFSET_BYTES, TailIndex
from kafkalog.errors import (
    CorruptBatchError,
    InvalidInputError,
    KafkaLogError,
    UnknownTopicError,
)
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.whole_number import whole_number
from kafkalog.storage_engine.fs.locks import SegmentsLock
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.object_snapshot import ObjectSnapshot
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot
from kafkalog.storage_engine.reading.partition_snapshot import CHUNK_SIZE
from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
from kafkalog.storage_engine.records.murmur2 import murmur2_partitions, partition_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from kafkalog.cleaner.dedup.offset_map import Int64s
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import TopicState
    from kafkalog.storage_engine.object_store.side_object import SideObject
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
    from kafkalog.storage_engine.records.tables import RecordTable
    from kafkalog.storage_engine.segment.open_segment import OpenSegment
    from kafkalog.storage_engine.transactions.transaction_index import IndexedTransactions
    from kafkalog.storage_engine.transactions.transaction_outcomes import TransactionOutcomes

_ABORTED_MAX: Final = 1 << 20
"""Aborted transactions of a partition kept between lookups: 24 MiB."""
_FILTERS_MAX: Final = 64 << 20
"""Bytes of key filters of a partition that are kept: those of 32 million keys."""
_HELD_MAX: Final = 1 << 24
"""Entries of key indexes of a partition kept between lookups of many keys: 128 MiB."""
_TAILS_MAX: Final = 128 << 20
"""Bytes of the indexes of a topic's uncleaned records that are kept: of 5 million at least."""
_TOPICS_MAX: Final = 16
"""Topics of which a log keeps the lookup."""
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """The latest records of some keys, among those of a run."""

    run: Chunk
    records: RecordTable
    rows: Int64s
    """(m) the rows of the records."""
    numbers: Int64s
    """(m) the number of the key that each has."""


class KeyLookup:
    """Look up keys of one topic; a context manager.

    Each call sees what is committed. The files of a partition stay open until something is
    committed to it. Calls from several threads are safe.
    """

    def __init__(self, store: ReadableLog, topic: str) -> None:
        """Name the topic; raises UnknownTopicError."""
        store.describe(topic)
        self._store = store
        self._topic = topic
        self._open: dict[int, tuple[str, PartitionLookup]] = {}
        self._mutex = threading.Lock()
        self.is_closed = False
        """Whether `close` was called."""
        self.scanned_bytes = 0
        """Bytes of segments without a key index that were scanned, or read for an index of them."""

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
        partition = None if partition is None else whole_number("partition", partition)
        with self._mutex:
            topic = self._described()
            if partition is None:
                partition = partition_of(data, len(topic.partitions))
            found = self._latest(topic, partition, ChosenKeys([data]))
            return found.get(data)

    def get_many(
        self, keys: Iterable[bytes | str], *, partition: int | None = None
    ) -> dict[bytes | str, Record | None]:
        """Return the latest record of each key, as `get` does, for many keys at once.

        The result has the keys as they were given, in that order.
        """
        data = {key: key_bytes(key) for key in keys}
        partition = None if partition is None else whole_number("partition", partition)
        found: dict[bytes, Record] = {}
        with self._mutex:
            topic = self._described()
            for number, some in _by_partition(set(data.values()), topic, partition):
                found |= self._latest(topic, number, ChosenKeys(some))
        return {key: found.get(each) for key, each in data.items()}

    def _described(self) -> TopicState:
        if self.is_closed:
            raise InvalidInputError("this lookup of keys is closed: create another one")
        return self._store.describe(self._topic)

    def _latest(self, topic: TopicState, partition: int, keys: ChosenKeys) -> dict[bytes, Record]:
        """Return the latest record of each key that has one, and no tombstone."""
        held = self._partition(topic, partition)
        try:
            return {
                record.key: record
                for found in held.latest(keys)
                for record in held.records(found, keys)
                if record.value is not None
            }
        finally:
            self.scanned_bytes += held.take_scanned_bytes()

    def _partition(self, topic: TopicState, number: int) -> PartitionLookup:
        if number not in self._open:
            return self._opened(topic, number, None)
        topic_id, held = self._open[number]
        is_there = topic_id == topic.topic_id and 0 <= number < len(topic.partitions)
        is_same = is_there and held.snapshot.state == topic.partitions[number]
        if is_same and not self._is_replaced(held.snapshot):
            return held
        del self._open[number]
        try:  # the files stay open meanwhile, so that no other file gets the inode of one
            return self._opened(topic, number, held if topic_id == topic.topic_id else None)
        finally:
            held.close()
            held.snapshot.close()

    def _opened(
        self, topic: TopicState, number: int, before: PartitionLookup | None
    ) -> PartitionLookup:
        """Open a partition as it is now, with what is still true of what was known before."""
        snapshot = self._store.snapshot(topic.name, number, whole=True)
        tail = TailIndex() if before is None or before.tail is None else before.tail
        others = sum(held.tail.size for _, held in self._open.values() if held.tail is not None)
        try:
            if before is not None and isinstance(snapshot, ObjectSnapshot):
                assert isinstance(before.snapshot, ObjectSnapshot)
                snapshot.keep(before.snapshot.sides)
            held = PartitionLookup(snapshot, tail, tail_max=_TAILS_MAX - others)
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


class KeptLookups:
    """The lookups of the topics that were asked last, kept between calls; `close` it.

    Calls from several threads are safe, also while another one closes it: it opens files again.
    """

    def __init__(self, open_log: Callable[[], ReadableLog]) -> None:
        self._open_log = open_log
        self._mutex = threading.Lock()
        self._kept: dict[str, KeyLookup] = {}

    def ask(self, topic: str, ask: Callable[[KeyLookup], T]) -> T:
        """Return what `ask` makes of the lookup of a topic; raises UnknownTopicError."""
        while True:
            lookup = self._lookup(topic)
            try:
                return ask(lookup)
            except UnknownTopicError:
                self._close(lambda name: name == topic)
                raise
            except InvalidInputError:
                if not lookup.is_closed:  # else another thread has closed it
                    raise

    def close(self) -> None:
        """Close all files; the next lookup opens them again."""
        self._close(lambda _: True)

    def _lookup(self, topic: str) -> KeyLookup:
        with self._mutex:
            found = self._kept.pop(topic, None) or KeyLookup(self._open_log(), topic)
            self._kept[topic] = found
            oldest = next(iter(self._kept))
            is_full = len(self._kept) > _TOPICS_MAX
        if is_full:
            self._close(lambda name: name == oldest)
        return found

    def _close(self, is_chosen: Callable[[str], bool]) -> None:
        with self._mutex:
            closed = [self._kept.pop(name) for name in [*self._kept] if is_chosen(name)]
        for lookup in closed:
            lookup.close()


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


def _by_partition(
    keys: Collection[bytes], topic: TopicState, partition: int | None
) -> Iterator[tuple[int, Sequence[bytes]]]:
    """Yield partitions with the keys that Kafka's default partitioner sends there."""
    every = list(keys)
    if partition is not None or len(topic.partitions) == 1:
        yield partition or 0, every
        return
    import pyarrow as pa

    numbers = murmur2_partitions(pa.array(every, pa.binary()), len(topic.partitions))
    order = np.argsort(numbers, kind="stable").tolist()
    for number, group in groupby(order, key=lambda place: int(numbers[place])):
        yield number, [every[place] for place in group]


class PartitionLookup:
    """Look up keys in a snapshot, opened whole, that stays open; `close` it."""

    def __init__(
        self, snapshot: PartitionSnapshot, tail: TailIndex | None = None, *, tail_max: int = 0
    ) -> None:
        """Without a `tail`, which may take `tail_max` bytes, uncleaned segments are scanned."""
        self.snapshot = snapshot
        self.tail = tail
        self._tail_max = tail_max
        self._is_followed = False
        self._segments: Sequence[OpenSegment] | None = None
        self._indexes: dict[int, KeyIndex] = {}
        self._aborted: IndexedTransactions | None = None
        """The transaction indexes, loaded on first use."""
        self._held_count = 0
        self._scanned_bytes = 0
        self._filters_left = _FILTERS_MAX
        try:
            if not isinstance(snapshot, DirectorySnapshot):
                return  # an object store's are opened when they are asked
            if snapshot.state.listed_from == layout.INT64_MAX:
                self.tail = None
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

    def latest(self, keys: ChosenKeys, end: int = layout.INT64_MAX) -> Iterator[FoundRecords]:
        """Yield the latest record of each key below `end`, tombstones too, in pieces.

        The pieces come in no order. A key without a record is in none. Raises CorruptBatchError,
        StorageError.
        """
        try:
            yield from self._latest(keys, min(end, self.snapshot.state.last_stable_offset))
        except KafkaLogError:
            self._aborted = None  # the indexes may be at fault, and be repaired later
            raise

    def _latest(self, keys: ChosenKeys, end: int) -> Iterator[FoundRecords]:
        span = self.snapshot.state.log_start_offset, end
        search_of = partial(_Search, keys, np.ones(len(keys), dtype=np.bool_), span)
        segments = self._whole_segments()
        tail = self._followed(segments)
        if tail is not None and (yield from self._in_tail(tail, segments, search_of)):
            segments = [each for each in segments if each.base_offset < tail.base_offset]
        for segment in reversed(segments):
            if segment.base_offset >= end or segment.end_offset <= span[0]:
                continue
            search = search_of(segment)
            if not search.is_left.any():
                return
            index = self._index(segment)
            if index is not None:
                found = self._places(index, search)
                if found is not None and (yield from self._at(search, *found)):
                    continue
                del self._indexes[segment.base_offset]  # damaged: the segment may be whole
                index.close()
            yield from self._scanned(search)

    def _whole_segments(self) -> Sequence[OpenSegment]:
        if self._segments is None:
            self._segments = self.snapshot.whole_segments()
        return self._segments

    def _followed(self, segments: Sequence[OpenSegment]) -> TailIndex | None:
        """Return the index of the last segments, up to date; None if they must be scanned."""
        if self.tail is None or not segments:
            return None
        if self._is_followed:
            return self.tail
        first = len(segments)
        while first and self._index(segments[first - 1]) is None:
            first -= 1
        if not self.tail.is_worth_reading(segments[first:]):
            return None
        state = self.snapshot.state
        span = state.log_start_offset, state.high_watermark
        begin = segments[first].base_offset if first < len(segments) else span[1]
        if (span[1] - max(begin, span[0])) * OFFSET_BYTES > self._tail_max:
            self.tail = None
            return None
        try:
            self._count_scanned(self.tail.follow(segments[first:], span))
        except KafkaLogError:  # a scan says of which keys it hides the latest record
            self.tail = None
        self._is_followed = True
        return self.tail

    def _in_tail(
        self,
        tail: TailIndex,
        segments: Sequence[OpenSegment],
        search_of: Callable[[OpenSegment], _Search],
    ) -> Generator[FoundRecords, None, bool]:
        """Search the last segments; return whether the batches of their index are there.

        The last batch of each key comes first.
        """
        by_base = {each.base_offset: each for each in segments}
        search = search_of(segments[-1])
        left: Int64s = np.arange(len(search.keys))
        hashes = tail.hashes(search.keys)
        before = np.full(len(left), tail.batches_below(search.span[1]), dtype=np.int64)
        while len(left):
            batches = tail.last_before(hashes, before)
            is_there = batches >= 0
            left, hashes, before = left[is_there], hashes[is_there], batches[is_there]
            for base_offset, rows, positions in tail.places(before):
                search = search_of(by_base[base_offset])
                if not (yield from self._in_batches(search, left[rows], positions)):
                    self.tail = None
                    return False
            is_left = search.is_left[left]
            left, hashes, before = left[is_left], hashes[is_left], before[is_left]
        return True

    def _places(self, index: KeyIndex, search: _Search) -> tuple[Int64s, Int64s] | None:
        """Return the keys that are left and the batches that may have them; None for damage."""
        left = np.flatnonzero(search.is_left)
        hashes = index.hashes(search.keys)[left]
        order = np.argsort(hashes)
        is_held = index.is_worth_reading(len(left)) and self._held_count + index.count <= _HELD_MAX
        if is_held and isinstance(self.snapshot, DirectorySnapshot) and index.hold():
            self._held_count += index.count
        found = index.places_of(hashes[order])
        return None if found is None else (left[order][found[0]], found[1])

    def _at(
        self, search: _Search, numbers: Int64s, positions: Int64s
    ) -> Generator[FoundRecords, None, bool]:
        """Search the batches at positions, each for a key; return whether the batches are there.

        The last batch of each key comes first. Few keys have a second one.
        """
        while len(numbers):
            order = np.lexsort((-positions, numbers))
            numbers, positions = numbers[order], positions[order]
            is_last = np.diff(numbers, prepend=-1) != 0
            asked, places = numbers[is_last], positions[is_last]
            order = np.argsort(places, kind="stable")
            if not (yield from self._in_batches(search, asked[order], places[order])):
                return False
            rest = ~is_last & search.is_left[numbers]
            numbers, positions = numbers[rest], positions[rest]
        return True

    def _in_batches(
        self, search: _Search, numbers: Int64s, positions: Int64s
    ) -> Generator[FoundRecords, None, bool]:
        """Search the batches at ascending positions, each for a key; return if they are there."""
        batches, batch_of = np.unique(positions, return_inverse=True)
        first = 0
        with self._outcomes() as outcomes:
            for chunk in search.segment.batches_at(batches.tolist(), CHUNK_SIZE):
                if chunk is None:
                    return False
                try:
                    is_wanted = ~chunk.table.is_control & ~outcomes.is_aborted_apart(chunk)
                    for run, records in chunk.runs(is_wanted):
                        here = (batch_of >= first) & (batch_of < first + len(run.table))
                        found = search.found(run, records, numbers[here], batch_of[here] - first)
                        first += len(run.table)
                        if found is not None:
                            yield found
                except CorruptBatchError:
                    if len(batches) > 1:  # the error of the batch alone names its position
                        for each in batches[first : first + len(chunk.table)]:
                            yield from self._in_batches(search, numbers[:0], each.reshape(1))
                    raise
        return True

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
        """Return the filter of a segment object; None without one, or if no more are kept.

        Without another segment it would spare nothing.
        """
        if len(self.snapshot.whole_segments()) < 2:
            return None
        size = side.size_of(layout.STORED_FILTER)
        if not 0 < size <= self._filters_left:
            return None
        self._filters_left -= size
        return KeyFilter(side.kept_section(layout.STORED_FILTER))

    def _scanned(self, search: _Search) -> Iterator[FoundRecords]:
        """Search a segment that has no index: once for the offsets, then for the records."""
        segment, (start, end) = search.segment, search.span
        offsets = np.full(len(search.keys), -1, dtype=np.int64)
        first = max(start, segment.base_offset)
        with self._outcomes() as outcomes:
            for chunk in segment.chunks(first, min(end, segment.end_offset), CHUNK_SIZE):
                self._count_scanned(int(chunk.table.sizes.sum()))
                is_wanted = ~chunk.table.is_control & ~outcomes.is_aborted(chunk)
                for _, records in chunk.runs(is_wanted):
                    is_within = (records.offsets >= start) & (records.offsets < end)
                    rows, numbers = search.keys.find(records, np.flatnonzero(is_within))
                    offsets[numbers] = records.offsets[rows]  # the last one of a key stays
        numbers = np.flatnonzero(search.is_left & (offsets >= 0))
        numbers = numbers[np.argsort(offsets[numbers])]
        search.is_left[numbers] = False
        while len(numbers):
            wanted = offsets[numbers]
            chunk = next(segment.chunks(int(wanted[0]), int(wanted[-1]) + 1, CHUNK_SIZE))
            has_wanted = wanted.searchsorted(chunk.table.base_offsets) < wanted.searchsorted(
                chunk.table.last_offsets, side="right"
            )
            for run, records in chunk.runs(has_wanted):
                rows = np.minimum(records.offsets.searchsorted(wanted), len(records) - 1)
                is_here = records.offsets[rows] == wanted if len(records) else wanted < 0
                if is_here.any():
                    yield FoundRecords(run, records, rows[is_here], numbers[is_here])
            numbers = numbers[wanted > chunk.table.last_offsets[-1]]

    def _count_scanned(self, size: int) -> None:
        self._scanned_bytes += size
        if self.tail is not None:
            self.tail.scanned_bytes += size

    def _outcomes(self) -> TransactionOutcomes:
        if self._aborted is None:
            self._aborted = self.snapshot.indexed_transactions(kept_max=_ABORTED_MAX)
        return self.snapshot.transaction_outcomes(self._aborted)

    def records(self, found: FoundRecords, keys: ChosenKeys) -> Iterator[Record]:
        """Yield the found records one by one."""
        rows, table = found.rows, found.records
        topic, partition = self.snapshot.topic, self.snapshot.partition
        headers = self._headers(found)
        arena = table.arena.data
        for number, offset, timestamp_ms, position, size, some in zip(
            found.numbers.tolist(),
            table.offsets[rows].tolist(),
            table.timestamps[rows].tolist(),
            table.value_positions[rows].tolist(),
            table.value_sizes[rows].tolist(),
            headers,
            strict=True,
        ):
            value = None if size < 0 else bytes(arena[position : position + size])
            key = keys.keys[number]
            yield Record(topic, partition, offset, timestamp_ms, key, value, some)

    def _headers(self, found: FoundRecords) -> Iterable[tuple[tuple[str, bytes | None], ...]]:
        """Return the headers of each record."""
        positions = found.records.header_positions[found.rows]
        if not (found.records.arena[positions[positions >= 0]] != 0).any():
            return [()] * len(positions)
        from kafkalog.schema import chosen_columns
        from kafkalog.storage_engine.records.records import to_arrow

        batch = to_arrow(
            found.records,
            found.run.table,
            found.rows,
            schema=chosen_columns(["headers"]),
            topic=self.snapshot.topic,
            partition=self.snapshot.partition,
        )
        return [
            tuple((header["key"], header["value"]) for header in headers or ())
            for headers in batch["headers"].to_pylist()
        ]


@dataclass(frozen=True, slots=True)
class _Search:
    """The search of one segment for the keys that are left."""

    keys: ChosenKeys
    is_left: npt.NDArray[np.bool_]
    """Which keys are not found yet (k); `found` clears what it finds."""
    span: tuple[int, int]
    """The offsets [start, end) that count."""
    segment: OpenSegment

    def found(
        self, run: Chunk, records: RecordTable, numbers: Int64s, batches: Int64s
    ) -> FoundRecords | None:
        """Search one batch of a run for each of some keys; None if no batch has its key."""
        firsts = records.batch_index.searchsorted(batches.astype(np.int32))
        stops = records.batch_index.searchsorted(batches.astype(np.int32), side="right")
        rows = self.keys.last_rows(records, numbers, firsts, stops, self.span)
        is_found = rows >= 0
        if not is_found.any():
            return None
        rows, numbers = rows[is_found], numbers[is_found]
        self.is_left[numbers] = False
        return FoundRecords(run, records, rows, numbers)
