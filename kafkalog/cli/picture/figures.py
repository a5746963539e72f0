"""The figures of a picture: those of `status --json`, and of each partition its segments.

{"version": 1, "madeMs": ..., "path": "...", "release": "...",
 "status": [the objects of `status --json`],
 "partitions": [{"topic": ..., "partition": ..., "config": {...}, "segments": [...],
                 "cleanedBytes": ..., "retiredBytes": ..., "cleanings": [...],
                 "explanation": {an object of `explain --json`}}]}

In an object store a run of batches in an object stands where a segment does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kafkalog.cleaner.report.explain import explain
from kafkalog.cleaner.shelves import moment_of
from kafkalog.cleaner.state.last_cleaning import read_cleanings
from kafkalog.cli import explain as explain_verb
from kafkalog.cli.status_rows import cleaning_row, status_rows
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.census import SegmentCensus
    from kafkalog.cleaner.plan import Plan
    from kafkalog.cleaner.report.explain import Explanation
    from kafkalog.cleaner.shelf import Moment
    from kafkalog.cli.picture.counts import Counts
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.config import TopicConfig


def figures(
    path: str, log: Log, counts: Counts, now_ms: int, topic: str | None = None
) -> dict[str, Any]:
    """Return the figures of a log, or of a topic, as JSON objects; no records are read.

    For a log in an object store that is one request, if nothing has changed.
    """
    from kafkalog import __version__

    moment = moment_of(log, now_ms)
    return {
        "version": 1,
        "madeMs": now_ms,
        "path": path,
        "release": __version__,
        "status": status_rows(path, moment, topic),
        "partitions": [_partition(moment, each, counts) for each in explain(moment, topic)],
    }


def _partition(moment: Moment, found: Explanation, counts: Counts) -> dict[str, Any]:
    place = found.topic, found.partition
    row: dict[str, Any] = {
        "topic": found.topic,
        "partition": found.partition,
        "config": None,
        "segments": [],
        "cleanedBytes": 0,
        "retiredBytes": 0,
        "cleanings": [],
        "explanation": explain_verb.row(found),
    }
    try:
        plan = moment.plan(*place)
        row["config"] = _config_row(plan.config)
        is_refused = any(one.code in ("paused", "uncleanable") for one in found.findings)
        row["segments"] = [*_segments(moment, plan, counts.of(*place), is_refused=is_refused)]
        row["cleanings"] = [cleaning_row(one) for one in read_cleanings(moment.notes(*place))]
        row["cleanedBytes"], row["retiredBytes"] = moment.leftovers(*place)
    except (OSError, KafkaLogError) as raised:
        files.pass_on(raised)
        # the explanation says why it cannot be read
    return row


def _segments(
    moment: Moment, plan: Plan, counts: Mapping[int, SegmentCensus], *, is_refused: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row for each file, or run of batches in an object, with its counts if there are any.

    Its state is its section (`Plan.section_of`), or `fresh` if it waits for a regroup.
    """
    for base, end, size, name, is_fresh in moment.pieces(plan):
        count = counts.get(base)
        yield {
            "baseOffset": base,
            "nextOffset": end,
            "bytes": size,
            "state": "fresh" if is_fresh else plan.section_of(base, end, is_refused=is_refused),
            **({} if name is None else {"object": name}),
            "records": None if count is None else count.records,
            "tombstones": None if count is None else count.tombstones,
            "obsoleteRecords": None if count is None else count.obsolete_records,
            "obsoleteBytes": None if count is None else count.obsolete_bytes,
        }


def _config_row(config: TopicConfig) -> dict[str, Any]:
    """Return the configs that the page shows."""
    return {
        "cleanupPolicy": ",".join(sorted(config.cleanup_policy)),
        "minCleanableDirtyRatio": config.min_cleanable_dirty_ratio,
        "deleteRetentionMs": config.delete_retention_ms,
        "segmentBytes": config.segment_bytes,
        "closesByItself": config.closes_by_itself,
    }
