"""The status of each partition, for the cleaner; reads no record and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.cleaner.report.explain import waits
from kafkalog.cleaner.report.reported import reported
from kafkalog.cleaner.state.last_cleaning import LastCleaning
from kafkalog.cleaner.state.uncleanable import fault_reason
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.log_to_clean import CleaningPlan
    from kafkalog.cleaner.report.reported_log import ReportedLog
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import PartitionState, TopicState


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The state of a partition, as the cleaner sees it."""

    topic: str
    partition: int
    log_start_offset: int
    first_dirty_offset: int
    first_uncleanable_offset: int
    high_watermark: int
    clean_bytes: int
    dirty_bytes: int
    """Bytes that a cleaning would treat as new."""
    uncleanable_bytes: int
    """Bytes that no cleaning may touch yet: the active segment, and what a lag or pin protects."""
    dirty_ratio: float
    """dirty_bytes / (clean_bytes + dirty_bytes); compared with min.cleanable.dirty.ratio."""
    state: str
    """`clean` (nothing in it is dirty), `not due`, `dirty` (the cleaner will come), `uncleanable`,
    `paused`, `not compacted`, or `policy unknown` (a broker's topic)."""
    reason: str | None = None
    """Why it is uncleanable or not due, as `explain` says it first."""
    reason_code: str | None = None
    """The code of `explain` for why it is not due."""
    last_stable_offset: int = 0
    """The first offset of the first open transaction, or else the high watermark."""
    tombstones_waiting: int | None = None
    """Tombstones of the clean section that wait for their delete horizon; None if unknown."""
    earliest_delete_horizon_ms: int | None = None
    """When the first of them may go (epoch ms); None if there is none, or unknown."""
    compaction_delay_ms: int = 0
    """Time since max.compaction.lag.ms demanded a cleaning; 0 if it does not."""
    last_cleaning: LastCleaning | None = None
    """The last successful cleaning; None if there was none, or unknown."""


def status(engine: Log, now_ms: int, topic: str | None = None) -> list[PartitionStatus]:
    """Return the status of every partition, in one topic or all; raises UnknownTopicError.

    A partition that cannot be read has the reason in its status.
    """
    return status_of(reported(engine, now_ms), topic)


def status_of(log: ReportedLog, topic: str | None = None) -> list[PartitionStatus]:
    """Return the status of every partition, as of a report, as `status` does."""
    state = log.state
    names = sorted(state.topics) if topic is None else [state.topic(topic).name]
    found: list[PartitionStatus] = []
    for name in names:
        known = state.topics[name]
        for partition in known.numbers():
            try:
                found.append(_readable(log, name, partition))
            except (OSError, KafkaLogError) as fault:
                files.pass_on(fault)
                if not log.has_topic(name, known.topic_id):
                    break  # deleted meanwhile
                found.append(_unreadable(name, partition, known, fault))
    return found


def _readable(reported: ReportedLog, topic: str, partition: int) -> PartitionStatus:
    log, state = reported.of(topic, partition)
    place = reported.partition(topic, partition)
    mark = place.mark()
    word = _word(log, state, is_marked=mark is not None, is_paused=place.is_paused())
    first = next(waits(reported, log, state), None) if word == "not due" else None
    reason = None if mark is None else mark.reason
    known = reported.state.topics[topic]
    if not known.knows_defaults and not known.config.get("cleanup.policy"):
        word = "policy unknown"
    last = place.last_cleaning()
    return PartitionStatus(
        topic=topic,
        partition=partition,
        log_start_offset=state.log_start_offset,
        first_dirty_offset=log.first_dirty_offset,
        first_uncleanable_offset=log.first_uncleanable_offset,
        high_watermark=state.high_watermark,
        clean_bytes=log.clean_bytes,
        dirty_bytes=log.cleanable_bytes,
        uncleanable_bytes=log.uncleanable_bytes,
        dirty_ratio=log.dirty_ratio,
        state=word,
        reason=reason if first is None else first.sentence,
        reason_code=None if first is None else first.code,
        last_stable_offset=state.last_stable_offset,
        tombstones_waiting=_tombstones(last, log.first_dirty_offset),
        earliest_delete_horizon_ms=log.earliest_delete_horizon_ms,
        compaction_delay_ms=log.compaction_delay_ms,
        last_cleaning=last,
    )


def _word(log: CleaningPlan, state: PartitionState, *, is_marked: bool, is_paused: bool) -> str:
    if not log.config.is_compacted:
        return "not compacted"
    if is_paused:
        return "paused"
    if is_marked:
        return "uncleanable"
    if log.is_eligible:
        return "dirty"
    return "clean" if log.first_dirty_offset >= state.high_watermark else "not due"


def _tombstones(last: LastCleaning | None, first_dirty_offset: int) -> int | None:
    """Return the number of waiting tombstones; None if our last cleaning was not the last."""
    if last is None or last.end_offset != first_dirty_offset:
        return None
    return last.tombstones


def _unreadable(topic: str, partition: int, known: TopicState, fault: Exception) -> PartitionStatus:
    state = known.state_or_empty(partition)
    return PartitionStatus(
        topic=topic,
        partition=partition,
        log_start_offset=state.log_start_offset,
        first_dirty_offset=state.first_dirty_offset,
        first_uncleanable_offset=state.first_dirty_offset,
        high_watermark=state.high_watermark,
        clean_bytes=0,
        dirty_bytes=0,
        uncleanable_bytes=0,
        dirty_ratio=0.0,
        state="uncleanable",
        reason=fault_reason(fault),
        last_stable_offset=state.last_stable_offset,
    )
