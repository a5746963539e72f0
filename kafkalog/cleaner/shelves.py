"""The only module of the cleaner that asks for the kind of a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.cleaner.directory.directory_shelf import DirectoryShelf
from kafkalog.cleaner.objects.object_shelf import ObjectShelf
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.place import directory_log_of

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import Shelf
    from kafkalog.storage_engine.log.log import Log


def shelf_of(log: Log) -> Shelf:
    """Return the shelf of an open log."""
    if isinstance(log, ObjectLog):
        return ObjectShelf(log)
    return DirectoryShelf(directory_log_of(log))
