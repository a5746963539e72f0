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

from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

RELEASE = "0.1.0"  # a new release gets a new numba cache
kernel = partial(njit, cache=True, nogil=True, _nrt=False)
inlined = partial(kernel, forceinline=True)

Int: TypeAlias = Any  # int, and without the JIT np.int64: what a kernel computes is either
Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]

I64: Any = types.int64
BYTES = types.Array(types.uint8, 1, "C", readonly=True)  # accepts writable arrays too
BYTES_OUT = types.Array(types.uint8, 1, "C")
INTEGERS = types.Array(types.int64, 1, "C", readonly=True)
INTEGERS_OUT = types.Array(types.int64, 1, "C")

OK = 0
NO_ROOM = 1
"""The target is full: what was decompressed before stands."""
OTHER = 2
"""A frame of another kind, or a damaged one."""

_MAGIC = 0x184D2204
_HEADER_SIZE = 7
_LINKED = 0x40
_INDEPENDENT = 0x60
"""The flags of a frame: its version, and that its blocks do not look back at each other."""
_MATCH_MIN = 4
_STRIDE = 16

if getattr(config, "DISABLE_JIT", False):

    def copy_bytes(target: Any, to: Int, source: Any, start: Int, size: Int) -> None:
        """Copy as the compiled one does."""
        target[to : to + size] = source[start : start + size].copy()

else:
    # Numba passes its own types to an intrinsic, for which there are no stubs.
    @intrinsic
    def copy_bytes(typing_context, target, to, source, start, size):  # type: ignore[no-untyped-def]
        """Copy `size` bytes by memcpy; the caller has proven both ranges."""
        signature = types.void(target, types.intp, source, types.intp, types.intp)

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = ir.IntType(8).as_pointer()
            target, to, source, start, size = arguments
            target_array = make_array(signature.args[0])(context, builder, target)
            source_array = make_array(signature.args[2])(context, builder, source)
            cgutils.raw_memcpy(
                builder,
                builder.gep(builder.bitcast(target_array.data, pointer), [to]),
                builder.gep(builder.bitcast(source_array.data, pointer), [start]),
                size,
                1,
            )
            return context.get_dummy_value()

        return signature, codegen


@inlined([I64(BYTES, I64)])
def read_u32(source: Bytes, position: Int) -> Int:
    """Return the four bytes at a position, little-endian; the caller has proven the range."""
    return (
        np.int64(source[position])
        | np.int64(source[position + 1]) << 8
        | np.int64(source[position + 2]) << 16
        | np.int64(source[position + 3]) << 24
    )


@inlined([types.UniTuple(types.int64, 2)(BYTES, I64, I64, I64)])
def read_length(source: Bytes, position: Int, end: Int, length: Int) -> tuple[Int, Int]:
    """Return (a length whose first four bits were all set, next position); -1 where it is cut."""
    while position < end:
        byte = np.int64(source[position])
        position += 1
        length += byte
        if byte != 255:
            return length, position
    return np.int64(-1), position


@inlined([types.void(BYTES_OUT, I64, BYTES, I64, I64, I64)])
def copy_ahead(
    target: Bytes, to: Int, source: Bytes, start: Int, size: Int, source_end: Int
) -> None:
    """Copy `size` bytes, in strides where both sides have room for one too many."""
    if source_end - start - size >= _STRIDE and target.size - to - size >= _STRIDE:
        done = np.int64(0)
        while done < size:
            copy_bytes(target, to + done, source, start + done, _STRIDE)
            done += _STRIDE
    else:
        copy_bytes(target, to, source, start, size)


@inlined([types.void(BYTES_OUT, I64, I64, I64)])
def repeat(target: Bytes, to: Int, distance: Int, size: Int) -> None:
    """Copy `size` bytes from `distance` before, byte by byte where they overlap."""
    start = to - distance
    if distance >= _STRIDE and target.size - to - size >= _STRIDE:
        done = np.int64(0)
        while done < size:
            copy_bytes(target, to + done, target, start + done, _STRIDE)
            done += _STRIDE
    elif distance >= 8 and target.size - to - size >= 8:
        done = np.int64(0)
        while done < size:
            copy_bytes(target, to + done, target, start + done, 8)
            done += 8
    else:
        for i in range(size):
            target[np.uint64(to + i)] = target[np.uint64(start + i)]


