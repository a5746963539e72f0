"""Offsets for timestamps: the first record at or after a time, the latest one, and the log's ends.

Times are epoch milliseconds, or one of Kafka's special values below. The search covers a partition
as far as its readers see it. It begins at the log start and ends at the high watermark, or at the
last stable offset if only committed records count. Like Kafka, it searches for *any* record. If its
readers do not see that record yet, the answer is None, and not a neighbouring record. Control
records count too.

The time index may choose where to look, unless an earlier batch is younger; only the records
decide. A batch that the cleaner has emptied still has its largest timestamp.

Kafka: UnifiedLog.fetchOffsetByTimestamp, Partition.fetchOffsetForTimestamp, ListOffsetsRequest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.batch import BatchHeader
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
    from kafkalog.storage_engine.segment.open_segment import OpenSegment

LATEST: Final = -1
"""The offset of the next visible record."""
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
"""The first record with the largest timestamp."""
EARLIEST_LOCAL: Final = -4
"""The same as EARLIEST, because all of a log is in one directory."""
LATEST_TIERED: Final = -5
"""Gives None, because no part of a log is elsewhere."""
READ_COMMITTED: Final = "read_committed"
READ_UNCOMMITTED: Final = "read_uncommitted"


class TimeOffset(NamedTuple):
    """An offset, its record's timestamp in ms, and its leader epoch.

    The timestamp is -1 for an end of the log. The epoch is -1 for a log without epochs.
    """

    offset: int
    timestamp: int = layout.NO_TIMESTAMP
    leader_epoch: int = -1


def end_offset(state: PartitionState, isolation_level: str) -> int:
    """Return the end of the records that readers of an isolation level see (rule F4).

    Raises InvalidInputError for an unknown level.
    """
    if isolation_level == READ_COMMITTED:
        return state.last_stable_offset
    if isolation_level == READ_UNCOMMITTED:
        return state.high_watermark
    raise InvalidInputError(
        f"isolation level: expected {READ_COMMITTED} or {READ_UNCOMMITTED}, "
        f"found {isolation_level!r}"
    )


def offset_for_time(
    log: ReadableLog, topic: str, partition: int, timestamp: int, isolation_level: str
) -> TimeOffset | None:
    """Return the offset for a time in one partition; see `DirectoryLog.offset_for_time`."""
    state = log.describe(topic).partitions[partition]
    end = end_offset(state, isolation_level)
    if timestamp in (LATEST, EARLIEST, EARLIEST_LOCAL):
        offset = end if timestamp == LATEST else state.log_start_offset
        return TimeOffset(offset, leader_epoch=log.leader_epoch_at(topic, partition, offset))
    if timestamp == LATEST_TIERED:
        return None
    if timestamp < 0 and timestamp != MAX_TIMESTAMP:
        raise InvalidInputError(
            f"timestamp: expected epoch milliseconds, or {LATEST} (latest), {EARLIEST} (earliest) "
            f"or {MAX_TIMESTAMP} (the largest timestamp), found {timestamp}"
        )
    with log.snapshot(topic, partition) as snapshot:
        found = latest(snapshot) if timestamp == MAX_TIMESTAMP else first_since(snapshot, timestamp)
        end = end_offset(snapshot.state, isolation_level)
        return found if found is not None and found.offset < end else None


def first_since(snapshot: PartitionSnapshot, timestamp: int) -> TimeOffset | None:
    """Return the first record with `timestamp` (epoch ms) or a later one, or None.

    Searches [log start, high watermark).
    """
    start, end = snapshot.state.log_start_offset, snapshot.state.high_watermark
    for segment in snapshot.open_segments(start, end):
        for position, header in segment.batches_since(timestamp):
            if header.base_offset >= end:
                return None
            if header.last_offset < start:
                continue  # do not use its number of records: no checksum was compared
            found = segment.first_since(position, header, timestamp, start=start, end=end)
            if found is not None:
                return TimeOffset(*found, header.leader_epoch)
    return None


def latest(snapshot: PartitionSnapshot) -> TimeOffset | None:
    """Return the first of the records with the largest timestamp.

    Returns None if no record of [log start, high watermark) has a timestamp.
    """
    start, end = snapshot.state.log_start_offset, snapshot.state.high_watermark
    known = snapshot.largest_timestamp(start, end)
    best: TimeOffset | None = None
    for segment in snapshot.open_segments(start, end):
        if segment.largest_timestamp >= known:
            best = _latest_of(segment, start, end, best)
    if best is not None and best.timestamp >= known:
        return best  # the segments that were skipped are older
    best = None
    for segment in snapshot.open_segments(start, end):
        best = _latest_of(segment, start, end, best)
    return best


def _latest_of(
    segment: OpenSegment, start: int, end: int, best: TimeOffset | None
) -> TimeOffset | None:
    """Return the latest record of a segment if it is newer than `best`, else `best`."""
    floor = layout.NO_TIMESTAMP if best is None else best.timestamp
    if segment.largest_timestamp <= floor:
        return best
    top: tuple[int, BatchHeader] | None = None
    ceiling, batches = segment.batches_since_largest()
    for position, header in batches:
        largest = floor if top is None else top[1].max_timestamp
        if header.max_timestamp > largest and _may_hold(header, start, end):
            top = position, header
    if top is None and ceiling <= floor:
        return best
    if top is not None and top[1].max_timestamp >= ceiling:
        found = segment.latest(*top, start=start, end=end)
        if found is not None and found[1] == top[1].max_timestamp:
            return TimeOffset(*found, top[1].leader_epoch)
    return _search(segment, start, end, best)


def _search(
    segment: OpenSegment, start: int, end: int, best: TimeOffset | None
) -> TimeOffset | None:
    """Do the same if the record with a header's largest timestamp is gone."""
    tried: set[int] = set()
    while True:
        floor = 0 if best is None else best.timestamp
        top: tuple[int, BatchHeader] | None = None
        for position, header in segment.batches_from(start):
            if position in tried or header.max_timestamp < floor:
                continue
            if not _may_hold(header, start, end):
                continue
            if top is None or header.max_timestamp > top[1].max_timestamp:
                top = position, header
        if top is None:
            return best
        tried.add(top[0])
        found = segment.latest(*top, start=start, end=end)
        if found is not None and found[1] >= floor:
            offset, timestamp = found
            if best is None or timestamp > best.timestamp or offset < best.offset:
                best = TimeOffset(offset, timestamp, top[1].leader_epoch)


def _may_hold(header: BatchHeader, start: int, end: int) -> bool:
    return header.records_count != 0 and header.last_offset >= start and header.base_offset < end
