"""The lz4 frames of a chunk's batches, decompressed in one call, one behind the other.

Called once a batch, a library spends more on the call, its context and the copy of the result than
on a small batch itself. Here only what producers write is known: one frame of version 1, blocks
independent or linked, no dictionary, no sizes and no checksums beside that of its header (that of
the batch covers it all). Whatever else is found, and whatever is wrong, ends the work with a
status, and the caller asks the library, which also knows what to complain of.

The bytes are a stranger's: every length is compared with what is left of its block, every place
with the target's end, and every distance with what was written, before a byte is moved. Copies may
write up to 32 bytes more than they need to, never past the target, and what comes next lies there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout, ops
from kafkalog.storage_engine.records.lz4_frames import codes

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Int64s


def read_u32(source: Bytes, position: int) -> int:
    """Return the four bytes at a position, little-endian; the caller has proven the range."""
    return ops.little_32(source, position)


def read_length(source: Bytes, position: int, end: int, length: int) -> tuple[int, int]:
    """Return (a length whose first four bits were all set, next position); -1 where it is cut."""
    while position < end:
        byte = source[position]
        position += 1
        length += byte
        if byte != 255:
            return length, position
    return -1, position


def copy_ahead(
    target: Bytes, to: int, source: Bytes, start: int, size: int, source_end: int
) -> None:
    """Copy `size` bytes, in strides where both sides have room for one too many."""
    if source_end - start - size >= codes.STRIDE and target.shape[0] - to - size >= codes.STRIDE:
        done = 0
        while done < size:
            ops.copy_bytes(target, to + done, source, start + done, codes.STRIDE)
            done += codes.STRIDE
    else:
        ops.copy_bytes(target, to, source, start, size)


def repeat(target: Bytes, to: int, distance: int, size: int) -> None:
    """Copy `size` bytes from `distance` before, byte by byte where they overlap."""
    start = to - distance
    if distance >= codes.STRIDE and target.shape[0] - to - size >= codes.STRIDE:
        done = 0
        while done < size:
            ops.copy_bytes(target, to + done, target, start + done, codes.STRIDE)
            done += codes.STRIDE
    elif distance >= 8 and target.shape[0] - to - size >= 8:
        done = 0
        while done < size:
            ops.copy_bytes(target, to + done, target, start + done, 8)
            done += 8
    else:
        for i in range(size):
            target[to + i] = target[start + i]


def decompress_block(
    source: Bytes, position: int, end: int, target: Bytes, to: int, floor: int, room_end: int
) -> tuple[int, int]:
    """Decompress one block and return (status, end of what was written).

    Nothing before `floor` in the target is looked back at, nothing belongs at or behind `room_end`.
    """
    while position < end:
        token = source[position]
        position += 1
        size = token >> 4
        if size == 15:
            size, position = read_length(source, position, end, size)
        if size < 0 or size > end - position:
            return codes.OTHER, to
        if size > room_end - to:
            return codes.NO_ROOM, to
        copy_ahead(target, to, source, position, size, source.shape[0])
        position += size
        to += size
        if position == end:  # the last sequence has no match
            return codes.OK, to
        if end - position < 2:
            return codes.OTHER, to
        distance = ops.little_16(source, position)
        position += 2
        size = token & 15
        if size == 15:
            size, position = read_length(source, position, end, size)
            if size < 0:
                return codes.OTHER, to
        size += codes.MATCH_MIN
        if distance == 0 or distance > to - floor:
            return codes.OTHER, to
        if size > room_end - to:
            return codes.NO_ROOM, to
        repeat(target, to, distance, size)
        to += size
    return codes.OTHER, to


def decompress_frame(
    source: Bytes, position: int, end: int, target: Bytes, to: int, checksums: Int64s
) -> tuple[int, int]:
    """Decompress the frame that fills source[position:end]; (status, end of what was written)."""
    start = to
    if end - position < codes.HEADER_SIZE or read_u32(source, position) != codes.MAGIC:
        return codes.OTHER, to
    flags = source[position + 4]
    kind = source[position + 5]
    code = kind >> 4
    if (
        (flags != codes.INDEPENDENT and flags != codes.LINKED)
        or kind & 0x0F != 0
        or code < 4
        or code > 7
    ):
        return codes.OTHER, to
    place = code - 4 if flags == codes.INDEPENDENT else code
    if source[position + 6] != checksums[place]:
        return codes.OTHER, to
    block_size = 1 << (2 * code + 8)
    position += codes.HEADER_SIZE
    while end - position >= 4:
        size = read_u32(source, position)
        position += 4
        if size == 0:
            return codes.OK if position == end else codes.OTHER, to
        is_stored = size >> 31
        size &= layout.INT32_MAX
        if size > end - position or size > block_size:
            return codes.OTHER, to
        before = to
        if is_stored != 0:
            if size > target.shape[0] - to:
                return codes.NO_ROOM, start
            ops.copy_bytes(target, to, source, position, size)
            to += size
        else:
            floor = start if flags == codes.LINKED else to
            status, to = decompress_block(
                source, position, position + size, target, to, floor, target.shape[0]
            )
            if status != codes.OK:
                return status, start
        if to - before > block_size:
            return codes.OTHER, start
        position += size
    return codes.OTHER, start


def decompress_frames(
    source: Bytes,
    starts: Int64s,
    ends: Int64s,
    first: int,
    checksums: Int64s,
    target: Bytes,
    to: int,
    run_size: int,
    places: Int64s,
) -> tuple[int, int, int]:
    """Decompress frames one behind the other, until they are `run_size` bytes.

    starts, ends: int64 (s,), where each lies in the source; nothing there is nothing decompressed
    first: the frame to begin with, which goes to byte `to` of the target
    checksums: int64 (8,), that of the header for each size of blocks: independent, then linked ones
    places: int64 (s,), written: the end of each in the target
    Returns (status, frames that are done, bytes that are written).
    """
    for i in range(first, starts.shape[0]):
        if starts[i] < 0 or ends[i] < starts[i] or ends[i] > source.shape[0]:
            return codes.OTHER, i, to
        if ends[i] > starts[i]:
            status, to = decompress_frame(source, starts[i], ends[i], target, to, checksums)
            if status != codes.OK:
                return status, i, to
        places[i] = to
        if to >= run_size:
            return codes.OK, (i + 1), to
    return codes.OK, starts.shape[0], to


ops.plain(globals())
