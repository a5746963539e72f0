"""What is due, and why: plans of plain values, without a log."""

from __future__ import annotations

import pytest

from kafkalog.cleaner.plan import (
    BROKERS,
    COPY,
    OBSTACLES,
    OURS,
    Part,
    Plan,
    Uncleanable,
    Verdict,
    Why,
    judge,
    may_be_retained,
    plan_cleaning,
    schedule,
)
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState, TopicState

NOW_MS = 10**12
HOUR_MS = 3_600_000


def part(base: int, size: int = 100, ms: int = NOW_MS - HOUR_MS) -> Part:
    return Part(base, size, lambda: ms, lambda: ms)


def plan(clean_to: int = 0, config: dict[str, str] | None = None, **given: object) -> Plan:
    """Plan three segments of ten offsets, the last one active."""
    parts = [part(0), part(10), part(20)]
    state = PartitionState(30, 20, 100, last_stable_offset=30, first_dirty_offset=clean_to)
    clean = sum(each.size for each in parts if each.base_offset < clean_to)
    known = {"horizon_ms": None, "clean_bytes": clean, "total_bytes": 300, "now_ms": NOW_MS}
    parsed = TopicConfig.parse({"cleanup.policy": "compact", **(config or {})})
    return plan_cleaning(
        "t",
        0,
        config=parsed,
        state=state,
        parts=parts,
        **{**known, **given},  # type: ignore[arg-type]
    )


def topic(found: Plan, **fields: object) -> TopicState:
    return TopicState("t", "id", {}, [found.state], **fields)  # type: ignore[arg-type]


def verdict(found: Plan, **given: object) -> Verdict:
    nothing = {"owner": OURS, "mark": None, "is_paused": False, "is_being_cleaned": False}
    known = {**nothing, "is_cleaner_running": None, "now_ms": NOW_MS, **given}
    return judge(found, topic(found), **known)  # type: ignore[arg-type]


DIRTY, CLEAN = plan(), plan(20)
LATER, NOW = Uncleanable("why", 1, 0, NOW_MS + 1), Uncleanable("why", 1, 0, NOW_MS)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (DIRTY, [Why.ABOVE_RATIO]),
        (plan(10, {"min.cleanable.dirty.ratio": "0.5"}), []),
        (plan(10, {"min.cleanable.dirty.ratio": "0.49"}), [Why.ABOVE_RATIO]),
        (plan(10, {"max.compaction.lag.ms": f"{HOUR_MS}"}), []),
        (plan(10, {"max.compaction.lag.ms": f"{HOUR_MS - 1}"}), [Why.MAX_LAG]),
        (plan(20, horizon_ms=NOW_MS), [Why.HORIZON]),
        (plan(20, horizon_ms=NOW_MS + 1), []),
        (plan(20, is_horizon_due=True), [Why.HORIZON_UNKNOWN]),
        (plan(0, clean_bytes=0, horizon_ms=NOW_MS, pinned=(0, 0)), []),
    ],
)
def test_a_partition_is_due_by_its_ratio_its_longest_lag_or_a_delete_horizon(
    found: Plan, expected: list[Why]
) -> None:
    assert found.due == expected
    assert found.is_eligible == bool(expected)


def test_readers_of_a_changelog_are_waited_for_but_not_beyond_the_longest_lag() -> None:
    waiting = plan(is_awaited=True)
    assert waiting.due and not waiting.is_eligible
    assert verdict(waiting).reasons[0] is Why.READERS
    assert plan(config={"max.compaction.lag.ms": "1"}, is_awaited=True).is_eligible
    assert Why.READERS not in OBSTACLES  # a forced cleaning does not wait for them


@pytest.mark.parametrize(
    ("given", "refusals", "is_due", "word"),
    [
        ({}, [], True, "dirty"),
        ({"is_paused": True}, [Why.PAUSED], False, "paused"),
        ({"is_being_cleaned": True}, [Why.CLEANING], False, "dirty"),
        ({"mark": LATER}, [Why.UNCLEANABLE], False, "uncleanable"),
        ({"mark": NOW}, [Why.UNCLEANABLE], True, "uncleanable"),
        ({"mark": NOW, "is_paused": True}, [Why.PAUSED, Why.UNCLEANABLE], False, "paused"),
        ({"owner": BROKERS}, [Why.BROKERS], False, "dirty"),
        ({"owner": COPY, "mark": LATER}, [Why.COPY], False, "dirty"),
    ],
)
def test_what_keeps_cleaners_away_is_said_first(
    given: dict[str, object], refusals: list[Why], is_due: bool, word: str
) -> None:
    found = verdict(DIRTY, **given)
    assert (found.refusals, found.is_due, found.state) == (refusals, is_due, word)
    assert found.reasons == [Why.ABOVE_RATIO]


def test_what_holds_records_back_is_said_from_the_lowest_offset_on() -> None:
    young = plan(config={"min.compaction.lag.ms": f"{HOUR_MS + 1}"}, pinned=(5, 0))
    assert young.lagging == (0, NOW_MS - HOUR_MS) and not young.is_eligible
    assert young.waits(topic(young)) == [Why.MIN_LAG, Why.PIN, Why.ACTIVE_SEGMENT]
    assert verdict(CLEAN).reasons == [Why.ACTIVE_SEGMENT]


def test_a_cleaner_that_runs_comes_and_one_that_does_not_is_missed() -> None:
    assert verdict(DIRTY, is_cleaner_running=True).others == [Why.CLEANER]
    assert verdict(CLEAN, is_cleaner_running=True).others == []
    assert verdict(DIRTY, is_cleaner_running=False).others == [Why.NO_CLEANER]
    assert verdict(DIRTY, is_cleaner_running=False, mark=LATER).others == []
    assert verdict(DIRTY, is_cleaner_running=None).others == [Why.CLEANER_UNKNOWN]


def test_a_brokers_defaults_are_not_known() -> None:
    assert DIRTY.waits(topic(DIRTY, knows_defaults=False)) == [Why.UNKNOWN]


def test_the_filthiest_comes_first_and_what_cannot_be_read_last() -> None:
    half = plan(10, {"min.cleanable.dirty.ratio": "0.1"})
    order = schedule([("a", 0, None), ("b", 0, half), ("c", 0, DIRTY), ("d", 0, CLEAN)])
    assert order.partitions == [("c", 0), ("b", 0), ("a", 0)]
    assert (order.max_dirty_ratio, order.max_compaction_delay_ms) == (1.0, 0)


def test_each_run_of_records_is_in_one_section() -> None:
    half = plan(10, pinned=(10, 0))
    sections = [half.section_of(base, base + 10) for base in (0, 10, 20)]
    assert sections == ["clean", "uncleanable", "active"]
    assert DIRTY.section_of(0, 10) == "cleanable"
    assert DIRTY.section_of(0, 10, is_refused=True) == "uncleanable"
    assert plan(config={"cleanup.policy": "delete"}).section_of(0, 10) == "closed"


def test_retention_goes_on_after_a_disk_fault_alone() -> None:
    assert may_be_retained(None, is_paused=False)
    assert not may_be_retained(None, is_paused=True)
    assert not may_be_retained(LATER, is_paused=False)
    assert may_be_retained(Uncleanable("full", is_disk_fault=True), is_paused=False)
