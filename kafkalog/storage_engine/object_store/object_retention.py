"""Retention of a log in an object store: log starts that rise, and objects that are dropped.

A segment is kept or goes whole, as in a directory. Its extents have no file of their own: an object
is dropped once the records of all its extents are gone. Records without a timestamp have the age of
their object, as a directory takes that of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kafkalog.storage_engine.log.results import RetentionStats
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.expiry import count_oldest
from kafkalog.storage_engine.object_store.store_draft import StoreDraft
from kafkalog.storage_engine.object_store.stored_segments import StoredSegment, stored_segments


def apply_retention(
    draft: StoreDraft, topic: str | None, *, now_ms: int, skips: Collection[tuple[str, int]] = ()
) -> list[RetentionStats]:
    """Draft the retention of a topic, or of every topic, but of the partitions `skips`.

    Returns one entry per partition that loses records.
    """
    found = []
    for name, known in sorted(draft.state.topics.items()):
        if topic not in (None, name):
            continue
        config = TopicConfig.parse(known.config)
        if not config.is_deleted:
            continue  # what lay below the log start has gone with the commit that raised it
        for number, state in known.present():
            if (name, number) in skips:
                continue
            segments = stored_segments(draft.store, known, number)

            def is_older(
                place: int, horizon_ms: int, segments: Sequence[StoredSegment] = segments
            ) -> bool:
                return segments[place].largest_timestamp < horizon_ms

            sizes = [segment.size for segment in segments]
            ends = [segment.end_offset for segment in segments]
            count = count_oldest(sizes, ends, state, config, is_older=is_older, now_ms=now_ms)
            if not count:
                continue
            log_start = max(ends[count - 1], state.log_start_offset)
            draft.raise_log_start(name, number, log_start)
            if count == len(segments):
                draft.roll(name, number)
            found.append(RetentionStats(name, number, log_start, count, sum(sizes[:count])))
    return found
