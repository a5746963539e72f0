"""Store when the next tombstone of a clean section may go, so that the cleaner comes back for it.

The file `kl-delete-horizon` also has the end offset of its cleaning. It is ignored if that is not
the partition's first dirty offset.
"""

from __future__ import annotations

import json
from pathlib import Path

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

_VERSION = 1


def write_delete_horizon(directory: Path, first_dirty_offset: int, horizon_ms: int | None) -> None:
    """Store when the earliest tombstone below `first_dirty_offset` may go; None for never."""
    content = horizon_told(first_dirty_offset, horizon_ms).encode() + b"\n"
    files.write_atomically(directory / layout.DELETE_HORIZON, content)


def horizon_told(first_dirty_offset: int, horizon_ms: int | None) -> str:
    """Return the content of the file."""
    content = {
        "version": _VERSION,
        "first_dirty_offset": first_dirty_offset,
        "earliest_delete_horizon_ms": horizon_ms,
    }
    return json.dumps(content)


def is_told(directory: Path) -> bool:
    """Return whether any cleaning of ours has written the file."""
    return (directory / layout.DELETE_HORIZON).exists()


def read_delete_horizon(directory: Path, first_dirty_offset: int) -> int | None:
    """Return the earliest delete horizon (ms) below that offset; None if unknown, or never."""
    try:
        content = files.read_file(directory / layout.DELETE_HORIZON)
    except FileNotFoundError:
        return None
    return delete_horizon_of(content, first_dirty_offset)


def delete_horizon_of(text: str | bytes, first_dirty_offset: int) -> int | None:
    """Return what the file's content says, as `read_delete_horizon` does."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return None
    if content.get("first_dirty_offset") != first_dirty_offset:
        return None
    horizon = content.get("earliest_delete_horizon_ms")
    return horizon if isinstance(horizon, int) else None
