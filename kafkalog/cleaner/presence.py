"""Whether any cleaner runs on a log, in whatever process.

A background cleaner holds `kl-cleaners.lock` in the root shared for as long as it runs, also while
it sleeps. Nothing waits for it: it is there to be asked about. The lock dies with its process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.storage_engine import files, layout

__all__ = ["announced", "is_cleaner_running"]


@contextlib.contextmanager
def announced(root: Path) -> Iterator[None]:
    """Tell that a cleaner runs; a file system that cannot be told is passed over."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, StorageError):
            held.enter_context(files.FileLock(root / layout.CLEANERS_LOCK).shared())
        yield


def is_cleaner_running(root: Path) -> bool | None:
    """Tell whether a background cleaner runs on a log; None where that cannot be found out.

    Creates nothing.
    """
    path = root / layout.CLEANERS_LOCK
    try:
        return path.exists() and files.FileLock(path).is_held()
    except (OSError, StorageError):
        return None
