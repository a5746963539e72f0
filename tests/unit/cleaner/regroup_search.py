"""Random workloads of a log in an object store, and the cheapest times to regroup, by search.

A workload is cut into steps. The search knows all arrivals, also those to come. It tries every step
as the time of every regroup: the cheapest way to a step is the cheapest way to an earlier regroup,
and what one interval costs from there. It keeps the promises of the planner about the age of fresh
objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kafkalog.cleaner.objects.regroup_plan import (
    GET_PRICE,
    OLDEST_MS,
    PUT_PRICE,
    PUTS_PER_OUTPUT,
    READ_PRICE,
    YOUNGEST_MS,
    Fresh,
    plan_regroup,
)
from kafkalog.storage_engine.object_store.segment_object import SEGMENT_SIZE_MAX

Numbers: TypeAlias = npt.NDArray[np.float64]

STEPS = 360
LONGEST = 60
"""The most steps of one interval: four times the one that steady arrivals ask for."""


@dataclass(frozen=True)
class Workload:
    """What arrives in each step."""

    step_ms: int
    arrivals: npt.NDArray[np.int64]
    """Objects by step."""
    sizes: Numbers
    """Bytes by step and partition; few partitions have most of them."""
    gap_ms: int

    @classmethod
    def drawn(cls, seed: int) -> Workload:
        """Draw arrivals, and the skew of keys."""
        draw = np.random.default_rng(seed)
        partitions = int(draw.choice([1, 4, 12, 50, 120]))
        per_hour, object_size = 10 ** draw.uniform(2, 3.5), 10 ** draw.uniform(4, 7)
        skew, keys = float(draw.choice([0, 0.5, 1, 2])), int(draw.choice([3, 30, 300]))
        per_ms_read = per_hour / 3_600_000 * READ_PRICE
        steady_ms = (2 * PUTS_PER_OUTPUT * partitions * PUT_PRICE / per_ms_read) ** 0.5
        step_ms = max(15_000, int(steady_ms / 15))
        is_busy = np.repeat(draw.random(STEPS // 8) >= draw.choice([0, 0.1, 0.25]), 8)
        arrivals = draw.poisson(per_hour * step_ms / 3_600_000 * is_busy)
        shares = 1 / np.arange(1, partitions + 1) ** skew
        shares /= shares.sum()
        sizes = np.array([draw.multinomial(keys * count, shares) for count in arrivals])
        sizes = sizes * object_size / keys
        gap_ms = int(3_600_000 / per_hour)
        return cls(step_ms, arrivals, sizes, gap_ms)


class Course:
    """A workload's sums from its begin, so that the cost of an interval is a difference."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        zero = np.zeros((1, workload.sizes.shape[1]))
        self.count = np.concatenate([[0], np.cumsum(workload.arrivals)])
        self.size = np.vstack([zero, np.cumsum(workload.sizes, axis=0)])
        self.runs = np.vstack([zero, np.cumsum(workload.sizes > 0, axis=0)])
        held = (self.count[:-1] + self.count[1:]) / 2 * workload.step_ms
        self.held = np.concatenate([[0], np.cumsum(held)])
        """Object-milliseconds since the begin."""
        first = np.where(workload.arrivals > 0, np.arange(STEPS), 2 * STEPS)
        self.first = np.append(np.minimum.accumulate(first[::-1])[::-1], 2 * STEPS)
        """The first step since each one in which something arrives."""

    def waited(self, since: npt.NDArray[np.int64] | int, now: int) -> Numbers:
        """Return how long the objects that are fresh since a step have waited, added up."""
        passed = (now - np.asarray(since)) * self.workload.step_ms
        return np.asarray(self.held[now] - self.held[since] - self.count[since] * passed)

    def regroup(self, since: npt.NDArray[np.int64] | int, now: int) -> Numbers:
        """Return what it costs to regroup all that is fresh since a step."""
        outputs = np.ceil((self.size[now] - self.size[since]) / SEGMENT_SIZE_MAX).sum(axis=-1)
        count = self.count[now] - self.count[since]
        whole = (PUTS_PER_OUTPUT * outputs + 1) * PUT_PRICE + (count + 1) * GET_PRICE
        return np.asarray(np.where(count > 0, whole, 0.0))

    def left(self, since: npt.NDArray[np.int64] | int) -> Numbers:
        """Return what the objects cost that are still fresh at the end: a GET each."""
        return np.asarray((self.count[STEPS] - self.count[since]) * GET_PRICE)


def cheapest(course: Course) -> float:
    """Return the cost of the cheapest plan."""
    step_ms = course.workload.step_ms
    costs = np.full(STEPS + 1, np.inf)
    costs[0] = 0.0
    for now in range(1, STEPS + 1):
        since = np.arange(max(0, now - LONGEST), now)
        age = (now - course.first[since]) * step_ms
        is_last = now == STEPS
        is_kept = (age <= OLDEST_MS + step_ms) & (is_last | (age >= YOUNGEST_MS))
        is_kept |= course.count[now] == course.count[since]
        read = course.waited(since, now) * READ_PRICE
        end = course.left(since) if is_last else course.regroup(since, now)
        costs[now] = np.where(is_kept, costs[since] + read + end, np.inf).min()
    return float(costs[STEPS])


def planned(course: Course) -> float:
    """Return the cost of what the planner does, which is asked after each step."""
    workload = course.workload
    total, last = 0.0, 0
    for now in range(1, STEPS + 1):
        count = int(course.count[now] - course.count[last])
        waited = float(course.waited(last, now))
        runs = course.runs[now] - course.runs[last]
        fresh = Fresh(
            count,
            int((course.size[now] - course.size[last]).sum()),
            int((runs > 0).sum()),
            int((runs == 1).sum()),
            int(course.first[last]) * workload.step_ms,
            int(waited),
            workload.gap_ms,
        )
        if now == STEPS:
            return total + waited * READ_PRICE + float(course.left(last))
        decision = plan_regroup(fresh, now_ms=now * workload.step_ms)
        if not count or decision.is_due:
            total += waited * READ_PRICE + float(course.regroup(last, now))
            last = now
    raise AssertionError
