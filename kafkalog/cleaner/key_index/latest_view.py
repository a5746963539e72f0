"""The latest record of each key, as of an offset, for `view=latest` and tables.

A record is obsolete if its key occurs again at a higher offset below the end. The cleaner has the
same rule, and its first pass is used here. A log that is clean up to the end has each key once, so
no key is looked up: the log is read once, as it is. Only committed records below the last stable
offset count. The records in memory are bounded, however well they were compressed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.dedup.latest_records import build_offset_map
from kafkalog.cleaner.dedup.offset_map import HashPart, Int64s, OffsetMap, parts_that_fit
from kafkalog.cleaner.dedup.transactions import mapped_batches
from kafkalog.cleaner.key_index.key_lookup import PartitionLookup
from kafkalog.cleaner.plan import valid_first_dirty_offset
from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError
from kafkalog.storage_engine.format.whole_number import whole_number
from kafkalog.storage_engine.reading.chunk_reader import ChunkReader
from kafkalog.storage_engine.reading.partition_snapshot import READ_SIZE
from kafkalog.storage_engine.records.chosen_keys import ChosenKeys

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
    from kafkalog.storage_engine.records.tables import RecordTable

_FAR: Final = 4096
"""Offsets between two records from which on they are read apart."""
_NULLABLE: Final = frozenset({"key", "value"})


def latest(
    snapshot: PartitionSnapshot,
    end: int,
    *,
    since: int | None = None,
    budget_bytes: int,
    schema: pa.Schema,
    keys: Collection[bytes] | None = None,
    with_tombstones: bool = False,
    with_obsolete: bool = False,
    may_be_passed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the latest record of each key below `end`; tombstones only with `with_tombstones`.

    A log that is clean up to `end` is read once. If the keys of another one exceed the memory
    budget, the hash space is split, and the log is read once or twice per part. Records are in
    offset order within a part. Records without a key, aborted records, and those above the last
    stable offset are skipped. With `since`, only records from that offset on are read and count.
    With `keys`, in a snapshot opened whole, these are looked up instead. With `with_obsolete` all
    records count, and tombstones too, for a reader that has another order than that of offsets.
    The callback `progress` receives the offsets done, and of how many: a part passes each twice, a
    clean log once.

    Raises OffsetOutOfRangeError if `end` is above the high watermark, InvalidInputError if the log
    is cleaned beyond it, so that records below it are gone.
    """
    state = snapshot.state
    start = state.log_start_offset
    if not start <= end <= state.high_watermark:
        raise OffsetOutOfRangeError(
            snapshot.topic, snapshot.partition, end, start, state.high_watermark
        )
    if state.cleaned_to > end and not may_be_passed:
        raise InvalidInputError(
            f"{snapshot.topic}-{snapshot.partition}: the latest records as of offset {end} "
            f"are gone, the log is cleaned up to offset {state.cleaned_to}; ask for that "
            "offset or a later one"
        )
    span = max(start, since or 0), min(end, state.last_stable_offset)
    passes = _Passes(span, progress)
    rows = _Rows(schema, with_tombstones or with_obsolete)
    if keys is None:
        if with_obsolete or _is_clean(state, span[1]):
            return _all(snapshot, span, rows, passes)
        return _latest(snapshot, span, budget_bytes, rows, passes=passes)
    with contextlib.closing(PartitionLookup(snapshot)) as lookup:
        found = [each.records.offsets[each.rows] for each in lookup.latest(ChosenKeys(keys), end)]
    offsets = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *found]))
    groups = np.split(offsets, np.flatnonzero(np.diff(offsets) > _FAR) + 1)
    return (batch for group in groups for batch in rows.at(snapshot, group, passes))


def checked_budget(budget_bytes: int) -> int:
    """Return the memory for an offset map (bytes); raises InvalidInputError."""
    found = whole_number("budget_bytes", budget_bytes)
    if found < 1:
        raise InvalidInputError(f"budget_bytes: expected at least 1, found {found}")
    return found


