"""A segment object: a real Kafka `.log` of one partition, with its indexes in a side object.

A regrouping writes it, or a cleaning, first to a file. Its name is new each time, so nobody else
writes it. It belongs to the log once a commit names it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.object_store import side_object

if TYPE_CHECKING:
    from kafkalog.storage_engine.fs.files import Buffer
    from kafkalog.storage_engine.object_store.client import ObjectClient
    from kafkalog.storage_engine.object_store.store_state import Extent

SEGMENT_SIZE_MAX: Final = 64 << 20
"""Bytes of a segment object, unless one batch has more; `segment.bytes` may be less."""


@dataclass(frozen=True, slots=True)
class SegmentObject:
    """A segment object that was written: its names, sizes, and its one extent."""

    name: str
    extent: Extent
    side_size: int

    @property
    def names(self) -> Sequence[str]:
        """The names of both objects."""
        return self.name, layout.stored_side(self.name)


def put_segment(
    client: ObjectClient, seen: int, extent: Extent, log: Path, sections: Mapping[str, Buffer]
) -> SegmentObject:
    """Write a `.log` file and its indexes, by two requests; `seen` is that of the name.

    The extent gets the size of the file, and the number of gaps that the sections list. The indexes
    are written first, so a segment object always has them. Raises StorageError, OSError.
    """
    with files.mapped(log) as data:
        return put_segment_bytes(client, seen, extent, data, sections)


def put_segment_bytes(
    client: ObjectClient, seen: int, extent: Extent, data: Buffer, sections: Mapping[str, Buffer]
) -> SegmentObject:
    """Write the batches of a segment, and its indexes, as `put_segment` does."""
    name = layout.stored_segment(
        seen, extent.topic_id, extent.partition, extent.base_offset, secrets.token_hex(8)
    )
    side = side_object.encoded(sections)
    client.put_unique(layout.stored_side(name), *side)
    client.put_unique(name, data)
    side_size = sum(map(len, side))
    gaps = len(sections.get(layout.GAPS, b"")) // layout.GAP.size
    return SegmentObject(name, dataclasses.replace(extent, size=len(data), gaps=gaps), side_size)
