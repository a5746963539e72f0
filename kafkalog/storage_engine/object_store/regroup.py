"""Regrouping: mixed objects become segment objects, a few large ones for each partition.

An input is fetched whole, by one request, into a temporary file. The segments of a partition are
then written from these files, one after the other. A batch is copied as it is, with its true offset
and epoch. One commit names the outputs in place of the inputs. It is made only if the log still has
all inputs. If segment objects are merged, their aborted transactions and producers go along. That
takes one more request for each of them.

Kafka has no counterpart: there the segments of a partition are written at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.stamping import stamp_run
from kafkalog.storage_engine.fs import c_library, files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.failure import ObjectMissingError, SweptError
from kafkalog.storage_engine.object_store.segment_object import (
    SEGMENT_SIZE_MAX,
    SegmentObject,
    put_segment,
)
from kafkalog.storage_engine.object_store.side_object import SideObject
from kafkalog.storage_engine.object_store.store_draft import is_live
from kafkalog.storage_engine.object_store.store_state import Extent, PlacedExtent
from kafkalog.storage_engine.segment.index_builder import IndexBuilder
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    parse_transactions,
    transaction_entry,
)

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
    from kafkalog.storage_engine.object_store.client import ObjectClient
    from kafkalog.storage_engine.object_store.store_state import StoreState
    from kafkalog.storage_engine.records.tables import BatchTable, Integers

REGROUP_BYTES: Final = 1 << 30
"""Bytes of the inputs of one regrouping; it takes twice as many of the disk meanwhile."""
_STEP: Final = 1 << 20
"""Bytes of an extent that are in memory at a time, unless a batch has more."""
REQUESTS: Final = 4
"""Objects that are read, or written, side by side; one that is read takes more than 1 MiB."""


@dataclass(frozen=True, slots=True)
class Regrouped:
    """The result of a regrouping."""

    objects: int
    """Mixed objects that are replaced."""
    bytes_read: int
    segments: int
    """Segment objects that replace them."""
    is_lost: bool
    """Whether another process was quicker, so that nothing was changed."""


class SwappingLog(Protocol):
    """The part of an `ObjectLog` that a regrouping needs; it regroups by itself at its limit."""

    client: ObjectClient

    @property
    def known_state(self) -> StoreState:
        """The last known state."""

    def store_state(self) -> StoreState:
        """Return the newest state."""

    def swap(
        self, sources: Sequence[str], outputs: Sequence[SegmentObject], *, now_ms: int
    ) -> bool:
        """Replace objects by segment objects; return whether that was done."""

    def discard_segments(
        self, outputs: Iterable[SegmentObject], fault: Exception | None = None
    ) -> None:
        """Delete those segment objects that no commit names."""


def fresh_objects(state: StoreState) -> list[str]:
    """Return the mixed objects of a state, in the order in which they were committed."""
    found = [name for name in state.objects if not layout.is_stored_segment(name)]
    return sorted(found, key=lambda name: (state.objects[name].added_at, name))


def regroup(
    log: SwappingLog,
    names: Sequence[str],
    *,
    now_ms: int,
    check_abort: Callable[[], None] = lambda: None,
) -> Regrouped:
    """Replace objects of the last known state by segment objects, in one commit.

    They are mixed objects, or small segment objects without gaps, which become larger ones.

    The objects are taken in their order, as far as they have `REGROUP_BYTES`; one is always taken.
    Calls `check_abort` for each partition, which may raise. Raises CorruptBatchError, StorageError,
    and CommitInDoubtError; nothing is changed then, or the commit is in doubt.
    """
    state = log.known_state
    inputs = _fitting(state, names)
    size = sum(state.objects[name].size for name in inputs)
    with contextlib.ExitStack() as stack:
        with files.disk_faults(Path("the directory for temporary files")):
            directory = stack.enter_context(files.scratch_directory())
        pool = stack.enter_context(ThreadPoolExecutor(REQUESTS, "kafkalog-regroup"))
        outputs: list[SegmentObject] = []
        try:
            with files.disk_faults(directory):
                work = _Regrouping(log.client, state, directory, pool, outputs)
                work.fetch(inputs)
                c_library.give_back_memory()
                work.write(inputs, check_abort)
            is_done = log.swap(inputs, outputs, now_ms=now_ms)
        except Exception as fault:
            log.discard_segments(outputs, fault)
            if not is_replaced(log, inputs, fault):
                raise
            is_done = False
        log.discard_segments(outputs)  # those that were left out, or all
    c_library.give_back_memory()
    return Regrouped(len(inputs), size, len(outputs), is_lost=not is_done)


def is_replaced(log: SwappingLog, names: Sequence[str], fault: Exception) -> bool:
    """Return whether others were quicker, so that an object is missing, or an output was swept.

    Sends a request if an object is missing. Raises StorageError.
    """
    if isinstance(fault, SweptError):
        return True
    if not isinstance(fault, ObjectMissingError):
        return False
    live = log.store_state().objects
    return any(name not in live for name in names)


def _fitting(state: StoreState, names: Sequence[str]) -> list[str]:
    inputs: list[str] = []
    size = 0
    for name in names:
        size += state.objects[name].size
        if inputs and size > REGROUP_BYTES:
            break
        inputs.append(name)
    return inputs


@dataclass(frozen=True, slots=True)
class _Transactions:
    """The transactions of segment objects, from their side objects."""

    aborted: Sequence[AbortedTransaction] = ()
    producers: bytes = b""
    """The content of a producer snapshot; empty if there is none."""
    producers_at: int = -1
    """The offset of that snapshot."""

    def sections(self, extent: Extent) -> dict[str, bytes]:
        """Return the sections of a segment."""
        found = {}
        ended = [each for each in self.aborted if extent.has_end(each.last_offset + 1)]
        if ended:
            found[layout.TRANSACTION_INDEX] = b"".join(map(transaction_entry, ended))
        if self.producers and extent.has_end(self.producers_at):
            found[layout.SNAPSHOT] = self.producers
        return found


class _Regrouping:
    """The files of one regrouping, and its outputs as they are finished."""

    def __init__(
        self,
        client: ObjectClient,
        state: StoreState,
        directory: Path,
        pool: ThreadPoolExecutor,
        outputs: list[SegmentObject],
    ) -> None:
        self._client = client
        self._state = state
        self._directory = directory
        self._pool = pool
        self._outputs = outputs
        self._inputs: dict[str, Path] = {}
        self._sides: dict[str, SideObject] = {}
        """The objects next to those inputs that are segment objects."""
        self._count = 0
        self._waiting: list[Future[SegmentObject]] = []

    def fetch(self, inputs: Sequence[str]) -> None:
        """Fetch all inputs into files."""
        for number, name in enumerate(inputs):
            self._inputs[name] = self._directory / f"{number}.mixed"
            if layout.is_stored_segment(name):
                self._sides[name] = SideObject(self._client, layout.stored_side(name))
        for _ in self._pool.map(self._fetch, inputs):
            pass

    def _fetch(self, name: str) -> None:
        with files.closing(files.open_empty(self._inputs[name])) as fd:
            files.write_pieces(fd, self._client.pieces(name, self._state.objects[name].size))

    def write(self, inputs: Sequence[str], check_abort: Callable[[], None]) -> None:
        """Write the segments of all partitions that have records in the inputs."""
        taken = set(inputs)
        topics = {topic.topic_id: topic for topic in self._state.log.topics.values()}
        places = {
            (extent.topic_id, extent.partition)
            for name in inputs
            for extent in self._state.objects[name].extents
            if is_live(extent, topics)
        }
        try:
            for place in sorted(places):
                check_abort()
                self._write_partition(topics[place[0]], place[1], taken)
        finally:
            self._take(0)

    def _write_partition(self, topic: TopicState, partition: int, taken: set[str]) -> None:
        config = TopicConfig.parse(topic.config)
        start = topic.partitions[partition].log_start_offset
        extents = [
            placed
            for placed in self._state.extents(topic.topic_id, partition)
            if placed.extent.next_offset > start
        ]
        for is_taken, run in groupby(extents, key=lambda placed: placed.object_name in taken):
            if is_taken:
                placed = [*run]
                transactions = self._transactions(placed, topic.partitions[partition])
                for output in self._segments(placed, config):
                    self._take(REQUESTS - 1)
                    put = partial(output.put, self._client, self._state.number, transactions)
                    self._waiting.append(self._pool.submit(put))

    def _transactions(self, run: Sequence[PlacedExtent], held: PartitionState) -> _Transactions:
        """Return the transactions of those extents of a run that are segment objects."""
        aborted: list[AbortedTransaction] = []
        producers, offset = b"", held.producer_snapshot
        for name, extent in run:
            side = self._sides.get(name)
            if side is None:
                continue
            aborted += parse_transactions(side.section(layout.TRANSACTION_INDEX), side.place)
            if extent.has_end(offset):
                producers = side.section(layout.SNAPSHOT)
        return _Transactions(aborted, producers, offset)

    def _take(self, count: int) -> None:
        """Wait until no more than `count` segments are being written."""
        while len(self._waiting) > count:
            self._outputs.append(self._waiting.pop(0).result())

    def _segments(
        self, extents: Iterable[PlacedExtent], config: TopicConfig
    ) -> Iterator[_SegmentFile]:
        """Yield the segments of consecutive extents, each once it is full."""
        limit = min(config.segment_bytes, SEGMENT_SIZE_MAX)
        output: _SegmentFile | None = None
        for placed in extents:
            if output is not None and not output.is_continued_by(placed):
                yield output.finished()
                output = None
            for data, table in self._stamped(placed):
                first = 0
                while first < len(table):
                    if output is None:
                        base_offset = int(table.base_offsets[first])
                        self._count += 1
                        path = self._directory / f"{self._count}{layout.LOG}"
                        output = _SegmentFile(path, placed.extent, base_offset, config)
                    stop = first + output.count_fitting(table.sizes[first:], limit)
                    output.append(data, table.select(slice(first, stop)))
                    first = stop
                    if first < len(table):
                        yield output.finished()
                        output = None
        if output is not None:
            yield output.finished()

    def _stamped(self, placed: PlacedExtent) -> Iterator[tuple[bytearray, BatchTable]]:
        """Yield the batches of an extent, a few MiB at a time, stamped and checked.

        Raises CorruptBatchError.
        """
        from kafkalog.storage_engine.records import records

        name, extent = placed
        path = f"{self._client.address}/{name}"
        expected = f"batches of the offsets {extent.base_offset} to {extent.next_offset - 1}"
        position, offset, step = 0, extent.base_offset, _STEP
        with files.closing(files.open_to_read(self._inputs[name])) as fd:
            while position < extent.size:
                size, place = min(step, extent.size - position), extent.position + position
                data = bytearray(files.read_at(fd, size, place))
                if not layout.is_stored_segment(name):
                    stamp_run(data, extent.run_offset, extent.leader_epoch)
                table, end, fault = records.scan_batches(data)
                if not len(table) and fault is None and position + size < extent.size:
                    step *= 2  # a batch is larger
                    continue
                records.check_crcs(data, table, path=path, file_position=place)
                nexts = [offset, *(table.last_offsets + 1).tolist()]
                if not len(table) or table.base_offsets.tolist() != nexts[:-1]:
                    raise CorruptBatchError(path, extent.position, expected, "others")
                yield data, table
                position, offset = position + end, nexts[-1]
        if offset != extent.next_offset:
            raise CorruptBatchError(path, extent.position, expected, "others")


class _SegmentFile:
    """A segment of regrouped batches, in a file."""

    def __init__(self, path: Path, extent: Extent, base_offset: int, config: TopicConfig) -> None:
        """Begin a segment with the batch at `base_offset`, which is in an extent."""
        self._path = path
        self._extent = dataclasses.replace(
            extent,
            position=0,
            size=0,
            base_offset=base_offset,
            max_timestamp=layout.NO_TIMESTAMP,
            first_timestamp=layout.NO_TIMESTAMP,
            skipped=0,
        )
        self._index = IndexBuilder(base_offset, config.index_interval_bytes)
        self._fd = files.open_empty(path)

    def is_continued_by(self, placed: PlacedExtent) -> bool:
        """Return whether an extent is of the same segment, so that one object may have both.

        In a log that an early release wrote, each extent is one; these are still put together.
        """
        return placed.extent.segment == self._extent.segment

    def count_fitting(self, sizes: Integers, limit: int) -> int:
        """Return how many of the next batches (b) have room; an empty segment takes one."""
        ends = self._extent.size + sizes.cumsum()
        count = int(ends.searchsorted(limit, side="right"))
        return count if self._extent.size else max(1, count)

    def append(self, data: bytearray, table: BatchTable) -> None:
        """Append the batches of a table, which lie one after the other in `data`."""
        if not len(table):
            return
        held = self._extent
        start = int(table.positions[0])
        size = int(table.sizes.sum())
        files.write_at(self._fd, memoryview(data)[start : start + size], held.size)
        positions = table.positions - start + held.size
        self._index.add_batches(positions, table.last_offsets, table.max_timestamps)
        self._extent = dataclasses.replace(
            held,
            size=held.size + size,
            next_offset=int(table.last_offsets[-1]) + 1,
            max_timestamp=max(held.max_timestamp, int(table.max_timestamps.max())),
            first_timestamp=held.first_timestamp if held.size else int(table.max_timestamps[0]),
        )

    def finished(self) -> _SegmentFile:
        """Close the file, and return the segment."""
        os.close(self._fd)
        self._index.add_time()
        return self

    def put(self, client: ObjectClient, seen: int, transactions: _Transactions) -> SegmentObject:
        """Write the objects, and remove the file."""
        sections = transactions.sections(self._extent)
        sections[layout.INDEX] = bytes(self._index.offset_entries)
        sections[layout.TIME_INDEX] = bytes(self._index.time_entries)
        made = put_segment(client, seen, self._extent, self._path, sections)
        files.remove(self._path)
        return made
