"""The cleaner's view of a log of either kind: the only module of the cleaner that asks which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.cleaner.directory.directory_moment import DirectoryMoment
from kafkalog.cleaner.objects.object_moment import ObjectMoment
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.place import directory_log_of

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import Moment, Shelf
    from kafkalog.storage_engine.log.log import Log


def moment_of(log: Log, now_ms: int) -> Moment:
    """Return a log as of now; raises StorageError."""
    if isinstance(log, ObjectLog):
        return ObjectMoment(log, log.store_state(), now_ms)
    return DirectoryMoment(directory_log_of(log), now_ms)


def shelf_of(log: Log) -> Shelf:
    """Return a log as the cleaner works on it; a report does without the cleaner's kernels."""
    if isinstance(log, ObjectLog):
        from kafkalog.cleaner.objects.object_shelf import ObjectShelf

        return ObjectShelf(log)
    from kafkalog.cleaner.directory.directory_shelf import DirectoryShelf

    return DirectoryShelf(directory_log_of(log))
