"""The last batches of active producers, whose headers stay even without records.

A broker takes a producer's epoch and last sequence number from its last batch, to recognize
duplicates. If a producer has only a marker in its epoch, the markers of that epoch stay.

Kafka: UnifiedLog.lastRecordsOfActiveProducers; rules C50 and C75 to C78.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pathlib import Path

    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.records.tables import BatchTable
    from kafkalog.storage_engine.transactions.producers import ProducerEntry


class ActiveProducers:
    """The last offset of each active producer."""

    def __init__(self, entries: Iterable[ProducerEntry] = ()) -> None:
        ordered = sorted(entries, key=lambda entry: entry.producer_id)
        rows = [(e.producer_id, e.last_offset, e.producer_epoch) for e in ordered]
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
        self._ids, self._last_offsets, self._epochs = np.ascontiguousarray(columns)

    def are_last(self, table: BatchTable) -> npt.NDArray[np.bool_]:
        """Return which batches (b) are the last of their producer."""
        if not len(self._ids):
            return np.zeros(len(table), dtype=np.bool_)
        places = np.minimum(np.searchsorted(self._ids, table.producer_ids), len(self._ids) - 1)
        last_offsets = self._last_offsets[places]
        is_fence = table.is_control & (self._epochs[places] == table.producer_epochs)
        is_last = np.where(last_offsets >= 0, last_offsets == table.last_offsets, is_fence)
        found: npt.NDArray[np.bool_] = is_last & (self._ids[places] == table.producer_ids)
        return found


def active_producers(directory: Path, state: PartitionState, now_ms: int) -> ActiveProducers:
    """Return the producers of a partition that have not expired at `now_ms`.

    Raises CorruptLogError and StorageError if the journal's producer snapshot is lost, and the log
    to rebuild it from is damaged.
    """
    if state.producer_snapshot < 0:
        return ActiveProducers()
    from kafkalog.storage_engine.transactions.producer_replay import recorded_producers

    producers, _ = recorded_producers(directory, state, now_ms=now_ms)
    producers.expire(now_ms)
    return ActiveProducers(producers.entries.values())
