"""The batch reader: `spark.read` and SQL."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import EARLIEST, LATEST, Offsets, TopicPartition
from kafkalog.datasource.opened_log import opened_log
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.pin import driver_name
from kafkalog.datasource.range_reader import OffsetRangePartition, RangeReader
from kafkalog.datasource.resolve import ending_offsets, starting_offsets
from kafkalog.datasource.task_ranges import task_ranges
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.records.murmur2 import partition_of

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.metadata.state import State

__all__ = ["KafkaLogBatchReader"]

_LOGGER = logging.getLogger(__name__)


class KafkaLogBatchReader(DataSourceReader):
    """Plans the ranges of a batch read, and reads them (Spark: KafkaBatch, KafkaRelation).

    Spark plans once per DataFrame and reads at every action. A range keeps -2 and -1 and the task
    resolves them, so the same DataFrame sees later records. Times are looked up in planning, as in
    Spark. Raises InvalidInputError for options that only streaming has.
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
        with opened_log(self.options.directories) as store:
            state = store.state()
            assigned = self.options.subscription.partitions(state)
            start = starting_offsets(store, self.options, assigned, default=EARLIEST)
            end = ending_offsets(store, self.options, assigned)
            resolved = [_resolve(p, start[p], end[p], state, self.options) for p in assigned]
            _check(resolved)
            chosen = set(self._with_keys(assigned, state))
            wanted = [piece for piece in resolved if piece.partition in chosen]
            # A view takes a partition whole: the latest record of a key may be anywhere in it.
            is_whole = self.options.latest_view
            split = wanted if is_whole else task_ranges(store, self.options, wanted)
            pieces = _bound(split, wanted, start, end)
        return [OffsetRangePartition(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one range."""
        return RangeReader(self.options, self.columns, self.driver).read(partition)

    def _with_keys(
        self, assigned: Sequence[TopicPartition], state: State
    ) -> Sequence[TopicPartition]:
        """Return the partitions that may have the chosen keys, as far as `partitioner` says."""
        keys = self.options.keys
        if keys is None or self.options.partitioner != "murmur2":
            return assigned
        counts = {p.topic: len(state.topic(p.topic).partitions) for p in assigned}
        sent_to = {
            TopicPartition(topic, partition_of(key, count))
            for topic, count in counts.items()
            for key in keys
        }
        return [partition for partition in assigned if partition in sent_to]


def _resolve(
    partition: TopicPartition, start: int, end: int, state: State, options: SourceOptions
) -> OffsetRange:
    """Return a planned range with -2 and -1 resolved."""
    held = state.topic(partition.topic).partitions[partition.partition]
    latest = options.latest_offset(held)
    named = {EARLIEST: held.log_start_offset, LATEST: latest}
    is_open = start == EARLIEST
    first, last = named.get(start, start), named.get(end, end)
    return OffsetRange(partition, first, last, is_open, high_watermark=held.high_watermark)


def _check(resolved: list[OffsetRange]) -> None:
    for piece in resolved:
        if piece.start > piece.end:
            raise InvalidInputError(
                "[RESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET] The resolved start offset "
                f"{piece.start} is greater than the resolved end offset {piece.end} for "
                f"{piece.partition}"
            )


def _bound(
    pieces: list[OffsetRange], resolved: list[OffsetRange], start: Offsets, end: Offsets
) -> list[OffsetRange]:
    """Give the first piece of a partition its -2 back, and the last one its -1.

    A partition with nothing to read now keeps its range if the end is open, so that the DataFrame
    sees later records. (A start of -1 has no later records.) All pieces of an open end are read at
    one moment, also those with an end of their own.
    """
    groups: dict[TopicPartition, list[OffsetRange]] = {}
    for piece in pieces:
        groups.setdefault(piece.partition, []).append(piece)
    bound: list[OffsetRange] = []
    for range_ in resolved:
        partition = range_.partition
        is_open = end[partition] == LATEST
        group = groups.get(partition, [range_] if is_open else [])
        for index, part in enumerate(group):
            is_first, is_last = index == 0, index == len(group) - 1
            first = EARLIEST if is_first and start[partition] == EARLIEST else part.start
            last = LATEST if is_last and is_open else part.end
            bound.append(dataclasses.replace(range_, start=first, end=last, to_latest=is_open))
    return bound
