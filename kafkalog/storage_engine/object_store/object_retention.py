"""Retention of a log in an object store: log starts that rise, and objects that are dropped.

An extent is kept or goes whole, as a segment of a directory does. It has no file of its own: its
object is dropped once the records of all its extents are gone. Records without a timestamp have the
age of their object, as a directory takes that of the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.expiry import count_oldest
from kafkalog.storage_engine.object_store.store_draft import StoreDraft
from kafkalog.storage_engine.writing.retention import RetentionStats


def apply_retention(draft: StoreDraft, topic: str | None, *, now_ms: int) -> list[RetentionStats]:
    """Draft the retention of a topic, or of every topic.

    Returns one entry per partition that loses records.
    """
    found = []
    for name, known in sorted(draft.state.topics.items()):
        if topic not in (None, name):
            continue
        config = TopicConfig.parse(known.config)
        for number, state in known.present():
            placed = [
                each
                for each in draft.store.extents(known.topic_id, number)
                if each.extent.next_offset > state.log_start_offset
            ]
            times = [*map(draft.store.time_of, placed)]

            def is_older(place: int, horizon_ms: int, times: Sequence[int] = times) -> bool:
                return times[place] < horizon_ms

            sizes = [each.extent.size for each in placed]
            ends = [each.extent.next_offset for each in placed]
            count = count_oldest(sizes, ends, state, config, is_older=is_older, now_ms=now_ms)
            if count:
                draft.raise_log_start(name, number, ends[count - 1])
                size = sum(sizes[:count])
                found.append(RetentionStats(name, number, ends[count - 1], count, size))
    return found
