"""Signs in a directory that no cleaner cleans a topic.

A topic is briefly dirty past its `min.cleanable.dirty.ratio` before each cleaning, so one look at
the journal proves nothing. The segments prove it: a segment was closed before the last write to the
next one. A topic is neglected if the segments that have been closed for a minute plus
`min.compaction.lag.ms` are dirty past the ratio, and no process holds a cleaner lock.

The ratio here is a share of *offsets*. It is at most the share of dirty bytes that cleaners use,
since cleaned offsets hold fewer records. The sign may therefore come late, by the time it takes to
fill a segment. If the cleaner closes segments, because the topic sets no `segment.bytes`, the
active one counts too. It must have been so dirty, as far as this process knows, for as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.plan import CLOSING_MOST, is_surely_above_ratio
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs.locks import FileLock, SegmentsLock
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import TopicState
from kafkalog.storage_engine.segment.segments import list_segments

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.metadata.state import PartitionState

_PATIENCE_MS: Final = 60_000
"""Background cleaners look every 15 seconds, and clean the dirtiest partition first."""
_dirty_since: dict[tuple[str, str, int], tuple[int, int]] = {}
"""(root, topic id, partition) -> the first dirty offset with which the active segment was first
seen too dirty, and when (ms)."""


def neglect(log: ReadableDirectory, topic: str, now_ms: int) -> str | None:
    """Say that no cleaner cleans a topic, and what to do; None without a sign of it.

    Raises StorageError, OSError.
    """
    known = log.state().topics.get(topic)
    neglected = [] if known is None else neglected_partitions(log, known, now_ms)
    locks = [
        FileLock(log.partition_directory(topic, number) / layout.CLEANER_LOCK)
        for number in neglected
    ]
    if not locks or any(lock.is_held_alone() for lock in locks):
        return None
    closes = ""
    if known is not None and TopicConfig.parse(known.config).closes_by_itself:
        closes = " (no segment.bytes set: the cleaner closes segments)"
    return (
        f"topic {topic} at {log.root} is dirty past its min.cleanable.dirty.ratio and no cleaner "
        f"is at work{closes}; keep the log open with kafkalog.open(path, cleaner=True), or call "
        f"its clean({topic!r})"
    )


def neglected_partitions(log: ReadableDirectory, topic: TopicState, now_ms: int) -> list[int]:
    """Return the partitions that have been dirty past the ratio for longer than a cleaner waits."""
    config = TopicConfig.parse(topic.config)
    deadline_ms = now_ms - _PATIENCE_MS - config.min_compaction_lag_ms
    found = []
    for number in dirty_partitions(topic):
        directory = log.partition_directory(topic.name, number)
        partition = topic.partitions[number]
        with SegmentsLock(directory).shared():
            end = max(
                (
                    segment.base_offset
                    for segment in list_segments(directory)
                    if segment.base_offset <= partition.active_base
                    and segment.log.stat().st_mtime_ns <= deadline_ms * 1_000_000
                ),
                default=0,
            )
        if is_surely_above_ratio(config, partition, end) or (
            _counts_active(config, partition)
            and _since((str(log.root), topic.topic_id, number), partition, now_ms) <= deadline_ms
        ):
            found.append(number)
    return found


def _counts_active(config: TopicConfig, partition: PartitionState) -> bool:
    """Return whether the cleaner would close the active segment, whatever the log's size is."""
    return config.closes_by_itself and partition.active_size >= CLOSING_MOST


def _since(place: tuple[str, str, int], partition: PartitionState, now_ms: int) -> int:
    """Return when a partition was first seen too dirty (ms); a cleaning restarts the time."""
    first_dirty, since_ms = _dirty_since.get(place, (-1, now_ms))
    if first_dirty != partition.first_dirty_offset:
        since_ms = now_ms
    _dirty_since[place] = partition.first_dirty_offset, since_ms
    return since_ms


def dirty_partitions(topic: TopicState) -> list[int]:
    """Return the partitions that are dirty past the topic's ratio in what a cleaner takes."""
    config = TopicConfig.parse(topic.config)
    return [
        number
        for number, partition in topic.present()
        for end in [
            partition.high_watermark if _counts_active(config, partition) else partition.active_base
        ]
        if config.is_compacted and is_surely_above_ratio(config, partition, end)
    ]
