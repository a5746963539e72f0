"""Convert messages of the formats v0 and v1 to batches v2, when the cleaner writes them.

- A message becomes a batch of one record. A wrapper becomes one batch, from its first remaining
  record to its last.
- Records of v0 have no time: they become CreateTime with timestamp -1. A wrapper of LogAppendTime
  keeps its time for all records.
- The codec stays; there is no leader epoch, no producer and no header.

A message without remaining records leaves no empty batch (C93), because a wrapper does not have its
first offset. Kafka fails there, and its partition stays uncleanable.

Kafka: MemoryRecords.filterTo since version 4.0 (KAFKA-13093), which never copies an old message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import BatchTable, Integers


def converted(table: BatchTable, first_offsets: Integers, last_offsets: Integers) -> BatchTable:
    """Return v2 headers for messages v0 and v1; rows of batches v2 stay unchanged.

    first_offsets, last_offsets: int64 (b,), of the records that each row keeps.
    """
    is_message = table.is_message
    return replace(
        table,
        base_offsets=np.where(is_message, first_offsets, table.base_offsets),
        last_offsets=np.where(is_message, last_offsets, table.last_offsets),
        magics=np.full_like(table.magics, layout.MAGIC),
    )
