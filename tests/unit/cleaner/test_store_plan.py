"""The planner of a log in an object store: a table of cases, and its price beside the best one."""

from __future__ import annotations

import dataclasses

import pytest

from kafkalog.cleaner.objects.regroup_plan import (
    GET_PRICE,
    OLDEST_MS,
    PUT_PRICE,
    READ_PRICE,
    YOUNGEST_MS,
    Fresh,
    mergeable,
    plan_regroup,
)
from kafkalog.storage_engine.object_store.object_log import FRESH_MAX
from kafkalog.storage_engine.object_store.segment_object import SEGMENT_SIZE_MAX
from tests.unit.cleaner.regroup_search import Course, Workload, cheapest, planned

NOW_MS = 10**12
MINUTE_MS = 60_000


def fresh(count: int = 100, age_ms: int = 2 * MINUTE_MS, **changes: int) -> Fresh:
    """Return objects that came at even times, for 12 partitions."""
    known = Fresh(
        count,
        count << 20,
        12,
        0,
        NOW_MS - age_ms,
        count * age_ms // 2,
        age_ms // max(1, count),
    )
    return dataclasses.replace(known, **changes)


@pytest.mark.parametrize(
    ("objects", "is_awaited", "expected"),
    [
        (fresh(0), False, (False, "none")),
        (fresh(), False, (True, "reads")),
        (fresh(age_ms=YOUNGEST_MS - 1), False, (False, "young")),
        (fresh(age_ms=YOUNGEST_MS - 1), True, (True, "awaited")),
        (fresh(partitions=1000), False, (False, "cheap")),
        (fresh(partitions=1000), True, (True, "awaited")),
        (fresh(partitions=1), False, (True, "reads")),
        (fresh(1, age_ms=OLDEST_MS - 1, partitions=1000), False, (False, "cheap")),
        (fresh(1, age_ms=OLDEST_MS, partitions=1000), False, (True, "old")),
        (fresh(FRESH_MAX, age_ms=1000), False, (True, "limit")),
        (fresh(FRESH_MAX - 1, age_ms=1000), False, (False, "young")),
        (fresh(age_ms=-MINUTE_MS), False, (False, "young")),
    ],
)
def test_a_regroup_is_due_once_reads_have_cost_as_much(
    objects: Fresh, is_awaited: bool, expected: tuple[bool, str]
) -> None:
    found = plan_regroup(objects, now_ms=NOW_MS, is_awaited=is_awaited)
    assert (found.is_due, found.code) == expected
    assert found.reason.endswith(".")


def test_a_regroup_is_due_at_the_moment_at_which_both_costs_are_equal() -> None:
    objects = fresh(10)
    found = plan_regroup(objects, now_ms=NOW_MS)
    missing = (found.figures["writeCost"] - found.figures["readCost"]) / READ_PRICE
    assert not found.is_due and missing > 10
    for passed, is_due in ((int(missing / 10) - 1, False), (int(missing / 10) + 1, True)):
        later = dataclasses.replace(objects, waited_ms=objects.waited_ms + 10 * passed)
        assert plan_regroup(later, now_ms=NOW_MS + passed).is_due == is_due


def test_the_figures_of_a_regroup_are_in_dollars() -> None:
    """100 objects wait for a minute each, and 4 tasks read them each minute: 400 GETs so far.

    Half a gap of 1.2 s adds 4 GETs. A regroup sends two PUTs for each partition, and commits.
    """
    found = plan_regroup(fresh(), now_ms=NOW_MS).figures
    assert found["readCost"] == pytest.approx(404 * GET_PRICE)
    assert found["writeCost"] == pytest.approx(25 * PUT_PRICE + GET_PRICE)


def test_eight_neighbours_of_one_size_class_are_merged() -> None:
    assert mergeable([SEGMENT_SIZE_MAX, *[9 << 20] * 8]) == (1, 9)
    assert mergeable([9 << 20] * 7 + [1 << 20] * 8) == (7, 15)
    assert mergeable([9 << 20] * 4 + [1 << 10] + [9 << 20] * 7) == (0, 0)
    assert mergeable([SEGMENT_SIZE_MAX] * 20) == (0, 0)
    assert mergeable([10, 60_000] * 4) == (0, 8)
    assert mergeable([9 << 20] * 4 + [None] + [9 << 20] * 7) == (0, 0)


@pytest.mark.parametrize("sizes", [[70], [70, 9_000], [1, 10, 100, 1000, 10_000], [60_000]])
def test_however_many_objects_come_each_byte_is_merged_a_few_times(sizes: list[int]) -> None:
    """A byte is in a larger object after each merge, so 64 KiB take at most sixteen."""
    held: list[int | None] = []
    moved = came = 0
    for number in range(4_000):
        size = sizes[number % len(sizes)]
        held.append(size)
        came += size
        first, end = mergeable(held)
        if first < end:
            merged = sum(each or 0 for each in held[first:end])
            moved += merged
            held[first:end] = [merged]
    assert moved <= 8 * came
    assert len(held) < 200


def within(seeds: range) -> None:
    ratios = {}
    for seed in seeds:
        course = Course(Workload.drawn(seed))
        ratios[seed] = planned(course) / cheapest(course)
    worst = max(ratios, key=lambda seed: ratios[seed])
    mean = sum(ratios.values()) / len(ratios)
    print(f"seed {worst}: {ratios[worst]:.3f} of the best plan's cost, mean {mean:.3f}")
    assert 1.0 <= ratios[worst] <= 1.3, f"seed {worst}"
    assert min(ratios.values()) >= 0.999


def test_the_planner_costs_little_more_than_the_best_plan() -> None:
    within(range(200, 208))


@pytest.mark.slow
def test_the_planner_costs_at_most_13_tenths_of_the_best_plan_on_200_workloads() -> None:
    within(range(200))
