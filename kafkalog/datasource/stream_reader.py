"""The micro-batch reader: `spark.readStream`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from kafkalog.datasource.columns import check_columns
from kafkalog.datasource.initial_offsets import InitialOffsets
from kafkalog.datasource.latest_ends import LatestEnds
from kafkalog.datasource.micro_batch import (
    TriggerDelay,
    check_available_now,
    held_partition,
    limit_offsets,
    micro_batch_ranges,
    report_left_out,
    report_missed_deletions,
    report_set_back,
)
from kafkalog.datasource.offsets import EARLIEST, LATEST, OffsetJson, Offsets, from_json, to_json
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.range_reader import RangeReader
from kafkalog.datasource.read_planner import ReadPlanner, planner_of
from kafkalog.datasource.snapshot import has_snapshot
from kafkalog.plain_errors import plain
from kafkalog.spark_release import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
    refuse_limits,
)
from kafkalog.storage_engine.fs import clock

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import State


_TRIES: Final = 5
"""Attempts to choose an end that no cleaner passes before it is pinned."""


@plain
class KafkaLogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Chooses the ends of micro-batches and plans their ranges (Spark: KafkaMicroBatchStream).

    One instance lives in the driver for a run of the query; pickled copies only `read`. It keeps
    plain data and the planner, which is not pickled. A batch ends at one point of the journal, so
    it sees a commit over many partitions whole.

    Spark loses the message of errors that are raised while a reader is made, so the first call
    after that checks the options.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        schema: StructType,
        now_ms: Callable[[], int] = clock.now_ms,
    ) -> None:
        self._given = dict(options)
        self._schema = schema
        self._now_ms = now_ms
        self._parsed: SourceOptions | None = None
        self._planner: ReadPlanner | None = None
        self._initial: InitialOffsets | None = None
        self._first_batch: tuple[OffsetJson, OffsetJson] | None = None
        self._is_begun = False
        self._has_gone_on = False
        self._ends: LatestEnds | None = None
        self._idle: tuple[State, OffsetJson] | None = None
        """The state at which all was read, up to these ends: the next poll finds the same."""
        self._reported: Offsets = {}
        self._delay: TriggerDelay | None = None
        self._available_now = False
        self._target: Offsets | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None, "_ends": None, "_idle": None}

    def initialOffset(self) -> OffsetJson:
        """Return the start of a new query: see `InitialOffsets`.

        Spark asks twice and stores only the end of the first batch, so the answer must not depend
        on the time. A -1 makes the first batch empty, and the second one starts at its stored end,
        even after a crash. A faulty start is reported by `latestOffset`, because the query may not
        be new. Raises InvalidInputError for options.
        """
        if self._initial is None:
            log = self._log()
            self._initial = InitialOffsets.find(log, self._options(), log.state())
        return self._initial.offsets

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return a limit if the options have one; Spark lifts it for Trigger.Once."""
        options = self._options()
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the query's target at the next call of `latestOffset`."""
        self._options()
        self._available_now = True
        self._target = None
        self._idle = None

    def latestOffset(self, start: OffsetJson, limit: ReadLimit) -> OffsetJson:
        """Return the end of the next micro-batch; `start` itself if there is nothing to read.

        New partitions are added here, except in a query's first batch: a repetition could not tell
        them from the partitions of its start. The second batch reads them from their first record.
        Costs one small read while nothing is committed.

        Raises DataLossError for a partition that was read, and is deleted, not subscribed to, or
        ends below what was read. For a new query it raises UnknownTopicError, and InvalidInputError
        for starts that do not fit the log.
        """
        if self._planner is not None:
            self._planner.poll()
        is_new = self._check_initial()
        for _ in range(_TRIES):
            end = self._next_end(start, limit, is_new=is_new)
            if not self._options().latest_view or self._opened().hold_views(
                from_json(start), from_json(end)
            ):
                break
            self._target = None  # a cleaner passed the end; choose a later one
        return end

    def _next_end(self, start: OffsetJson, limit: ReadLimit, *, is_new: bool) -> OffsetJson:
        state = self._log().state()
        if self._idle is not None and self._idle[0] is state and self._idle[1] == start:
            return self._idle[1]
        self._idle = None
        begin = from_json(start)
        known = self._looked_up(begin)
        ends = self._latest().of(known)
        if self._target is None:
            self._latest().report_recreated(known)
        if is_new:
            initial = self._initial_ends()
            ends = {partition: end for partition, end in ends.items() if partition in initial}
        if LATEST in begin.values():  # a query's first batch ends where such partitions begin
            ends = {
                p: known.get(p, end) if begin.get(p) == LATEST else end for p, end in ends.items()
            }
        if self._options().fail_on_data_loss and not is_new and self._target is None:
            # Refuse before Spark writes a plan that has forgotten where the query was.
            report_left_out(begin, ends, state, fail=True)
            report_set_back(known, ends, state, fail=True)
        if self._available_now:
            if self._target is None:
                self._target = ends
            ends = self._target
        self._reported = ends
        if self._delay is None and begin == ends and self._latest().are_of(ends, state):
            self._idle = state, to_json(ends)
            return self._idle[1]
        is_whole = self._options().latest_view and has_snapshot(begin)
        if not ends or not (is_whole or isinstance(limit, ReadAllAvailable)):
            ends = self._limited(known, ends)
        return to_json(ends)

    def reportLatestOffset(self) -> OffsetJson | None:
        """Return the log's end at the last `latestOffset`, or the target of AvailableNow."""
        return (to_json(self._reported) if self._idle is None else self._idle[1]) or None

    def partitions(self, start: OffsetJson, end: OffsetJson) -> Sequence[InputPartition]:
        """Return the ranges of a micro-batch; raises DataLossError if records are gone.

        Only `start` and `end` count, since the batch may be repeated after a crash. If a broker has
        restarted since, this waits for its checkpoint to reach the batch. A log in an object store
        is polled only if it was not known yet up to `end`.
        """
        options, log = self._options(), self._log()
        is_resumed = self._initial is None and not self._has_gone_on
        self._is_begun = self._has_gone_on = True
        if self._first_batch is None and self._initial and start == self._initial.offsets:
            self._first_batch = start, end
        begin, until = from_json(start), from_json(end)
        self._opened().poll(until)
        if is_resumed and not has_snapshot(begin):
            report_missed_deletions(begin, log.state())
        self._latest().wait_for(
            {p: end for p, end in until.items() if begin.get(p, EARLIEST) < end}
        )
        is_moving = options.starting_time is not None and self._first_batch == (start, end)
        if is_moving and self._initial:
            state = log.state()
            if self._initial.behind(until):
                self._initial = InitialOffsets.find(log, options, state)
            self._initial.report_lost(until, state, options)
            begin = from_json(self._initial.offsets)
        if self._target:
            check_available_now(until, self._target, self._latest().of(until))
            self._latest().report_recreated(until)
        ranges = micro_batch_ranges(
            begin,
            until,
            log.state(),
            fail_on_data_loss=options.fail_on_data_loss,
            moving_start=is_moving,
        )
        return self._opened().micro_batch(begin, ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one range, or of the view with which it begins."""
        columns = tuple(self._schema.fieldNames())
        options = dataclasses.replace(self._options(), latest_view=False)
        return RangeReader(options, columns).read(partition)

    def commit(self, end: OffsetJson) -> None:
        """Do nothing: the log keeps no positions of its readers."""

    def stop(self) -> None:
        """Close the log; no harm is done if Spark kills the process instead."""
        if self._planner is not None:
            self._planner.close()
            self._planner = self._ends = self._idle = None

    def _options(self) -> SourceOptions:
        if self._parsed is None:
            parsed = SourceOptions.parse(self._given)
            check_columns(self._schema)
            parsed.check_stream()
            refuse_limits(parsed.warn_of_batch)
            if parsed.min_offsets_per_trigger is not None:
                self._delay = TriggerDelay(
                    parsed.min_offsets_per_trigger, parsed.max_trigger_delay_ms
                )
            self._parsed = parsed
        return self._parsed

    def _opened(self) -> ReadPlanner:
        if self._planner is None:
            self._planner = planner_of(self._options())
        return self._planner

    def _log(self) -> ReadableLog:
        return self._opened().log

    def _check_initial(self) -> bool:
        """Check the start of a new query before its first batch; return whether it is new."""
        is_new = self._initial is not None and not self._is_begun
        if is_new and self._initial is not None:
            self._initial.check(self._options())
            if self._options().starting_offsets is not None:
                given = from_json(self._initial.offsets)
                self._latest().check_starts({p: o for p, o in given.items() if o >= 0})
        self._is_begun = True
        return is_new

    def _initial_ends(self) -> Offsets:
        return {} if self._initial is None else self._initial.ends

    def _looked_up(self, begin: Offsets) -> Offsets:
        """Return the start of a batch with -1 and -2 resolved.

        A -1 is the end that the partition had when the query asked for its start. Partitions that
        have vanished are left out.
        """
        found: Offsets = {}
        initial_ends = self._initial_ends()
        for partition, offset in begin.items():
            if offset >= 0:
                found[partition] = offset
            elif offset == LATEST:
                if partition in initial_ends:
                    found[partition] = initial_ends[partition]
            elif (held := held_partition(partition, self._log().state())) is not None:
                found[partition] = held.log_start_offset
        return found

    def _limited(self, known: Offsets, ends: Offsets) -> Offsets:
        """Return the end of the next batch within the limits; its start if the batch must wait.

        It never returns no partitions if there were some: the next batch would read all again as
        new.
        """
        options = self._options()
        if not ends:
            return known
        if self._delay and self._delay.holds_back(known, ends, now_ms=self._now_ms()):
            return known
        if options.max_offsets_per_trigger is None or known == ends:
            return ends
        begin = dict(known)
        for partition, end in ends.items():
            if partition not in begin:
                held = held_partition(partition, self._log().state())
                begin[partition] = end if held is None else held.log_start_offset
        limited = limit_offsets(begin, ends, options.max_offsets_per_trigger)
        if options.latest_view:  # the view of a new partition is not limited either
            limited |= {partition: end for partition, end in ends.items() if partition not in known}
        return limited

    def _latest(self) -> LatestEnds:
        if self._ends is None:
            self._ends = LatestEnds(self._log(), self._options())
        return self._ends
