"""The figures of each partition of a log in an object store, for a picture.

They are those of a directory: a run of batches in an object stands where a segment does. They come
from the commit log, so no object is read, and nothing that is dead is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafkalog.cleaner.report.store_report import explain_store
from kafkalog.cleaner.schedule.store_plan import live_extents, plan_of
from kafkalog.cleaner.state.last_cleaning import cleanings_of
from kafkalog.cli.picture.partition_row import config_row, partition_row
from kafkalog.cli.status_rows import cleaning_row
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig

if TYPE_CHECKING:
    from kafkalog.cleaner.report.explain import Explanation
    from kafkalog.storage_engine.object_store.store_state import StoreState


def store_partitions(state: StoreState, topic: str | None, now_ms: int) -> list[dict[str, Any]]:
    """Return a row for each partition, all or those of one topic; sends no request."""
    return [_partition(state, found, now_ms) for found in explain_store(state, topic, now_ms)]


def _partition(state: StoreState, found: Explanation, now_ms: int) -> dict[str, Any]:
    known = state.log.topic(found.topic)
    cleaned = state.cleaned_of(known.topic_id, found.partition)
    notes = {} if cleaned is None else cleaned.notes
    row = partition_row(found)
    row["config"] = config_row(TopicConfig.parse(known.config))
    row["segments"] = _runs(state, found.topic, found.partition, now_ms)
    row["cleanings"] = [
        cleaning_row(one) for one in cleanings_of(notes.get(layout.LAST_CLEANING, ""))
    ]
    return row


def _runs(state: StoreState, topic: str, partition: int, now_ms: int) -> list[dict[str, Any]]:
    """Return a row for each run of batches that is live.

    A run in a mixed object is `fresh`. The states of the others are those of segments.
    """
    figures = plan_of(state, topic, partition, now_ms).figures
    held = state.log.topic(topic).partitions[partition]
    is_compacted = "dirtyRatio" in figures
    cleanable_bytes = figures.get("dirtyBytes", 0)
    rows = []
    for name, extent in live_extents(state, topic, partition):
        is_dirty = extent.next_offset > held.first_dirty_offset
        word = "closed" if not is_compacted else "clean"
        if is_dirty and is_compacted:
            word = "cleanable" if cleanable_bytes > 0 else "uncleanable"
            cleanable_bytes -= extent.size
        rows.append(
            {
                "baseOffset": extent.base_offset,
                "nextOffset": extent.next_offset,
                "bytes": extent.size,
                "state": word if layout.is_stored_segment(name) else "fresh",
                "object": name,
                "records": None,
                "tombstones": None,
                "deadRecords": None,
                "deadBytes": None,
            }
        )
    return rows
