"""Choose which partitions to clean, and in which order.

Kafka: LogCleanerManager.grabFilthiestCompactedLog (rules C33 to C39).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.dedup.log_to_clean import LogToClean, log_to_clean
from kafkalog.cleaner.directory.pause import is_paused
from kafkalog.cleaner.state.first_dirty_offset import heal_first_dirty_offsets
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.pins import LivePins
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import TopicState
from kafkalog.storage_engine.segment.segments import (
    SegmentFiles,
    glance_at_segments,
    list_segments,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.metadata.state import PartitionState

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Schedule:
    """The result of planning all compacted partitions."""

    partitions: list[tuple[str, int]] = field(default_factory=list)
    """(topic, partition) of those to clean, the filthiest first."""
    max_dirty_ratio: float = 0.0
    """The largest dirty ratio, also if it makes no partition due (C39)."""
    max_compaction_delay_ms: int = 0
    """The largest delay behind max.compaction.lag.ms; 0 for none."""


def choose(
    engine: DirectoryLog,
    topic: str | None = None,
    partition: int | None = None,
    *,
    force: bool = False,
    now_ms: int,
) -> Schedule:
    """Choose the partitions that are due, of one topic or all; with `force` all partitions.

    Paused partitions, and uncleanable ones before their retry, are skipped, except with `force`.
    Raises StorageError, LockedByBrokerError if first dirty offsets cannot be corrected.
    """
    heal_first_dirty_offsets(engine, now_ms=now_ms)
    candidates = _compacted(engine, topic, partition)
    if force:
        return Schedule([(name, number) for name, _, number in candidates])
    schedule = Schedule()
    ratios: list[tuple[float, str, int]] = []
    plans = Plans(engine, now_ms)
    for name, known, number in candidates:
        if not may_be_cleaned(engine, name, known, number, now_ms):
            continue
        try:
            log, _ = plans.of(name, number)
        except Exception as fault:  # without a plan the cleaning would fail too (C38)
            files.pass_on(fault)
            if engine.has_topic(name, known.topic_id):
                _log.debug("%s-%d cannot be planned: %s", name, number, fault)
                ratios.append((1.0, name, number))  # sorted last; its cleaning reports the reason
            continue
        schedule.max_dirty_ratio = max(schedule.max_dirty_ratio, log.dirty_ratio)
        if log.is_eligible:
            delay_ms = max(schedule.max_compaction_delay_ms, log.compaction_delay_ms)
            schedule.max_compaction_delay_ms = delay_ms
            ratios.append((-log.dirty_ratio, name, number))
    schedule.partitions = [(name, number) for _, name, number in sorted(ratios)]
    return schedule


def _compacted(
    engine: DirectoryLog, topic: str | None, partition: int | None
) -> Iterator[tuple[str, TopicState, int]]:
    for name, known in sorted(engine.state().topics.items()):
        if topic in (None, name) and TopicConfig.parse(known.config).is_compacted:
            for number in known.numbers():
                if partition in (None, number):
                    yield name, known, number


def may_be_cleaned(
    engine: DirectoryLog, name: str, known: TopicState, number: int, now_ms: int
) -> bool:
    """Return whether a partition is neither paused nor uncleanable until a later time (C35)."""
    directory = engine.partition_directory(name, number)
    mark = read_uncleanable(directory)
    return (mark is None or mark.is_due(known.config, now_ms)) and not is_paused(directory)


class Plans:
    """The plans and pins of a log at one time; each plan is made on first use."""

    def __init__(self, engine: DirectoryLog, now_ms: int) -> None:
        """Load the state, and the pins."""
        self.engine: Final = engine
        self.state: Final = engine.state()
        self.now_ms: Final = now_ms
        self.pins: Final = LivePins(engine.root, now_ms)
        self._made: dict[tuple[str, int], tuple[LogToClean, PartitionState]] = {}

    def of(self, topic: str, partition: int) -> tuple[LogToClean, PartitionState]:
        """Return plan and state; raises OSError, KafkaLogError if the partition cannot be read."""
        made = self._made.get((topic, partition))
        if made is None:
            made = self._made[topic, partition] = self._plan(topic, partition)
        return made

    def _plan(self, topic: str, partition: int) -> tuple[LogToClean, PartitionState]:
        """Plan from the state at the beginning and a listing without a lock.

        Where the two do not fit each other, plan from a listing under the lock and its state.
        """
        known = self.state.topics.get(topic)
        directory = self.engine.partition_directory(topic, partition)
        if known is not None and partition < len(known.partitions):
            state = known.partitions[partition]
            with contextlib.suppress(FileNotFoundError):
                segments = glance_at_segments(directory)
                if segments is not None and _has_active(segments, state):
                    return self._planned(known, partition, directory, segments), state
        return self._plan_locked(topic, partition, directory)

    def _plan_locked(
        self, topic: str, partition: int, directory: Path
    ) -> tuple[LogToClean, PartitionState]:
        """Plan from a listing and a state that fit each other.

        Raises StorageError if the active segment has committed bytes and is missing, except in a
        broker's.
        """
        engine = self.engine
        with engine.listing_lock(directory):
            described = engine.describe(topic)
            segments = list_segments(directory)
        state = described.partitions[partition]
        if state.active_size and not _has_active(segments, state) and not engine.is_brokers:
            raise StorageError(
                f"{directory}: the segment of offset {state.active_base} is missing; committed "
                "records are lost"
            )
        return self._planned(described, partition, directory, segments), state

    def _planned(
        self, known: TopicState, partition: int, directory: Path, segments: Sequence[SegmentFiles]
    ) -> LogToClean:
        return log_to_clean(
            known.name,
            partition,
            directory=directory,
            config=TopicConfig.parse(known.config),
            state=known.partitions[partition],
            segments=segments,
            now_ms=self.now_ms,
            pinned_offset=self.pins.limit(known.name, known.topic_id, partition),
            is_awaited=self.pins.has_changelog,
        )


def _has_active(segments: Sequence[SegmentFiles], state: PartitionState) -> bool:
    return any(segment.base_offset == state.active_base for segment in segments)
