"""The second pass over a group of segments: every batch copied, filtered, emptied or left out.

Batches are filtered one by one, as Kafka does it; what is written for a batch depends on nothing
but the batch, the offset map and the round's fixed time. Neighbouring batches that stay as they are
go out in one piece of the input buffer. Checksums hold already: the view checks every batch it
yields, so damage is found here and never written anew under a fresh checksum.

Control and transactional batches are copied as they are, with their transaction index; a later
piece of work filters them.

Kafka: Cleaner.cleanInto, MemoryRecords.filterTo; the rules are C51 to C64 and C87 to C94.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.cleaned_segment import CleanedSegment
from kafkalog.cleaner.offset_map import Int64s, OffsetMap
from kafkalog.cleaner.stats import CleanerStats
from kafkalog.cleaner.survivors import Retained, is_looked_into, retain
from kafkalog.storage_engine import layout
from kafkalog.storage_engine.batch import parse_header
from kafkalog.storage_engine.config import TopicConfig
from kafkalog.storage_engine.files import Buffer
from kafkalog.storage_engine.gaps import GapCollector, Section

if TYPE_CHECKING:
    from kafkalog.storage_engine.log_view import Chunk, LogView
    from kafkalog.storage_engine.records import BatchTable, RecordTable
    from kafkalog.storage_engine.segments import SegmentFiles

__all__ = ["Rewritten", "Round", "clean_into"]


@dataclass(slots=True)
class Round:
    """What stays the same during one round, and what it finds out on its way through the log."""

    view: LogView
    reopen: Callable[[], LogView]
    """Opens the log as it is after this round's swaps so far, for the holder of the lock."""
    config: TopicConfig
    offset_map: OffsetMap
    now_ms: int
    chunk_size: int
    """Bytes read at once."""
    stats: CleanerStats
    check_abort: Callable[[], None]
    tombstones_from: int = layout.INT64_MAX
    """First offset of the first transactional data batch met: no tombstone behind it expires."""
    earliest_delete_horizon_ms: int | None = None
    """The next moment at which a tombstone of what was written may go."""
    _last_offsets: dict[int, int] | None = field(default=None, repr=False)

    @property
    def new_delete_horizon_ms(self) -> int | None:
        """The horizon of tombstones seen for the first time; None past the range (C61)."""
        horizon = self.now_ms + self.config.delete_retention_ms
        return horizon if horizon <= layout.INT64_MAX else None

    def is_last_of_producer(self, producer_id: int, last_offset: int) -> bool:
        """Whether a batch is the last of its producer in the whole log (C75).

        Reads the log's headers once per round, and only when a producer's batch has lost all its
        records: what our own writers append has no producer id. Every producer counts as active.
        """
        if self._last_offsets is None:
            self._last_offsets = {}
            with self.reopen() as view:
                # What this round has replaced still ends with the last batch of each producer.
                for chunk in view.chunks(
                    view.segments[0].base_offset, self.view.state.high_watermark
                ):
                    self.check_abort()
                    table = chunk.table
                    self._last_offsets.update(
                        zip(table.producer_ids.tolist(), table.last_offsets.tolist(), strict=True)
                    )
        return self._last_offsets.get(producer_id) == last_offset


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What was made of a group of segments."""

    outputs: list[CleanedSegment]
    """Finished, ascending."""
    sections: list[Section]
    """The gaps of the outputs."""
    source_sections: list[Section]
    """The gaps of the group's segments."""
    is_changed: bool
    """Whether the outputs differ from their sources."""