def latest_of_topic(
    store: ReadableLog,
    topic: str,
    *,
    partition: int | None = None,
    include_headers: bool = False,
    budget_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the latest records of a topic, partition by partition, or those of one partition.

    Raises UnknownTopicError, and what `latest` raises.
    """
    from kafkalog.schema import changelog_schema

    schema = changelog_schema(include_headers=include_headers)
    present = store.describe(topic).numbers()
    for number in present if partition is None else [partition]:
        with store.snapshot(topic, number, whole=True) as snapshot:
            end = snapshot.state.high_watermark
            yield from latest(
                snapshot, end, budget_bytes=budget_bytes, schema=schema, progress=progress
            )


def _all(
    snapshot: PartitionSnapshot, span: tuple[int, int], rows: _Rows, passes: _Passes
) -> Iterator[pa.RecordBatch]:
    passes.left = 1
    yield from rows.all_of(snapshot, span, passes)
    passes.end_one()


def _latest(
    snapshot: PartitionSnapshot,
    span: tuple[int, int],
    budget_bytes: int,
    rows: _Rows,
    *,
    passes: _Passes,
) -> Iterator[pa.RecordBatch]:
    start, end = span
    offset_map = OffsetMap.for_parts(end - start, budget_bytes=budget_bytes)

    def put(part: HashPart, left: int) -> bool:
        passes.left = 2 * left
        offset_map.clear()
        known_to = build_offset_map(
            snapshot,
            start,
            end,
            offset_map,
            is_mapped=mapped_batches(snapshot, is_strict=False),
            part=part,
            on_records=passes.tell,
        )
        return known_to == end

    for _ in parts_that_fit(put):
        passes.end_one()
        yield from rows.at(snapshot, offset_map.take_offsets(), passes)
        passes.end_one()


def _is_clean(state: PartitionState, end: int) -> bool:
    """Return whether each key occurs once below `end`, because a cleaning of ours has been there.

    The checkpoint of a broker outlives a truncation of its log, so a broker's part is looked up.
    """
    return valid_first_dirty_offset(state) >= end and state.listed_from <= state.log_start_offset


class _Passes:
    """The passes over a log that are done and left, for `progress`."""

    def __init__(self, span: tuple[int, int], progress: Callable[[int, int], None] | None) -> None:
        self._start, end = span
        self._size = end - self._start
        self._progress = progress
        self._done = 0
        self.left = 0

    def tell(self, records: RecordTable) -> None:
        if self._progress is not None and len(records.offsets):
            self.tell_to(int(records.offsets[-1]) + 1)

    def tell_to(self, next_offset: int) -> None:
        self._tell(min(max(next_offset - self._start, 0), self._size))

    def end_one(self) -> None:
        self._done += 1
        self.left -= 1
        self._tell(0)

    def _tell(self, offsets: int) -> None:
        if self._progress is not None:
            of = (self._done + self.left) * self._size
            self._progress(self._done * self._size + offsets, of)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The columns of the rows, and whether tombstones make rows."""

    schema: pa.Schema
    with_tombstones: bool

    def at(
        self, snapshot: PartitionSnapshot, offsets: Int64s, passes: _Passes
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the records at these offsets (n, ascending)."""
        if not len(offsets):
            return
        for chunk in snapshot.chunks(int(offsets[0]), int(offsets[-1]) + 1):
            table = chunk.table
            first = offsets.searchsorted(table.base_offsets)
            is_wanted = first < offsets.searchsorted(table.last_offsets, side="right")
            for run, records in chunk.runs(is_wanted):
                yield from self._of(snapshot, run, records, _rows_at(records.offsets, offsets))
                passes.tell(records)

    def all_of(
        self, snapshot: PartitionSnapshot, span: tuple[int, int], passes: _Passes
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all committed records with a key in a span of offsets."""
        start, end = span
        is_mapped = mapped_batches(snapshot, is_strict=False)
        if _NULLABLE.issubset(self.schema.names):  # the batches show which rows are none
            reader = ChunkReader((snapshot.topic, snapshot.partition), self.schema)
            for chunk in snapshot.chunks(start, end, chunk_size=READ_SIZE):
                for batch in reader.read(chunk, is_mapped(chunk)):
                    yield from self._made_of(batch)
                passes.tell_to(int(chunk.table.last_offsets[-1]) + 1)
            return
        for chunk in snapshot.chunks(start, end):
            for run, records in chunk.runs(is_mapped(chunk)):
                offsets = records.offsets
                is_in = (records.key_sizes >= 0) & (offsets >= start) & (offsets < end)
                yield from self._of(snapshot, run, records, np.flatnonzero(is_in))
                passes.tell(records)

    def _made_of(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a batch that have a key, without tombstones if they make no rows."""
        needed = ["key"] if self.with_tombstones else ["key", "value"]
        lacking = [name for name in needed if batch.column(name).null_count]
        for name in lacking:
            batch = batch.filter(batch.column(name).is_valid())
        if not lacking or batch.num_rows:
            yield batch

    def _of(
        self, snapshot: PartitionSnapshot, run: Chunk, records: RecordTable, rows: Int64s
    ) -> Iterator[pa.RecordBatch]:
        """Yield some records of a run, without tombstones if they make no rows."""
        from kafkalog.storage_engine.records.columns import arrow_batches

        if not self.with_tombstones:
            rows = rows[records.value_sizes[rows] >= 0]
        place = snapshot.topic, snapshot.partition
        yield from arrow_batches(records, run.table, rows, place, schema=self.schema)


def _rows_at(found: Int64s, wanted: Int64s) -> Int64s:
    """Return the rows of the wanted offsets among the found ones; both are ascending."""
    if not len(found):
        return np.empty(0, dtype=np.int64)
    first = int(wanted.searchsorted(found[0]))
    stop = int(wanted.searchsorted(found[-1], side="right"))
    wanted = wanted[first:stop]
    rows = found.searchsorted(wanted)
    there: Int64s = rows[found[rows] == wanted]
    return there
