"""Choose which partitions to clean, and in which order.

Kafka: LogCleanerManager.grabFilthiestCompactedLog (rules C33 to C39).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kafkalog.cleaner.plan import Schedule, may_be_tried, schedule
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig

if TYPE_CHECKING:
    from kafkalog.cleaner.plan import Plan
    from kafkalog.cleaner.shelf import Moment
    from kafkalog.storage_engine.metadata.state import TopicState

_log = logging.getLogger(__name__)


def choose(
    moment: Moment, topic: str | None = None, partition: int | None = None, *, force: bool = False
) -> Schedule:
    """Choose the partitions that are due, of one topic or all; with `force` all partitions.

    Paused partitions, and uncleanable ones before their retry, are skipped, except with `force`.
    """
    candidates = [
        (known, number)
        for name, known in sorted(moment.state.topics.items())
        if topic in (None, name) and TopicConfig.parse(known.config).is_compacted
        for number in known.numbers()
        if partition in (None, number)
    ]
    if force:
        return Schedule([(known.name, number) for known, number in candidates])
    return schedule(_planned(moment, candidates))


def _planned(
    moment: Moment, candidates: list[tuple[TopicState, int]]
) -> Iterator[tuple[str, int, Plan | None]]:
    for known, number in candidates:
        place = known.name, number
        mark = read_uncleanable(moment.notes(*place))
        if not may_be_tried(mark, known, moment.now_ms) or moment.is_paused(*place):
            continue
        try:
            yield *place, moment.plan(*place) if mark is None else None
        except Exception as fault:  # without a plan the cleaning would fail too (C38)
            files.pass_on(fault)
            if moment.has_topic(known.name, known.topic_id):
                _log.debug("%s-%d cannot be planned: %s", *place, fault)
                yield *place, None
