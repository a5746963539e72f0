"""Crash a log in each listed state that its disk may have; then open, check and use it.

    python -m tests.torture.crash_states [--quick] [--json] [--seed N] [--only CASE]
                                         [--jobs N] [--states N]

A workload runs once, and a recorder notes every act on the disk. The program then takes each moment
of the last operation, and ways in which the disk may have kept the unsynced acts. For each it
builds the directory as a crash would leave it, opens it and checks the log:

- All that was acknowledged, or that a reader could see, is there.
- An operation that was not acknowledged is there as a whole or not at all.
- The operation can be tried again.
- The log can be read, appended to, cleaned, verified and opened.

Then the program crashes recoveries. It records some of them, in which a process with another clock
tries again, and cuts the power in the middle. The disk may lose all that neither process has
synced. After each death within a single operation it does so at two moments. It draws them from
those at which names given by the dead process are not all durable. A third round has one more
process. The second does another operation, and dies while its truncations or names are not all
durable. The third does an operation too, and the power goes.

The workloads are all sequences of one, two and three operations, and long sequences that are drawn.
The moments before the last operation belong to a shorter sequence. Single operations are checked in
every listed state and in each variant of the log. For the others the disk has what a dead process
leaves: all of the unsynced acts, none, all but one, or some of the rest. Pairs are checked at every
moment in one variant, and at one moment in another; both are drawn. Sequences of three are checked
at one moment that is drawn, long sequences at two.

The listed states of a moment have none and all of the unsynced acts, all but one, and one alone.
Each write is torn at each of its sectors, with all of the others and with none. All subsets of four
acts or fewer are listed; of more acts eight subsets are drawn. The count of trees is the number of
different directories in these lists. `--states` draws workloads for about that many
states. Equal trees with the same expected content count once.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import logging
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tests.torture import Tally, parser
from tests.torture.checks import told
from tests.torture.crashes import DIED, Crash, Crashes, Outcome
from tests.torture.disk import State
from tests.torture.going_on import GoingOn
from tests.torture.recording import Stage, record
from tests.torture.repeatable import booted, repeatable
from tests.torture.scratch import scratch
from tests.torture.workers import Workers
from tests.torture.workloads import (
    OPERATIONS,
    VARIANTS,
    begin,
    prepare,
    random_sequences,
    sequences,
)

TARGET: Final = 200_000
_QUICK: Final = 220
_LONG: Final = range(8, 21)
_LONGS: Final = 20
"""Workloads of each of those lengths."""
_OF_DEATH: Final = 2
"""Moments of what the next process does, while names that a dead one has given may be lost."""
_OF_SECOND_DEATH: Final = 1
"""Moments at which the next process dies too, having cut or named something."""
_NEXT: Final = ("append", "commit", "adopt", "transact", "roll", "release_adopt")
"""What the process that comes after a death does, and the next one."""
_OF_ONE: Final = 14
"""States of one moment, with those of recoveries, on average."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How much of a workload is looked at."""

    moments: int | None
    """So many moments of its last operation are drawn; None: all."""
    drawn: int | None
    """So many states of a moment are drawn besides those that are always checked; None: all."""
    recovered_one_in: int = 24
    """Of so many states one is recovered from, and crashed in the middle of that."""
    deaths: bool = False
    """Whether each death is recovered from and crashed again, and one of that process follows."""


ALL: Final = Depth(None, None, deaths=True)
EVERY_MOMENT: Final = Depth(None, 1, recovered_one_in=240)
ONE_MOMENT: Final = Depth(1, 4)
TWO_MOMENTS: Final = Depth(2, 4)
OF_ONE_DRAWN: Final = Depth(1, 4, deaths=True)


