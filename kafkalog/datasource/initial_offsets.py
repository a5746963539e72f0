"""The start of a new streaming query, in a form that keeps its meaning when Spark asks again.

Spark asks twice at a query's start, and once more if the query died in its first batch. Its
checkpoint then has only the end of that batch. Therefore -1 and -2 stay unresolved: a partition at
-1 is left out of the first batch, so it starts at that batch's end. A time is looked up; it gives
the same offset as long as its record exists.

The reader cannot tell a new query from a repeated one. A fault in a new query's start may be
harmless when the first batch is repeated, so it is kept until a first batch is planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kafkalog.datasource.data_loss import report_data_loss
from kafkalog.datasource.micro_batch import held_partition
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
from kafkalog.datasource.resolve import no_offset_matched, offsets_for_times
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import State

_FROM_NOW_ON: Final = StartOrEnd(everywhere=LATEST)
_FROM_THE_START: Final = StartOrEnd(everywhere=EARLIEST)
_ENDS: Final = (LATEST, EARLIEST)


@dataclass(frozen=True, slots=True)
class InitialOffsets:
    """The starts of the partitions that the options name, and the log's ends at that moment.

    The existing partitions are `ends`, with their end offsets. Those in `times` start at the first
    record since a time (epoch ms), or at -1 without a record that late.
    """

    offsets: OffsetJson
    ends: Offsets
    times: dict[TopicPartition, int]
    fault: InvalidInputError | None

    @classmethod
    def find(cls, log: ReadableLog, options: SourceOptions, state: State) -> InitialOffsets:
        """Look up the starts; missing topics have none, and are the `fault`."""
        missing = options.subscription.missing_topics(state)
        fault: InvalidInputError | None = options.subscription.missing_fault(state)
        # Look up the ends before the times, so that no record falls between them.
        ends = options.latest_offsets(options.subscription.without(missing), state)
        if options.starting_time is None:
            default = _FROM_THE_START if options.latest_view else _FROM_NOW_ON
            named = (options.starting_offsets or default).named(ends)
            return cls(to_json(named), ends, {}, fault)
        times = options.starting_time.named(ends)
        # Kafka's numbers for the two ends of a log are not times, since the ends move.
        starts = {partition: time for partition, time in times.items() if time in _ENDS}
        times = {partition: times[partition] for partition in times.keys() - starts.keys()}
        found = offsets_for_times(log, times, isolation_level=options.isolation_level)
        unmatched = sorted(partition for partition, offset in found.items() if offset is None)
        starts |= {p: LATEST if offset is None else offset for p, offset in found.items()}
        if fault is None and unmatched and options.non_matching == "error":
            fault = no_offset_matched(options, unmatched[0], times[unmatched[0]])
        return cls(to_json(starts), ends, times, fault)

    def check(self, options: SourceOptions) -> None:
        """Raise the fault of these starts for a new query; a repeated first batch is not checked.

        Raises UnknownTopicError, and InvalidInputError for a time after the last record, and for
        options that do not name all partitions.
        """
        if self.fault is not None:
            raise self.fault
        if options.starting_time is not None:
            options.starting_time.times(self.ends, option="startingOffsetsByTimestamp")
        elif options.starting_offsets is not None:
            options.starting_offsets.offsets(self.ends, option="startingOffsets")

    def behind(self, until: Offsets) -> list[TopicPartition]:
        """Return partitions that end before the first batch did, without a record since their time.

        A restarted broker may report an older end.
        """
        starts, ends = from_json(self.offsets), self.ends
        return [p for p in self.times if starts[p] == LATEST and ends[p] < until.get(p, 0)]

    def report_lost(self, until: Offsets, state: State, options: SourceOptions) -> None:
        """Report partitions that a first batch was to read, up to `until`, and that are lost.

        Each had a record since the given time when the batch was planned. If the log still starts
        at 0, a cleaner removed that record, so nothing is lost, unless the log ends too early.
        Raises DataLossError, or warns.
        """
        # A batch that waits for more records ends where it begins.
        least = 1 if options.min_offsets_per_trigger is None else 0
        starts, behind = from_json(self.offsets), set(self.behind(until))
        for partition, time in sorted(self.times.items()):
            held = held_partition(partition, state)
            is_left = 0 <= starts[partition] <= until.get(partition, 0) - least
            # With the strategy "latest" there may have been nothing to read from the first.
            is_retained = options.non_matching != "error" or (
                held is not None and held.log_start_offset == 0
            )
            if partition in behind or (partition in until and not is_left and not is_retained):
                available = (
                    "it is gone"
                    if held is None
                    else f"available are [{held.log_start_offset}, {self.ends[partition]})"
                )
                report_data_loss(
                    "INITIAL_OFFSET_NOT_FOUND_FOR_PARTITIONS",
                    f"the first batch was to read {partition} from the timestamp {time} up to the "
                    f"offset {until[partition]}, and none of that is left: {available}",
                    fail=options.fail_on_data_loss,
                )
