"""Log compaction: which records survive, cleaning one log, choosing what to clean, the thread.

Kafka: org.apache.kafka.storage.internals.log, classes Cleaner, LogCleaner and LogCleanerManager.
"""

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.manager import clean, status
from kafkalog.cleaner.stats import CleanerStats, PartitionStatus
from kafkalog.cleaner.survivors import latest
from kafkalog.cleaner.thread import CleanerThread

__all__ = [
    "CleanerConfig",
    "CleanerStats",
    "CleanerThread",
    "PartitionStatus",
    "clean",
    "latest",
    "status",
]
