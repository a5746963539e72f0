"""Log compaction: which records survive, cleaning one log, choosing what to clean, the thread.

Kafka: org.apache.kafka.storage.internals.log, classes Cleaner, LogCleaner and LogCleanerManager.
"""

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.last_cleaning import LastCleaning
from kafkalog.cleaner.manager import clean
from kafkalog.cleaner.pause import abort_and_pause
from kafkalog.cleaner.stats import CleanerStats, PartitionStatus
from kafkalog.cleaner.status import status
from kafkalog.cleaner.survivors import latest
from kafkalog.cleaner.thread import CleanerThread

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
