"""The batch reader: `spark.read` and SQL."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import EARLIEST, LATEST, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.pin import driver_name
from kafkalog.datasource.range_reader import RangeReader
from kafkalog.datasource.read_planner import planner_of
from kafkalog.datasource.resolve import ending_offsets, starting_offsets
from kafkalog.errors import InvalidInputError
from kafkalog.plain_errors import plain
from kafkalog.storage_engine.records.murmur2 import partition_of

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.metadata.state import State

_LOGGER = logging.getLogger(__name__)


@plain
class KafkaLogBatchReader(DataSourceReader):
    """Plans the ranges of a batch read, and reads them (Spark: KafkaBatch, KafkaRelation).

    Spark plans once per DataFrame and reads at every action. A range keeps -2 and -1 and the task
    resolves them, so the same DataFrame sees later records. In an object store they are resolved
    in planning, and the DataFrame is of that moment. Times are looked up in planning, as in Spark.
    Raises InvalidInputError for options that only streaming has.
    """

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        options.check_batch()
        self.options = options
        self.columns = columns
        self.driver = driver_name()
        if options.warn_of_batch:
            _LOGGER.warning("ignored in batch queries: %s", ", ".join(options.warn_of_batch))

    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges to read, one per task.

        They have about 128 MiB of the log, or follow `minPartitions` and `maxRecordsPerPartition`;
        a view of the latest records has one per partition. Raises UnknownTopicError, and
        InvalidInputError for offsets that do not fit the partitions.
        """
        with contextlib.closing(planner_of(self.options)) as planner:
            state = planner.log.state()
            assigned = self.options.subscription.partitions(state)
            _check_moment(assigned, state, self.options)
            start = starting_offsets(planner.log, self.options, assigned)
            end = ending_offsets(planner.log, self.options, assigned)
            ranges = [_range(p, start[p], end[p], state, self.options) for p in assigned]
            _check(ranges)
            chosen = set(self._with_keys(assigned, state))
            return planner.batch([each for each in ranges if each.partition in chosen], state)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one range."""
        return RangeReader(self.options, self.columns, self.driver).read(partition)

    def _with_keys(
        self, assigned: Sequence[TopicPartition], state: State
    ) -> Sequence[TopicPartition]:
        """Return the partitions that may have the chosen keys, as far as `partitioner` says."""
        keys = self.options.keys
        if keys is None or not self.options.is_partitioned:
            return assigned
        counts = {p.topic: len(state.topic(p.topic).partitions) for p in assigned}
        sent_to = {
            TopicPartition(topic, partition_of(key, count))
            for topic, count in counts.items()
            for key in keys
        }
        return [partition for partition in assigned if partition in sent_to]


def _check_moment(assigned: Sequence[TopicPartition], state: State, options: SourceOptions) -> None:
    """Raise IncompleteTableError if the log cannot complete a materialized table."""
    if options.completes is not None:
        options.completes.check_log(state)
        for topic, number in assigned:
            options.completes.check_partition(state.topic(topic), number)


def _range(
    partition: TopicPartition, start: int, end: int, state: State, options: SourceOptions
) -> OffsetRange:
    """Return a planned range with -2 and -1 resolved."""
    held = state.topic(partition.topic).partitions[partition.partition]
    named = {EARLIEST: held.log_start_offset, LATEST: options.latest_offset(held)}
    first, last = named.get(start, start), named.get(end, end)
    return OffsetRange(
        partition,
        EARLIEST if start == EARLIEST else first,
        LATEST if end == LATEST else last,
        from_earliest=start == EARLIEST,
        to_latest=end == LATEST,
        high_watermark=held.high_watermark,
        planned=(first, last),
    )


def _check(ranges: list[OffsetRange]) -> None:
    for range_ in ranges:
        first, last = range_.bounds
        if first > last:
            raise InvalidInputError(
                "[RESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET] The resolved start offset "
                f"{first} is greater than the resolved end offset {last} for {range_.partition}"
            )