@inlined([types.UniTuple(types.int64, 2)(BYTES, I64, I64, BYTES_OUT, I64, I64, I64)])
def decompress_block(
    source: Bytes, position: Int, end: Int, target: Bytes, to: Int, floor: Int, room_end: Int
) -> tuple[Int, Int]:
    """Decompress one block and return (status, end of what was written).

    Nothing before `floor` in the target is looked back at, nothing belongs at or behind `room_end`.
    """
    while position < end:
        token = np.int64(source[position])
        position += 1
        size = token >> 4
        if size == 15:
            size, position = read_length(source, position, end, size)
        if size < 0 or size > end - position:
            return np.int64(OTHER), to
        if size > room_end - to:
            return np.int64(NO_ROOM), to
        copy_ahead(target, to, source, position, size, source.size)
        position += size
        to += size
        if position == end:  # the last sequence has no match
            return np.int64(OK), to
        if end - position < 2:
            return np.int64(OTHER), to
        distance = np.int64(source[position]) | np.int64(source[position + 1]) << 8
        position += 2
        size = token & 15
        if size == 15:
            size, position = read_length(source, position, end, size)
            if size < 0:
                return np.int64(OTHER), to
        size += _MATCH_MIN
        if distance == 0 or distance > to - floor:
            return np.int64(OTHER), to
        if size > room_end - to:
            return np.int64(NO_ROOM), to
        repeat(target, to, distance, size)
        to += size
    return np.int64(OTHER), to


@inlined([types.UniTuple(types.int64, 2)(BYTES, I64, I64, BYTES_OUT, I64, INTEGERS)])
def decompress_frame(
    source: Bytes, position: Int, end: Int, target: Bytes, to: Int, checksums: Integers
) -> tuple[Int, Int]:
    """Decompress the frame that fills source[position:end]; (status, end of what was written)."""
    start = to
    if end - position < _HEADER_SIZE or read_u32(source, position) != _MAGIC:
        return np.int64(OTHER), to
    flags = np.int64(source[position + 4])
    kind = np.int64(source[position + 5])
    code = kind >> 4
    if (flags != _INDEPENDENT and flags != _LINKED) or kind & 0x0F != 0 or code < 4 or code > 7:
        return np.int64(OTHER), to
    place = code - 4 if flags == _INDEPENDENT else code
    if np.int64(source[position + 6]) != checksums[place]:
        return np.int64(OTHER), to
    block_size = np.int64(1) << (2 * code + 8)
    position += _HEADER_SIZE
    while end - position >= 4:
        size = read_u32(source, position)
        position += 4
        if size == 0:
            return (np.int64(OK) if position == end else np.int64(OTHER)), to
        is_stored = size >> 31
        size &= 0x7FFF_FFFF
        if size > end - position or size > block_size:
            return np.int64(OTHER), to
        before = to
        if is_stored != 0:
            if size > target.size - to:
                return np.int64(NO_ROOM), start
            copy_bytes(target, to, source, position, size)
            to += size
        else:
            floor = start if flags == _LINKED else to
            status, to = decompress_block(
                source, position, position + size, target, to, floor, target.size
            )
            if status != OK:
                return status, start
        if to - before > block_size:
            return np.int64(OTHER), start
        position += size
    return np.int64(OTHER), start


@kernel(
    [
        types.UniTuple(types.int64, 3)(
            BYTES, INTEGERS, INTEGERS, I64, INTEGERS, BYTES_OUT, I64, I64, INTEGERS_OUT
        )
    ]
)
def decompress_frames(
    source: Bytes,
    starts: Integers,
    ends: Integers,
    first: Int,
    checksums: Integers,
    target: Bytes,
    to: Int,
    run_size: Int,
    places: Integers,
) -> tuple[Int, Int, Int]:
    """Decompress frames one behind the other, until they are `run_size` bytes.

    starts, ends: int64 (s,), where each lies in the source; nothing there is nothing decompressed
    first: the frame to begin with, which goes to byte `to` of the target
    checksums: int64 (8,), that of the header for each size of blocks: independent, then linked ones
    places: int64 (s,), written: the end of each in the target
    Returns (status, frames that are done, bytes that are written).
    """
    for i in range(first, starts.size):
        if starts[i] < 0 or ends[i] < starts[i] or ends[i] > source.size:
            return np.int64(OTHER), np.int64(i), to
        if ends[i] > starts[i]:
            status, to = decompress_frame(source, starts[i], ends[i], target, to, checksums)
            if status != OK:
                return np.int64(status), np.int64(i), to
        places[i] = to
        if to >= run_size:
            return np.int64(OK), np.int64(i + 1), to
    return np.int64(OK), np.int64(starts.size), to
