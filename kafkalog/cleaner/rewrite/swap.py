"""The swap: finished `.cleaned` segments take the place of those they were made from.

The steps and their order are Kafka's, because the loader (a broker's, and ours in
`segment.segments`) tells from the names alone how far a dead process had come:

1. `.cleaned` -> `.swap`, the highest base first, of each segment its `.log` first. As long as one
   `.cleaned` is left, the sources are live.
2. The sources -> `.deleted`. From the last rename of step 1 on, the new segments are live.
3. `.swap` -> the final names.

A swap replaces a group of segments, or several that lie side by side. Before the first one of a
round's groups the gaps of all outputs are listed at once, beside those of the sources: whoever
finishes or forgets a swap finds listed what is live then. The sources' key indexes are removed
first, the outputs' put in place last, so that there never is one beside a segment that it is not
of. Outputs of later swaps may wait as `.cleaned` files meanwhile, since their bases are higher.

The directory is synced after each step, so that a power cut cannot show a later step without the
one before it. Kafka: LocalLog.replaceSegments; unlike it, no new base is taken for a vanished one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kafkalog.cleaner.rewrite.cleaned_segment import CleanedSegment
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.segment.gaps import Section, list_sections
from kafkalog.storage_engine.segment.segments import (
    SegmentFiles,
    remove_key_indexes,
    retire,
    swap_in,
)

__all__ = [
    "LiveFiles",
    "RewrittenGroup",
    "adjacent_groups",
    "drop_replaced_gaps",
    "keep_key_index",
    "list_gaps",
    "replace_segments",
]

SEGMENTS_MAX: Final = 128
"""Sources of one swap, unless a single group has more: for so long writers and readers wait."""

LiveFiles = set[tuple[int, int]]
"""The live segments, as (base offset, size)."""


@dataclass(frozen=True, slots=True)
class RewrittenGroup:
    """What was made of a group of segments."""

    sources: Sequence[SegmentFiles]
    end: int
    """The offset at which the next segment begins."""
    outputs: Sequence[CleanedSegment]
    """Finished, ascending."""
    sections: Sequence[Section]
    """The gaps of the outputs."""
    source_sections: Sequence[Section]
    """The gaps of the sources."""
    is_changed: bool
    """Whether the outputs differ from their sources."""
    records_removed: int
    bytes_removed: int

    @property
    def size(self) -> int:
        """Bytes of the outputs' `.log` files."""
        return sum(output.size for output in self.outputs)

    @property
    def gap_count(self) -> int:
        """How many gaps are held to be listed."""
        return sum(len(section.gaps) for section in (*self.sections, *self.source_sections))

    def discard(self) -> None:
        """Remove the outputs."""
        for output in self.outputs:
            output.discard()


def adjacent_groups(groups: Sequence[RewrittenGroup]) -> Iterator[list[RewrittenGroup]]:
    """Yield what one swap may replace: groups side by side, with `SEGMENTS_MAX` sources or one."""
    found: list[RewrittenGroup] = []
    count = 0
    for group in groups:
        count += len(group.sources)
        is_apart = found and found[-1].end != group.sources[0].base_offset
        if found and (is_apart or count > SEGMENTS_MAX):
            yield found
            found, count = [], len(group.sources)
        found.append(group)
    if found:
        yield found


def list_gaps(directory: Path, groups: Sequence[RewrittenGroup], live: LiveFiles) -> None:
    """List the gaps of groups before they are swapped, durably; those of no live file are dropped.

    The caller holds the partition's cleaner lock and the commit lock. Raises CorruptLogError,
    OSError.
    """
    new = {section.key: section for group in groups for section in group.sections}
    old = [
        section
        for group in groups
        for section in group.source_sections
        if section.key not in new or not np.array_equal(section.gaps, new[section.key].gaps)
    ]
    list_sections(directory, [*old, *new.values()], present=live)


def drop_replaced_gaps(directory: Path, groups: Sequence[RewrittenGroup], live: LiveFiles) -> None:
    """Drop gaps of replaced files that were as large as those that replaced them.

    What was listed of those must not count for these. The caller holds the same locks.
    """
    old = {s.key: s for group in groups for s in group.source_sections}
    shared = [
        section
        for group in groups
        for section in group.sections
        if section.key in old and not np.array_equal(section.gaps, old[section.key].gaps)
    ]
    if shared:
        list_sections(directory, shared, present=live - {section.key for section in shared})


def replace_segments(
    directory: Path, groups: Sequence[RewrittenGroup], *, producer_snapshot: int = -1
) -> None:
    """Put finished output segments in the place of the source segments (rule C111).

    The groups lie side by side, and their gaps are listed (`list_gaps`). `producer_snapshot` is the
    offset of the one that the journal names, which stays wherever it is. The caller holds the
    partition's cleaner lock, the commit lock and, exclusively, the segments lock, and has finished
    every earlier swap. A source that is gone is passed over (C112). Raises OSError and leaves the
    directory as it is then, which every reader resolves.
    """
    outputs = [output for group in groups for output in group.outputs]
    new_bases = {output.base_offset for output in outputs}
    bases = [source.base_offset for group in groups for source in group.sources]
    if remove_key_indexes(directory, {*bases, *new_bases}):
        files.sync_directory(directory)

    for output in sorted(outputs, key=lambda output: output.base_offset, reverse=True):
        for suffix in layout.SEGMENT_SUFFIXES:
            if output.path(suffix).exists():
                name = layout.segment_file(output.base_offset, suffix, layout.SWAP)
                files.rename(output.path(suffix), directory / name)
    files.sync_directory(directory)

    retire(directory, bases, suffixes=layout.SEGMENT_SUFFIXES)
    # The producer snapshot at a base that stays a base is as good as before (C113).
    vanished = [base for base in bases if base not in {*new_bases, producer_snapshot}]
    retire(directory, vanished, suffixes=(layout.SNAPSHOT,))

    swap_in(directory, {base: set(layout.SEGMENT_SUFFIXES) for base in new_bases})
    for output in outputs:
        output.place_keys()
    files.sync_directory(directory)


def keep_key_index(directory: Path, group: RewrittenGroup) -> None:
    """Put the key index of an output beside its source, which stays, since the two are alike.

    The caller holds the partition's cleaner lock, and discards the output. The name of the index is
    durable once the directory is synced; without it the segment is scanned. Raises OSError.
    """
    if len(group.sources) != 1 or len(group.outputs) != 1:
        return
    (source,), (output,) = group.sources, group.outputs
    if output.keys is None or output.size != source.size:
        return
    output.sync_keys()
    with locks.SegmentsLock(directory).exclusive():
        if source.log.exists():
            output.place_keys()