@dataclass(frozen=True, slots=True)
class Task:
    """One workload, and how much of it is looked at."""

    variant: str
    names: tuple[str, ...]
    depth: Depth = ALL

    def __str__(self) -> str:
        """Name the workload, for people and for `--only`."""
        prefix = "" if self.variant == VARIANTS[0] else f"{self.variant}/"
        return prefix + ",".join(self.names) + ":"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read what `str` has written."""
        variant, _, names = text.removesuffix(":").rpartition("/")
        return cls(variant or VARIANTS[0], tuple(names.split(",")))


def tasks(seed: int, states: int | None = None) -> list[Task]:
    """Return all workloads, or some of each kind, for about so many states."""
    dice = random.Random(f"tasks {seed}")
    ones = [Task(variant, (name,)) for variant in VARIANTS for name in OPERATIONS]
    twos = []
    for names in itertools.product(OPERATIONS, repeat=2):
        whole, other = dice.sample(VARIANTS, 2)
        twos += [Task(whole, names, EVERY_MOMENT), Task(other, names, ONE_MOMENT)]
    threes = [Task(dice.choice(VARIANTS), names, ONE_MOMENT) for names in sequences(3, least=3)]
    longs = [
        Task(dice.choice(VARIANTS), names, TWO_MOMENTS)
        for length in _LONG
        for names in random_sequences(seed, length, _LONGS)
    ]
    kinds = [ones, twos, threes, longs]
    if states is not None:
        shares = zip(kinds, (0.5, 0.2, 0.2, 0.1), strict=True)
        kinds = [_some(kind, round(states * share / _OF_ONE), dice) for kind, share in shares]
    found = list(itertools.chain(*kinds))
    dice.shuffle(found)
    return sorted(found, key=lambda task: len(task.names))  # what is looked at most comes first


def _some(kind: list[Task], count: int, dice: random.Random) -> list[Task]:
    """Draw workloads, of which one moment is looked at."""
    drawn = dice.sample(kind, max(1, min(len(kind), count)))
    depth = OF_ONE_DRAWN if len(drawn[0].names) == 1 else ONE_MOMENT
    return [dataclasses.replace(task, depth=depth) for task in drawn]


@dataclass
class Checked:
    """What came of a task."""

    task: Task
    outcomes: list[Outcome] = field(default_factory=list)
    trees: int = 0
    """How many of the trees that there may be after a crash of the workload were checked."""
    all_trees: int = 0
    fault: str = ""
    """Why it could not be run."""


class Worker:
    """Runs workloads and checks their crash states, in a directory of its own."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self.going_on = GoingOn()
        self._passed: set[bytes] = set()
        logging.getLogger("kafkalog").setLevel(logging.CRITICAL)

    def run(self, task: Task) -> Iterator[Outcome]:
        """Check states of a workload, up to one that is wrong."""
        return self._run(task, self.crashes(task))

    def check(self, task: Task) -> Checked:
        """Check states of a workload, and count which there are."""
        checked = Checked(task)
        try:
            crashes = self.crashes(task)
            checked.outcomes += self._run(task, crashes)
            first = {outcome.tree for outcome in checked.outcomes if not outcome.is_recovery}
            checked.trees = len(first)
            checked.all_trees = crashes.count(crashes.stages[-1:])
        except Exception as fault:
            checked.fault = told(fault)
        return checked

    def _run(self, task: Task, crashes: Crashes) -> Iterator[Outcome]:
        dice, depth = random.Random(f"states {self._seed} {task}"), task.depth
        stages = crashes.stages[-1:]
        moments = crashes.moments(stages)
        died: set[bytes] = set()
        if depth.moments is not None:
            moments = sorted(dice.sample(moments, min(len(moments), depth.moments)))
        for crash, state, outcome in self._checked(crashes, stages, moments, depth.drawn, dice):
            yield outcome
            if outcome.faults:
                return
            if depth.deaths and state.label == DIED:
                yield from self._recovered(crashes, crash, state, dice, has_died=True)
                if state.digest() not in died:
                    died.add(state.digest())
                    yield from self._relayed(crashes, crash, state, dice)
            if dice.randrange(depth.recovered_one_in) == 0:
                yield from self._recovered(crashes, crash, state, dice)

    def _recovered(
        self,
        crashes: Crashes,
        crash: Crash,
        state: State,
        dice: random.Random,
        *,
        has_died: bool = False,
    ) -> Iterator[Outcome]:
        """Check states after a recovery: where it is done, and of a moment before.

        After a process that `has_died`: of some moments while its names are not all durable.
        """
        below = crashes.recovery(crash, state)
        if has_died:
            before = below.inherited_moments(below.stages)
            moments = dice.sample(before, min(_OF_DEATH, len(before)))
        else:
            *before, end = below.moments(below.stages)
            moments = [*dice.sample(before, min(1, len(before))), end]
        for _, _, outcome in self._checked(below, below.stages, moments, ONE_MOMENT.drawn, dice):
            yield dataclasses.replace(outcome, is_recovery=True)

    def _relayed(
        self, crashes: Crashes, crash: Crash, state: State, dice: random.Random
    ) -> Iterator[Outcome]:
        """Check states after two deaths: where the third process is done, and of a moment before.

        The second one dies while what it has cut, or named, is not all durable.
        """
        below = crashes.recovery(crash, state, _next(crash, dice))
        moments = below.cutting_moments(below.stages)
        drawn = dice.sample(moments, min(_OF_SECOND_DEATH, len(moments)))
        for again in below.crashes(below.stages, drawn):
            died = next(below.states(again))
            third = below.recovery(again, died, _next(again, dice))
            before = third.inherited_moments(third.stages)
            *_, end = third.moments(third.stages)
            moments = sorted({*dice.sample(before, min(1, len(before))), end})
            for _, _, outcome in self._checked(third, third.stages, moments, 1, dice):
                yield dataclasses.replace(outcome, is_recovery=True)

    def _checked(
        self,
        crashes: Crashes,
        stages: Sequence[Stage],
        moments: Sequence[int],
        most: int | None,
        dice: random.Random,
    ) -> Iterator[tuple[Crash, State, Outcome]]:
        """Check states at some moments: `most` besides those that are always checked; None: all."""
        seen: set[bytes] = set()
        for crash in crashes.crashes(stages, moments):
            found = {crashes.key(crash, state): state for state in crashes.states(crash)}
            keys = [key for key in found if key not in seen]
            if most is not None:
                keys = _chosen(keys, found, most, dice)
            seen.update(keys)
            for key in keys:
                state = found[key]
                outcome = crashes.check(crash, state, is_known=key in self._passed)
                if not outcome.faults:
                    self._passed.add(key)
                yield crash, state, outcome

    def crashes(self, task: Task) -> Crashes:
        """Run a workload, and return its crashes."""
        template = self._directory / f"log-{task.variant}"
        with booted("boot 0"):
            if not template.exists():
                with repeatable("prepare"):
                    prepare(template, task.variant)
            root = self._directory / "live"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(template, root)
            recording = record(root, task.names, begin(task.variant))
        return Crashes(str(task), recording, self._directory / "state", self._seed, self.going_on)

    def replay(self, case: str) -> Iterator[Outcome]:
        """Check the one state that a violation names, or all of a workload."""
        if case.endswith(":"):
            yield from self.run(Task.parse(case))
            return
        workload, *rest = case.split(">")
        name, moment, label = workload.rsplit(":", 2)
        crashes = self.crashes(Task.parse(name))
        crash, state = _found(crashes, crashes.stages[-1:], int(moment), label)
        for below in rest:
            then, _, place = below.rpartition("@")
            crashes = crashes.recovery(crash, state, then or None)
            moment, label = place.split(":")
            crash, state = _found(crashes, crashes.stages, int(moment), label)
        yield crashes.check(crash, state)


