"""Resolves the starts and ends of the options: times are looked up in the log, -1 and -2 stay.

A time for all partitions is stronger than times per partition, and those than offsets
(`SourceOptions`), separately for start and end. Spark: KafkaOffsetReader.fetchPartitionOffsets.

A time means the first record at or after it; aborted records and markers count too, as in Kafka.
No record matches if readers of the isolation level do not see that one yet. Looking it up reads a
batch or two per partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kafkalog.datasource.offsets import LATEST, Offsets, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.start_or_end_time import StartOrEndTime
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.reading.time_offsets import offset_for_time

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.readable_log import ReadableLog


def offsets_for_times(
    log: ReadableLog, times: Mapping[TopicPartition, int], *, isolation_level: str
) -> dict[TopicPartition, int | None]:
    """Return the offset of the first record since each time (epoch ms); None without one.

    Kafka: Admin.listOffsets with OffsetSpec.forTimestamp. Raises UnknownTopicError.
    """
    found: dict[TopicPartition, int | None] = {}
    for partition, time in times.items():
        place = offset_for_time(log, partition.topic, partition.partition, time, isolation_level)
        found[partition] = None if place is None else place.offset
    return found


def starting_offsets(
    log: ReadableLog, options: SourceOptions, assigned: Iterable[TopicPartition]
) -> Offsets:
    """Return the start of each assigned partition; -2 if no option gives it.

    A time after the last record gives -1 with startingOffsetsByTimestampStrategy=latest, and
    InvalidInputError otherwise. Raises InvalidInputError for options that do not name exactly the
    assigned partitions.
    """
    wanted = sorted(assigned)
    if options.starting_time is None:
        return options.batch_start.offsets(wanted, option="startingOffsets")
    times = options.starting_time.times(wanted, option=_by_time(options.starting_time, "starting"))
    found = offsets_for_times(log, times, isolation_level=options.isolation_level)
    starts: Offsets = {}
    for partition, offset in found.items():
        if offset is None and options.non_matching == "error":
            raise no_offset_matched(options, partition, times[partition])
        starts[partition] = LATEST if offset is None else offset
    return starts


def no_offset_matched(
    options: SourceOptions, partition: TopicPartition, time: int
) -> InvalidInputError:
    """Return the error for a start (epoch ms) that is after a partition's last record."""
    assert options.starting_time is not None
    return InvalidInputError(
        f"No offset matched from request of topic-partition {partition} and timestamp {time}. "
        f"Give an earlier {_by_time(options.starting_time, 'starting')}, or set "
        "startingOffsetsByTimestampStrategy to latest"
    )


def ending_offsets(
    log: ReadableLog, options: SourceOptions, assigned: Iterable[TopicPartition]
) -> Offsets:
    """Return the end of each assigned partition; -1 if no option gives it.

    A time that no record matches gives the present end: later records do not belong to the read.
    Raises InvalidInputError for options that do not name exactly the assigned partitions.
    """
    wanted = sorted(assigned)
    if options.ending_time is None:
        return options.batch_end.offsets(wanted, option="endingOffsets")
    times = options.ending_time.times(wanted, option=_by_time(options.ending_time, "ending"))
    state = log.state()  # before the look-up, which may see later records
    found = offsets_for_times(log, times, isolation_level=options.isolation_level)
    return {
        p: options.latest_offset(state.topic(p.topic).partitions[p.partition])
        if offset is None
        else offset
        for p, offset in found.items()
    }


def _by_time(given: StartOrEndTime, side: str) -> str:
    return f"{side}OffsetsByTimestamp" if given.is_specific else f"{side}Timestamp"
