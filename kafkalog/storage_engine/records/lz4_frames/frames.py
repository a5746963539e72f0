"""Decompress the lz4 frames of many batches in one call, or leave them to the library."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.records import columns
from kafkalog.storage_engine.records.lz4_frames import codes, kernels

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.batch import Buffer

__all__ = ["decompress_frames"]

Integers = npt.NDArray[np.int64]

_ROOM_MIN: Final = 1 << 16
_ROOM_MAX: Final = 16 << 20
"""The room doubles up to this size if frames hold more than expected."""
_BEHIND: Final = 1 << 18
"""Room for the last frame of a run, if it is an ordinary one."""
_RATIO: Final = compression.LZ4_LIKELY_RATIO


def decompress_frames(
    buffer: Buffer, starts: Integers, ends: Integers, *, run_size: int | None, limit: int
) -> tuple[npt.NDArray[np.uint8], Integers] | None:
    """Decompress the frames in buffer[starts:ends] (s), one after the other.

    Stops after the frame that makes them `run_size` bytes. Returns the bytes, and the end of each
    frame in them. Returns None for the whole call if a frame is unusual, damaged, larger than
    `limit`, or too large for the room.
    """
    source = np.frombuffer(buffer, dtype=np.uint8)
    run_size = layout.INT64_MAX if run_size is None else run_size
    room = min(run_size + _BEHIND, _RATIO * int((ends - starts).sum()) + _ROOM_MIN)
    target = columns.allocate(min(room, _ROOM_MAX))
    places = np.empty(len(starts), dtype=np.int64)
    status, count, size = codes.NO_ROOM, 0, 0
    while True:
        status, count, size = kernels.decompress_frames(
            source, starts, ends, count, _checksums(), target, size, run_size, places
        )
        if status != codes.NO_ROOM:
            break
        if len(target) >= _ROOM_MAX:
            return None
        larger = columns.allocate(min(2 * len(target), _ROOM_MAX))
        larger[:size] = target[:size]
        target = larger
    if status != codes.OK:
        return None
    places = places[:count]
    if count and int(np.diff(places, prepend=0).max()) > limit:
        return None
    return target[:size], places


@cache
def _checksums() -> Integers:
    """Return the header checksums for independent blocks of each size, then for linked ones (8)."""
    descriptors = [bytes((flags, code << 4)) for flags in (0x60, 0x40) for code in (4, 5, 6, 7)]
    checksums = [compression.lz4_header_checksum(descriptor) for descriptor in descriptors]
    return np.array(checksums, dtype=np.int64)
