"""Append runs of another log to a log in an object store: segment objects with true offsets.

A run becomes segment objects of up to 64 MiB, each with its indexes. They are written first, and
one commit appends those of several partitions. The last object of a partition that has producers
also has their state, as a broker's snapshot file has it. A later copy continues from there, and one
into a directory takes it along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.segment_object import SEGMENT_SIZE_MAX, put_segment_bytes
from kafkalog.storage_engine.object_store.store_state import Extent
from kafkalog.storage_engine.object_store.stored_producers import recorded_producers
from kafkalog.storage_engine.object_store.stored_segments import (
    OfferedBatch,
    active_segment,
    filled,
)
from kafkalog.storage_engine.segment.gaps import GapCollector
from kafkalog.storage_engine.segment.index_builder import IndexBuilder
from kafkalog.storage_engine.transactions.control_record import batches_of_producers
from kafkalog.storage_engine.transactions.producer_snapshot import pack_snapshot
from kafkalog.storage_engine.transactions.transaction_index import transaction_entry

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.object_store.client import ObjectClient
    from kafkalog.storage_engine.object_store.segment_object import SegmentObject
    from kafkalog.storage_engine.object_store.store_draft import StoreDraft
    from kafkalog.storage_engine.object_store.store_state import StoreState
    from kafkalog.storage_engine.records.tables import BatchTable
    from kafkalog.storage_engine.writing.copied_run import CopiedRun

_REQUESTS: Final = 8
"""Segment objects that are written side by side."""


class CopiedSegments:
    """The segment objects of several runs; `put` them, then let a commit end the partitions."""

    def __init__(
        self, client: ObjectClient, state: StoreState, runs: Sequence[CopiedRun], now_ms: int
    ) -> None:
        """Check the runs against a state of the log.

        Raises StorageError for a run that does not follow its partition's log, CorruptLogError.
        """
        self.outputs: list[SegmentObject] = []
        """The objects that were written."""
        self._client = client
        self._seen = state.number
        self._parts = [_Segments(client, state, run, now_ms) for run in runs]

    @property
    def rows(self) -> int:
        """The number of records."""
        return sum(part.rows for part in self._parts)

    def put(self) -> None:
        """Write the objects.

        Raises StorageError, and InvalidInputError for batches that no broker could load.
        """

        def put_one(each: tuple[Extent, memoryview, dict[str, bytes]]) -> None:
            self.outputs.append(put_segment_bytes(self._client, self._seen, *each))

        made = [each for part in self._parts for each in part.made()]
        with ThreadPoolExecutor(_REQUESTS, "kafkalog-copy") as pool:
            for _ in pool.map(put_one, made):
                pass

    def end_partitions(self, draft: StoreDraft) -> bool:
        """Draft what a commit changes besides its objects; raises StorageError."""
        for part in self._parts:
            run = part.run
            run.continued(draft.state)
            draft.end_partition(run.topic, run.partition, run.log_start, **part.fields())
        return True


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment: its batches are rows [first, stop) of a run's table."""

    base_offset: int
    first: int
    stop: int
    end: int
    segment: int
    """The base offset of its segment; -1 without batches."""


