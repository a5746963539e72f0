"""The state of a log in an object store, and why it is or is not regrouped, cleaned and merged.

Sizes, times and counts are those of the commit log, so a report sends no request of its own. The
costs of reads and writes are counted from them. The reasons and figures are those of the planner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.cleaner.report.explain import Explanation, Reason
from kafkalog.cleaner.report.status import PartitionStatus
from kafkalog.cleaner.schedule.store_plan import (
    CLEAN,
    REGROUP,
    Decision,
    fresh_of,
    live_extents,
    plan_of,
    regroup_of,
)
from kafkalog.cleaner.state.uncleanable import uncleanable_of
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


def word_of(state: StoreState, topic: str, partition: int, plan: Decision) -> tuple[str, str]:
    """Return a partition's state in a word, and the reason, which is empty for `clean`.

    A partition with records that wait, for whatever reason, is `not due`; it is not `clean`.
    """
    known = state.log.topic(topic)
    cleaned = state.cleaned_of(known.topic_id, partition)
    text = None if cleaned is None else cleaned.notes.get(layout.UNCLEANABLE)
    mark = None if text is None else uncleanable_of(text)
    if plan.code == "policy" or "dirtyRatio" not in plan.figures:
        return "not compacted", plan.reason
    if mark is not None:
        return "uncleanable", mark.reason
    if plan.act == CLEAN:
        return "dirty", plan.reason
    if plan.code in {"clean", "empty"}:
        return "clean", ""
    return "not due", plan.reason


def status_store(state: StoreState, now_ms: int) -> list[PartitionStatus]:
    """Return the status of each partition; the states are those of `word_of`."""
    return [
        _status(state, name, number, now_ms)
        for name, known in sorted(state.log.topics.items())
        for number, _ in known.present()
    ]


def _status(state: StoreState, topic: str, partition: int, now_ms: int) -> PartitionStatus:
    held = state.log.topic(topic).partitions[partition]
    plan = plan_of(state, topic, partition, now_ms)
    word, reason = word_of(state, topic, partition, plan)
    size = sum(each.extent.size for each in live_extents(state, topic, partition))
    figures = plan.figures if "dirtyRatio" in plan.figures else {}
    clean, dirty = int(figures.get("cleanBytes", 0)), int(figures.get("dirtyBytes", size))
    return PartitionStatus(
        topic=topic,
        partition=partition,
        log_start_offset=held.log_start_offset,
        first_dirty_offset=held.first_dirty_offset,
        first_uncleanable_offset=held.high_watermark,
        high_watermark=held.high_watermark,
        clean_bytes=clean,
        dirty_bytes=dirty,
        uncleanable_bytes=size - clean - dirty,
        dirty_ratio=figures.get("dirtyRatio", 0.0),
        state=word,
        reason=reason or None,
        last_stable_offset=held.last_stable_offset,
        compaction_delay_ms=int(figures.get("compactionDelayMs", 0)),
    )


def explain_store(state: StoreState, topic: str | None, now_ms: int) -> list[Explanation]:
    """Explain each partition of a topic, or of all (None); raises UnknownTopicError."""
    names = sorted(state.log.topics) if topic is None else [topic]
    return [each for name in names for each in _explained(state, name, now_ms)]


def _explained(state: StoreState, topic: str, now_ms: int) -> list[Explanation]:
    known = state.log.topic(topic)
    regroup = regroup_of(state, now_ms)
    found = []
    for number, _ in known.present():
        plan = plan_of(state, topic, number, now_ms)
        word, reason = word_of(state, topic, number, plan)
        code = {"uncleanable": "uncleanable", "clean": "all clean"}.get(word, _code(plan))
        findings = [Reason(code, reason or plan.reason, until_ms=plan.until_ms)]
        if plan.figures.get("freshBytes") or _has_fresh(state, topic, number):
            cleaned = "" if word == "not compacted" else ", which are cleaned after a regroup"
            fresh = f"It has fresh records{cleaned}. {regroup.reason}"
            until_ms = None if regroup.act == REGROUP else regroup.until_ms
            findings.append(Reason("fresh", fresh, until_ms=until_ms))
        figures = ", ".join(f"{name} {value:.6g}" for name, value in plan.figures.items())
        if figures:
            findings.append(Reason("figures", f"The planner's figures: {figures}."))
        is_due = plan.is_due and word != "uncleanable"
        found.append(Explanation(topic, number, is_due, tuple(findings)))
    return found


def _code(plan: Decision) -> str:
    codes = {"young": "lag", "clean": "all clean", "horizon": "tombstones", "sizes": "due"}
    return "due" if plan.act == CLEAN else codes.get(plan.code, plan.code)


def _has_fresh(state: StoreState, topic: str, partition: int) -> bool:
    return any(
        not layout.is_stored_segment(name) for name, _ in live_extents(state, topic, partition)
    )
