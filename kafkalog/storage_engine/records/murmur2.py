"""The partitions of keys by Kafka's default partitioner.

Kafka: Utils.murmur2 and toPositive, BuiltInPartitioner.partitionForKey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.records import columns
from kafkalog.storage_engine.records.kernels import murmur2

if TYPE_CHECKING:
    import pyarrow as pa


def murmur2_partitions(keys: pa.Array, partition_count: int) -> npt.NDArray[np.int32]:
    """Return the partition of each key (binary or string), -1 for null: int32 (n,).

    Raises InvalidInputError for fewer than one partition.
    """
    if partition_count < 1:
        raise InvalidInputError(f"partition count: expected at least 1, found {partition_count}")
    column = columns.binary_column(keys, len(keys), "key")
    partitions = np.empty(len(keys), dtype=np.int32)
    is_inside = murmur2.murmur2_partitions(
        column.data, column.places[0], column.places[1], partition_count, partitions
    )
    if not is_inside:
        raise InvalidInputError("key: a value lies outside its data")
    return partitions


def partition_of(key: bytes, partition_count: int) -> int:
    """Return the partition of one key; `partition_count` is at least 1."""
    partition = np.empty(1, dtype=np.int32)
    data = np.frombuffer(key, dtype=np.uint8)
    places = np.array([[0], [len(key)]], dtype=np.int64)
    murmur2.murmur2_partitions(data, places[0], places[1], partition_count, partition)
    return int(partition[0])
