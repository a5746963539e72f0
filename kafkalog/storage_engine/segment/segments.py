"""The segments of a partition: which of its files are live.

A *segment* is a `.log` file, named by its base offset, with its indexes. The cleaner replaces
segments in steps: `.cleaned`, then `.swap` while the sources become `.deleted`, then the final
names. A process may die between any two steps. The names of the files alone therefore show which
are live:

1. A `.swap` file whose base is at or above that of any `.cleaned` file is dead. The process died
before it had renamed all new segments, in descending order, so the sources are live. A cleaner that
finds `.swap` files therefore finishes them before it writes its first `.cleaned` file. 2. Otherwise
the `.log.swap` files are live, and the files that they replace are not. These are the files with
final names whose base lies in what a `.log.swap` spans by our list of gaps. Without a list, their
base lies in [smallest base, largest next offset) of all `.log.swap` files. 3. A `.swap` index whose
`.log` has its final name already belongs to it. 4. `.cleaned` and `.deleted` files are never live.

`list_segments` applies these rules in memory, `swaps.finish_swaps` on disk. They are the first
three passes of Kafka's LogLoader, which knows no list; the renames are those of
LocalLog.replaceSegments.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.locate import headers, locate
from kafkalog.storage_engine.segment.offset_chain import GapLists


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


@dataclass(frozen=True, slots=True)
class FoundFiles:
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
    return frozenset(name for name, _, _, stage in scan(directory) if stage != layout.CLEANED)


def scan(directory: Path) -> Iterator[tuple[str, int, str, str]]:
    """Yield (name, base offset, suffix, stage) of every segment file, without directories."""
    with files.scan(directory) as entries:
        for entry in entries:
            parsed = layout.parse_segment_file(entry.name)
            if parsed is not None and not entry.is_dir(follow_symlinks=False):
                yield (entry.name, *parsed)


def resolve(directory: Path, *, is_strict: bool) -> FoundFiles:
    """Tell the live segment files from the others; `is_strict` as in `_swap_ends`."""
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
    return FoundFiles(live, swaps, dead_swaps, cleaned, replaced)


def _stages(directory: Path) -> dict[str, dict[int, set[str]]]:
    """Return the suffixes of the segment files by stage and base offset."""
    stages: dict[str, dict[int, set[str]]] = {
        stage: {} for stage in ("", layout.SWAP, layout.CLEANED, layout.DELETED)
    }
    for _, base, suffix, stage in scan(directory):
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
    return SegmentFiles(directory, base, files.size_of(log), frozenset(swaps))


def list_segments(directory: Path) -> list[SegmentFiles]:
    """Return the live segments, ascending; resolve half a swap in memory, not on disk.

    The caller holds the segments lock, shared or exclusive. Raises FileNotFoundError if a file
    vanishes, which only a process without that lock, such as a broker, can cause.
    """
    found = resolve(directory, is_strict=False)
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
    renames. An index next to a renamed one thus belongs to what a dead process was doing.
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
    replaced = resolve(directory, is_strict=False).replaced if found and renamed else set()
    return {base: found[base] for base in found.keys() - replaced}


def retired_bases(directory: Path) -> list[int]:
    """Return the base offsets of the `.deleted` logs, ascending."""
    stages = _stages(directory)[layout.DELETED]
    return sorted(base for base, suffixes in stages.items() if layout.LOG in suffixes)


def bases_below(directory: Path, base_offset: int) -> list[int]:
    """Return the bases below `base_offset` of segment files with final names, ascending.

    Producer snapshots do not count.
    """
    found = {
        base
        for _, base, suffix, stage in scan(directory)
        if not stage and suffix != layout.SNAPSHOT and base < base_offset
    }
    return sorted(found)


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
