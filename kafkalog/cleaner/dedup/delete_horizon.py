"""When the next tombstone of a clean section may go, kept in the partition's directory.

A quiet partition has nothing dirty, so nothing else would bring the cleaner back. The file
`kl-delete-horizon` says what the last cleaning left, and up to which offset it went; where that is
not the partition's first dirty offset, the file is of another cleaning and says nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

__all__ = ["is_told", "read_delete_horizon", "write_delete_horizon"]

_VERSION = 1


def write_delete_horizon(directory: Path, first_dirty_offset: int, horizon_ms: int | None) -> None:
    """Say when the earliest tombstone below `first_dirty_offset` may go; None for never."""
    content = {
        "version": _VERSION,
        "first_dirty_offset": first_dirty_offset,
        "earliest_delete_horizon_ms": horizon_ms,
    }
    files.write_atomically(directory / layout.DELETE_HORIZON, json.dumps(content).encode() + b"\n")


def is_told(directory: Path) -> bool:
    """Tell whether any cleaning of ours has left word of what may go."""
    return (directory / layout.DELETE_HORIZON).exists()


def read_delete_horizon(directory: Path, first_dirty_offset: int) -> int | None:
    """Return the earliest delete horizon (ms) below that offset; None for none, or unknown."""
    try:
        content = json.loads(files.read_file(directory / layout.DELETE_HORIZON))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return None
    if content.get("first_dirty_offset") != first_dirty_offset:
        return None
    horizon = content.get("earliest_delete_horizon_ms")
    return horizon if isinstance(horizon, int) else None
