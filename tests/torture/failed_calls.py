"""Let calls of the operating system fail, one in each trial, while work continues.

The program counts the calls of a workload's last operation below the log's root. It then runs the
workload again and again, and each time another call fails. The call raises EIO, ENOSPC, EDQUOT,
EMFILE or EINTR, or writes half of its bytes. Calls that look at files and directories fail too, and
so do locks. With `ENOSPC+` the disk stays full until the operation has ended. With `EIO+` the disk
refuses all writes and syncs until then.

The operation must succeed or report the fault. Then the same process continues with an allowed
state, or a new process that does not know of the failure. It tries again, a little later, appends,
cleans and reopens. After a failed sync, its pages count as lost: later acknowledged data must
survive a power cut without them. The library must not log an untyped error either.

A failing call also meets a death, in pairs that are drawn. The process dies a few calls after the
one that failed, and a new process continues. Or the process died before some call of the operation,
and a call fails while the next process does it again.

Every call that changes something fails. Single operations fail in every way in the plainest variant
of the log. In the other variants, and for pairs of basic operations, each call fails in one way
that is drawn. Looks and locks fail in one way: all of them in the plainest variant, some elsewhere.
Some of the other pairs, and longer sequences, are drawn, and a dozen cases of each. The table also
says how many cases there would be if nothing were drawn.

A case is `OPERATION+OPERATION@VARIANT:N:KIND:PROCESS`, where PROCESS is `same` or `new`, or `dead5`
after a death 5 calls later. With `VARIANT!7` the first process has died before its call 7. The part
before the first colon names all cases of a workload.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from tests.torture import Tally, parser
from tests.torture.calls import KINDS, READS
from tests.torture.scratch import scratch
from tests.torture.trial import DEAD, NEW, SAME, Bench, Case, Tried, Workload
from tests.torture.workers import Workers
from tests.torture.workloads import (
    BASIC,
    OPERATIONS,
    VARIANTS,
    random_sequences,
    small_files,
)

__all__ = ["Plan", "cases", "main"]

TARGET: Final = 20_000
_QUICK: Final = 1
"""Cases of each workload in a quick run, which has each operation in one variant, drawn."""
_FURTHER_PAIRS: Final = 80
"""Pairs with operations that are no basic ones, drawn."""
_OF_FURTHER: Final = 12
"""Cases of such a pair, or of a longer workload, drawn."""
_CALLS_TO_DEATH: Final = (1, 1, 1, 2, 2, 3, 4, 6, 9)
"""How many calls after the one that failed a process dies, drawn."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """How many deaths meet a failing call, drawn."""

    after: int = 0
    """Cases in which the process dies after a call has failed."""
    before: int = 0
    """Deaths after which a call of the next process fails."""
    of_each: int = 1
    """Cases of each of those deaths."""


_OF_ONE: Final = Deaths(40, 6, 12)
_OF_PAIR: Final = Deaths(6, 1, 6)
_OF_QUICK: Final = Deaths(1, 1, 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which calls of a workload fail, and how."""

    workload: Workload
    kinds: int = 0
    """How many kinds, drawn, of each call that changes something; 0 for all. Of others one."""
    reads: int = 1
    """One of so many calls that change nothing."""
    most: int = 0
    """How many cases, drawn; 0 for all."""
    deaths: Deaths = Deaths()

    def __str__(self) -> str:
        """Name all cases of the workload, as `--only` takes them."""
        return str(self.workload)


def plans(seed: int, *, quick: bool) -> Iterator[Plan]:
    """Yield what is tried."""
    dice = random.Random(f"variants {seed}")
    if quick:
        for name in OPERATIONS:
            workload = Workload((name,), dice.choice(VARIANTS))
            yield Plan(workload, most=_QUICK, deaths=_OF_QUICK)
        return
    for variant, name in itertools.product(VARIANTS, OPERATIONS):
        is_plain = variant == VARIANTS[0]
        kinds, reads = (0, 1) if is_plain else (1, 8)
        yield Plan(Workload((name,), variant), kinds, reads, deaths=_OF_ONE)
    pairs = [*itertools.product(OPERATIONS, repeat=2)]
    further = [pair for pair in pairs if not {*pair} <= {*BASIC}]
    drawn = [random_sequences(seed, *what) for what in ((3, 60), (8, 20), (25, 6))]
    for sequence in itertools.product(BASIC, repeat=2):
        yield Plan(Workload(sequence, dice.choice(VARIANTS)), kinds=1, reads=16, deaths=_OF_PAIR)
    for sequence in itertools.chain(dice.sample(further, _FURTHER_PAIRS), *drawn):
        yield Plan(Workload(sequence, dice.choice(VARIANTS)), kinds=1, reads=4, most=_OF_FURTHER)


def cases(plan: Plan, names: Iterable[str], seed: int) -> list[Case]:
    """Return which of these calls are to fail, and how; a new process goes on in half of them."""
    dice = random.Random(f"{seed} {plan.workload}")
    found = []
    for n, name in enumerate(names, 1):
        if name in READS and dice.randrange(plan.reads):
            continue
        kinds, count = KINDS[name], 1 if name in READS else plan.kinds
        for kind in dice.sample(kinds, count) if count else kinds:
            found.append(Case(plan.workload, n, kind, dice.choice((SAME, NEW))))
    return dice.sample(found, min(plan.most, len(found))) if plan.most else found


