"""The figures of a log in an object store, and why it is or is not regrouped.

Sizes, times and counts are those of the commit log, so a report sends no request of its own. The
costs of reads and writes are counted from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.cleaner.objects.object_moment import live_extents
from kafkalog.cleaner.objects.regroup_plan import GET_PRICE, TASKS, Decision, fresh_of
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.collector import deleted_after
from kafkalog.storage_engine.object_store.fetched_ranges import RANGE_SIZE

if TYPE_CHECKING:
    from kafkalog.cleaner.objects.object_moment import ObjectMoment


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The figures of a log in an object store at one time."""

    objects: int
    bytes: int
    fresh_objects: int
    fresh_bytes: int
    oldest_fresh_ms: int | None
    """When the oldest fresh object was committed (epoch ms); None for none."""
    dropped_objects: int
    deleted_from_ms: int | None
    """When the first dropped object may be deleted (epoch ms); None for none."""
    read_requests: int
    """The GETs of one read of everything by four tasks."""
    read_amplification: float
    """Those divided by the GETs that as many bytes need if nothing is fresh or small."""
    write_amplification: float
    """How often a byte that is live now was written so far, at least: fresh ones once."""
    read_price: float
    """The price of those GETs, in dollars."""
    regroup: Decision


def store_figures(moment: ObjectMoment) -> StoreFigures:
    """Return the figures of a moment; sends no request."""
    state = moment.store
    fresh = fresh_of(state, moment.now_ms)
    after = deleted_after(state)
    size = sum(each.size for each in state.objects.values())
    reads = 0
    for name, each in state.objects.items():
        ranges = math.ceil(each.size / RANGE_SIZE)
        is_mixed = not layout.is_stored_segment(name)
        reads += max(ranges, min(TASKS, len(each.extents))) if is_mixed else ranges
    partitions = sum(
        bool(live_extents(state, name, number))
        for name, known in state.log.topics.items()
        for number, _ in known.present()
    )
    least = max(partitions, math.ceil(size / RANGE_SIZE))
    return StoreFigures(
        objects=len(state.objects),
        bytes=size,
        fresh_objects=fresh.count,
        fresh_bytes=fresh.size,
        oldest_fresh_ms=fresh.oldest_ms if fresh.count else None,
        dropped_objects=len(state.dropped),
        deleted_from_ms=min((after(*each) for each in state.dropped.items()), default=None),
        read_requests=reads,
        read_amplification=reads / least if least else 1.0,
        write_amplification=(2 * size - fresh.size) / size if size else 1.0,
        read_price=GET_PRICE * reads,
        regroup=moment.regroup,
    )
