"""Which records survive: decided here once, for the cleaner and for views of the newest records.

A record with key K and offset O is superseded if K occurs again at a higher offset below the end of
what is looked at. `build_offset_map` learns the newest offset of every key of a range, `retain`
says which records the cleaner keeps, `latest` yields the newest records themselves. All three read
the log in runs, whose records are bounded in memory whatever they were compressed to.

Transactional batches are not looked into yet: the cleaner copies them as they are and maps none of
their keys, so no tombstone behind one may expire (it might still hide a record inside); `latest`
refuses a partition that has one.

Kafka: the methods buildOffsetMap and shouldRetainRecord of Cleaner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.offset_map import WHOLE, Int64s, OffsetMap, Part, Uint64s, load_kernels
from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError
from kafkalog.storage_engine import layout
from kafkalog.storage_engine.log_view import CHUNK_SIZE

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.cleaner.stats import CleanerStats
    from kafkalog.storage_engine.log_view import Chunk, LogView
    from kafkalog.storage_engine.records import BatchTable, RecordTable

__all__ = ["Retained", "build_offset_map", "is_looked_into", "latest", "retain"]

_OPAQUE = layout.CONTROL_BIT | layout.TRANSACTIONAL_BIT
_NONE_SHADOWED = layout.INT64_MAX


def _nothing() -> None:
    pass


def is_looked_into(table: BatchTable) -> npt.NDArray[np.bool_]:
    """Say which batches (b) are: neither control nor transactional ones."""
    looked_into: npt.NDArray[np.bool_] = (table.attributes & _OPAQUE) == 0
    return looked_into


def old_format(path: Path, magic: int) -> InvalidInputError:
    """Say that a segment with messages v0 or v1 is not cleaned: rewriting them is not built."""
    return InvalidInputError(
        f"{path}: holds messages of format v{magic}; the cleaner rewrites record batches v2 only, "
        "so the partition stays as it is and readable"
    )


def _hash(run: Chunk, records: RecordTable, offset_map: OffsetMap) -> Uint64s:
    return offset_map.hash(records, path=run.path, file_position=run.file_position)


# --- the first pass ------------------------------------------------------------------------------


def build_offset_map(
    view: LogView,
    start: int,
    end: int,
    offset_map: OffsetMap,
    *,
    part: Part = WHOLE,
    chunk_size: int = CHUNK_SIZE,
    stats: CleanerStats | None = None,
    check_abort: Callable[[], None] = _nothing,
) -> int:
    """Put the newest offset of every key in [start, end) into the map, until it is full.

    Returns the end of what the map knows: `end`, or one past the last record that was put when the
    next keyed one found the map full (rules C9 to C21). `check_abort` is called between runs and
    raises to stop. Raises CorruptBatchError.
    """
    for run, records in view.runs(start, end, is_looked_into, chunk_size=chunk_size):
        check_abort()
        # Everything before this segment is known, also across a gap of offsets (C15).
        if run.segment_base > start:
            offset_map.update_latest_offset(run.segment_base - 1)
        table = run.table
        hashes = _hash(run, records, offset_map)
        stop, _ = offset_map.put(
            hashes, records.key_sizes, records.offsets, start=start, end=end, part=part
        )
        if stats is not None:
            stats.map_records_read += stop
            stats.map_bytes_read += int(table.sizes.sum())
        if stop < len(records.offsets):
            batch = int(records.batch_index[stop])
            if batch > 0:
                offset_map.update_latest_offset(int(table.last_offsets[batch - 1]))
            return max(start, offset_map.latest_offset + 1)
        offset_map.update_latest_offset(min(int(table.last_offsets[-1]), end - 1))
    offset_map.update_latest_offset(end - 1)
    return end


# --- the second pass -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retained:
    """Which records of a run stay. n = records of its data batches, b = batches."""

    keep: npt.NDArray[np.bool_]
    """(n)"""
    kept: Int64s
    """(b) records that stay; 0 also for batches that were not looked into."""
    tombstones: Int64s
    """(b) tombstones among them."""
    keyless: int
    """Records that go because they have no key."""


def retain(
    run: Chunk,
    records: RecordTable,
    offset_map: OffsetMap,
    *,
    now_ms: int,
    tombstones_from: int = _NONE_SHADOWED,
) -> Retained:
    """Say which records of a run the cleaner keeps (rules C51 to C58).

    Kept is what lies beyond the map, and of the rest the newest record of each key, unless it is a
    tombstone in a batch whose delete horizon has come. Tombstones at or above `tombstones_from`
    stay in any case. Raises CorruptBatchError, and InvalidInputError for messages v0 and v1.
    """
    kernels = load_kernels()
    table = run.table
    if table.has_messages:
        raise old_format(run.path, int(table.magics[table.is_message][0]))
    hashes = _hash(run, records, offset_map)
    expired = ((table.attributes & layout.DELETE_HORIZON_BIT) != 0) & (
        table.base_timestamps <= now_ms
    )
    keep = np.empty(len(records.offsets), dtype=np.bool_)
    kept = np.zeros(len(table.sizes), dtype=np.int64)
    tombstones = np.zeros(len(table.sizes), dtype=np.int64)
    keyless = kernels.retain_records(
        offset_map.slots,
        hashes,
        records.key_sizes,
        records.value_sizes,
        records.offsets,
        records.batch_index,
        expired,
        offset_map.latest_offset,
        tombstones_from,
        keep,
        kept,
        tombstones,
    )
    return Retained(keep, kept, tombstones, int(keyless))


# --- the newest records --------------------------------------------------------------------------


def latest(
    view: LogView, end: int, *, budget_bytes: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the newest record of each key below `end`, without those that are tombstones.

    Exact at any number of keys: where they do not fit the budget, the hash space is split and the
    log read once (twice, counting the map) per part. Records come in offset order within a part.
    Records without a key are skipped. Raises OffsetOutOfRangeError when `end` is above the high
    watermark, InvalidInputError when the log has been cleaned beyond it: then records below it are
    gone in favour of newer ones above.
    """
    state = view.state
    start = state.log_start_offset
    if not start <= end <= state.high_watermark:
        raise OffsetOutOfRangeError(view.topic, view.partition, end, start, state.high_watermark)
    if state.cleaned_to > end:
        raise InvalidInputError(
            f"{view.topic}-{view.partition}: the newest records as of offset {end} are gone, the "
            f"log is cleaned up to offset {state.cleaned_to}; ask for that offset or a later one"
        )
    return _latest(view, start, end, budget_bytes, schema)


