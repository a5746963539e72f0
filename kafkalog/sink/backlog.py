"""A warning when nobody cleans what a stream writes.

A topic is dirty past its `min.cleanable.dirty.ratio` for a moment whenever a cleaner is about to
start, so one look proves nothing: the warning comes when a topic has stayed so for a minute, and no
cleaner holds the lock of any of its dirty partitions. The numbers are the journal's: the share of
dirty *offsets* in the closed segments, which is at most the share of dirty bytes, since cleaned
offsets hold fewer records.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kafkalog.sink.options import SinkOptions
from kafkalog.storage_engine import layout
from kafkalog.storage_engine.config import TopicConfig
from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.files import FileLock
from kafkalog.storage_engine.state import PartitionState, TopicState

__all__ = ["dirty_partitions", "warn_of_backlog"]

_log = logging.getLogger("kafkalog.sink")
_PATIENCE_MS = 60_000
_dirty_since: dict[tuple[str, str], int] = {}
_warned: set[tuple[str, str]] = set()


def warn_of_backlog(options: SinkOptions, query_id: str, now_ms: int) -> None:
    """Warn once per query and topic that a topic of the option `topic` is left uncleaned."""
    if options.topic is None or (query_id, options.topic) in _warned:
        return
    use = (query_id, options.topic)
    engine = Engine(options.root, read_only=True)
    topic = engine.state().topics.get(options.topic)
    directories = (
        [engine.partition_directory(topic.name, number) for number in dirty_partitions(topic)]
        if topic is not None
        else []
    )
    if not directories:
        _dirty_since.pop(use, None)
        return
    since = _dirty_since.setdefault(use, now_ms)
    if now_ms - since < _PATIENCE_MS or any(_is_locked(directory) for directory in directories):
        return
    _warned.add(use)
    _log.warning(
        "topic %s at %s is dirty past its min.cleanable.dirty.ratio and no cleaner is at work; "
        "open the log with kafkalog.open(path, cleaner=True), or run: kafkalog clean %s %s",
        options.topic,
        options.root,
        options.root,
        options.topic,
    )


def dirty_partitions(topic: TopicState) -> list[int]:
    """Return the partitions whose closed segments are dirty past the topic's ratio."""
    config = TopicConfig.parse(topic.config)
    if not config.is_compacted:
        return []
    return [
        number
        for number, partition in enumerate(topic.partitions)
        if _dirty_ratio(partition) > config.min_cleanable_dirty_ratio
    ]


def _dirty_ratio(partition: PartitionState) -> float:
    closed = partition.active_base - partition.log_start_offset
    dirty = partition.active_base - max(partition.first_dirty_offset, partition.log_start_offset)
    return dirty / closed if dirty > 0 else 0.0


def _is_locked(directory: Path) -> bool:
    with FileLock(directory / layout.CLEANER_LOCK).exclusive(wait=False) as free:
        return not free
