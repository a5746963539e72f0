"""The segments of a partition: find the live files, and the place of an offset in one.

A *segment* is a `.log` file, named by its base offset, with its indexes. The cleaner replaces
segments in steps: `.cleaned`, then `.swap` while the sources become `.deleted`, then the final
names. A process may die between any two steps. The names of the files alone therefore show which
are live:

1. A `.swap` file whose base is at or above that of any `.cleaned` file is dead. The process died
   before it had renamed all new segments, in descending order, so the sources are live. (A cleaner
   that finds `.swap` files thus finishes them before it writes its first `.cleaned` file.)
2. Otherwise the `.log.swap` files are live, and the files that they replace are not. These are the
   files with final names whose base lies in what a `.log.swap` spans by our list of gaps. Without a
   list, their base lies in [smallest base, largest next offset) of all `.log.swap` files.
3. A `.swap` index whose `.log` has its final name already belongs to it.
4. `.cleaned` and `.deleted` files are never live.

`list_segments` applies these rules in memory and `finish_swaps` on disk. They are the first three
passes of Kafka's LogLoader, which knows no list; the renames are those of LocalLog.replaceSegments.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader, iterate_headers, read_header
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import ByteSource, FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex
from kafkalog.storage_engine.segment.offset_chain import GapLists

_HEADERS_SIZE = 64 << 10
"""Bytes to read at once when skipping small batches."""
_SMALL_BATCH = 8 << 10
"""Above this size, only the header of a batch is read to skip it."""
_TIME_HINTS = 3
"""Entries of a time index to try before scanning the whole segment."""


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """The files of one live segment; only the `.log` must exist.

    `size` is that of the `.log` file in bytes at the listing; it may exceed the committed size.
    A dead process may have left files with names that end in `.swap`: those of the suffixes
    `swaps`.
    """

    directory: Path
    base_offset: int
    size: int
    swaps: frozenset[str] = frozenset()

    @property
    def log(self) -> Path:
        """The path of the batches."""
        return self._path(layout.LOG)

    @property
    def index(self) -> Path:
        """The path of the offset index."""
        return self._path(layout.INDEX)

    @property
    def time_index(self) -> Path:
        """The path of the time index."""
        return self._path(layout.TIME_INDEX)

    @property
    def transaction_index(self) -> Path:
        """The path of the list of aborted transactions."""
        return self._path(layout.TRANSACTION_INDEX)

    def _path(self, suffix: str) -> Path:
        stage = layout.SWAP if suffix in self.swaps else ""
        return self.directory / layout.segment_file(self.base_offset, suffix, stage)


# --- which files are live ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Files:
    """The segment files of a directory, as base offset -> suffixes, by their state."""

    live: dict[int, set[str]]
    """Files with final names, including replaced ones."""
    swaps: dict[int, set[str]]
    """`.swap` files that become final."""
    dead_swaps: dict[int, set[str]]
    cleaned: dict[int, set[str]]
    replaced: set[int]
    """Base offsets of final files that the swap files replace."""


def file_names(directory: Path) -> frozenset[str]:
    """Return the names of all segment files except those a cleaner is still writing.

    Equal names before and after a listing mean that the directory did not change, even if a broker,
    which ignores our locks, replaces files.
    """
    return frozenset(name for name, _, _, stage in _scan(directory) if stage != layout.CLEANED)


def _scan(directory: Path) -> Iterator[tuple[str, int, str, str]]:
    """Yield (name, base offset, suffix, stage) of every segment file, without directories."""
    with files.scan(directory) as entries:
        for entry in entries:
            parsed = layout.parse_segment_file(entry.name)
            if parsed is not None and not entry.is_dir(follow_symlinks=False):
                yield (entry.name, *parsed)


def _resolve(directory: Path, *, is_strict: bool) -> _Files:
    stages = _stages(directory)
    live, cleaned = stages[""], stages[layout.CLEANED]
    swaps, dead_swaps = stages[layout.SWAP], {}
    if cleaned:
        first_cleaned = min(cleaned)
        dead_swaps = {base: swaps[base] for base in swaps if base >= first_cleaned}
        swaps = {base: swaps[base] for base in swaps if base < first_cleaned}
    logs = [base for base in swaps if layout.LOG in swaps[base]]
    replaced: set[int] = set()
    if logs:
        spans = _spans(directory, live, sorted(logs), is_strict=is_strict)
        starts = [start for start, _ in spans]
        # An empty .log.swap may span no offsets, and still replaces what has its own base.
        replaced = {
            base
            for base in live
            if base in logs or ((at := bisect_right(starts, base)) and base < spans[at - 1][1])
        }
    return _Files(live, swaps, dead_swaps, cleaned, replaced)


def _stages(directory: Path) -> dict[str, dict[int, set[str]]]:
    """Return the suffixes of the segment files by stage and base offset."""
    stages: dict[str, dict[int, set[str]]] = {
        stage: {} for stage in ("", layout.SWAP, layout.CLEANED, layout.DELETED)
    }
    for _, base, suffix, stage in _scan(directory):
        stages[stage].setdefault(base, set()).add(suffix)
    return stages


def _spans(
    directory: Path, live: Mapping[int, set[str]], bases: Sequence[int], *, is_strict: bool
) -> list[tuple[int, int]]:
    """Return the offsets [start, end) whose files the `.log.swap` files replace, ascending.

    The gaps that our cleaner lists say what each of its files spans. A power cut may have lost the
    final name of a file below another one's, so a file between two `.log.swap` files may be final.
    A broker lists nothing: by its rule, all its `.log.swap` files replace one span.
    """
    with contextlib.closing(GapLists(directory)) as lists:
        ends = {base: _swap_ends(directory, base, lists, is_strict=is_strict) for base in bases}
    batches = {base: end.batches for base, end in ends.items()}
    limit = _limit(directory, live, batches, is_strict=is_strict)
    spans = [(base, min(end.listed, limit)) for base, end in ends.items() if end.listed is not None]
    return spans if len(spans) == len(bases) else [(bases[0], min(max(batches.values()), limit))]


class _SwapEnds(NamedTuple):
    batches: int
    """The offset after the last batch of a `.log.swap`."""
    listed: int | None
    """The end of the offsets that it spans; None if its gaps are not listed."""


def _swap_ends(directory: Path, base: int, lists: GapLists, *, is_strict: bool) -> _SwapEnds:
    """Return the ends of a `.log.swap`.

    No checksum covers a batch's base offset, and a wrong one would remove live segments. If our
    cleaner has listed the file's gaps, only batches that follow each other count. A caller that
    removes the replaced files (`is_strict`) gets a CorruptLogError for others.
    """
    segment = _swapped(directory, base)
    if not lists.cleaned.sections_of(base):
        return _SwapEnds(next_offset(segment), None)  # a broker's
    chain = lists.chain(base, segment.size, next_offset=base, listed_from=0)
    fault: CorruptLogError | None = None
    if chain.sizes:
        sizes = " or ".join(str(size) for size in sorted(set(chain.sizes)))
        fault = CorruptLogError(segment.log, segment.size, f"{sizes} bytes", segment.size)
    end = base
    with files.closing(files.open_to_read(segment.log)) as fd:
        for position, header in headers(FileBytes(fd), 0, segment.size):
            if not chain.follows(header.base_offset, header.last_offset):
                expected = f"a batch from offset {chain.expected_after(end)} on"
                found = f"one of the offsets {header.base_offset} to {header.last_offset}"
                fault = CorruptLogError(segment.log, position, expected, found)
                break
            end = max(end, header.next_offset)
    if fault is not None and is_strict:
        raise fault
    if not chain.has_list:
        return _SwapEnds(end, None)
    return _SwapEnds(end, end if fault is not None else chain.expected_after(end))


def _limit(
    directory: Path, live: Mapping[int, set[str]], ends: Mapping[int, int], *, is_strict: bool
) -> int:
    """Return an offset that no swap passes; `ends` maps base offsets to the ends of the batches.

    No cleaner replaces the active segment, the last one; without it, the last cleaned one counts.
    An end inside or above that segment's offsets comes from a damaged batch.
    """
    base, end = max(ends.items(), key=lambda found: found[1])
    last = max((offset for offset in live if layout.LOG in live[offset]), default=base)
    if last in ends or not base <= last < end:
        return layout.INT64_MAX
    if end == next_offset(_segment_files(directory, last, set())):
        return layout.INT64_MAX
    if is_strict:
        swap = _swapped(directory, base)
        expected = f"offsets below {last}, where the last segment begins"
        raise CorruptLogError(swap.log, swap.size, expected, f"some up to {end - 1}")
    return last


def _swapped(directory: Path, base: int) -> SegmentFiles:
    return _segment_files(directory, base, layout.SEGMENT_SUFFIXES)


def _segment_files(directory: Path, base: int, swaps: Collection[str]) -> SegmentFiles:
    stage = layout.SWAP if layout.LOG in swaps else ""
    log = directory / layout.segment_file(base, layout.LOG, stage)
    return SegmentFiles(directory, base, log.stat().st_size, frozenset(swaps))


def list_segments(directory: Path) -> list[SegmentFiles]:
    """Return the live segments, ascending; resolve half a swap in memory, not on disk.

    The caller holds the segments lock, shared or exclusive. Raises FileNotFoundError if a file
    vanishes, which only a process without that lock, such as a broker, can cause.
    """
    found = _resolve(directory, is_strict=False)
    segments: list[SegmentFiles] = []
    for base in sorted(found.live.keys() | found.swaps.keys()):
        swaps = found.swaps.get(base, set())
        if layout.LOG in swaps:
            segments.append(_swapped(directory, base))
        elif layout.LOG in found.live.get(base, ()) and base not in found.replaced:
            segments.append(_segment_files(directory, base, swaps))
    return segments


def glance_at_segments(directory: Path) -> list[SegmentFiles] | None:
    """Return the live segments without a lock; None while a cleaner is at work on them.

    For a report or a choice that is made again under the lock: a segment may be replaced or gone
    as soon as it is returned. Raises FileNotFoundError if it is gone before.
    """
    stages = _stages(directory)
    if stages[layout.SWAP] or stages[layout.CLEANED]:
        return None
    live = stages[""]
    return [
        _segment_files(directory, base, ()) for base in sorted(live) if layout.LOG in live[base]
    ]


def orphaned_indexes(directory: Path) -> dict[int, set[str]]:
    """Return the suffixes of the indexes whose `.log` is gone, by base offset.

    A `.log` is the first file of a segment that is created, and the first that a deletion or a swap
    renames. An index beside a renamed one thus belongs to what a dead process was doing.
    """
    stages = _stages(directory)
    renamed = {
        base
        for stage in (layout.SWAP, layout.CLEANED, layout.DELETED)
        for base, suffixes in stages[stage].items()
        if layout.LOG in suffixes
    }
    found = {
        base: suffixes - {layout.SNAPSHOT}
        for base, suffixes in stages[""].items()
        if layout.LOG not in suffixes and base not in renamed and suffixes != {layout.SNAPSHOT}
    }
    replaced = _resolve(directory, is_strict=False).replaced if found and renamed else set()
    return {base: found[base] for base in found.keys() - replaced}


def retired_bases(directory: Path) -> list[int]:
    """Return the base offsets of the `.deleted` logs, ascending."""
    stages = _stages(directory)[layout.DELETED]
    return sorted(base for base, suffixes in stages.items() if layout.LOG in suffixes)


def finish_swaps(directory: Path) -> None:
    """Apply the result of `list_segments` to the disk: finish or undo a dead process's swap.

    The caller holds the cleaner lock and, exclusively, the segments lock; or it holds the root's
    lock alone. The process may die at any step; the next call continues. `.deleted` files stay for
    readers with a recent listing (`sweep_deleted`). Raises CorruptLogError if the batches of a
    `.log.swap` do not follow each other as listed.
    """
    found = _resolve(directory, is_strict=True)
    if not (found.swaps or found.dead_swaps or found.cleaned):
        return
    # Make the names that the dead process gave durable before building on them.
    files.sync_directory(directory)
    # Remove dead .swap files first: they are dead only while the .cleaned file exists.
    _remove(directory, found.dead_swaps, layout.SWAP)
    _remove(directory, found.cleaned, layout.CLEANED)
    # The replaced files are known only while the last .log.swap exists.
    retire(directory, found.replaced)
    swap_in(directory, found.swaps)
    files.sync_directory(directory)


def swap_in(directory: Path, found: Mapping[int, Collection[str]]) -> None:
    """Give `.swap` files, by base offset and suffix, their final names; the caller syncs these.

    Logs come first, durably. Beside a `.log.swap` every file of that base counts as replaced. If a
    power cut lost only the log's new name, that would include new files, such as the list of
    aborted transactions.
    """
    logs = {base for base in found if layout.LOG in found[base]}
    for base in sorted(logs):
        _swap_in(directory, base, layout.LOG)
    if logs:
        files.sync_directory(directory)
    for base in sorted(found):
        for suffix in layout.SEGMENT_SUFFIXES:
            if suffix in found[base] and suffix != layout.LOG:
                _swap_in(directory, base, suffix)


def _swap_in(directory: Path, base: int, suffix: str) -> None:
    path = directory / layout.segment_file(base, suffix, layout.SWAP)
    if path.exists():
        files.rename(path, directory / layout.segment_file(base, suffix))


def _remove(directory: Path, found: dict[int, set[str]], stage: str) -> None:
    for base, suffixes in sorted(found.items()):
        for suffix in sorted(suffixes):
            files.remove(directory / layout.segment_file(base, suffix, stage))
    if found:
        files.sync_directory(directory)


def retire(
    directory: Path,
    base_offsets: Iterable[int],
    *,
    suffixes: Iterable[str] = layout.SEGMENT_SUFFIXES,
) -> None:
    """Rename the files of segments to `.deleted`, durably.

    Skips missing files. With its `.log`, also removes a segment's key index at once. Keeps producer
    snapshots, because segments alone do not show which are needed; see
    `producer_snapshot.sweep_snapshots`. The caller holds the segments lock exclusively.
    """
    base_offsets, suffixes = sorted(base_offsets), tuple(suffixes)
    wanted = [(base, suffix) for base in base_offsets for suffix in suffixes]
    changed = layout.LOG in suffixes and remove_key_indexes(directory, base_offsets)
    for base, suffix in wanted:
        path = directory / layout.segment_file(base, suffix)
        if path.exists():
            files.rename(path, directory / layout.segment_file(base, suffix, layout.DELETED))
            changed = True
    if changed:
        files.sync_directory(directory)


def remove_key_indexes(directory: Path, base_offsets: Iterable[int]) -> bool:
    """Remove the key indexes of segments; return whether there were any.

    `sync_directory` makes it durable. A key index may exist only while its segment is live. A
    process that replaces or removes a segment calls this first.
    """
    found = False
    for base in base_offsets:
        path = directory / layout.key_index_file(base)
        if path.exists():
            files.remove(path)
            found = True
    return found


def bases_below(directory: Path, base_offset: int) -> list[int]:
    """Return the bases below `base_offset` of segment files with final names, ascending.

    Producer snapshots do not count.
    """
    found = {
        base
        for _, base, suffix, stage in _scan(directory)
        if not stage and suffix != layout.SNAPSHOT and base < base_offset
    }
    return sorted(found)


def sweep_deleted(directory: Path, *, older_than_ms: int, now_ms: int) -> int:
    """Remove `.deleted` segment files that got that name at least `older_than_ms` ago.

    Returns their number. Needs no lock: no reader opens such a file, and open ones stay readable.
    The canary is not a segment file. Kafka: file.delete.delay.ms.
    """
    count = 0
    retired = [name for name, _, _, stage in _scan(directory) if stage == layout.DELETED]
    for path in (directory / name for name in sorted(retired)):
        try:
            # Renaming a file changes its ctime, and nothing changes that of a retired file.
            changed_ms = path.stat().st_ctime_ns // 1_000_000
        except FileNotFoundError:
            continue  # another sweep
        if changed_ms <= now_ms - older_than_ms:
            files.remove(path)
            count += 1
    return count


# --- find an offset ------------------------------------------------------------------------------


def header_at(source: ByteSource, position: int, limit: int) -> BatchHeader | None:
    """Return the header of the whole batch at `position` of a `.log` file, or None.

    The log ends at byte `limit`. Does not compare the checksum. A message v0 or v1 counts as a
    batch.
    """
    size = min(layout.BATCH_OVERHEAD, limit - position)
    if position < 0 or size <= 0:
        return None
    data = source.read_at(size, position)
    if len(data) < size:
        return None
    header = read_header(data, 0, limit - position)
    return None if header is None or header.last_offset_delta < 0 else header


def headers(source: ByteSource, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of the batches from `position` up to byte `limit` of a `.log` file.

    Stops early, like `batch.iterate_headers`, before bytes that are not a whole batch.
    """
    while (header := header_at(source, position, limit)) is not None:
        if header.size > _SMALL_BATCH:
            yield position, header
            position += header.size
            continue
        data = source.read_at(min(_HEADERS_SIZE, limit - position), position)
        start = position
        for place, found in iterate_headers(data):
            yield start + place, found
            position = start + place + found.size
        if position == start:
            return  # the file was truncated meanwhile


