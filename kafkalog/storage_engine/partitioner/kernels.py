"""Where Kafka's default partitioner sends keys, a column at a time.

A position is compared with the end of the array before a byte is read; nothing raises.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit, types

RELEASE = "0.1.0"  # a new release gets a new numba cache
kernel = partial(njit, cache=True, nogil=True, _nrt=False)

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]
Offsets: TypeAlias = npt.NDArray[np.int32]

BYTES: Any = types.Array(types.uint8, 1, "C", readonly=True)
INTEGERS: Any = types.Array(types.int64, 1, "C", readonly=True)
OFFSETS_OUT: Any = types.Array(types.int32, 1, "C")


@kernel([types.boolean(BYTES, INTEGERS, INTEGERS, types.int64, OFFSETS_OUT)])
def murmur2_partitions(
    data: Bytes, positions: Integers, sizes: Integers, partition_count: int, partitions: Offsets
) -> bool:
    """Write the partition of each key, -1 for none; False for a key outside of `data`.

    Kafka: Utils.murmur2 and toPositive, BuiltInPartitioner.partitionForKey.
    """
    multiplier = np.int64(0x5BD1E995)
    mask = np.int64(0xFFFF_FFFF)  # 32-bit arithmetic in 64 bits: no product reaches 2^63
    for i in range(sizes.size):
        size = sizes[i]
        position = positions[i]
        if size < 0:
            partitions[i] = -1
            continue
        if position < 0 or position > data.size or size > data.size - position:
            return False
        value = np.int64(0x9747B28C) ^ (size & mask)
        for word in range(size >> 2):
            at = position + 4 * word
            part = (
                np.int64(data[at])
                | np.int64(data[at + 1]) << 8
                | np.int64(data[at + 2]) << 16
                | np.int64(data[at + 3]) << 24
            )
            part = (part * multiplier) & mask
            part ^= part >> 24
            part = (part * multiplier) & mask
            value = ((value * multiplier) & mask) ^ part
        tail = position + (size & ~np.int64(3))
        rest = size & 3
        if rest == 3:
            value ^= np.int64(data[tail + 2]) << 16
        if rest >= 2:
            value ^= np.int64(data[tail + 1]) << 8
        if rest >= 1:
            value ^= np.int64(data[tail])
            value = (value * multiplier) & mask
        value ^= value >> 13
        value = (value * multiplier) & mask
        value ^= value >> 15
        partitions[i] = (value & 0x7FFF_FFFF) % partition_count
    return True
