"""Every state in which a crash may leave a log: opened, judged, and worked on.

    python -m tests.torture.crash_states [--quick] [--json] [--seed N] [--only CASE]
                                         [--jobs N] [--states N]

A workload is run once, and all that it does to the disk is recorded. For each moment of its last
operation, and for each way in which the disk may have the acts that are not synced by then, the
directory is made as it would be found, and opened: what was acknowledged, or could be read, is
there, what was not is all there or not at all, the operation can be tried again, and the log be
read, appended to, cleaned, verified and opened. Some of those recoveries are recorded, and crashed
in the same way.

Workloads are all sequences of one, two and three operations (the moments before the last one are
those of a shorter sequence), and long ones that are drawn. `--states` says how many states are
checked, about; those of a workload that are not checked by then are drawn by the seed. Equal trees
of which the same is expected count once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.torture import Tally, parser
from tests.torture.checks import told
from tests.torture.crashes import Crash, Crashes, Outcome
from tests.torture.disk import State
from tests.torture.going_on import GoingOn
from tests.torture.recording import Stage, booted, record, repeatable
from tests.torture.workloads import OPERATIONS, VARIANTS, prepare, random_sequences, sequences

TARGET: Final = 100_000
_QUICK: Final = 450
_MARGIN: Final = 1.1
"""Equal states are met in several workloads, and counted once."""
_LONG: Final = range(8, 21)
_LEAST: Final = 6
"""To run a workload costs as much as some states of it: so many are checked of each at least."""
_RECOVERED_ONE_IN: Final = 12
_RECOVERY_STATES: Final = 8


@dataclass(frozen=True, slots=True)
class Task:
    """One workload, and about how many of its states are checked."""

    variant: str
    names: tuple[str, ...]
    most: int

    @property
    def case(self) -> str:
        """Name the workload, for people and for `--only`."""
        prefix = "" if self.variant == VARIANTS[0] else f"{self.variant}/"
        return prefix + ",".join(self.names) + ":"


def tasks(states: int, seed: int) -> list[Task]:
    """Share out so many states: to single operations most, then to pairs, triples, long ones."""
    dice = random.Random(f"tasks {seed}")
    ones = [(variant, (name,)) for variant in VARIANTS for name in OPERATIONS]
    twos = [
        (variant, pair) for variant in VARIANTS for pair in itertools.product(OPERATIONS, repeat=2)
    ]
    threes = [(VARIANTS[0], names) for names in sequences(3, least=3)]
    longs = [
        (dice.choice(VARIANTS), names)
        for length in _LONG
        for names in random_sequences(seed, length, 40)
    ]
    found: list[Task] = []
    for kind, share in ((ones, 0.25), (twos, 0.3), (threes, 0.3), (longs, 0.15)):
        room = max(1, round(states * share))
        least = 1 if kind is ones else _LEAST
        chosen = dice.sample(kind, min(len(kind), max(1, room // least)))
        most = -(-room // len(chosen))
        found += [Task(variant, names, most) for variant, names in chosen]
    dice.shuffle(found)
    return found


class Worker:
    """Runs workloads and checks their crash states, in a directory of its own."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self.going_on = GoingOn()
        self._seen: set[bytes] = set()
        logging.getLogger("kafkalog").setLevel(logging.CRITICAL)

    def run(self, task: Task) -> Iterator[Outcome]:
        """Check as many states of a workload as the task says, up to one that is wrong."""
        crashes = self.crashes(task)
        return self._checked(crashes, crashes.stages[-1:], task.most, task.case)

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
            recording = record(root, task.names)
        return Crashes(task.case, recording, self._directory / "state", self._seed, self.going_on)

    def _checked(
        self,
        crashes: Crashes,
        stages: Sequence[Stage],
        most: int,
        case: str,
        *,
        is_recovery: bool = False,
    ) -> Iterator[Outcome]:
        dice = random.Random(f"states {self._seed} {case}")
        moments = crashes.moments(stages)
        chosen = dice.sample(moments, min(len(moments), most))
        quota = -(-most // len(chosen))
        for crash in crashes.crashes(stages, chosen):
            for state in self._new(crashes, crash, dice, quota):
                outcome = crashes.check(crash, state)
                yield dataclasses.replace(outcome, is_recovery=is_recovery)
                if outcome.faults:
                    return
                if not is_recovery and dice.randrange(_RECOVERED_ONE_IN) == 0:
                    below = crashes.recovery(crash, state)
                    name = f"{case}{crash.count}:{state.label}>"
                    yield from self._checked(
                        below, below.stages, _RECOVERY_STATES, name, is_recovery=True
                    )

    def _new(self, crashes: Crashes, crash: Crash, dice: random.Random, quota: int) -> list[State]:
        """Draw states of a crash that were not checked before."""
        found = {crashes.key(crash, state): state for state in crashes.states(crash)}
        new = [key for key in found if key not in self._seen]
        chosen = dice.sample(new, min(len(new), quota))
        self._seen.update(chosen)
        return [found[key] for key in chosen]

    def replay(self, case: str) -> Outcome:
        """Check the one state that a violation names."""
        workload, *rest = case.split(">")
        name, moment, label = workload.rsplit(":", 2)
        variant, _, names = name.rpartition("/")
        task = Task(variant or VARIANTS[0], tuple(names.split(",")), 1)
        crashes = self.crashes(task)
        crash, state = _found(crashes, crashes.stages[-1:], int(moment), label)
        for below in rest:
            crashes = crashes.recovery(crash, state)
            moment, label = below.split(":")
            crash, state = _found(crashes, crashes.stages, int(moment), label)
        return crashes.check(crash, state)


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


def _run(task: Task) -> tuple[Task, list[Outcome] | str]:
    assert _worker is not None
    try:
        return task, list(_worker.run(task))
    except Exception as fault:
        return task, told(fault)


def run(planned: Sequence[Task], tally: Tally, directory: Path, seed: int, jobs: int) -> None:
    """Do all tasks, in so many processes, and count."""
    keys: set[bytes] = set()
    recoveries = 0
    with multiprocessing.get_context("spawn").Pool(jobs, _begin, (directory, seed)) as pool:
        for task, outcomes in pool.imap_unordered(_run, planned):
            if isinstance(outcomes, str):
                tally.violated(task.case, f"{task.case} could not be run: {outcomes}")
                continue
            for outcome in outcomes:
                if outcome.key not in keys:
                    keys.add(outcome.key)
                    recoveries += outcome.is_recovery
                    tally.tried()
                if outcome.faults:
                    tally.violated(outcome.case, f"{outcome.case}: {'; '.join(outcome.faults[:4])}")
    tally.more["workloads"] = len(planned)
    tally.more["crashes_of_recoveries"] = recoveries
    tally.more["states_per_second"] = round(tally.count / tally.seconds, 1)


def main() -> None:
    """Run what is asked for, and report."""
    options = _options()
    tally = Tally("crash_states", "crash states", options, target=TARGET)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="kafkalog-crash-states-", dir=shm if shm.is_dir() else None
    ) as name:
        if options.only:
            outcome = Worker(Path(name), options.seed).replay(options.only)
            tally.tried()
            for fault in outcome.faults:
                print(fault)
            if outcome.faults:
                tally.violated(outcome.case, "; ".join(outcome.faults[:4]))
        else:
            states = options.states or (_QUICK if options.quick else round(TARGET * _MARGIN))
            planned = tasks(states, options.seed)
            run(planned, tally, Path(name), options.seed, options.jobs)
    tally.report()


def _options() -> argparse.Namespace:
    made = parser("crash_states", __doc__)
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    made.add_argument("--states", type=int, help=f"about so many ({TARGET * _MARGIN:,.0f})")
    return made.parse_args()


if __name__ == "__main__":
    main()
