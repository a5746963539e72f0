"""The log that the options of a read name, opened to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkalog.datasource.options import SourceOptions
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.object_store.polled_log import PolledLog


def open_log(options: SourceOptions) -> ReadableDirectory | PolledLog:
    """Open the log; raises InvalidInputError if it does not exist, and StorageError."""
    if options.store is None:
        from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory

        return ReadableDirectory(options.directories, read_only=True, create=False)
    from kafkalog.storage_engine.object_store.polled_log import PolledLog

    return PolledLog.shared(options.store)
