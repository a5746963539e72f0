"""Give finished batches their place in a log: base offset and leader epoch.

No checksum covers these two fields, so they are written where the batches are, in twelve bytes.
Nothing else in the package writes them into a batch that exists.
"""

from __future__ import annotations

from typing import TypeAlias

from kafkalog.storage_engine.format import layout

Writable: TypeAlias = bytearray | memoryview


def stamp(
    batches: Writable, position: int, base_offset: int, leader_epoch: int | None = None
) -> None:
    """Write the base offset of the batch at `position`, and its leader epoch if it is given."""
    layout.STAMP_OFFSET.pack_into(batches, position, base_offset)
    if leader_epoch is not None:
        layout.STAMP_EPOCH.pack_into(batches, position + layout.EPOCH_POSITION, leader_epoch)


def stamp_run(batches: Writable, base_offset: int, leader_epoch: int) -> None:
    """Stamp the batches v2 of a run, whose offsets count from 0.

    Stops before bytes that aren't a batch, or whose offsets no log has: their reader finds the
    fault.
    """
    position = 0
    while len(batches) - position >= layout.BATCH_OVERHEAD:
        offset, length, magic, delta, _ = layout.BATCH_PLACE.unpack_from(batches, position)
        size = length + layout.LOG_OVERHEAD
        last = base_offset + offset + delta
        if magic != layout.MAGIC or size < layout.BATCH_OVERHEAD:
            return
        if offset < 0 or not 0 <= last <= layout.INT64_MAX:
            return
        stamp(batches, position, base_offset + offset, leader_epoch)
        position += size
