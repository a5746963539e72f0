"""`minOffsetsPerTrigger` and `maxTriggerDelay`: whether a micro-batch waits for more.

Spark: KafkaMicroBatchStream.delayBatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kafkalog.datasource.offsets import TopicPartition

__all__ = ["TriggerDelay"]


@dataclass(slots=True)
class TriggerDelay:
    """Holds micro-batches back until enough is waiting or enough time has passed.

    The first batch of a run never waits: nothing says when the run before it had its last.
    """

    min_offsets: int
    max_delay_ms: int
    last_trigger_ms: int = 0
    """When a batch was last let through (epoch ms)."""

    def holds_back(
        self,
        begin: Mapping[TopicPartition, int],
        end: Mapping[TopicPartition, int],
        *,
        now_ms: int,
    ) -> bool:
        """Tell whether the batch from `begin` to `end` has to wait; remember when it has not.

        A partition that `begin` lacks counts from offset 0, one whose end lies below its begin
        counts against the others, both as in Spark.
        """
        is_due = now_ms - self.last_trigger_ms >= self.max_delay_ms
        if not is_due:
            waiting = sum(offset - begin.get(partition, 0) for partition, offset in end.items())
            if waiting < self.min_offsets:
                return True
        self.last_trigger_ms = now_ms
        return False
