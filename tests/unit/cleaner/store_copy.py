"""Copy closed segments of a log directory into a log in an object store, as segment objects."""

from __future__ import annotations

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.segment_object import SegmentObject, put_segment
from kafkalog.storage_engine.object_store.store_draft import StoreDraft
from kafkalog.storage_engine.object_store.store_state import Extent
from kafkalog.storage_engine.segment.gaps import SourceGaps
from kafkalog.storage_engine.segment.index import TimeIndex
from kafkalog.storage_engine.segment.segments import list_segments


def copy_segments(engine: DirectoryLog, log: ObjectLog, topic: str, partition: int) -> None:
    """Copy the closed segments at or above the store's high watermark, and the ends of the log."""
    start = log.describe(topic).partitions[partition].high_watermark
    directory = engine.partition_directory(topic, partition)
    state = engine.describe(topic).partitions[partition]
    listed = [s for s in list_segments(directory) if s.base_offset < state.active_base]
    ends = [*(s.base_offset for s in listed[1:]), state.active_base]
    outputs: list[SegmentObject] = []
    with engine.snapshot(topic, partition) as snapshot:
        for segment, end in zip(listed, ends, strict=True):
            if segment.base_offset < start:
                continue
            gaps = SourceGaps(segment.base_offset, segment.size)
            for chunk in snapshot.chunks(segment.base_offset, end):
                gaps.add(chunk.table)
            paths = {
                layout.INDEX: segment.index,
                layout.TIME_INDEX: segment.time_index,
                layout.TRANSACTION_INDEX: segment.transaction_index,
            }
            sections = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
            sections[layout.GAPS] = gaps.section(end).gaps.astype(">i8").tobytes()
            times = TimeIndex(segment.time_index, segment.base_offset).last_entry()
            extent = Extent(
                log.describe(topic).topic_id,
                partition,
                0,
                segment.size,
                segment.base_offset,
                end,
                state.leader_epoch,
                layout.NO_TIMESTAMP if times is None else times[0],
            )
            seen = log.known_state.number
            outputs.append(put_segment(log.client, seen, extent, segment.log, sections))

    def import_ends(draft: StoreDraft) -> bool:
        draft.change_partition(
            topic,
            partition,
            high_watermark=state.active_base,
            log_start_offset=state.log_start_offset,
            last_stable_offset=min(state.last_stable_offset, state.active_base),
        )
        return True

    assert log.swap([], outputs, now_ms=engine.state().time_ms, work=import_ends)