def _next(crash: Crash, dice: random.Random) -> str | None:
    """Draw what is done after a death. What goes record by record is gone on with: None."""
    return None if crash.stage.kind == "partial" else dice.choice(_NEXT)


def _chosen(
    keys: list[bytes], states: dict[bytes, State], most: int, dice: random.Random
) -> list[bytes]:
    """Return the states that are always checked, and some of the others."""
    always = [key for key in keys if states[key].is_simple]
    others = [key for key in keys if not states[key].is_simple]
    return always + dice.sample(others, min(len(others), most))


def _found(
    crashes: Crashes, stages: Sequence[Stage], moment: int, label: str
) -> tuple[Crash, State]:
    for crash in crashes.crashes(stages, [moment]):
        for state in crashes.states(crash):
            if state.label == label:
                return crash, state
    raise SystemExit(f"there is no state {moment}:{label}")


# --- the program ---------------------------------------------------------------------------------

_worker: Worker | None = None


def _begin(directory: Path, seed: int) -> None:
    global _worker
    own = directory / str(os.getpid())
    own.mkdir()
    _worker = Worker(own, seed)
    gc.freeze()  # what is imported stays, and need not be looked at again and again


def _check(task: Task) -> Checked:
    assert _worker is not None
    return _worker.check(task)


def run(planned: Sequence[Task], tally: Tally, directory: Path, seed: int, jobs: int) -> None:
    """Do all tasks, in so many processes, and count."""
    keys: set[bytes] = set()
    trees, all_trees = [0, 0], [0, 0]
    recoveries = 0
    with tally.deaths(), Workers(jobs, partial(_begin, directory, seed), kind="spawn") as workers:
        for checked in workers.results(_check, planned):
            if checked.fault:
                case = str(checked.task)
                tally.violated(case, f"{case} could not be run: {checked.fault}")
            for outcome in checked.outcomes:
                if outcome.key not in keys:
                    keys.add(outcome.key)
                    recoveries += outcome.is_recovery
                    tally.tried()
                if outcome.faults:
                    tally.violated(outcome.case, f"{outcome.case}: {'; '.join(outcome.faults[:4])}")
            several = len(checked.task.names) > 1
            trees[several] += checked.trees
            all_trees[several] += checked.all_trees
    tally.more["workloads"] = len(planned)
    tally.more["trees_after_one_operation"] = f"{trees[0]:,} of {all_trees[0]:,}"
    tally.more["trees_after_several"] = f"{trees[1]:,} of {all_trees[1]:,}"
    tally.more["crashes_of_recoveries"] = recoveries
    tally.more["states_per_second"] = round(tally.count / tally.seconds, 1)


def main() -> None:
    """Run what is asked for, and report."""
    options = _options()
    target = 0 if options.states else TARGET
    tally = Tally("crash_states", "crash states", options, target)
    with scratch("crash-states") as directory:
        if options.only:
            for outcome in Worker(directory, options.seed).replay(options.only):
                tally.tried()
                for fault in outcome.faults:
                    print(fault)
                if outcome.faults:
                    tally.violated(outcome.case, "; ".join(outcome.faults[:4]))
        else:
            planned = tasks(options.seed, options.states or (_QUICK if options.quick else None))
            run(planned, tally, directory, options.seed, options.jobs)
    tally.report()


def _options() -> argparse.Namespace:
    made = parser("crash_states", __doc__)
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    made.add_argument("--states", type=int, help="only about so many (all)")
    return made.parse_args()


if __name__ == "__main__":
    main()
