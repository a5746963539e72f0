"""The checks before each micro-batch of `Trigger.AvailableNow`."""

from __future__ import annotations

from collections.abc import Mapping

from kafkalog.datasource.offsets import TopicPartition, listed
from kafkalog.errors import DataLossError


def check_available_now(
    end: Mapping[TopicPartition, int],
    target: Mapping[TopicPartition, int],
    latest: Mapping[TopicPartition, int],
) -> None:
    """Check a batch's end against the query's target and the present log.

    If partitions or records vanish, a query with a fixed target would never end, or would end
    wrongly. These faults are therefore DataLossErrors whatever `failOnDataLoss` says (Spark:
    KafkaMicroBatchStream's checks for AvailableNow).
    """
    if end.keys() != target.keys():
        raise DataLossError(
            "[MISMATCHED_TOPIC_PARTITIONS_BETWEEN_END_OFFSET_AND_PREFETCHED] the batch ends in "
            f"{listed(end)}, the query's target in {listed(target)}"
        )
    beyond = [p for p, offset in end.items() if offset > target[p]]
    if beyond:
        raise DataLossError(
            "[END_OFFSET_HAS_GREATER_OFFSET_FOR_TOPIC_PARTITION_THAN_PREFETCHED] the batch ends "
            f"beyond the query's target in {listed(beyond)}"
        )
    lost = [p for p in end if p not in latest]
    if lost:
        raise DataLossError(
            "[LOST_TOPIC_PARTITIONS_IN_END_OFFSET_WITH_TRIGGER_AVAILABLENOW] partitions are gone "
            f"since the query began: {listed(lost)}; run it again"
        )
    shrunk = [p for p, offset in end.items() if offset > latest[p]]
    if shrunk:
        raise DataLossError(
            "[END_OFFSET_HAS_GREATER_OFFSET_FOR_TOPIC_PARTITION_THAN_LATEST_WITH_TRIGGER_"
            f"AVAILABLENOW] records are gone since the query began, in {listed(shrunk)}; "
            "run it again"
        )
