"""The rows that a workload writes: they follow from its turn and its time alone."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from tests.builders.batch_builder import ABORT, COMMIT, BatchBuilder, joined, marker

__all__ = ["KEYS", "Rows", "abort", "batch", "commit", "rows", "transactions"]

KEYS: Final = 12
Rows = list[tuple[bytes, bytes | None]]
_GAP: Final = 2
"""Offsets that an import leaves out."""


def rows(turn: int, count: int, scale: int = 1) -> Rows:
    """Return the records of a turn, in batches `scale` times as long; one deletes its key."""
    times = 3 * scale - 2  # a value is a third of a short batch
    found: Rows = []
    for n in range(count):
        value = None if n == 1 and turn % 2 else (b"%d.%d" % (turn, n) + b"v" * 9) * times
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


def transactions(turn: int, base: int, now_ms: int, scale: int = 1) -> bytes:
    """Return the batches, from an offset on, of a transaction that commits, and one that aborts.

    They leave a gap in the offsets, as a broker's cleaner does, and have a leader epoch of their
    own.
    """
    base += _GAP
    producer = 2 * turn
    found = commit(base, producer, now_ms, rows(turn, 2, scale), leader_epoch=turn)
    return found + abort(base + 3, producer + 1, now_ms, leader_epoch=turn)


def commit(
    base: int,
    producer: int,
    now_ms: int,
    records: Rows = [(b"k0", b"committed")],  # noqa: B006  (nobody changes it)
    *,
    leader_epoch: int = 0,
) -> bytes:
    """Return the batches of a transaction that commits, from an offset on."""
    return _transaction(COMMIT, base, producer, now_ms, records, leader_epoch)


def abort(base: int, producer: int, now_ms: int, *, leader_epoch: int = 0) -> bytes:
    """Return the batches of a transaction of one record that aborts, from an offset on."""
    return _transaction(ABORT, base, producer, now_ms, [(b"k0", b"aborted")], leader_epoch)


def _transaction(
    kind: int, base: int, producer: int, now_ms: int, records: Rows, leader_epoch: int
) -> bytes:
    data = BatchBuilder(
        base_offset=base, transactional=True, leader_epoch=leader_epoch, producer=(producer, 0, 0)
    )
    for record in records:
        data.add(*record, timestamp=now_ms)
    end = marker(base + len(records), kind, producer, timestamp=now_ms, leader_epoch=leader_epoch)
    return joined([data.build(), end])
