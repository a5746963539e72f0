"""The locks of the file system that a log is in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kafkalog.cli.environment.check import Check
from kafkalog.errors import StorageError
from kafkalog.storage_engine.fs.locks import RootLock, lock_fault

_ADVICE: Final = (
    "Put the log on a file system with locks: a local disk, or NFS 4 mounted without nolock. "
    "A directory that cannot be opened needs other permissions."
)


def check_locks(directory: Path) -> Check:
    """Check that the directory can be locked, and that its `.lock` can be asked about."""
    fault = lock_fault(directory)
    if fault is None:
        try:
            RootLock(directory).is_held_alone()
        except StorageError as error:
            fault = str(error)
    if fault is not None:
        return Check("locks", fault, _ADVICE)
    return Check("locks", f"{directory}: work")
