"""The status of each partition, for the cleaner; reads no record and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.cleaner.report.explain import reason_of
from kafkalog.cleaner.report.judged import Judged, judged
from kafkalog.cleaner.state.last_cleaning import LastCleaning
from kafkalog.cleaner.state.uncleanable import fault_reason
from kafkalog.storage_engine.metadata.config import TopicConfig

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import Moment
    from kafkalog.storage_engine.metadata.state import TopicState


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
    closed_by: str = "writer"
    """Who closes the active segment: `writer`, at segment.bytes and segment.ms, or also the
    `cleaner`, if a compacted topic sets no segment.bytes."""
    deletions_gone_to: int = 0
    """Who has followed the log up to a lower offset only may have missed a deletion."""


def status(moment: Moment, topic: str | None = None) -> list[PartitionStatus]:
    """Return the status of every partition, in one topic or all; raises UnknownTopicError.

    A partition that cannot be read has the reason in its status.
    """
    return [
        _unreadable(known.name, partition, known, found)
        if isinstance(found, Exception)
        else _readable(partition, found)
        for known, partition, found in judged(moment, topic, asks_cleaners=False)
    ]


def _readable(partition: int, at: Judged) -> PartitionStatus:
    plan, known, word = at.plan, at.known, at.verdict.state
    reason = None if at.mark is None else at.mark.reason
    code = None
    for why in at.verdict.reasons[:1] if word == "not due" else ():
        first = reason_of(why, at)
        reason, code = first.sentence, first.code
    if not known.knows_defaults and not known.config.get("cleanup.policy"):
        word = "policy unknown"
    return PartitionStatus(
        topic=known.name,
        partition=partition,
        log_start_offset=plan.state.log_start_offset,
        first_dirty_offset=plan.first_dirty_offset,
        first_uncleanable_offset=plan.first_uncleanable_offset,
        high_watermark=plan.state.high_watermark,
        clean_bytes=plan.clean_bytes,
        dirty_bytes=plan.dirty_bytes,
        uncleanable_bytes=plan.uncleanable_bytes - plan.closing_bytes,
        dirty_ratio=plan.dirty_ratio,
        state=word,
        reason=reason,
        reason_code=code,
        last_stable_offset=plan.state.last_stable_offset,
        tombstones_waiting=at.tombstones,
        earliest_delete_horizon_ms=plan.earliest_delete_horizon_ms,
        compaction_delay_ms=plan.compaction_delay_ms,
        last_cleaning=at.last,
        closed_by=_closed_by(known),
        deletions_gone_to=plan.state.deletions_gone_to,
    )


def _closed_by(known: TopicState) -> str:
    is_cleaner = known.knows_defaults and TopicConfig.parse(known.config).closes_by_itself
    return "cleaner" if is_cleaner else "writer"


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
        closed_by=_closed_by(known),
        deletions_gone_to=state.deletions_gone_to,
    )
