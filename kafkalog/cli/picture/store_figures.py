"""The figures of each partition of a log in an object store, for a picture.

They are those of a directory: a run of batches in an object stands where a segment does. They come
from the commit log, so no object is read, and nothing that is dead is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafkalog.cleaner.objects.store_plan import live_extents, note_of
from kafkalog.cleaner.report.explain import explain_reported
from kafkalog.cleaner.state.last_cleaning import cleanings_of
from kafkalog.cli.picture.partition_row import config_row, partition_row
from kafkalog.cli.status_rows import cleaning_row
from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafkalog.cleaner.dedup.log_to_clean import CleaningPlan
    from kafkalog.cleaner.report.explain import Explanation
    from kafkalog.cleaner.report.reported_store import ReportedStore
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.object_store.store_state import StoreState


def store_partitions(log: ReportedStore, topic: str | None) -> list[dict[str, Any]]:
    """Return a row for each partition, all or those of one topic; sends no request."""
    return [_partition(log, found) for found in explain_reported(log, topic)]


def _partition(log: ReportedStore, found: Explanation) -> dict[str, Any]:
    plan, held = log.of(found.topic, found.partition)
    text = note_of(log.store, found.topic, found.partition, layout.LAST_CLEANING)
    row = partition_row(found)
    row["config"] = config_row(plan.config)
    row["segments"] = [*_runs(log.store, plan, held)]
    row["cleanings"] = [cleaning_row(one) for one in cleanings_of(text)]
    return row


def _runs(state: StoreState, plan: CleaningPlan, held: PartitionState) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of batches that is live.

    A run in a mixed object is `fresh`. The states of the others are those of segments.
    """
    for name, extent in live_extents(state, plan.topic, plan.partition):
        if not layout.is_stored_segment(name):
            word = "fresh"
        elif extent.base_offset >= held.active_base:
            word = "active"
        elif not plan.config.is_compacted:
            word = "closed"
        elif extent.next_offset <= plan.first_dirty_offset:
            word = "clean"
        else:
            word = "cleanable" if extent.base_offset < plan.end else "uncleanable"
        yield {
            "baseOffset": extent.base_offset,
            "nextOffset": extent.next_offset,
            "bytes": extent.size,
            "state": word,
            "object": name,
            "records": None,
            "tombstones": None,
            "deadRecords": None,
            "deadBytes": None,
        }
