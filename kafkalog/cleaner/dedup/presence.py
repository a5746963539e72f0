"""Whether any cleaner runs on a log, or cleans a partition now, in whatever process.

A background cleaner holds `kl-cleaners.lock` in the root shared for as long as it runs, also while
it sleeps. Nothing waits for it: it is there to be asked about. The lock dies with its process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kafkalog.errors import KafkaLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks

__all__ = ["announced", "is_being_cleaned", "is_cleaner_running", "may_clean"]


@contextlib.contextmanager
def announced(root: Path) -> Iterator[None]:
    """Tell that a cleaner runs; a file system that cannot be told is passed over."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, StorageError):
            held.enter_context(locks.FileLock(root / layout.CLEANERS_LOCK).shared())
        yield


def is_cleaner_running(root: Path) -> bool | None:
    """Tell whether a background cleaner runs on a log; None where that cannot be found out.

    Creates nothing.
    """
    path = root / layout.CLEANERS_LOCK
    try:
        return path.exists() and locks.FileLock(path).is_held()
    except (OSError, StorageError):
        return None


def is_being_cleaned(directory: Path) -> bool:
    """Tell whether some process cleans a partition, or deletes from it, at this moment.

    Creates nothing; what cannot be found out is a no.
    """
    path = directory / layout.CLEANER_LOCK
    try:
        return path.exists() and locks.FileLock(path).is_held_alone()
    except (OSError, KafkaLogError):
        return False


def may_clean(directory: Path) -> bool:
    """Tell whether this process may write a directory: no read-only mount, and the permission."""
    return os.access(directory, os.W_OK | os.X_OK)
