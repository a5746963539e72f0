"""A new log: an empty journal in a directory that is empty, or was not there."""

from __future__ import annotations

from pathlib import Path

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine import files, layout
from kafkalog.storage_engine.journal import Journal

__all__ = ["create_log"]


def create_log(root: Path) -> None:
    """Create a log, unless another process just does.

    Raises InvalidInputError for a directory with anything else in it, StorageError where none can
    be made, and LockedByBrokerError.
    """
    try:
        missing = [path for path in (root, *root.parents) if not path.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for path in missing:
            files.sync_directory(path.parent)
    except OSError as fault:
        raise StorageError(
            f"{root}: the log's directory cannot be created: {fault.strerror}"
        ) from fault
    foreign = [
        entry.name
        for entry in root.iterdir()
        if entry.is_dir() and not entry.name.startswith((".", layout.OURS))
    ]
    if foreign:
        raise InvalidInputError(
            f"{root}: the directory is not empty (it has {sorted(foreign)[0]!r}) and is "
            "no log; choose an empty or a new directory"
        )
    commit_lock = files.FileLock(root / layout.COMMIT_LOCK)
    with files.RootLock(root).shared(), commit_lock.exclusive():
        if not (root / layout.COMMIT).exists():
            Journal.create(root / layout.COMMIT)
