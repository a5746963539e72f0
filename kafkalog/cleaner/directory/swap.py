"""The swap: finished `.cleaned` segments replace their sources.

The steps and their order are Kafka's, so that a loader (a broker's, and `segment.segments`) finds
from the names how far a dead process came:

1. `.cleaned` -> `.swap`, the highest base first, and of each segment `.log` first. The sources are
   live as long as one `.cleaned` is left.
2. The sources -> `.deleted`. The new segments are live from the end of step 1 on.
3. `.swap` -> the final names.

The directory is synced after each step. A swap replaces one or several adjacent groups of segments.
Before the first swap, the gaps of all outputs are listed next to those of the sources. The sources'
key indexes are removed first, and the outputs' come last, so no segment has another's index.

Kafka: LocalLog.replaceSegments; unlike it, no new base is taken for a vanished one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.segment.gaps import list_sections
from kafkalog.storage_engine.segment.swaps import remove_key_indexes, retire, swap_in

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.groups import RewrittenGroup

SEGMENTS_MAX: Final = 128
"""Sources of one swap, unless a single group has more; writers and readers wait for a swap."""

LiveFiles = set[tuple[int, int]]
"""The live segments, as (base offset, size)."""


def adjacent_groups(groups: Sequence[RewrittenGroup]) -> Iterator[list[RewrittenGroup]]:
    """Yield the groups of each swap: adjacent ones with at most `SEGMENTS_MAX` sources, or one."""
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


def list_gaps(
    directory: Path, groups: Sequence[RewrittenGroup], live: LiveFiles, *, number: int = 0
) -> None:
    """List the gaps of groups durably before their swap; drop those of files that are not live.

    `number` is that of the journal's last record. The caller holds the partition's cleaner lock and
    the commit lock. Raises CorruptLogError, OSError.
    """
    new = {section.key: section for group in groups for section in group.sections}
    old = [
        section
        for group in groups
        for section in group.source_sections
        if section.key not in new or not np.array_equal(section.gaps, new[section.key].gaps)
    ]
    list_sections(directory, [*old, *new.values()], present=live, number=number)


def drop_replaced_gaps(
    directory: Path, groups: Sequence[RewrittenGroup], live: LiveFiles, *, number: int = 0
) -> None:
    """Drop the gaps of replaced files that have the base and size of their replacement.

    The caller holds the same locks.
    """
    old = {s.key: s for group in groups for s in group.source_sections}
    shared = [
        section
        for group in groups
        for section in group.sections
        if section.key in old and not np.array_equal(section.gaps, old[section.key].gaps)
    ]
    if shared:
        present = live - {section.key for section in shared}
        list_sections(directory, shared, present=present, number=number)


def end_swaps(directory: Path, live: LiveFiles, *, number: int) -> None:
    """Note that a round's swaps are over, and drop the gaps of the files that they replaced.

    The caller holds the same locks.
    """
    list_sections(directory, [], present=live, number=number, is_finished=True)


def replace_segments(
    directory: Path, groups: Sequence[RewrittenGroup], *, producer_snapshot: int = -1
) -> None:
    """Replace source segments by finished output segments (rule C111).

    The groups are adjacent, and `list_gaps` has listed their gaps. The journal's producer snapshot,
    at the offset `producer_snapshot`, stays. The caller holds the partition's cleaner lock, the
    commit lock and the exclusive segments lock, and has finished earlier swaps. Missing sources are
    ignored (C112). Raises OSError, and leaves a state that every reader resolves.
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
    # The producer snapshot of a base that remains stays valid (C113).
    vanished = [base for base in bases if base not in {*new_bases, producer_snapshot}]
    retire(directory, vanished, suffixes=(layout.SNAPSHOT,))

    swap_in(directory, {base: set(layout.SEGMENT_SUFFIXES) for base in new_bases})
    for output in outputs:
        output.place_keys()
    files.sync_directory(directory)


def keep_key_index(directory: Path, group: RewrittenGroup) -> None:
    """Put the key index of an output next to its identical source, which stays.

    The caller holds the partition's cleaner lock, and discards the output. The index is durable
    once the directory is synced. Raises OSError.
    """
    if len(group.sources) != 1 or len(group.outputs) != 1:
        return
    (source,), (output,) = group.sources, group.outputs
    if output.keys is None or output.size != source.size:
        return
    output.sync_keys()
    with locks.SegmentsLock(directory).exclusive():
        if source.modified_ns() is not None:  # retention has not taken it
            output.place_keys()
