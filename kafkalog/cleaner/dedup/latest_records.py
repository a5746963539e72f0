"""The first pass of a round: find which records are obsolete.

If the keys of the dirty section do not fit into memory, Kafka ends the round at the record that
finds the offset map full. Here the keys are spilled to temporary files, and the round continues.
After two spilling rounds in a row that did not finish, one round is like Kafka's.

Kafka: Cleaner.buildOffsetMap, rules C9 to C21.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.dedup.obsolete_offsets import ObsoleteOffsets
from kafkalog.cleaner.dedup.offset_map import WHOLE, HashPart, OffsetMap
from kafkalog.cleaner.dedup.spill.spill_file import sweep_spill_files
from kafkalog.cleaner.dedup.spill.spilled import Spill, Spilled
from kafkalog.cleaner.state.notes import DirectoryNotes, packed, unpacked
from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.reading.partition_snapshot import CHUNK_SIZE

if TYPE_CHECKING:
    from kafkalog.cleaner.plan import Plan
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
    from kafkalog.storage_engine.records.records import RecordTable

IsMapped: TypeAlias = "Callable[[Chunk], npt.NDArray[np.bool_]]"
"""Returns which batches (b) of a chunk have keys that count; called for each chunk in log order."""

_DEATHS_MAX = 2
_ROW_BYTES = 24 + 8
"""Bytes of a spilled key: its row, and its offset in a list."""


LatestRecords: TypeAlias = OffsetMap | Spilled
"""The result of the first pass; `close` it."""


def find_latest_records(
    snapshot: PartitionSnapshot,
    plan: Plan,
    scratch: Path,
    *,
    start: int,
    make_is_mapped: Callable[[int], IsMapped],
    config: CleanerConfig,
    stats: CleanerStats,
    check_abort: Callable[[], None],
    on_records: Callable[[RecordTable], None] | None = None,
) -> tuple[LatestRecords, int]:
    """Find the records that the dirty section makes obsolete; return them, and the round's end.

    The segments begin at offset `start`. Keys are spilled to the directory `scratch`. The end is
    `plan.end`, or where a map without spill was full. A call of `make_is_mapped(start)`
    returns an `IsMapped` for chunks from `start` on. All dirty records whose keys count go to
    `on_records`. The caller holds the partition's cleaner lock and closes the result. Raises
    CorruptBatchError, and StorageError if the disk has no room for the keys.
    """
    sweep_spill_files(scratch)
    deaths = _read_deaths(scratch)
    offset_map = OffsetMap.for_records(
        plan.end - plan.first_dirty_offset,
        budget_bytes=config.dedupe_buffer_size,
        load_factor=config.io_buffer_load_factor,
    )
    offset_map.obsolete_offsets = ObsoleteOffsets.within(
        plan.first_dirty_offset, plan.end, config.dedupe_buffer_size
    )
    if deaths >= _DEATHS_MAX:
        offset_map.on_close = lambda: _set_deaths(scratch, 0)
    can_spill = config.spill and deaths < _DEATHS_MAX
    overflow = _Overflow(plan, scratch, start, offset_map, deaths, stats, check_abort)
    try:
        end = build_offset_map(
            snapshot,
            plan.first_dirty_offset,
            plan.end,
            offset_map,
            is_mapped=make_is_mapped(plan.first_dirty_offset),
            chunk_size=config.io_buffer_size,
            stats=stats,
            check_abort=check_abort,
            on_full=overflow.take_map if can_spill else None,
            on_records=on_records,
        )
        spill = overflow.spill
        if spill is None:
            return offset_map, end
        spill.take_map()
        _take_clean_section(
            snapshot,
            plan,
            spill,
            start=start,
            offset_map=offset_map,
            make_is_mapped=make_is_mapped,
            config=config,
            stats=stats,
            check_abort=check_abort,
        )
        stats.spilled_bytes += spill.key_bytes
        latest = spill.resolve(
            plan.first_dirty_offset,
            offset_map.capacity / len(offset_map.slots),
            lambda: _set_deaths(scratch, 0),
        )
        return latest, end
    except StorageError:
        raise  # it counts as a death
    except Exception:
        _set_deaths(scratch, deaths)
        raise
    finally:
        if overflow.spill is not None:
            overflow.spill.close()


@dataclass(slots=True)
class _Overflow:
    """Creates the spill when the map is full, and counts a death until the round has ended."""

    plan: Plan
    scratch: Path
    start: int
    offset_map: OffsetMap
    deaths: int
    stats: CleanerStats
    check_abort: Callable[[], None]
    spill: Spill | None = None
    read_before: int = field(init=False)

    def __post_init__(self) -> None:
        self.read_before = self.stats.map_bytes_read

    def take_map(self, taken: int) -> None:
        """Spill the keys in the map, which include `taken` bytes of the current run."""
        if self.spill is None:
            _set_deaths(self.scratch, self.deaths + 1)
            read = self.stats.map_bytes_read - self.read_before + taken
            _check_space(self.plan, self.scratch, self.start, self.offset_map.size, read)
            # The result keeps what counts its bytes, and through it must not keep the offset map.
            moved = self.stats.add_spill_bytes_moved
            self.spill = Spill(self.scratch, self.offset_map, self.check_abort, moved)
        self.spill.take_map()


def build_offset_map(
    snapshot: PartitionSnapshot,
    start: int,
    end: int,
    offset_map: OffsetMap,
    *,
    is_mapped: IsMapped,
    part: HashPart = WHOLE,
    chunk_size: int = CHUNK_SIZE,
    stats: CleanerStats | None = None,
    check_abort: Callable[[], None] | None = None,
    on_full: Callable[[int], None] | None = None,
    on_records: Callable[[RecordTable], None] | None = None,
) -> int:
    """Put the latest offset of every key in [start, end) into the map, until it is full.

    Returns the end of the known range: `end`, or the offset after the last record that was put (C9
    to C21). If the map is full, `on_full` makes room; it receives how many bytes of the current run
    are done. Only keys in `keys`, if given, are put. The callback `on_records` receives the records
    of the batches that `is_mapped` chooses. Between runs `check_abort` may raise. Raises
    CorruptBatchError.
    """
    for chunk in snapshot.chunks(start, end, chunk_size=chunk_size):
        wanted = is_mapped(chunk)
        if stats is not None:
            stats.map_records_read += int(chunk.table.counts[~wanted].sum())
        for run, records in chunk.runs(wanted):
            if check_abort is not None:
                check_abort()
            # Everything before this segment is known, also across a gap of offsets (C15).
            if run.segment_base > start:
                offset_map.update_latest_offset(run.segment_base - 1)
            table = run.table
            hashes = offset_map.hash(records, path=run.path, file_position=run.file_position)
            key_sizes = records.key_sizes
            size, count = int(table.sizes.sum()), len(records.offsets)
            if on_records is not None:
                on_records(records)
            stop = 0
            while True:
                stop = offset_map.put(
                    hashes, key_sizes, records.offsets,
                    first=stop, start=start, end=end, part=part,
                )[0]  # fmt: skip
                if stop == count or on_full is None:
                    break
                on_full(size * stop // count)
            if stats is not None:
                stats.map_bytes_read += size
                stats.map_records_read += stop
            if stop < count:
                batch = int(records.batch_index[stop])
                if batch > 0:
                    offset_map.update_latest_offset(int(table.last_offsets[batch - 1]))
                return max(start, offset_map.latest_offset + 1)
            offset_map.update_latest_offset(min(int(table.last_offsets[-1]), end - 1))
    offset_map.update_latest_offset(end - 1)
    return end


def _take_clean_section(
    snapshot: PartitionSnapshot,
    plan: Plan,
    spill: Spill,
    *,
    start: int,
    offset_map: OffsetMap,
    make_is_mapped: Callable[[int], IsMapped],
    config: CleanerConfig,
    stats: CleanerStats,
    check_abort: Callable[[], None],
) -> None:
    is_mapped = make_is_mapped(start)
    for chunk in snapshot.chunks(start, plan.first_dirty_offset, chunk_size=config.io_buffer_size):
        for run, records in chunk.runs(is_mapped(chunk)):
            check_abort()
            hashes = offset_map.hash(records, path=run.path, file_position=run.file_position)
            rows = np.flatnonzero(
                (records.key_sizes >= 0) & (records.offsets < plan.first_dirty_offset)
            )
            spill.take_clean(hashes[rows], records.offsets[rows])
            stats.map_bytes_read += int(run.table.sizes.sum())
            stats.map_records_read += len(records.offsets)


# --- room and deaths -----------------------------------------------------------------------------


def _check_space(plan: Plan, scratch: Path, start: int, keys: int, read: int) -> None:
    """Raise StorageError if the disk has no room for the log's keys; `read` bytes had `keys`."""
    left = max(0, plan.clean_bytes + plan.cleanable_bytes - read)
    needed = int(_ROW_BYTES * min(keys * (1 + left / max(1, read)), plan.end - start))
    free = files.free_space(scratch)
    if needed > free:
        raise StorageError(
            f"{scratch}: the keys do not fit the cleaner's memory and need about {needed:,} "
            f"bytes on disk, {free:,} are free; free space, or raise "
            "log.cleaner.dedupe.buffer.size; the log is unchanged"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_deaths(directory: Path) -> int:
    deaths = unpacked(DirectoryNotes(directory).read(layout.SPILLING)).get("deaths")
    return deaths if isinstance(deaths, int) else 0


def _set_deaths(directory: Path, deaths: int) -> None:
    if not deaths:
        files.remove(directory / layout.SPILLING)
        return
    content = packed({"deaths": deaths}).encode() + b"\n"
    try:
        files.write_atomically(
            directory / layout.SPILLING, content, temporary_name=layout.SPILL + "mark"
        )
    except OSError as fault:
        files.pass_on(fault)
        sweep_spill_files(directory)
        raise StorageError(
            f"{directory / layout.SPILLING}: cannot be written: {fault.strerror}; the log is "
            "unchanged: free space, or raise log.cleaner.dedupe.buffer.size"
        ) from fault