class _Segments:
    """The segments of one run, and the partition's state after it."""

    def __init__(
        self, client: ObjectClient, state: StoreState, run: CopiedRun, now_ms: int
    ) -> None:
        from kafkalog.storage_engine.records import records

        self.run = run
        self._held: PartitionState = run.continued(state.log)
        self._topic = state.log.topic(run.topic)
        self._config = TopicConfig.parse(self._topic.config)
        self._active = active_segment(state, self._topic, run.partition)
        self._data = memoryview(run.data)
        self._table, _, _ = records.scan_batches(run.data)
        self.rows = int(self._table.counts[~self._table.is_control].sum())
        self._producers = recorded_producers(client, state, run.topic, run.partition)
        self._producers.expire(now_ms)

    def made(self) -> Iterator[tuple[Extent, memoryview, dict[str, bytes]]]:
        """Yield the extent, the batches and the indexes of each segment."""
        parts = [*self._parts()]
        for place, part in enumerate(parts):
            aborted = self._replay(part)
            is_last = place + 1 == len(parts)
            if is_last and self.run.producers is not None:
                self._producers.take_over(self.run.producers)
            yield self._made(part, aborted, is_last=is_last)

    def _parts(self) -> Iterator[_Part]:
        """Yield the objects of the run: each ends with its segment, or when it is full."""
        table, run = self._table, self.run
        limit = min(self._config.segment_bytes, SEGMENT_SIZE_MAX)
        base_offset, first = run.start, 0
        for part in filled(self._active, self._topic, run.partition, self._offered()):
            if base_offset < part.base_offset == part.active.base_offset:
                # The gap before the first batch of a new segment is at the end of the old one.
                yield _Part(base_offset, 0, 0, part.base_offset, self._active.base_offset)
                base_offset = part.base_offset
            self._active = part.active
            stop = first + part.batches
            while first < stop:
                ends = table.sizes[first:stop].cumsum()
                after = first + max(1, int(ends.searchsorted(limit, side="right")))
                end = int(table.base_offsets[after]) if after < len(table) else run.end
                yield _Part(base_offset, first, after, end, part.active.base_offset)
                base_offset, first = end, after
        if base_offset < run.end:
            yield _Part(base_offset, first, len(table), run.end, -1)

    def _offered(self) -> Iterator[OfferedBatch]:
        table = self._table
        columns = (table.base_offsets, table.last_offsets + 1, table.sizes, table.max_timestamps)
        for values in zip(*(column.tolist() for column in columns), strict=True):
            yield OfferedBatch(*values)

    def _replay(self, part: _Part) -> bytes:
        """Replay a segment's batches for the producers; return the entries of aborted ones."""
        table, found = self._table.select(slice(part.first, part.stop)), bytearray()
        for header, control in batches_of_producers(self._data, table, path=self.run.source):
            refusal = self._producers.refusal(header, control)
            if refusal is not None:
                raise InvalidInputError(
                    f"{self.run.source}: {refusal}; no broker could load such a log, so it is not "
                    "copied"
                )
            aborted = self._producers.append(header, control)
            if aborted is not None:
                found += transaction_entry(aborted)
        return bytes(found)

    def _made(
        self, part: _Part, aborted: bytes, *, is_last: bool
    ) -> tuple[Extent, memoryview, dict[str, bytes]]:
        table = self._table.select(slice(part.first, part.stop))
        start = int(table.positions[0]) if len(table) else 0
        data = self._data[start : start + int(table.sizes.sum())]
        gaps = GapCollector(part.base_offset)
        gaps.add(table.base_offsets, table.last_offsets)
        index = IndexBuilder(part.base_offset, self._config.index_interval_bytes)
        index.add_batches(table.positions - start, table.last_offsets, table.max_timestamps)
        index.add_time()
        sections = {
            layout.INDEX: bytes(index.offset_entries),
            layout.TIME_INDEX: bytes(index.time_entries),
            layout.GAPS: gaps.gaps(part.end).astype(">i8").tobytes(),
        }
        if aborted:
            sections[layout.TRANSACTION_INDEX] = aborted
        if is_last and len(self._producers):
            sections[layout.SNAPSHOT] = pack_snapshot(self._producers.entries.values())
        extent = Extent(
            self.run.topic_id,
            self.run.partition,
            0,
            len(data),
            part.base_offset,
            part.end,
            _last_epoch(table, self._held.leader_epoch),
            int(table.max_timestamps.max(initial=layout.NO_TIMESTAMP)),
            first_timestamp=int(table.max_timestamps[0]) if len(table) else layout.NO_TIMESTAMP,
            segment=part.segment,
        )
        return extent, data, sections

    def fields(self) -> dict[str, int]:
        """Return what the commit sets of the partition's state."""
        run, held = self.run, self._held
        gone = {"deletions_gone_to": max(held.deletions_gone_to, run.deletions_gone_to)}
        if run.start == run.end:
            return gone
        most = min(run.stable, run.end)
        stable = self._producers.last_stable_offset(most, log_start=run.log_start)
        return gone | {
            "high_watermark": run.end,
            "last_stable_offset": stable,
            "active_base": self._active.base_offset,
            "active_size": self._active.size,
            "leader_epoch": _last_epoch(self._table, held.leader_epoch),
            "producer_snapshot": run.end if len(self._producers) else -1,
        }


def _last_epoch(table: BatchTable, otherwise: int) -> int:
    """Return the leader epoch of the last batch, or another value if that lacks one."""
    return max(int(table.leader_epochs[-1]), 0) if len(table) else otherwise
