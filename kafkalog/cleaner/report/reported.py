"""Open a report on a log of either kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.cleaner.report.reported_directory import ReportedDirectory
from kafkalog.cleaner.report.reported_store import ReportedStore
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.place import directory_log_of

if TYPE_CHECKING:
    from kafkalog.cleaner.report.reported_log import ReportedLog
    from kafkalog.storage_engine.log.log import Log


def reported(engine: Log, now_ms: int) -> ReportedLog:
    """Return a log of either kind as of now; raises StorageError."""
    if isinstance(engine, ObjectLog):
        return ReportedStore(engine, engine.store_state(), now_ms)
    return ReportedDirectory(directory_log_of(engine), now_ms)