def followed_by_death(plan: Plan, names: Iterable[str], seed: int) -> list[Case]:
    """Return cases in which the process dies some calls after one that failed."""
    dice = random.Random(f"{seed} {plan.workload} dies")
    changes = [(n, name) for n, name in enumerate(names, 1) if name not in READS]
    drawn = [dice.choice(changes) for _ in range(plan.deaths.after if changes else 0)]
    return [
        Case(plan.workload, n, dice.choice(KINDS[name]), f"{DEAD}{dice.choice(_CALLS_TO_DEATH)}")
        for n, name in drawn
    ]


def after_death(plan: Plan, names: Sequence[str], seed: int) -> Iterator[Plan]:
    """Yield plans in which a process has died; not before its first call that changes something."""
    dice = random.Random(f"{seed} {plan.workload} has died")
    first = next((n for n, name in enumerate(names, 2) if name not in READS), len(names) + 1)
    deaths = range(first, len(names) + 1)
    for death in dice.sample(deaths, min(plan.deaths.before, len(deaths))):
        yield Plan(replace(plan.workload, death=death), 1, 4, plan.deaths.of_each)


@dataclass(slots=True)
class Found:
    """What became of the cases of a workload."""

    raised: Counter[str] = field(default_factory=Counter)
    """How often the operation raised an error of that type; empty where it succeeded."""
    all_cases: int = 0
    """Each call of the workload in each way, with each process that goes on."""
    died_after: int = 0
    """Cases in which the process died after a call had failed."""
    died_before: int = 0
    """Cases in which a call failed after a process had died."""
    violations: list[tuple[str, str]] = field(default_factory=list)
    """Cases, and what was wrong."""

    def note(self, case: Case, tried: Tried) -> None:
        """Add what became of a case."""
        self.raised[tried.raised] += tried.has_fired
        self.died_after += tried.has_fired and bool(case.death)
        self.died_before += tried.has_fired and bool(case.workload.death)
        if tried.faults:
            self.violations.append((str(case), f"{case}: " + "; ".join(tried.faults)))


def try_plan(place: Path, seed: int, plan: Plan) -> Found:
    """Try the cases of a workload."""
    found, bench = Found(), Bench(place)
    with small_files():
        course = bench.course(plan.workload)
        found.all_cases = sum(2 * len(KINDS[name]) for name in course.calls)
        tried = cases(plan, course.calls, seed) + followed_by_death(plan, course.calls, seed)
        for case in tried:
            found.note(case, bench.try_case(case, course))
        for below in after_death(plan, course.calls, seed):
            course_of_next = bench.course(below.workload, course)
            for case in cases(below, course_of_next.calls, seed):
                found.note(case, bench.try_case(case, course_of_next))
    return found


def try_one(place: Path, seed: int, text: str) -> Found:
    """Try one case by its name, or all of a workload."""
    if ":" not in text:
        workload = Workload.parse(text)
        deaths = Deaths() if workload.death else _OF_ONE
        return try_plan(place, seed, Plan(workload, deaths=deaths))
    case, found, bench = Case.parse(text), Found(), Bench(place)
    with small_files():
        found.note(case, bench.try_case(case, bench.course(case.workload)))
    return found


def _all(options: Namespace, place: Path) -> Iterator[Found]:
    if options.only:
        yield try_one(place, options.seed, options.only)
        return
    made = plans(options.seed, quick=options.quick)
    if options.jobs == 1:
        yield from (try_plan(place, options.seed, plan) for plan in made)
        return
    with Workers(options.jobs, kind="spawn") as workers:
        yield from workers.results(partial(_try_elsewhere, place, options.seed), made)


def _try_elsewhere(place: Path, seed: int, plan: Plan) -> Found:
    """Try a workload in a process of its own, which has a place of its own."""
    logging.disable(logging.CRITICAL)
    mine = place / str(os.getpid())
    mine.mkdir(exist_ok=True)
    return try_plan(mine, seed, plan)


def main() -> None:
    """Run the program."""
    made = parser("failed_calls", __doc__)
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    options = made.parse_args()
    logging.disable(logging.CRITICAL)  # the library warns of every failure
    tally = Tally("failed_calls", "failed calls", options, TARGET)
    raised: Counter[str] = Counter()
    all_cases = died_after = died_before = 0
    with scratch("failed_calls") as directory, tally.deaths():
        for found in _all(options, directory):
            tally.tried(found.raised.total())
            all_cases += found.all_cases
            died_after += found.died_after
            died_before += found.died_before
            raised += found.raised
            for case, fault in found.violations:
                tally.violated(case, fault)
    tally.more = {
        "of_all_cases": all_cases,
        "operations_done_all_the_same": raised[""],
        "operations_that_raised": raised.total() - raised[""],
        "commits_in_doubt": raised["CommitInDoubtError"],
        "deaths_after_a_failed_call": died_after,
        "failed_calls_after_a_death": died_before,
    }
    tally.report()


if __name__ == "__main__":
    main()