def clean_into(
    round_: Round, group: Sequence[SegmentFiles], end: int, directory: Path
) -> Rewritten:
    """Write what stays of a group of segments, which end before offset `end`, to `.cleaned` files.

    The first output has the base offset of the group's first segment, though its first records may
    be gone (C48); another is begun where sizes or offsets would pass 2^31-1. Raises
    CorruptBatchError, OSError; then no output is left.
    """
    source_gaps = {segment.base_offset: GapCollector(segment.base_offset) for segment in group}
    outputs = [CleanedSegment(directory, group[0].base_offset, round_.config)]
    is_changed = len(group) > 1
    carried = 0
    try:
        for run, records in round_.view.runs(
            group[0].base_offset, end, is_looked_into, chunk_size=round_.chunk_size
        ):
            round_.check_abort()
            table = run.table
            source_gaps[run.segment_base].add(table.base_offsets, table.last_offsets)
            cleaned = _filter(round_, run, records)
            is_changed |= cleaned.is_changed
            while carried < len(group) and group[carried].base_offset <= run.segment_base:
                outputs[-1].append_transactions(_transactions(group[carried]))
                carried += 1
            if len(cleaned.sizes) and not outputs[-1].fits(
                int(cleaned.sizes.sum()), int(cleaned.last_offsets[-1])
            ):
                outputs.append(CleanedSegment(directory, outputs[-1].next_offset, round_.config))
            outputs[-1].append(
                cleaned.pieces,
                cleaned.sizes,
                cleaned.base_offsets,
                cleaned.last_offsets,
                cleaned.max_timestamps,
            )
            round_.stats.bytes_written += int(cleaned.sizes.sum())
        for segment in group[carried:]:
            outputs[-1].append_transactions(_transactions(segment))
        mtime_ns = _modified_ns(group)
        for output in outputs:
            output.finish(mtime_ns)
    except BaseException:
        for output in outputs:
            output.discard()
        raise
    sources = [
        Section(segment.base_offset, segment.size, source_gaps[segment.base_offset].gaps(following))
        for segment, following in zip(group, _ends(group, end), strict=True)
    ]
    ends = _ends(outputs, end)
    sections = [output.section(following) for output, following in zip(outputs, ends, strict=True)]
    return Rewritten(outputs, sections, sources, is_changed)


def _ends(segments: Sequence[SegmentFiles | CleanedSegment], end: int) -> list[int]:
    """Return the offsets by which segments are followed, the last one by `end`."""
    return [*(segment.base_offset for segment in segments[1:]), end]


@dataclass(frozen=True, slots=True)
class _Cleaned:
    """What goes out for one run: bytes in pieces, and per batch four figures."""

    pieces: list[Buffer]
    sizes: Int64s
    base_offsets: Int64s
    last_offsets: Int64s
    max_timestamps: Int64s
    is_changed: bool


def _filter(round_: Round, run: Chunk, records: RecordTable) -> _Cleaned:
    """Decide batch by batch, in columns; only batches that change are touched one by one."""
    table = run.table
    is_opaque = ~is_looked_into(table)
    _note_transactions(round_, table)
    retained = retain(
        run,
        records,
        round_.offset_map,
        now_ms=round_.now_ms,
        tombstones_from=round_.tombstones_from,
    )
    _count(round_, table, retained)
    has_horizon = (table.attributes & layout.DELETE_HORIZON_BIT) != 0
    new_horizon = round_.new_delete_horizon_ms
    gets_horizon = (retained.tombstones > 0) & ~has_horizon & (new_horizon is not None)
    is_verbatim = is_opaque | (
        (retained.kept == table.counts) & (retained.kept > 0) & ~gets_horizon
    )
    _note_horizons(round_, table, retained, has_horizon)

    sizes = table.sizes.astype(np.int64)
    max_timestamps = table.max_timestamps.astype(np.int64)
    pieces: list[Buffer] = []
    firsts = np.searchsorted(records.batch_index, np.arange(len(sizes) + 1))
    buffer = memoryview(run.buffer)
    copied = int(table.positions[0])
    is_changed = False
    for batch in np.flatnonzero(~is_verbatim).tolist():
        position = int(table.positions[batch])
        end = position + int(table.sizes[batch])
        if retained.kept[batch] > 0:
            horizon = new_horizon if gets_horizon[batch] else None
            keep = retained.keep[firsts[batch] : firsts[batch + 1]]
            data: Buffer | None = _rewritten(run, batch, records, keep, horizon)
        else:
            data = _emptied(round_, run, batch)
        if data is not None and data == buffer[position:end]:
            continue  # an empty batch that stays: part of the run around it
        is_changed = True
        if position > copied:
            pieces.append(buffer[copied:position])
        copied = end
        round_.stats.batches_rewritten += 1
        if data is None:
            sizes[batch] = 0
        else:
            pieces.append(data)
            sizes[batch] = len(data)
            max_timestamps[batch] = parse_header(data).max_timestamp
    end = int(table.positions[-1] + table.sizes[-1])
    if end > copied:
        pieces.append(buffer[copied:end])
    stays = sizes > 0
    return _Cleaned(
        pieces,
        sizes[stays],
        table.base_offsets[stays].astype(np.int64, copy=False),
        table.last_offsets[stays].astype(np.int64, copy=False),
        max_timestamps[stays],
        is_changed,
    )


