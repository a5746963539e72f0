"""The figures of a picture: those of `status --json`, and of each partition its segments.

{"version": 1, "madeMs": ..., "path": "...", "release": "...",
 "status": [the objects of `status --json`],
 "partitions": [{"topic": ..., "partition": ..., "config": {...}, "segments": [...],
                 "cleanedBytes": ..., "retiredBytes": ..., "cleanings": [...],
                 "explanation": {an object of `explain --json`}}]}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafkalog.cleaner.report.explain import explain
from kafkalog.cleaner.schedule.scheduler import Plans
from kafkalog.cleaner.state.last_cleaning import read_cleanings
from kafkalog.cli import explain as explain_verb
from kafkalog.cli.picture.segments import leftovers, segment_rows
from kafkalog.cli.status_rows import cleaning_row, status_rows
from kafkalog.errors import KafkaLogError

if TYPE_CHECKING:
    from kafkalog.cleaner.report.explain import Explanation
    from kafkalog.cli.picture.counts import Counts
    from kafkalog.storage_engine.engine import Engine
    from kafkalog.storage_engine.metadata.config import TopicConfig


def figures(
    path: str, log: Engine, counts: Counts, now_ms: int, topic: str | None = None
) -> dict[str, Any]:
    """Return the figures of a log, or of a topic, as JSON objects; no records are read."""
    from kafkalog import __version__

    plans = Plans(log, now_ms)
    partitions = []
    for name in log.topics() if topic is None else [topic]:
        try:
            explanations = explain(log, name, now_ms, plans)
        except KafkaLogError:  # it was deleted meanwhile
            continue
        partitions += [_partition(log, found, counts, plans) for found in explanations]
    return {
        "version": 1,
        "madeMs": now_ms,
        "path": path,
        "release": __version__,
        "status": status_rows(path, log, topic, plans),
        "partitions": partitions,
    }


def _partition(log: Engine, found: Explanation, counts: Counts, plans: Plans) -> dict[str, Any]:
    topic, partition = found.topic, found.partition
    row: dict[str, Any] = {
        "topic": topic,
        "partition": partition,
        "config": None,
        "segments": [],
        "cleanedBytes": 0,
        "retiredBytes": 0,
        "cleanings": [],
        "explanation": explain_verb.row(found),
    }
    try:
        directory = log.partition_directory(topic, partition)
        planned, state = plans.of(topic, partition)
        row["config"] = _config(planned.config)
        row["segments"] = segment_rows(
            planned,
            state,
            counts.of(topic, partition),
            is_refused=any(one.code in ("paused", "uncleanable") for one in found.findings),
        )
        row["cleanings"] = [cleaning_row(one) for one in read_cleanings(directory)]
        row["cleanedBytes"], row["retiredBytes"] = leftovers(directory)
    except (OSError, KafkaLogError):
        pass  # the explanation says why it cannot be read
    return row


def _config(config: TopicConfig) -> dict[str, Any]:
    return {
        "cleanupPolicy": ",".join(sorted(config.cleanup_policy)),
        "minCleanableDirtyRatio": config.min_cleanable_dirty_ratio,
        "deleteRetentionMs": config.delete_retention_ms,
        "segmentBytes": config.segment_bytes,
    }
