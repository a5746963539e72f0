"""Log compaction: choose what to clean, clean it, and read the latest record of each key.

Kafka: org.apache.kafka.storage.internals.log, classes Cleaner, LogCleaner and LogCleanerManager.
"""

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.schedule.pause import abort_and_pause
from kafkalog.cleaner.schedule.thread import CleanerThread
from kafkalog.cleaner.state.last_cleaning import LastCleaning
from kafkalog.cleaner.state.stats import CleanerStats, PartitionStatus

__all__ = [
    "CleanerConfig",
    "CleanerStats",
    "CleanerThread",
    "LastCleaning",
    "PartitionStatus",
    "abort_and_pause",
    "clean",
    "latest",
    "status",
]
