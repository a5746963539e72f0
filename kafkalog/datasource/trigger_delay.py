"""`minOffsetsPerTrigger` and `maxTriggerDelay`: a micro-batch waits for more records.

Spark: KafkaMicroBatchStream.delayBatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kafkalog.datasource.offsets import TopicPartition


@dataclass(slots=True)
class TriggerDelay:
    """Holds micro-batches back for enough offsets or time; a run's first one never waits."""

    min_offsets: int
    max_delay_ms: int
    last_trigger_ms: int = 0
    """The time of the last batch that was let through (epoch ms)."""

    def holds_back(
        self,
        begin: Mapping[TopicPartition, int],
        end: Mapping[TopicPartition, int],
        *,
        now_ms: int,
    ) -> bool:
        """Return whether the batch from `begin` to `end` must wait; store the time if not.

        A partition that `begin` lacks counts from offset 0. One whose end is below its begin counts
        negative. Both are as in Spark.
        """
        is_due = now_ms - self.last_trigger_ms >= self.max_delay_ms
        if not is_due:
            waiting = sum(offset - begin.get(partition, 0) for partition, offset in end.items())
            if waiting < self.min_offsets:
                return True
        self.last_trigger_ms = now_ms
        return False
