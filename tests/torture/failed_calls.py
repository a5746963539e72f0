"""Every call of the operating system fails once, in every way it may, and work goes on.

Of each workload the last operation's calls below the log's root are counted; then the workload is
done again as often, and each time another call fails: it raises EIO, ENOSPC, EDQUOT, EMFILE or
EINTR, or writes half of what it was given. `ENOSPC+` is a disk that stays full until the operation
has ended. The operation must say what is wrong, or succeed; the same process goes on with what is
allowed to be there, tries again, appends, cleans and opens anew. Where a sync has failed, its pages
count as lost: what is acknowledged later must outlive a power cut without them.

A case is `OPERATION+OPERATION@VARIANT:N:KIND`.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import random
import shutil
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Self

from kafkalog.errors import StorageError
from tests.torture import Tally, parser
from tests.torture.calls import KINDS, READS, Calls, CutReader, Disturbed
from tests.torture.checks import Snapshot, faults_of, forget, is_repeatable, snapshot, told, works
from tests.torture.recording import repeatable
from tests.torture.workloads import (
    OPERATIONS,
    VARIANTS,
    Opened,
    prepare,
    random_sequences,
    small_files,
)

__all__ = ["Bench", "Plan", "Workload", "cases", "main"]

TARGET: Final = 10_000
_QUICK: Final = 3
"""Cases of each workload in a quick run."""
_SETTLES_DOUBT: Final = ("adopt", "commit")
"""Operations that have a batch id, by which the log itself knows whether they were done."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Operations on a prepared log, of which the last one is disturbed."""

    operations: tuple[str, ...]
    variant: str = "plain"

    @property
    def last(self) -> str:
        """The operation that is disturbed."""
        return self.operations[-1]

    def __str__(self) -> str:
        return "+".join(self.operations) + "@" + self.variant

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` has written."""
        operations, _, variant = text.partition("@")
        return cls(tuple(operations.split("+")), variant)


# --- one case ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tried:
    """What became of one case."""

    has_fired: bool = False
    raised: str = ""
    """The type of what the operation raised; empty where it succeeded."""
    faults: list[str] = field(default_factory=list)


class Bench:
    """A place where cases are tried, one after the other."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._cuts = CutReader(scratch)

    def calls_of(self, workload: Workload) -> tuple[list[str], Snapshot]:
        """Return the calls that the last operation makes, and what the log shows after it."""
        calls, root = Calls(), self._copy(workload.variant)
        with Disturbed(root, calls), repeatable(str(workload)):
            log = _before_last(root, workload)
            snapshot(log.engine)  # so that as much is known as where a case is tried
            calls.is_armed = True
            log.perform(workload.last)
            calls.is_armed = False
            return calls.names, snapshot(log.engine)

    def try_case(self, workload: Workload, n: int, kind: str, after: Snapshot) -> Tried:
        """Let the n-th call of the last operation fail, and go on."""
        calls, tried, root = Calls(n, kind), Tried(), self._copy(workload.variant)
        with Disturbed(root, calls) as disturbed, repeatable(str(workload)):
            log = _before_last(root, workload)
            before = snapshot(log.engine)
            calls.is_armed = True
            try:
                log.perform(workload.last)
            except Exception as fault:
                tried.raised = type(fault).__name__
                if not _says_where(fault):
                    tried.faults.append(f"raised {told(fault)}")
            finally:
                calls.is_armed = False
            tried.has_fired = bool(calls.failed)
            if not tried.has_fired:
                return tried
            try:
                tried.faults += self._goes_on(log, workload, tried.raised, disturbed, before, after)
            except Exception as fault:
                tried.faults.append(told(fault))
        if tried.faults:
            what = f"{calls.failed[0]} failed, the operation: {tried.raised or 'done'}"
            tried.faults.insert(0, what)
        return tried

    def _copy(self, variant: str) -> Path:
        """Return the root of a fresh copy of the prepared log."""
        start, root = self._scratch / variant, self._scratch / "log"
        if not start.exists():
            prepare(start, variant)
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)
        forget()
        return root

    def _goes_on(
        self,
        log: Opened,
        workload: Workload,
        raised: str,
        disturbed: Disturbed,
        before: Snapshot,
        after: Snapshot,
    ) -> list[str]:
        """Go on in the same process, and return what is wrong."""
        operation = OPERATIONS[workload.last]
        is_synced = "relaxed" not in workload.operations
        shown = before
        if operation.kind != "handed":
            shown = snapshot(log.engine)
            faults = faults_of(shown, before, after, operation.kind)
            if not raised and shown != after:
                faults.append("it succeeded, but was not done")
            if is_synced:
                faults += self._cut(disturbed, shown, after, operation.kind)
            if faults:
                return faults
        if raised == "CommitInDoubtError" and workload.last not in _SETTLES_DOUBT:
            log.reopen()  # which settles it: until then nobody knows if it is to be done again
            shown = snapshot(log.engine)
        if raised and (is_repeatable(workload.last) or shown == before):
            log.perform_again(workload.last)
            shown = snapshot(log.engine)
            faults = faults_of(shown, after, after, "none")
            if is_synced:
                faults += self._cut(disturbed, shown, shown, "none")
            if faults:
                return [f"after the retry: {fault}" for fault in faults]
        if faults := works(log, shown):
            return faults
        shown = snapshot(log.engine)
        return [f"in the end: {fault}" for fault in self._cut(disturbed, shown, shown, "none")]

    def _cut(self, disturbed: Disturbed, shown: Snapshot, after: Snapshot, kind: str) -> list[str]:
        """Return what a power cut would take of what the log shows."""
        for state in disturbed.cuts():
            with disturbed.away():
                try:
                    faults = faults_of(self._cuts.read(state), shown, after, kind)
                except Exception as fault:
                    faults = [told(fault)]
            if faults:
                return [f"after a power cut ({state.label}): {fault}" for fault in faults]
        return []


def _before_last(root: Path, workload: Workload) -> Opened:
    """Do all operations but the last one."""
    log = Opened(root)
    for name in workload.operations[:-1]:
        log.perform(name)
    return log


def _says_where(fault: Exception) -> bool:
    """Tell whether an error is one of those that are promised, and names what it is about."""
    return isinstance(fault, StorageError) or (
        isinstance(fault, OSError) and fault.filename is not None
    )


# --- all cases -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Which calls of a workload fail, and how."""

    workload: Workload
    kinds: int = 0
    """How many kinds, drawn, of each call; 0 for all."""
    reads: int = 1
    """One of so many calls that change nothing."""
    most: int = 0
    """How many cases, drawn; 0 for all."""


def plans(seed: int, *, quick: bool) -> Iterator[Plan]:
    """Yield what is tried."""
    for variant, name in itertools.product(VARIANTS, OPERATIONS):
        workload = Workload((name,), variant)
        if quick:
            yield Plan(workload, most=_QUICK)
        else:
            yield Plan(workload, kinds=0 if variant == VARIANTS[0] else 1)
    if quick:
        return
    dice = random.Random(f"variants {seed}")
    drawn = [random_sequences(seed, *what) for what in ((3, 60), (8, 20), (25, 6))]
    for sequence in itertools.chain(itertools.product(OPERATIONS, repeat=2), *drawn):
        yield Plan(Workload(sequence, dice.choice(VARIANTS)), kinds=1, reads=4)


def cases(plan: Plan, names: Iterable[str], seed: int) -> list[tuple[int, str]]:
    """Return (n, kind) of the calls that are to fail."""
    dice = random.Random(f"{seed} {plan.workload}")
    found = []
    for n, name in enumerate(names, 1):
        if name in READS and dice.randrange(plan.reads):
            continue
        kinds = KINDS[name]
        found += [(n, kind) for kind in (dice.sample(kinds, plan.kinds) if plan.kinds else kinds)]
    return dice.sample(found, min(plan.most, len(found))) if plan.most else found


@dataclass(slots=True)
class Found:
    """What became of the cases of a workload."""

    raised: Counter[str] = field(default_factory=Counter)
    """How often the operation raised an error of that type; empty where it succeeded."""
    violations: list[tuple[str, str]] = field(default_factory=list)
    """Cases, and what was wrong."""

    def note(self, case: str, tried: Tried) -> None:
        """Add what became of a case."""
        self.raised[tried.raised] += tried.has_fired
        if tried.faults:
            self.violations.append((case, f"{case}: " + "; ".join(tried.faults)))


def try_plan(scratch: Path, seed: int, plan: Plan) -> Found:
    """Try the cases of a workload."""
    found, bench = Found(), Bench(scratch)
    with small_files():
        names, after = bench.calls_of(plan.workload)
        for n, kind in cases(plan, names, seed):
            tried = bench.try_case(plan.workload, n, kind, after)
            found.note(f"{plan.workload}:{n}:{kind}", tried)
    return found


def try_one(scratch: Path, case: str) -> Found:
    """Try one case by its name."""
    text, n, kind = case.rsplit(":", 2)
    workload, found, bench = Workload.parse(text), Found(), Bench(scratch)
    with small_files():
        _, after = bench.calls_of(workload)
        found.note(case, bench.try_case(workload, int(n), kind, after))
    return found


def _all(options: Namespace, scratch: Path) -> Iterator[Found]:
    if options.only:
        yield try_one(scratch, options.only)
        return
    made = plans(options.seed, quick=options.quick)
    if options.jobs == 1:
        yield from (try_plan(scratch, options.seed, plan) for plan in made)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        yield from pool.map(partial(_try_elsewhere, scratch, options.seed), made)


def _try_elsewhere(scratch: Path, seed: int, plan: Plan) -> Found:
    """Try a workload in a process of its own, which has a place of its own."""
    logging.disable(logging.CRITICAL)
    place = scratch / str(os.getpid())
    place.mkdir(exist_ok=True)
    return try_plan(place, seed, plan)


def main() -> None:
    """Run the program."""
    made = parser("failed_calls", __doc__)
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    options = made.parse_args()
    logging.disable(logging.CRITICAL)  # the library warns of every failure
    is_full = not (options.quick or options.only)
    tally = Tally("failed_calls", "failed calls", options, TARGET if is_full else 0)
    raised: Counter[str] = Counter()
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="failed_calls-", dir=place) as scratch:
        for found in _all(options, Path(scratch)):
            tally.tried(found.raised.total())
            raised += found.raised
            for case, fault in found.violations:
                tally.violated(case, fault)
    tally.more = {
        "operations_done_all_the_same": raised[""],
        "operations_that_raised": raised.total() - raised[""],
        "commits_in_doubt": raised["CommitInDoubtError"],
    }
    tally.report()


if __name__ == "__main__":
    main()
