"""The ranges of one micro-batch, and checks for records that were lost before it.

Spark: KafkaOffsetReader.getOffsetRangesFromResolvedOffsets with its checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kafkalog.datasource.data_loss import report_data_loss
from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import EARLIEST, LATEST, TopicPartition
from kafkalog.storage_engine.metadata.state import PartitionState, State


def micro_batch_ranges(
    begin: Mapping[TopicPartition, int],
    until: Mapping[TopicPartition, int],
    state: State,
    *,
    fail_on_data_loss: bool,
    moving_start: bool = False,
) -> list[OffsetRange]:
    """Return the ranges between two offsets of a query, one per partition, sorted.

    A partition that `begin` lacks is new, and read from its first record. In a query's first batch
    `begin` may have -2 and -1. With `moving_start` its other offsets were looked up again for a
    batch that may be planned already: a start beyond that plan is no loss. Raises DataLossError, or
    warns.
    """
    fail = fail_on_data_loss
    if not moving_start:
        report_deleted(((p, o) for p, o in begin.items() if p not in until), fail=fail)
    ranges: list[OffsetRange] = []
    for partition, end in sorted(until.items()):
        offset = begin.get(partition)
        if offset == LATEST:
            continue
        if offset is None or offset == EARLIEST:
            start = _first_offset(partition, state, is_new=offset is None, fail=fail)
        else:
            start = offset
            if end < start and not moving_start:
                _report_changed(partition, start, end, state, fail=fail)
        if start is not None and start < end:
            held = held_partition(partition, state)
            seen = 0 if held is None else held.high_watermark
            ranges.append(OffsetRange(partition, start, end, high_watermark=seen))
    return ranges


def report_deleted(gone: Iterable[tuple[TopicPartition, int]], *, fail: bool) -> None:
    """Report deleted partitions that were read, each with the next offset wanted from it.

    A -1 or -2 belongs to a query's first batch, so nothing of that partition was read.
    """
    read = [
        f"{partition} (wanted from {offset})" for partition, offset in sorted(gone) if offset >= 0
    ]
    if read:
        report_data_loss("PARTITIONS_DELETED", f"{', '.join(read)}: gone", fail=fail)


def held_partition(partition: TopicPartition, state: State) -> PartitionState | None:
    """Return the state of a partition; None if it is gone, or not in these directories."""
    topic = state.topics.get(partition.topic)
    number = partition.partition
    if topic is None or number >= len(topic.partitions) or number in topic.absent:
        return None
    return topic.partitions[number]


def _report_changed(
    partition: TopicPartition, start: int, end: int, state: State, *, fail: bool
) -> None:
    held = held_partition(partition, state)
    available = (
        "it is gone"
        if held is None
        else f"available are [{held.log_start_offset}, {held.high_watermark})"
    )
    report_data_loss(
        "PARTITION_OFFSET_CHANGED",
        f"partition {partition}'s offset was changed from {start} to {end}: its topic was "
        f"created again, or its log truncated; {available}",
        fail=fail,
    )


def _first_offset(
    partition: TopicPartition, state: State, *, is_new: bool, fail: bool
) -> int | None:
    """Return the earliest offset of a partition that the query has not read before."""
    held = held_partition(partition, state)
    if held is None:
        report_data_loss(
            "INITIAL_OFFSET_NOT_FOUND_FOR_PARTITIONS",
            f"the first offset of {partition} cannot be found, the partition is gone",
            fail=fail,
        )
        return None
    start = held.log_start_offset
    if is_new and start != 0:
        report_data_loss(
            "ADDED_PARTITION_DOES_NOT_START_FROM_OFFSET_ZERO",
            f"added partition {partition} starts from {start} instead of 0; available are "
            f"[{start}, {held.high_watermark})",
            fail=fail,
        )
    return start
