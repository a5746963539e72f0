"""A new log: an empty journal in a directory that is empty, or was not there."""

from __future__ import annotations

from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.storage_engine import files, layout, locks
from kafkalog.storage_engine.broker import directory_signs
from kafkalog.storage_engine.journal import Journal

__all__ = ["create_log"]


def create_log(root: Path) -> None:
    """Create a log, unless another process just does.

    Raises InvalidInputError for a directory with anything else in it or inside of another log,
    StorageError where none can be made, and LockedByBrokerError.
    """
    directory_signs.check_is_free(root)
    try:
        missing = [path for path in (root, *root.parents) if not path.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for path in missing:
            files.sync_directory(path.parent)
    except OSError as fault:
        raise StorageError(
            f"{root}: the log's directory cannot be created: {fault.strerror}"
        ) from fault
    commit_lock = locks.FileLock(root / layout.COMMIT_LOCK)
    with files.disk_faults(root), locks.RootLock(root).shared(), commit_lock.exclusive():
        if not (root / layout.COMMIT).exists():
            Journal.create(root / layout.COMMIT)