def locate(source: ByteSource, limit: int, index: OffsetIndex, offset: int) -> int:
    """Return the position of a batch such that all earlier batches lie wholly below `offset`.

    It comes from the closest index entry that its batch confirms, or is 0.
    """
    for last_offset, position in index.hints(offset):
        header = header_at(source, position, limit)
        if header is not None and header.last_offset == last_offset:
            return position
    return 0


def confirmed(
    source: ByteSource, limit: int, index: OffsetIndex, entry: tuple[int, int]
) -> int | None:
    """Return the position of the batch that confirms a time index entry, or None without one.

    It has the entry's offset, and its largest timestamp is the entry's. Earlier batches may still
    be younger: the entries between may be lost.
    """
    largest, offset = entry
    for position, header in headers(source, locate(source, limit, index, offset), limit):
        if header.last_offset >= offset:
            is_its = header.base_offset <= offset and header.max_timestamp == largest
            return position if is_its else None
    return None


def locate_time(
    source: ByteSource, limit: int, index: OffsetIndex, times: TimeIndex, timestamp: int
) -> int:
    """Return the position of a batch that a time index names for a time (ms), or 0.

    If the entry is true, all batches before are older than `timestamp`. Its batch confirms it.
    """
    for tried, entry in enumerate(times.hints(timestamp)):
        if tried == _TIME_HINTS:
            break
        position = confirmed(source, limit, index, entry)
        if position is not None:
            return position
    return 0


def next_offset(segment: SegmentFiles) -> int:
    """Return the offset after a segment's last whole batch, or its base offset without one.

    No checksum covers a batch's base offset. A batch below the ones before it, or above the ones
    after it, is damaged and does not count. Kafka: LogSegment.readNextOffset.
    """
    with files.closing(files.open_to_read(segment.log)) as fd:
        source = FileBytes(fd)
        limit = source.size()
        index = OffsetIndex(segment.index, segment.base_offset)
        before = following = segment.base_offset
        for _, header in headers(source, locate(source, limit, index, layout.INT64_MAX), limit):
            first = header.known_first_offset
            if header.last_offset < first or first < before:
                continue  # below the others
            if first >= following:
                before = following
            # Otherwise the batch before was damaged, and lay above the others.
            following = header.next_offset
        return following
