"""The partitions to which Kafka's default partitioner sends keys, a column at a time.

A position is compared with the end of the array before a byte is read; nothing raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import ops

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Int32s, Int64s


def murmur2_partitions(
    data: Bytes, positions: Int64s, sizes: Int64s, partition_count: int, partitions: Int32s
) -> bool:
    """Write the partition of each key, -1 for none; False for a key outside of `data`.

    Kafka: Utils.murmur2 and toPositive, BuiltInPartitioner.partitionForKey.
    """
    multiplier = 0x5BD1E995
    seed = 0x9747B28C
    mask = 0xFFFF_FFFF  # 32-bit arithmetic in 64 bits: no product reaches 2^63
    for i in range(sizes.shape[0]):
        size = sizes[i]
        position = positions[i]
        if size < 0:
            partitions[i] = -1
            continue
        if position < 0 or position > data.shape[0] or size > data.shape[0] - position:
            return False
        value = seed ^ (size & mask)
        for word in range(size >> 2):
            at = position + 4 * word
            part = ops.little_32(data, at)
            part = (part * multiplier) & mask
            part ^= part >> 24
            part = (part * multiplier) & mask
            value = ((value * multiplier) & mask) ^ part
        tail = position + (size & ~3)
        rest = size & 3
        if rest == 3:
            value ^= data[tail + 2] << 16
        if rest >= 2:
            value ^= data[tail + 1] << 8
        if rest >= 1:
            value ^= data[tail]
            value = (value * multiplier) & mask
        value ^= value >> 13
        value = (value * multiplier) & mask
        value ^= value >> 15
        partitions[i] = (value & 0x7FFF_FFFF) % partition_count
    return True


ops.plain(globals())
