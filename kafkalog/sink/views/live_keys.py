"""Whether a table that follows a log has to have rows: whether any key's latest record is a value.

The log is looked through from its end, so that the first value found settles it: nothing newer of
its key has been seen. Only where all keys have been deleted is the whole of it read.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafkalog.schema import chosen_columns
from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

__all__ = ["has_live_keys"]

_SPAN = 1 << 16
"""Offsets that are read at once; more where few of them have records."""
_KEYS_MAX = 1 << 20
"""Keys to remember as deleted; where there are more the answer is yes."""


def has_live_keys(
    engine: Engine, topic: str, ends: Mapping[str, int], *, read_committed: bool
) -> bool:
    """Return whether a key has a value, of the records below `ends`, {partition: offset}.

    What was cleaned away has a newer record, at or above the end perhaps, which is not looked at: a
    table that has come to `ends` gets that one later. Raises CorruptBatchError and StorageError.
    """
    for number, _ in engine.describe(topic).present():
        end = ends.get(str(number), 0)
        with engine.snapshot(topic, number, whole=True) as snapshot:
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
        # Arrow's lists are untyped: records without a key, which make no rows, are under None.
        latest.pop(None, None)  # type: ignore[call-overload]
        if any(is_value and key not in deleted for key, is_value in latest.items()):
            return True
        deleted.update(latest)
        span = span * 2 if len(latest) < _SPAN // 8 else _SPAN
        end = start
    return False
