"""The names of the options of a read and of a write, as Spark's Kafka source and sink have them.

Spark does not say which of both it wants, so each names the options of the other in its errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OF_A_STORE: Final = ("store.endpoint", "store.region", "store.allow_http", "store.credentials")
"""The options of a log in an object store, for a read and a write."""
OF_A_READ: Final = (
    "path",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "startingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "endingOffsets",
    "minOffsetsPerTrigger",
    "maxOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "kafka.isolation.level",
    "view",
    "keys",
    "partitioner",
    "completes",
    "withObsolete",
    *OF_A_STORE,
)
OF_A_WRITE: Final = (
    "path",
    "topic",
    "numPartitions",
    "topic.<kafka topic config>",
    "txnAppId",
    "txnVersion",
    "batch.size",
    "kafka.batch.size",
    "kafka.compression.type",
    "resetWriter",
    "create",
    "includeHeaders",
    *OF_A_STORE,
)
_WRITTEN: Final = {name.lower(): name for name in (*OF_A_WRITE, "checkpointLocation")}


def of_a_write(name: str) -> str | None:
    """Return how an option of a write is spelled, by its lower-case name; None for others."""
    return name if name.startswith("topic.") else _WRITTEN.get(name)


def are_for_both(options: Mapping[str, str]) -> bool:
    """Return whether options, by lower-case names, read and write one topic.

    A temporary view that is read and that takes INSERT has such options.
    """
    topic = options.get("topic", "").strip()
    return topic != "" and options.get("subscribe", "").strip() == topic
