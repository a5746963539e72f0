"""Whether a table that follows a log must have rows: whether the latest record of keys has a value.

The log is read from its end, so the first value of a key not yet seen decides. The whole log is
read only if too few keys have a value.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafkalog.schema import chosen_columns
from kafkalog.storage_engine.log.readable_log import ReadableLog
from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

_SPAN = 1 << 16
"""Offsets that are read at once; the span doubles where few of them have records."""
_KEYS_MAX = 1 << 20
"""Keys to remember as deleted; with more keys the answer is yes."""


def has_live_keys(
    log: ReadableLog,
    topic: str,
    ends: Mapping[str, int],
    *,
    read_committed: bool,
    more_than: int = 0,
) -> bool:
    """Return whether more keys have a value in the records below `ends`, {partition: offset}.

    A record that a cleaning removed has a later one, perhaps at or above its end. That one does not
    count: a table that has reached `ends` gets it later. Raises CorruptBatchError and StorageError.
    """
    for number in log.describe(topic).numbers():
        end = ends.get(str(number), 0)
        with log.snapshot(topic, number, whole=True) as snapshot:
            state = snapshot.state
            limit = state.last_stable_offset if read_committed else state.high_watermark
            more_than -= _live_keys(snapshot, min(end, limit), read_committed, more_than + 1)
            if more_than < 0:
                return True
    return False


def _live_keys(snapshot: PartitionSnapshot, end: int, read_committed: bool, wanted: int) -> int:
    """Return how many keys have a value, or `wanted` if there are as many at least."""
    schema = chosen_columns(["key", "value"])
    deleted: set[bytes] = set()
    live: set[bytes] = set()
    span = _SPAN
    while end > snapshot.state.log_start_offset:
        start = max(snapshot.state.log_start_offset, end - span)
        latest: dict[bytes, bool] = {}
        for batch in snapshot.read(start, end, schema=schema, read_committed=read_committed):
            keys = batch.column(0).to_pylist()
            latest.update(zip(keys, batch.column(1).is_valid().to_pylist(), strict=True))
            if len(latest) + len(deleted) + len(live) > _KEYS_MAX:
                return wanted
        # The key None holds records without a key, which make no rows.
        latest.pop(None, None)  # type: ignore[call-overload]  # Arrow's lists have no types
        live.update(key for key, is_value in latest.items() if is_value and key not in deleted)
        if len(live) >= wanted:
            return wanted
        deleted.update(key for key in latest if key not in live)
        span = span * 2 if len(latest) < _SPAN // 8 else _SPAN
        end = start
    return len(live)
