"""The figures of a log in an object store, and why it is or is not regrouped.

Sizes, times and counts are those of the commit log, so a report sends no request of its own. The
costs of reads and writes are counted from them. What `status` and `explain` say of partitions is
what they say of a directory (`reported_log`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.cleaner.objects.store_plan import (
    Decision,
    fresh_of,
    live_extents,
    regroup_of,
)
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.collector import deleted_after
from kafkalog.storage_engine.object_store.fetched_ranges import RANGE_SIZE
from kafkalog.storage_engine.object_store.prices import S3_STANDARD, Prices

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.store_state import StoreState

_TASKS = 4
"""Tasks of the read whose requests are counted."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The figures of a log in an object store at one time."""

    objects: int
    bytes: int
    fresh_objects: int
    fresh_bytes: int
    oldest_fresh_ms: int | None
    """When the oldest fresh object was committed (epoch ms); None for none."""
    dead_objects: int
    deleted_from_ms: int | None
    """When the first dead object may be deleted (epoch ms); None for none."""
    read_requests: int
    """The GETs of one read of everything by four tasks."""
    read_amplification: float
    """Those beside the GETs that as many bytes need if nothing is fresh or small."""
    write_amplification: float
    """How often a byte that is live now was written so far, at least: fresh ones once."""
    read_price: float
    """The price of those GETs, in dollars."""
    regroup: Decision


def report(state: StoreState, now_ms: int, prices: Prices = S3_STANDARD) -> StoreReport:
    """Return the figures of a state; sends no request."""
    fresh = fresh_of(state, now_ms)
    after = deleted_after(state)
    size = sum(each.size for each in state.objects.values())
    reads = 0
    for name, each in state.objects.items():
        ranges = math.ceil(each.size / RANGE_SIZE)
        is_mixed = not layout.is_stored_segment(name)
        reads += max(ranges, min(_TASKS, len(each.extents))) if is_mixed else ranges
    partitions = sum(
        bool(live_extents(state, name, number))
        for name, known in state.log.topics.items()
        for number, _ in known.present()
    )
    least = max(partitions, math.ceil(size / RANGE_SIZE))
    return StoreReport(
        objects=len(state.objects),
        bytes=size,
        fresh_objects=fresh.count,
        fresh_bytes=fresh.size,
        oldest_fresh_ms=fresh.oldest_ms if fresh.count else None,
        dead_objects=len(state.dead),
        deleted_from_ms=min((after(*each) for each in state.dead.items()), default=None),
        read_requests=reads,
        read_amplification=reads / least if least else 1.0,
        write_amplification=(2 * size - fresh.size) / size if size else 1.0,
        read_price=prices.get * reads,
        regroup=regroup_of(state, now_ms),
    )
