"""The figures of a partition in a picture, before those of its place are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafkalog.cli import explain as explain_verb

if TYPE_CHECKING:
    from kafkalog.cleaner.report.explain import Explanation
    from kafkalog.storage_engine.metadata.config import TopicConfig


def partition_row(found: Explanation) -> dict[str, Any]:
    """Return the row of a partition that is explained, without segments and cleanings."""
    return {
        "topic": found.topic,
        "partition": found.partition,
        "config": None,
        "segments": [],
        "cleanedBytes": 0,
        "retiredBytes": 0,
        "cleanings": [],
        "explanation": explain_verb.row(found),
    }


def config_row(config: TopicConfig) -> dict[str, Any]:
    """Return the configs that the page shows."""
    return {
        "cleanupPolicy": ",".join(sorted(config.cleanup_policy)),
        "minCleanableDirtyRatio": config.min_cleanable_dirty_ratio,
        "deleteRetentionMs": config.delete_retention_ms,
        "segmentBytes": config.segment_bytes,
    }
