"""Find out whether any process runs a cleaner on a log, or cleans a partition now.

A background cleaner holds `kl-cleaners.lock` in the root shared as long as it runs. No process
waits for this lock; it ends with the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kafkalog.errors import KafkaLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks


@contextlib.contextmanager
def announced(root: Path) -> Iterator[None]:
    """Hold the lock that shows a running cleaner; ignore a file system that refuses it."""
    with contextlib.ExitStack() as held:
        with files.ignoring(StorageError):
            held.enter_context(locks.FileLock(root / layout.CLEANERS_LOCK).shared())
        yield


def is_cleaner_running(root: Path) -> bool | None:
    """Return whether a background cleaner runs on a log; None if unknown. Creates no file."""
    path = root / layout.CLEANERS_LOCK
    try:
        return path.exists() and locks.FileLock(path).is_held()
    except (OSError, StorageError) as raised:
        files.pass_on(raised)
        return None


def is_being_cleaned(directory: Path) -> bool:
    """Return whether a process cleans a partition or deletes from it; creates no file."""
    path = directory / layout.CLEANER_LOCK
    try:
        return path.exists() and locks.FileLock(path).is_held_alone()
    except (OSError, KafkaLogError) as raised:
        files.pass_on(raised)
        return False


def may_clean(directory: Path) -> bool:
    """Return whether this process may write a directory."""
    return os.access(directory, os.W_OK | os.X_OK)
