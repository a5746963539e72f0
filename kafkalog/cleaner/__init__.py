"""Log compaction: choose what to clean, clean it, and read the latest record of each key.

The names are imported when they are first used: a status needs none of the cleaner's kernels.

Kafka: org.apache.kafka.storage.internals.log, classes Cleaner, LogCleaner and LogCleanerManager.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.directory.pause import abort_and_pause
    from kafkalog.cleaner.report.status import PartitionStatus
    from kafkalog.cleaner.schedule.thread import CleanerThread
    from kafkalog.cleaner.state.last_cleaning import LastCleaning
    from kafkalog.cleaner.state.stats import CleanerStats

__all__ = [
    "CleanerConfig",
    "CleanerStats",
    "CleanerThread",
    "LastCleaning",
    "PartitionStatus",
    "abort_and_pause",
]

_HOMES = {
    "CleanerConfig": "config",
    "CleanerStats": "state.stats",
    "CleanerThread": "schedule.thread",
    "LastCleaning": "state.last_cleaning",
    "PartitionStatus": "report.status",
    "abort_and_pause": "directory.pause",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used; raises AttributeError for an unknown one."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kafkalog.cleaner.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
