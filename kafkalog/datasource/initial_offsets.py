"""Where a new streaming query starts, in a form that means the same when Spark asks again.

Spark asks for it twice at a query's start, and once more when the query died in its first batch;
its checkpoint has only where that batch ends. So -1 and -2 stay as they are: a -1 leaves its
partition out of the first batch, whose end is then what was meant. A time is looked up, and gives
the same offset each time as long as its record is there.

Whoever asks does not know yet which of the two it is. What would be a fault in a new query may have
come after the batch that is repeated, so a fault is kept until a first batch is planned.
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
    from kafkalog.storage_engine.metadata.state import State
    from kafkalog.storage_engine.store import Store

__all__ = ["InitialOffsets"]

_FROM_NOW_ON: Final = StartOrEnd(everywhere=LATEST)
_FROM_THE_START: Final = StartOrEnd(everywhere=EARLIEST)
_ENDS: Final = (LATEST, EARLIEST)


@dataclass(frozen=True, slots=True)
class InitialOffsets:
    """The starts of the partitions that the options name, and what the log was at that moment.

    `ends` are the partitions there were and where each ended; `times` those of them whose start is
    the first record since a time (epoch ms), or -1 where there is none.
    """

    offsets: OffsetJson
    ends: Offsets
    times: dict[TopicPartition, int]
    fault: InvalidInputError | None

    @classmethod
    def find(cls, store: Store, options: SourceOptions, state: State) -> InitialOffsets:
        """Look the starts up; topics that are missing have none, and are the `fault`."""
        missing = options.subscription.missing_topics(state)
        fault: InvalidInputError | None = options.subscription.missing_fault(state)
        # First the ends, then the times: no record falls between the two.
        ends = options.latest_offsets(options.subscription.without(missing), state)
        if options.starting_time is None:
            default = _FROM_THE_START if options.latest_view else _FROM_NOW_ON
            named = (options.starting_offsets or default).named(ends)
            return cls(to_json(named), ends, {}, fault)
        times = options.starting_time.named(ends)
        # Kafka's numbers for the two ends of a log are no times: what they stand for moves.
        starts = {partition: time for partition, time in times.items() if time in _ENDS}
        times = {partition: times[partition] for partition in times.keys() - starts.keys()}
        found = offsets_for_times(store, times, isolation_level=options.isolation_level)
        unmatched = sorted(partition for partition, offset in found.items() if offset is None)
        starts |= {p: LATEST if offset is None else offset for p, offset in found.items()}
        if fault is None and unmatched and options.non_matching == "error":
            fault = no_offset_matched(options, unmatched[0], times[unmatched[0]])
        return cls(to_json(starts), ends, times, fault)

    def check(self, options: SourceOptions) -> None:
        """Raise what makes these starts none of a new query.

        UnknownTopicError; InvalidInputError for a time that no record is as young as, and where
        offsets or times are given and do not name all partitions. One that repeats its first batch
        may meet partitions created since, and is not looked at.
        """
        if self.fault is not None:
            raise self.fault
        if options.starting_time is not None:
            options.starting_time.times(self.ends, option="startingOffsetsByTimestamp")
        elif options.starting_offsets is not None:
            options.starting_offsets.offsets(self.ends, option="startingOffsets")

    def behind(self, until: Offsets) -> list[TopicPartition]:
        """Return those whose time was looked up, in vain, in less than a first batch was to read.

        Such a batch ends where the partition did; a broker that has started again may tell less.
        """
        starts, ends = from_json(self.offsets), self.ends
        return [p for p in self.times if starts[p] == LATEST and ends[p] < until.get(p, 0)]

    def report_lost(self, until: Offsets, state: State, options: SourceOptions) -> None:
        """Report partitions that a first batch was to read, up to `until`, and cannot any more.

        Each had a record since the time given, or the batch would not have been planned. That it is
        not there is the cleaner's doing where the log still starts at 0, and no loss, unless the
        log ends too early. Raises DataLossError, or warns.
        """
        # A batch that waits for more ends where it begins.
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
