"""The producers of a partition in an object store, at its high watermark.

They are in the side object of the segment object with the offset that the partition's state names.
An early release merged segment objects without them. There they are replayed from the batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.object_snapshot import open_snapshot
from kafkalog.storage_engine.object_store.side_object import SideObject
from kafkalog.storage_engine.object_store.store_state import covering
from kafkalog.storage_engine.transactions.control_record import batches_of_producers
from kafkalog.storage_engine.transactions.producer_snapshot import parse_snapshot
from kafkalog.storage_engine.transactions.producers import Producers

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.client import ObjectReader
    from kafkalog.storage_engine.object_store.store_state import StoreState


def recorded_producers(
    client: ObjectReader, state: StoreState, topic: str, partition: int
) -> Producers:
    """Return the producers at a partition's high watermark; a request if there are any.

    If the object with their state is gone, the result is empty. Raises CorruptLogError,
    StorageError.
    """
    known = state.log.topic(topic)
    held = known.partitions[partition]
    offset = held.producer_snapshot
    producers = Producers(end_offset=held.high_watermark)
    extents = state.extents(known.topic_id, partition)
    for name, _ in covering(extents, offset - 1, offset):
        if layout.is_stored_segment(name):
            side = SideObject(client, layout.stored_side(name))
            content = side.section(layout.SNAPSHOT)
            if content:
                producers.take_over(parse_snapshot(content, side.place))
            else:
                # Batches below the log start count while they are there, as in a directory.
                start = min(held.log_start_offset, extents[0].extent.base_offset)
                with open_snapshot(client, state, topic, partition) as snapshot:
                    for chunk in snapshot.chunks(start, offset):
                        for header, control in batches_of_producers(
                            chunk.buffer,
                            chunk.table,
                            path=chunk.path,
                            file_position=chunk.file_position,
                        ):
                            producers.append(header, control)
                producers.end_offset = held.high_watermark
    return producers
