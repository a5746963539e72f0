"""The batch reader: `spark.read` and SQL."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from kafkalog.datasource.offset_range import OffsetRange, split_ranges
from kafkalog.datasource.offsets import EARLIEST, LATEST, Offsets, StartOrEnd, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.range_reader import OffsetRangePartition, RangeReader
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.engine import Engine

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.state import State

__all__ = ["KafkaLogBatchReader"]

_LOGGER = logging.getLogger(__name__)
_EVERYTHING_FROM: Final = StartOrEnd(everywhere=EARLIEST)
_EVERYTHING_TO: Final = StartOrEnd(everywhere=LATEST)


class KafkaLogBatchReader(DataSourceReader):
    """Plans the ranges of a batch read, and reads them (Spark: KafkaBatch, KafkaRelation).

    Spark plans once per DataFrame and reads at every action, so a range keeps -2 and -1 and the
    task looks them up: the same DataFrame sees records that came later. Raises InvalidInputError
    for options that only streaming knows.
    """

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self.options = options
        self.columns = columns
        self.starting_offsets = options.starting_offsets or _EVERYTHING_FROM
        self.ending_offsets = options.ending_offsets or _EVERYTHING_TO
        _refuse(self.starting_offsets, LATEST, "starting offset", "startingOffsets", "latest")
        _refuse(self.ending_offsets, EARLIEST, "ending offset", "ending offset", "earliest")
        if options.max_offsets_per_trigger is not None:
            _LOGGER.warning("option maxOffsetsPerTrigger is ignored in batch queries")

    def partitions(self) -> Sequence[InputPartition]:
        """Return one range per partition of the log, or the pieces `minPartitions` asks for.

        Raises UnknownTopicError, and InvalidInputError for offsets that do not fit the partitions.
        """
        with Engine(self.options.directories, read_only=True, create=False) as engine:
            state = engine.state()
        assigned = self.options.subscription.partitions(state)
        start = self.starting_offsets.offsets(assigned, option="startingOffsets")
        end = self.ending_offsets.offsets(assigned, option="endingOffsets")
        planned = [OffsetRange(partition, start[partition], end[partition]) for partition in start]
        resolved = [_resolve(piece, state, self.options) for piece in planned]
        for piece in resolved:
            if piece.start > piece.end:
                raise InvalidInputError(
                    f"[RESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET] {piece.partition}: "
                    f"the start offset {piece.start} is greater than the end offset {piece.end}"
                )
        if self.options.min_partitions is not None:
            planned = _split(resolved, self.options.min_partitions, start, end)
        return [OffsetRangePartition(piece) for piece in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one range."""
        return RangeReader(self.options, self.columns).read(partition)


def _refuse(offsets: StartOrEnd, refused: int, all_: str, one: str, name: str) -> None:
    if offsets.everywhere == refused:
        raise InvalidInputError(f"{all_} can't be {name} for batch queries on Kafka")
    for place, offset in (*offsets.partitions.items(), *offsets.topics.items()):
        if offset == refused:
            raise InvalidInputError(f"{one} for {place} can't be {name} for batch queries on Kafka")


def _resolve(piece: OffsetRange, state: State, options: SourceOptions) -> OffsetRange:
    """Return a planned range with -2 and -1 looked up."""
    topic, number = piece.partition
    held = state.topic(topic).partitions[number]
    return OffsetRange(
        piece.partition,
        held.log_start_offset if piece.start == EARLIEST else piece.start,
        options.latest_offset(held) if piece.end == LATEST else piece.end,
    )


def _split(
    resolved: list[OffsetRange], min_partitions: int, start: Offsets, end: Offsets
) -> list[OffsetRange]:
    """Split by size now; the first piece keeps a -2, the last one a -1.

    A partition with nothing to read now keeps its range too if the end is open, so that the
    DataFrame sees what arrives later.
    """
    pieces = split_ranges(resolved, min_partitions)
    by_partition: dict[TopicPartition, list[OffsetRange]] = {}
    for piece in pieces:
        by_partition.setdefault(piece.partition, []).append(piece)
    bound: list[OffsetRange] = []
    for piece in resolved:
        partition = piece.partition
        group = by_partition.get(partition, [piece] if end[partition] == LATEST else [])
        for index, part in enumerate(group):
            first = start[partition] if index == 0 else part.start
            last = end[partition] if index == len(group) - 1 else part.end
            bound.append(OffsetRange(partition, first, last))
    return bound
