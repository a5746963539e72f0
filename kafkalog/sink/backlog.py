"""A warning if no cleaner cleans a topic that a stream writes.

A topic is briefly dirty past its `min.cleanable.dirty.ratio` before each cleaning, so one look at
the journal proves nothing. The segments prove it: a segment was closed before the last write to the
next one. The warning comes if the segments that have been closed for a minute plus
`min.compaction.lag.ms` are dirty past the ratio, and no process holds a cleaner lock. This needs no
memory of earlier looks, which Spark would lose: it ends a worker that was idle for a minute.

The ratio here is a share of *offsets*. It is at most the share of dirty bytes that cleaners use,
since cleaned offsets hold fewer records. The warning may therefore come late, by the time it takes
to fill a segment. It comes once per query, topic and process.

In an object store the number of fresh objects proves it: a cleaner regroups them every minute.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.plan import is_surely_above_ratio
from kafkalog.errors import KafkaLogError
from kafkalog.sink.options import SinkOptions
from kafkalog.sink.shared_log import shared_engine
from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.fs.locks import FileLock, SegmentsLock
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import TopicState
from kafkalog.storage_engine.segment.segments import list_segments

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log import Log

_log = logging.getLogger("kafkalog.sink")
_PATIENCE_MS = 60_000
"""Background cleaners look every 15 seconds, and clean the dirtiest partition first."""
FRESH_WARNED: Final = 512
_warned: set[tuple[str, str]] = set()


def warn_of_backlog(options: SinkOptions, query_id: str, now_ms: int) -> None:
    """Warn, after the commit, that no cleaner cleans the option's topic; raise nothing."""
    if options.topic is None or (query_id, options.topic) in _warned:
        return
    try:
        store = shared_engine(options.root)
        if not isinstance(store, ReadableDirectory):
            _warn_of_fresh(store, (query_id, options.topic))
            return
        topic = store.state().topics.get(options.topic)
        if topic is None:
            return
        neglected = neglected_partitions(store, topic, now_ms)
        locks = [
            FileLock(store.partition_directory(topic.name, number) / layout.CLEANER_LOCK)
            for number in neglected
        ]
        if not locks or any(lock.is_held_alone() for lock in locks):
            return
    except (KafkaLogError, OSError) as fault:
        files.pass_on(fault)
        _log.debug("%s: whether a cleaner is at work is unknown: %s", options.root, fault)
        return
    _warned.add((query_id, options.topic))
    _log.warning(
        "topic %s at %s is dirty past its min.cleanable.dirty.ratio and no cleaner is at work; "
        "keep the log open with kafkalog.open(path, cleaner=True), or call its clean(%r)",
        options.topic,
        options.root,
        options.topic,
    )


def _warn_of_fresh(log: Log, what: tuple[str, str]) -> None:
    """Warn that nobody regroups the objects of a log in an object store."""
    from kafkalog.storage_engine.object_store.object_log import FRESH_MAX, ObjectLog

    if isinstance(log, ObjectLog) and log.known_state.fresh >= FRESH_WARNED:
        _warned.add(what)
        _log.warning(
            "%s has %d objects that no cleaner has regrouped, and each read fetches them all; "
            "run: kafkalog cleaner %s (at %d objects a commit regroups them, and takes long)",
            log.root,
            log.known_state.fresh,
            log.root,
            FRESH_MAX,
        )


def neglected_partitions(store: ReadableDirectory, topic: TopicState, now_ms: int) -> list[int]:
    """Return the partitions that have been dirty past the ratio for longer than a cleaner waits."""
    config = TopicConfig.parse(topic.config)
    deadline_ns = (now_ms - _PATIENCE_MS - config.min_compaction_lag_ms) * 1_000_000
    found = []
    for number in dirty_partitions(topic):
        directory = store.partition_directory(topic.name, number)
        partition = topic.partitions[number]
        with SegmentsLock(directory).shared():
            end = max(
                (
                    segment.base_offset
                    for segment in list_segments(directory)
                    if segment.base_offset <= partition.active_base
                    and segment.log.stat().st_mtime_ns <= deadline_ns
                ),
                default=0,
            )
        if is_surely_above_ratio(config, partition, end):
            found.append(number)
    return found


def dirty_partitions(topic: TopicState) -> list[int]:
    """Return the partitions whose closed segments are dirty past the topic's ratio."""
    config = TopicConfig.parse(topic.config)
    return [
        number
        for number, partition in topic.present()
        if config.is_compacted and is_surely_above_ratio(config, partition, partition.active_base)
    ]
