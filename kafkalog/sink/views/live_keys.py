"""Whether a table that follows a log must have rows: whether a key's latest record has a value.

The log is read from its end, so the first value of a key not yet seen decides. The whole log is
read only if all keys have been deleted.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafkalog.schema import chosen_columns
from kafkalog.storage_engine.log.log_store import LogStore
from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

__all__ = ["has_live_keys"]

_SPAN = 1 << 16
"""Offsets that are read at once; the span doubles where few of them have records."""
_KEYS_MAX = 1 << 20
"""Keys to remember as deleted; with more keys the answer is yes."""


def has_live_keys(
    log: LogStore, topic: str, ends: Mapping[str, int], *, read_committed: bool
) -> bool:
    """Return whether a key has a value in the records below `ends`, {partition: offset}.

    A record that a cleaning removed has a later one, perhaps at or above its end. That one does not
    count: a table that has reached `ends` gets it later. Raises CorruptBatchError and StorageError.
    """
    for number, _ in log.describe(topic).present():
        end = ends.get(str(number), 0)
        with log.snapshot(topic, number, whole=True) as snapshot:
            state = snapshot.state
            limit = state.last_stable_offset if read_committed else state.high_watermark
            if _has_live_keys(snapshot, min(end, limit), read_committed):
                return True
    return False


def _has_live_keys(snapshot: PartitionSnapshot, end: int, read_committed: bool) -> bool:
    schema = chosen_columns(["key", "value"])
    deleted: set[bytes] = set()
    span = _SPAN
    while end > snapshot.state.log_start_offset:
        start = max(snapshot.state.log_start_offset, end - span)
        latest: dict[bytes, bool] = {}
        for batch in snapshot.read(start, end, schema=schema, read_committed=read_committed):
            keys = batch.column(0).to_pylist()
            latest.update(zip(keys, batch.column(1).is_valid().to_pylist(), strict=True))
            if len(latest) + len(deleted) > _KEYS_MAX:
                return True
        # Arrow's lists are untyped. The key None holds records without a key, which make no rows.
        latest.pop(None, None)  # type: ignore[call-overload]
        if any(is_value and key not in deleted for key, is_value in latest.items()):
            return True
        deleted.update(latest)
        span = span * 2 if len(latest) < _SPAN // 8 else _SPAN
        end = start
    return False
