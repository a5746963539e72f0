"""The arena of a chunk: the bytes in which the records of its batches are read.

It is the chunk itself if nothing is compressed, else its decompressed record sections, one after
the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.records import columns
from kafkalog.storage_engine.records.lz4_frames.frames import decompress_frames

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import BatchTable, ChunkFault

__all__ = ["sections"]

Integers = npt.NDArray[np.int64]


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
    if (codecs == layout.CODEC_LZ4).all():
        filled = np.where(table.counts[selection] == 0, starts, ends)
        found = decompress_frames(buffer, starts, filled, run_size=run_size, limit=limit)
        if found is not None:
            return found[0], np.append(0, found[1][:-1]), found[1]
    parts: list[bytes | memoryview] = []
    total = 0
    counts = table.counts[selection].tolist()
    with memoryview(buffer) as view:
        for number, codec in enumerate(codecs.tolist()):
            if counts[number] == 0:  # no caller reads an empty batch
                parts.append(b"")
                continue
            try:
                part = compression.decompress(
                    codec, view[int(starts[number]) : int(ends[number])], limit=limit
                )
            except ValueError as error:
                fault.report_undecodable(number, error)
            parts.append(part)
            total += len(part)
            if run_size is not None and total >= run_size:
                break
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    starts = np.append(0, ends[:-1])
    if len(parts) == 1:  # saves a copy of a large batch
        return np.frombuffer(parts[0], dtype=np.uint8), starts, ends
    arena = columns.allocate(total)
    for part, start, end in zip(parts, starts.tolist(), ends.tolist(), strict=True):
        arena[start:end] = np.frombuffer(part, dtype=np.uint8)
    return arena, starts, ends
