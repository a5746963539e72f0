"""Open a report on a log of either kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.cleaner.report.reported_directory import ReportedDirectory
from kafkalog.cleaner.report.reported_store import ReportedStore
from kafkalog.storage_engine.engine import engine_of
from kafkalog.storage_engine.object_store.object_log import ObjectLog

if TYPE_CHECKING:
    from kafkalog.cleaner.report.reported_log import ReportedLog
    from kafkalog.storage_engine.log.log_engine import LogEngine


def reported(engine: LogEngine, now_ms: int) -> ReportedLog:
    """Return a log of either kind as of now; raises StorageError."""
    if isinstance(engine, ObjectLog):
        return ReportedStore(engine, engine.store_state(), now_ms)
    return ReportedDirectory(engine_of(engine), now_ms)
