"""Correct first dirty offsets that lie outside their log.

An offset like this means that all of the log is dirty. Every search for work corrects it in the
journal and in Kafka's checkpoint.

Kafka: LogCleanerManager.cleanableOffsets, grabFilthiestCompactedLog (rules C24 to C27).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kafkalog.cleaner.plan import valid_first_dirty_offset
from kafkalog.storage_engine.metadata.checkpoints import write_cleaner_checkpoint
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState, State

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog

_log = logging.getLogger(__name__)


def heal_first_dirty_offsets(log: DirectoryLog, *, now_ms: int) -> int:
    """Correct wrong first dirty offsets of compacted partitions; return how many."""
    if not any(_invalid(log.state())):
        return 0
    with log.transaction() as transaction:
        found = list(_invalid(transaction.state))
        for topic, partition, state in found:
            offset = valid_first_dirty_offset(state)
            _tell(
                TopicConfig.parse(transaction.topic(topic).config), topic, partition, state, offset
            )
            # Snapshots below an offset that was cleaned stay refused, up to the log's end.
            cleaned_to = min(state.cleaned_to, state.high_watermark)
            transaction.change_partition(
                topic, partition, first_dirty_offset=offset, cleaning_offset=cleaned_to
            )
        if found:
            write_cleaner_checkpoint(log.root, transaction.publish(now_ms))
    return len(found)


def _invalid(published: State) -> Iterator[tuple[str, int, PartitionState]]:
    for name, topic in published.topics.items():
        if TopicConfig.parse(topic.config).is_compacted:
            for partition, state in topic.present():
                if valid_first_dirty_offset(state) != state.first_dirty_offset:
                    yield name, partition, state


def _tell(
    config: TopicConfig, topic: str, partition: int, state: PartitionState, offset: int
) -> None:
    # With compact,delete, retention often raises the log start past it (C25).
    is_usual = config.is_deleted and state.first_dirty_offset < state.log_start_offset
    _log.log(
        logging.DEBUG if is_usual else logging.WARNING,
        "%s-%d: the first dirty offset %d is outside the log, [%d, %d); cleaning begins at %d",
        topic,
        partition,
        state.first_dirty_offset,
        state.log_start_offset,
        state.high_watermark,
        offset,
    )
