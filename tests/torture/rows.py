"""The rows that a workload writes: they follow from its turn and its time alone."""

from __future__ import annotations

import struct
from typing import Final

import pyarrow as pa

from tests.storage_engine import naive

__all__ = ["KEYS", "Rows", "batch", "rows", "transactions"]

KEYS: Final = 12
Rows = list[tuple[bytes, bytes | None]]
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_ABORT, _COMMIT = 0, 1


def rows(turn: int, count: int) -> Rows:
    """Return the records of a turn; one of them deletes its key."""
    found: Rows = []
    for n in range(count):
        value = None if n == 1 and turn % 2 else b"%d.%d" % (turn, n) + b"v" * 9
        found.append((b"k%d" % ((turn * 5 + n) % KEYS), value))
    return found


def batch(
    records: Rows, *, partition: int | None = None, now_ms: int | None = None
) -> pa.RecordBatch:
    """Return records as columns; with a time each has one of its own, in no order, none later."""
    columns = {
        "key": pa.array([key for key, _ in records], pa.binary()),
        "value": pa.array([value for _, value in records], pa.binary()),
    }
    if partition is not None:
        columns["partition"] = pa.array([partition] * len(records), pa.int32())
    if now_ms is not None:
        times = [(now_ms - 1_000 * (7 * n % 5)) * 1_000 for n in range(len(records))]
        columns["timestamp"] = pa.array(times, pa.timestamp("us", tz="UTC"))
    return pa.record_batch(columns)


def transactions(turn: int, base: int, now_ms: int) -> bytes:
    """Return the batches, from an offset on, of a transaction that commits, and one that aborts."""
    producer = 2 * turn
    found = _data(rows(turn, 2), base, producer, now_ms)
    found += _marker(_COMMIT, base + 2, producer, now_ms)
    found += _data([(b"k0", b"aborted")], base + 3, producer + 1, now_ms)
    return found + _marker(_ABORT, base + 4, producer + 1, now_ms)


def _data(records: Rows, base: int, producer: int, now_ms: int) -> bytes:
    made = [naive.Record(base + n, now_ms, *record) for n, record in enumerate(records)]
    return naive.batch(
        made, base_offset=base, attributes=_TRANSACTIONAL, leader_epoch=0, producer=(producer, 0, 0)
    )


def _marker(kind: int, base: int, producer: int, now_ms: int) -> bytes:
    key, value = struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 0)
    return naive.batch(
        [naive.Record(base, now_ms, key, value)],
        base_offset=base,
        attributes=_TRANSACTIONAL | _CONTROL,
        leader_epoch=0,
        producer=(producer, 0, -1),
    )
