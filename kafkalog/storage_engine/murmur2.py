"""Where Kafka's default partitioner sends a key, for the few that planning asks about.

The kernel of the same name does it for columns, and takes numba for that.

Kafka: Utils.murmur2 and toPositive, BuiltInPartitioner.partitionForKey.
"""

from __future__ import annotations

from typing import Final

__all__ = ["partition_of"]

_SEED: Final = 0x9747B28C
_MULTIPLIER: Final = 0x5BD1E995
_MASK: Final = 0xFFFF_FFFF


def partition_of(key: bytes, partition_count: int) -> int:
    """Return the partition of a key; `partition_count` is at least 1."""
    value = _SEED ^ (len(key) & _MASK)
    whole = len(key) & ~3
    for start in range(0, whole, 4):
        part = int.from_bytes(key[start : start + 4], "little") * _MULTIPLIER & _MASK
        part = (part ^ part >> 24) * _MULTIPLIER & _MASK
        value = (value * _MULTIPLIER & _MASK) ^ part
    if whole < len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER & _MASK
    value = (value ^ value >> 13) * _MULTIPLIER & _MASK
    value ^= value >> 15
    return (value & 0x7FFF_FFFF) % partition_count
