"""The arena of a chunk: the bytes in which the records of its batches are read.

It is the chunk itself if nothing is compressed, else its decompressed record sections, one after
the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.records import columns

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import BatchTable, ChunkFault

__all__ = ["sections"]

Integers = npt.NDArray[np.int64]

_RATIO: Final = 4
"""The arena has room for so many times the compressed bytes at first."""
_BEHIND: Final = 1 << 18
"""Room for the section that ends a run, unless it is larger."""


def sections(
    buffer: Buffer,
    table: BatchTable,
    *,
    limit: int,
    run_size: int | None,
    fault: ChunkFault,
) -> tuple[npt.NDArray[np.uint8], Integers, Integers]:
    """Return an arena, and the start and end of the record section of each batch of `fault`.

    No section has more than `limit` bytes. With a `run_size`, it stops after the batch that makes
    the decompressed sections this large. Raises CorruptBatchError.
    """
    selection = fault.selection
    starts = table.positions[selection] + layout.BATCH_OVERHEAD
    ends = table.positions[selection] + table.sizes[selection]
    codecs = table.attributes[selection] & layout.CODEC_MASK
    if not codecs.any():
        return np.frombuffer(buffer, dtype=np.uint8), starts, ends
    room = _RATIO * int(table.sizes[selection].sum())
    arena = columns.allocate(room if run_size is None else min(room, run_size + _BEHIND))
    target = arena.data
    section_ends: list[int] = []
    end = 0
    places = zip(starts.tolist(), ends.tolist(), table.counts[selection].tolist(), strict=True)
    with memoryview(buffer) as view:
        for (first, last, count), codec in zip(places, codecs.tolist(), strict=True):
            if count == 0:  # no caller reads an empty batch
                section_ends.append(end)
                continue
            try:
                section = compression.decompress(codec, view[first:last], limit=limit)
            except ValueError as error:
                fault.report_undecodable(len(section_ends), error)
            start, end = end, end + len(section)
            if len(codecs) == 1:  # a large batch is not copied once more
                arena = np.frombuffer(section, dtype=np.uint8)
            else:
                if end > len(target):
                    arena = _enlarged(arena, start, end)
                    target = arena.data
                target[start:end] = section
            section_ends.append(end)
            if run_size is not None and end >= run_size:
                break
    ends = np.array(section_ends, dtype=np.int64)
    return arena[:end], np.append(0, ends[:-1]), ends


def _enlarged(arena: npt.NDArray[np.uint8], used: int, needed: int) -> npt.NDArray[np.uint8]:
    """Return a larger arena with the same bytes."""
    larger = columns.allocate(max(2 * len(arena), needed))
    larger[:used] = arena[:used]
    return larger
