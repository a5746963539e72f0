"""Messages of the formats v0 and v1 become batches v2 when the cleaner writes what stays of them.

* A message is a batch of its one record; a wrapper is one batch, from the first record that it
  keeps to the last one: there is no header that could say more.
* Records of v0 have no time: they are CreateTime with timestamp -1. A wrapper of LogAppendTime
  stays one, so all its records read its time.
* The codec stays; there is no leader epoch, no producer and no header.

A message that keeps nothing leaves nothing, also where a batch would keep its header (C93): a
wrapper does not say where it begins. Kafka refuses to go on there, and a partition would be
uncleanable for ever.

Kafka: MemoryRecords.filterTo since version 4.0 (KAFKA-13093), which never copies an old message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import BatchTable, Integers

__all__ = ["converted"]


def converted(table: BatchTable, first_offsets: Integers, last_offsets: Integers) -> BatchTable:
    """Return the headers v2 of what stays of messages v0 and v1; rows of batches are as they were.

    first_offsets, last_offsets: int64 (b,), those of the records that each row keeps
    """
    is_message = table.is_message
    return replace(
        table,
        base_offsets=np.where(is_message, first_offsets, table.base_offsets),
        last_offsets=np.where(is_message, last_offsets, table.last_offsets),
        magics=np.full_like(table.magics, layout.MAGIC),
    )
