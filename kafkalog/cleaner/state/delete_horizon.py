"""Store when the next tombstone of a clean section may go, so that the cleaner comes back for it.

The note `kl-delete-horizon` also has the end offset of its cleaning. It is ignored if that is not
the partition's first dirty offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.cleaner.state.notes import VERSION, packed, unpacked
from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import PartitionNotes


def write_delete_horizon(
    notes: PartitionNotes, first_dirty_offset: int, horizon_ms: int | None
) -> None:
    """Store when the earliest tombstone below `first_dirty_offset` may go; None for never."""
    content = {
        "first_dirty_offset": first_dirty_offset,
        "earliest_delete_horizon_ms": horizon_ms,
    }
    notes.write(layout.DELETE_HORIZON, packed(content))


def read_delete_horizon(notes: PartitionNotes, first_dirty_offset: int) -> int | None:
    """Return the earliest delete horizon (ms) below that offset; None if unknown, or never."""
    content = unpacked(notes.read(layout.DELETE_HORIZON))
    ours = (content.get("version"), content.get("first_dirty_offset"))
    horizon = content.get("earliest_delete_horizon_ms")
    is_valid = ours == (VERSION, first_dirty_offset) and isinstance(horizon, int)
    return horizon if is_valid else None
