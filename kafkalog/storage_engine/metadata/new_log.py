"""Create a log: an empty journal in a new or empty directory."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata import directory_signs
from kafkalog.storage_engine.metadata.journal import Journal


def create_log(root: Path) -> None:
    """Create a log, unless another process creates it at the same time.

    Raises InvalidInputError for a directory with other content or inside another log, StorageError
    if creation fails, and LockedByBrokerError.
    """
    directory_signs.check_is_free(root)
    try:
        files.make_directories(root)
        _sync_names_up_to(root)
    except OSError as fault:
        files.pass_on(fault)
        raise StorageError(
            f"{root}: the log's directory cannot be created: {fault.strerror}"
        ) from fault
    commit_lock = locks.FileLock(root / layout.COMMIT_LOCK)
    with files.disk_faults(root), locks.RootLock(root).shared(), commit_lock.exclusive():
        if not (root / layout.COMMIT).exists():
            Journal.create(root / layout.COMMIT)


def _sync_names_up_to(root: Path) -> None:
    """Make the names of a directory and of its parents durable, up to the mount point.

    The process that made them may have died before its sync. Walks by `..`, because the path may
    contain links or lead through another process's namespace. Skips directories that this user may
    not read.
    """
    path, found = root, root.stat()
    with contextlib.suppress(PermissionError):
        while True:
            path, below = path / "..", found
            found = path.stat()
            if found.st_dev != below.st_dev or found.st_ino == below.st_ino:
                return
            with contextlib.suppress(PermissionError):
                files.sync_directory(path)
