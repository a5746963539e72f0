"""The micro-batch reader: `spark.readStream`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from kafkalog.datasource.available_now import check_available_now
from kafkalog.datasource.columns import check_columns
from kafkalog.datasource.data_loss import report_data_loss
from kafkalog.datasource.offset_range import OffsetRange, split_ranges
from kafkalog.datasource.offsets import (
    EARLIEST,
    LATEST,
    OffsetJson,
    Offsets,
    StartOrEnd,
    TopicPartition,
    from_json,
    to_json,
)
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.range_reader import OffsetRangePartition, RangeReader
from kafkalog.datasource.rate_limit import limit_offsets
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.engine import Engine

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafkalog.storage_engine.state import State

__all__ = ["KafkaLogStreamReader"]

_LOGGER = logging.getLogger(__name__)
_FROM_NOW_ON: Final = StartOrEnd(everywhere=LATEST)


class KafkaLogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Says where micro-batches end, and plans their ranges (Spark: KafkaMicroBatchStream).

    One instance lives in the driver for a run of the query; others are only pickled for `read`, so
    what an instance keeps is plain data, but for the engine, which is not pickled. The end of a
    batch is always one point of the journal: a commit over many partitions is seen whole.

    Spark loses the message of errors raised while a reader is made, so the options are checked at
    the first call after.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._given = dict(options)
        self._schema = schema
        self._parsed: SourceOptions | None = None
        self._engine: Engine | None = None
        self._initial: OffsetJson | None = None
        self._is_begun = False
        self._state: State | None = None
        self._ends: Offsets = {}
        self._available_now = False
        self._target: Offsets | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_state": None}

    def initialOffset(self) -> OffsetJson:
        """Return where a new query starts, with -1 and -2 not looked up.

        Spark asks twice and stores only the end of the first batch, so the answer must not depend
        on the time: a -1 makes the first batch empty, and its end, which Spark stores, is where
        the second one begins, also after a crash. Raises UnknownTopicError and InvalidInputError.

        That given offsets name all partitions is checked later, for a new query only: one that
        repeats its first batch may meet partitions created since.
        """
        if self._initial is None:
            assigned = self._options().subscription.partitions(self._load())
            self._initial = to_json(self._start().named(assigned))
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return `maxOffsetsPerTrigger`; Spark itself lifts it for Trigger.Once."""
        limit = self._options().max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the query's target at the next call of `latestOffset`."""
        self._options()
        self._available_now = True
        self._target = None

    def latestOffset(self, start: OffsetJson, limit: ReadLimit) -> OffsetJson:
        """Return where the next micro-batch ends; `start` itself when there is nothing to read.

        New partitions are picked up here. Costs one small read while nothing is committed.
        """
        self._check_initial()
        ends = self._latest_ends()
        if self._available_now:
            if self._target is None:
                self._target = ends
            ends = self._target
        if not ends:
            return start
        if isinstance(limit, ReadMaxRows):
            begin = _begin(from_json(start), ends, self._load())
            ends = limit_offsets(begin, ends, limit.max_rows)
        return to_json(ends)

    def reportLatestOffset(self) -> OffsetJson | None:
        """Return the log's end as of the last `latestOffset`, for the query's progress."""
        return to_json(self._ends) or None

    def partitions(self, start: OffsetJson, end: OffsetJson) -> Sequence[InputPartition]:
        """Return the ranges of a micro-batch; raises DataLossError where records are gone.

        Only `start` and `end` count, since the batch may be a repetition after a crash.
        """
        self._is_begun = True
        until = from_json(end)
        if self._target is not None:
            check_available_now(until, self._target, self._latest_ends())
        ranges = self._ranges(from_json(start), until)
        pieces = split_ranges(ranges, self._options().min_partitions)
        return [OffsetRangePartition(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one range."""
        columns = tuple(self._schema.fieldNames())
        return RangeReader(self._options(), columns).read(partition)

    def commit(self, end: OffsetJson) -> None:
        """Do nothing: the log keeps no positions of its readers."""

    def stop(self) -> None:
        """Close the log; Spark may kill the process instead, and no harm is done."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _options(self) -> SourceOptions:
        if self._parsed is None:
            parsed = SourceOptions.parse(self._given)
            check_columns(self._schema)
            if parsed.ending_offsets is not None:
                raise InvalidInputError("ending offset not valid in streaming queries")
            if parsed.latest_view:
                raise InvalidInputError(
                    "view=latest is not supported in streaming queries in this version; "
                    "use spark.read, or stream the changelog"
                )
            self._parsed = parsed
        return self._parsed

    def _start(self) -> StartOrEnd:
        return self._options().starting_offsets or _FROM_NOW_ON

    def _check_initial(self) -> None:
        """Check given offsets against the partitions there are, before a query's first batch."""
        if self._initial is not None and not self._is_begun:
            assigned = self._options().subscription.partitions(self._load())
            self._start().offsets(assigned, option="startingOffsets")
        self._is_begun = True

    def _load(self) -> State:
        if self._engine is None:
            self._engine = Engine(self._options().directories, read_only=True, create=False)
        return self._engine.state()

    def _latest_ends(self) -> Offsets:
        """Return the end of each partition subscribed to, all from one point of the journal."""
        state = self._load()
        if state is not self._state:
            options = self._options()
            subscription = options.subscription
            missing = subscription.missing_topics(state)
            if missing and not options.fail_on_data_loss:
                _LOGGER.warning("going on without missing topics: %s", ", ".join(missing))
                subscription = subscription.without(missing)
            self._ends = {
                TopicPartition(topic, number): options.latest_offset(
                    state.topic(topic).partitions[number]
                )
                for topic, number in subscription.partitions(state)
            }
            self._state = state
        return self._ends

    def _ranges(self, begin: Offsets, until: Offsets) -> list[OffsetRange]:
        fail = self._options().fail_on_data_loss
        # A -1 or -2 is of a query's first batch: it may name partitions created after that batch.
        deleted = [str(p) for p, offset in sorted(begin.items()) if offset >= 0 and p not in until]
        if deleted:
            report_data_loss("PARTITIONS_DELETED", f"{', '.join(deleted)} are gone", fail=fail)
        state = self._load()
        ranges: list[OffsetRange] = []
        for partition, end in sorted(until.items()):
            offset = begin.get(partition)
            if offset == LATEST:
                continue
            if offset is None or offset == EARLIEST:
                start = _first_offset(partition, state, is_new=offset is None, fail=fail)
            else:
                start = offset
                if end < start:
                    report_data_loss(
                        "PARTITION_OFFSET_CHANGED",
                        f"partition {partition}'s offset was changed from {start} to {end}",
                        fail=fail,
                    )
            if start is not None and start < end:
                ranges.append(OffsetRange(partition, start, end))
        return ranges


def _begin(begin: Offsets, ends: Offsets, state: State) -> Offsets:
    """Return where each partition's next batch begins, for the rate limit."""
    found: Offsets = {}
    for partition, end in ends.items():
        offset: int | None = begin.get(partition, EARLIEST)
        if offset == EARLIEST:
            offset = _log_start(partition, state)
        found[partition] = end if offset is None or offset == LATEST else offset
    return found


def _first_offset(
    partition: TopicPartition, state: State, *, is_new: bool, fail: bool
) -> int | None:
    """Return the earliest offset of a partition that the query has not read before."""
    start = _log_start(partition, state)
    if start is None:
        report_data_loss(
            "INITIAL_OFFSET_NOT_FOUND_FOR_PARTITIONS",
            f"the first offset of {partition} cannot be found, the partition is gone",
            fail=fail,
        )
    elif is_new and start != 0:
        report_data_loss(
            "ADDED_PARTITION_DOES_NOT_START_FROM_OFFSET_ZERO",
            f"added partition {partition} starts from {start} instead of 0",
            fail=fail,
        )
    return start


def _log_start(partition: TopicPartition, state: State) -> int | None:
    """Return the first offset a partition still has; None when it is gone."""
    topic = state.topics.get(partition.topic)
    number = partition.partition
    if topic is None or number >= len(topic.partitions) or number in topic.absent:
        return None
    return topic.partitions[partition.partition].log_start_offset