def _latest(
    view: LogView, start: int, end: int, budget_bytes: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    offset_map = OffsetMap.for_records(end - start, budget_bytes=budget_bytes)
    parts = [WHOLE]
    while parts:
        part = parts[0]
        if build_offset_map(view, start, end, offset_map, part=part) < end:
            # Parts are of equal weight, so the others would not fit either: split them all.
            parts = [half for whole in parts for half in whole.halves()]
        else:
            parts.pop(0)
            yield from _newest(view, (start, end), offset_map, part, schema)
        if parts:
            offset_map.clear()


def _newest(
    view: LogView, span: tuple[int, int], offset_map: OffsetMap, part: Part, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    kernels = load_kernels()
    from kafkalog.storage_engine.records import to_arrow

    start, end = span
    for run, records in view.runs(start, end, is_looked_into):
        attributes = run.table.attributes
        if ((attributes & _OPAQUE) == layout.TRANSACTIONAL_BIT).any():
            raise InvalidInputError(
                f"{view.topic}-{view.partition}: holds transactional batches, whose newest records "
                "cannot be told yet; read the changelog instead"
            )
        hashes = _hash(run, records, offset_map)
        keep = np.empty(len(records.offsets), dtype=np.bool_)
        kernels.select_latest(
            offset_map.slots,
            hashes,
            records.key_sizes,
            records.value_sizes,
            records.offsets,
            start,
            end,
            part.mask,
            np.uint64(part.prefix),
            keep,
        )
        rows = np.flatnonzero(keep)
        if len(rows):
            yield to_arrow(
                records,
                run.table,
                rows,
                schema=schema,
                topic=view.topic,
                partition=view.partition,
            )
