"""The swap: finished `.cleaned` segments take the place of those they were made from.

The steps and their order are Kafka's, because the loader (a broker's, and ours in
`storage_engine.segments`) tells from the names alone how far a dead process had come:

1. `.cleaned` -> `.swap`, the highest base first, of each segment its `.log` first. As long as one
   `.cleaned` is left, the sources are live.
2. The sources -> `.deleted`. From the last rename of step 1 on, the new segments are live.
3. `.swap` -> the final names.

Before all that the outputs' gaps are listed, beside those of the sources: whoever finishes or
forgets the swap finds listed what is live then. And the sources' key indexes are removed first, the
outputs' put in place last, so that there never is one beside a segment that it is not of.

The directory is synced after each step, so that a power cut cannot show a later step without the
one before it. Kafka: LocalLog.replaceSegments; unlike it, no new base is taken for a vanished one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kafkalog.cleaner.cleaned_segment import CleanedSegment
from kafkalog.storage_engine import files, layout, locks
from kafkalog.storage_engine.gaps import Section, list_sections
from kafkalog.storage_engine.segments import (
    SegmentFiles,
    list_segments,
    remove_key_indexes,
    retire,
    swap_in,
)

__all__ = ["keep_key_index", "replace_segments"]


def replace_segments(
    directory: Path,
    sources: Sequence[SegmentFiles],
    outputs: Sequence[CleanedSegment],
    *,
    sections: Sequence[Section],
    source_sections: Sequence[Section] = (),
    producer_snapshot: int = -1,
) -> None:
    """Put finished output segments in the place of the source segments (rule C111).

    `sections` are the gaps of the outputs, `source_sections` those of the sources.
    `producer_snapshot` is the offset of the one that the journal names, which stays wherever it is.
    The caller holds the partition's cleaner lock, the commit lock and, exclusively, the segments
    lock, and has finished every earlier swap. A source that is gone is passed over (C112). Raises
    OSError and leaves the directory as it is then, which every reader resolves.
    """
    new_bases = {output.base_offset for output in outputs}
    present = {(segment.base_offset, segment.size) for segment in list_segments(directory)}
    list_sections(directory, [*source_sections, *sections], present=present)
    bases = [source.base_offset for source in sources]
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

    new_keys = {section.key for section in sections}
    if not new_keys.isdisjoint(section.key for section in source_sections):
        # As large as the file it replaces: what was listed of that one must not count for it.
        list_sections(directory, sections, present=present - new_keys)


def keep_key_index(
    directory: Path, sources: Sequence[SegmentFiles], outputs: Sequence[CleanedSegment]
) -> None:
    """Put the key index of an output beside its source, which stays, since the two are alike.

    The caller holds the partition's cleaner lock, and discards the output. Raises OSError.
    """
    if len(sources) != 1 or len(outputs) != 1:
        return
    (source,), (output,) = sources, outputs
    if output.keys is None or output.size != source.size:
        return
    with locks.SegmentsLock(directory).exclusive():
        live = {(segment.base_offset, segment.size) for segment in list_segments(directory)}
        if (source.base_offset, source.size) in live:
            output.place_keys()
            files.sync_directory(directory)
