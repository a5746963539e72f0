"""One micro-batch: its size, its wait for more records, its ranges, and checks for lost records.

Spark: KafkaMicroBatchStream, KafkaOffsetReader.getOffsetRangesFromResolvedOffsets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kafkalog.datasource.data_loss import report_data_loss
from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import EARLIEST, LATEST, Offsets, TopicPartition, listed
from kafkalog.errors import DataLossError
from kafkalog.storage_engine.metadata.state import PartitionState, State

_log = logging.getLogger(__name__)


def limit_offsets(
    begin: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], limit: int
) -> Offsets:
    """Return `end`, lowered so that about `limit` offsets lie between it and `begin`.

    The limit is `maxOffsetsPerTrigger` (Spark: KafkaMicroBatchStream.rateLimit). Each partition
    gets a share in proportion to its waiting offsets, at least one offset; a share above one is
    rounded down. The sum may therefore differ a little from the limit. A partition whose end is not
    beyond its begin keeps its end. Shares are computed in double precision in Spark's order, so
    that both make the same batches.
    """
    waiting = {p: end[p] - begin[p] for p in end if end[p] > begin[p]}
    total = float(sum(waiting.values()))
    limited = dict(end)
    if total < 1:
        return limited
    for partition, size in waiting.items():
        share = limit * (size / total)
        count = math.ceil(share) if share < 1 else math.floor(share)
        limited[partition] = min(end[partition], begin[partition] + count)
    return limited


@dataclass(slots=True)
class TriggerDelay:
    """Holds micro-batches back for `minOffsetsPerTrigger` or `maxTriggerDelay`.

    A run's first micro-batch never waits. Spark: KafkaMicroBatchStream.delayBatch.
    """

    min_offsets: int
    max_delay_ms: int
    last_trigger_ms: int = 0
    """The time of the last batch that was let through (epoch ms)."""

    def holds_back(
        self, begin: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], *, now_ms: int
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
    batch that may be planned already: a start beyond that plan loses nothing. Raises DataLossError,
    or warns.
    """
    fail = fail_on_data_loss
    if not moving_start:
        report_left_out(begin, until, state, fail=fail)
        report_set_back(begin, until, state, fail=fail)
    ranges: list[OffsetRange] = []
    for partition, end in sorted(until.items()):
        offset = begin.get(partition)
        if offset == LATEST:
            continue
        if offset is None or offset == EARLIEST:
            start = _first_offset(partition, state, is_new=offset is None, fail=fail)
        else:
            start = offset
        if start is not None and start < end:
            held = held_partition(partition, state)
            seen = 0 if held is None else held.high_watermark
            ranges.append(OffsetRange(partition, start, end, high_watermark=seen))
    return ranges


def report_left_out(
    begin: Mapping[TopicPartition, int],
    until: Mapping[TopicPartition, int],
    state: State,
    *,
    fail: bool,
) -> None:
    """Report partitions that were read, and that a micro-batch to `until` leaves out.

    They are deleted, or the query does not subscribe to them any more. Spark keeps only the end of
    a micro-batch, so the query would forget where it was in them. Raises DataLossError, or warns.
    """
    left = {p: o for p, o in begin.items() if p not in until and o >= 0}
    report_deleted(((p, o) for p, o in left.items() if not _is_held(p, state)), fail=fail)
    unread = [f"{p} (read up to {o})" for p, o in sorted(left.items()) if _is_held(p, state)]
    if unread:
        report_data_loss(
            "PARTITIONS_DELETED",
            f"{', '.join(unread)}: in the query's checkpoint, and not subscribed to; subscribe to "
            "what the query has read before",
            fail=fail,
        )


def report_set_back(
    begin: Mapping[TopicPartition, int],
    until: Mapping[TopicPartition, int],
    state: State,
    *,
    fail: bool,
) -> None:
    """Report partitions that end below the offset up to which the query has read them.

    A later micro-batch would read their records again. Raises DataLossError, or warns.
    """
    for partition, end in sorted(until.items()):
        start = begin.get(partition, EARLIEST)
        if end < start:
            held = held_partition(partition, state)
            available = (
                "it is gone"
                if held is None
                else f"available are [{held.log_start_offset}, {held.high_watermark})"
            )
            report_data_loss(
                "PARTITION_OFFSET_CHANGED",
                f"partition {partition}'s offset was changed from {start} to {end}: its topic was "
                f"created again, its log truncated, or this is another log; {available}",
                fail=fail,
            )


def report_deleted(gone: Iterable[tuple[TopicPartition, int]], *, fail: bool) -> None:
    """Report deleted partitions that were read, each with the next offset wanted from it.

    A -1 or -2 belongs to a query's first batch, so nothing of that partition was read.
    """
    read = [
        f"{partition} (wanted from {offset})" for partition, offset in sorted(gone) if offset >= 0
    ]
    if read:
        report_data_loss("PARTITIONS_DELETED", f"{', '.join(read)}: gone", fail=fail)


def report_missed_deletions(begin: Mapping[TopicPartition, int], state: State) -> None:
    """Warn if deletions are gone that a query, which resumes, has not read.

    The rows that the query has made of the deleted keys stay in its table.
    """
    for partition, offset in sorted(begin.items()):
        held = held_partition(partition, state)
        if held is not None and offset >= 0 and held.lacks_deletions_after(offset):
            _log.warning(
                "%s: the query goes on from offset %d, and deletions up to offset %d are gone "
                "(delete.retention.ms): its table may keep rows of deleted keys. Make it anew from "
                "view=latest.",
                partition,
                offset,
                held.deletions_gone_to,
            )


def _is_held(partition: TopicPartition, state: State) -> bool:
    return held_partition(partition, state) is not None


def held_partition(partition: TopicPartition, state: State) -> PartitionState | None:
    """Return the state of a partition; None if it is gone, or not in these directories."""
    topic = state.topics.get(partition.topic)
    number = partition.partition
    if topic is None or not topic.is_here(number):
        return None
    return topic.partitions[number]


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
