"""The cleaner's view of a log of either kind: the only module of the cleaner that asks which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.place import directory_log_of, object_log_of

if TYPE_CHECKING:
    from kafkalog.cleaner.objects.object_moment import ObjectMoment
    from kafkalog.cleaner.shelf import Moment, Shelf
    from kafkalog.storage_engine.log.log import Log


def moment_of(log: Log, now_ms: int) -> Moment:
    """Return a log as of now; raises StorageError."""
    stored = object_log_of(log)
    if stored is not None:
        from kafkalog.cleaner.objects.object_moment import ObjectMoment

        return ObjectMoment(stored, stored.store_state(), now_ms)
    from kafkalog.cleaner.directory.directory_moment import DirectoryMoment

    return DirectoryMoment(directory_log_of(log), now_ms)


def object_moment_of(moment: Moment) -> ObjectMoment | None:
    """Return the moment of a log in an object store; None, loading nothing, for a directory's."""
    from kafkalog.cleaner.directory.directory_moment import DirectoryMoment

    if isinstance(moment, DirectoryMoment):
        return None
    from kafkalog.cleaner.objects.object_moment import ObjectMoment

    return moment if isinstance(moment, ObjectMoment) else None


def shelf_of(log: Log) -> Shelf:
    """Return a log as the cleaner works on it; a report does without the cleaner's kernels."""
    stored = object_log_of(log)
    if stored is not None:
        from kafkalog.cleaner.objects.object_shelf import ObjectShelf

        return ObjectShelf(stored)
    from kafkalog.cleaner.directory.directory_shelf import DirectoryShelf

    return DirectoryShelf(directory_log_of(log))