def _rewritten(
    run: Chunk,
    batch: int,
    records: RecordTable,
    keep: npt.NDArray[np.bool_],
    new_horizon: int | None,
) -> Buffer:
    """The batch with the records that stay; a horizon it has stays with it for ever (C59)."""
    from kafkalog.storage_engine.records import filter_batch

    horizon = new_horizon
    if run.table.attributes[batch] & layout.DELETE_HORIZON_BIT:
        horizon = int(run.table.base_timestamps[batch])
    data = filter_batch(run.buffer, run.table, batch, records, keep, delete_horizon_ms=horizon)
    assert data is not None, "a batch that keeps records has become none"
    return data


def _emptied(round_: Round, run: Chunk, batch: int) -> bytes | None:
    """What is left of a batch that keeps no record: its header, or nothing (C64, C91, C92).

    The header stays where it ends at the high watermark, which else could not be told from the
    files, and where it is a producer's last, which knows its sequence number.
    """
    from kafkalog.storage_engine.records import empty_batch

    table = run.table
    last_offset = int(table.last_offsets[batch])
    producer_id = int(table.producer_ids[batch])
    if last_offset + 1 == round_.view.state.high_watermark or (
        producer_id >= 0 and round_.is_last_of_producer(producer_id, last_offset)
    ):
        return bytes(empty_batch(run.buffer, table, batch))
    return None


def _modified_ns(group: Sequence[SegmentFiles]) -> int:
    """When the last segment of a group was written, of those that have not been deleted."""
    for segment in reversed(group):
        with contextlib.suppress(FileNotFoundError):
            return segment.log.stat().st_mtime_ns
    return 0


def _transactions(segment: SegmentFiles) -> bytes:
    try:
        return segment.transaction_index.read_bytes()
    except FileNotFoundError:
        return b""


def _note_transactions(round_: Round, table: BatchTable) -> None:
    """Remember where the first records begin that are not looked into."""
    mask = layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT
    found = np.flatnonzero((table.attributes & mask) == layout.TRANSACTIONAL_BIT)
    if len(found):
        first = int(table.base_offsets[found[0]])
        round_.tombstones_from = min(round_.tombstones_from, first)


def _note_horizons(
    round_: Round, table: BatchTable, retained: Retained, has_horizon: npt.NDArray[np.bool_]
) -> None:
    """Remember the next moment at which a tombstone may go.

    A horizon that has come and did not remove its tombstone (which lies beyond the map, or behind
    a transaction) is left out: coming back for it alone would change nothing.
    """
    holds = retained.tombstones > 0
    known = table.base_timestamps[has_horizon & holds]
    horizons = known[known > round_.now_ms].tolist()
    if round_.new_delete_horizon_ms is not None and (holds & ~has_horizon).any():
        horizons.append(round_.new_delete_horizon_ms)
    if round_.earliest_delete_horizon_ms is not None:
        horizons.append(round_.earliest_delete_horizon_ms)
    round_.earliest_delete_horizon_ms = min(horizons, default=None)


def _count(round_: Round, table: BatchTable, retained: Retained) -> None:
    stats = round_.stats
    stats.bytes_read += int(table.sizes.sum())
    opaque = int(table.counts.sum()) - len(retained.keep)
    stats.records_read += len(retained.keep) + opaque
    stats.records_kept += int(np.count_nonzero(retained.keep)) + opaque
    stats.keyless_records += retained.keyless
