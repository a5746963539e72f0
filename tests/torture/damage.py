"""Flip every byte of every file of a log, and cut every file at every byte; read and judge.

    python -m tests.torture.damage [--quick] [--all-bits] [--jobs N] [--only CASE]

Two roots hold every kind of file that a log has: one is ours, the other is of a killed broker.
After each damage the program reads all records in both isolation levels, and looks up keys and
times. Some copies are also cleaned and appended to, or adopted. tests/unit/storage_engine/damage.py
judges the results and defines its words: *whole*, *refused*, and for a broker's log *short* and
*shifted*.

Four more roots have the files next to the logs: key indexes, pins, staged files, and the old
journal of a released log. They also have a controller's metadata, and the files that wait for the
broker's return. The program does with each file what the file is for.
tests/unit/storage_engine/damage_beside.py lists the harmless outcomes.

One log more is in an object store, with each kind of object. `stored_damage` judges it. Without its
last commit it must be exactly what it was before that commit, and counts as *short*.

A wrong record or answer, a record lost below the damage, an untyped error and a hang are
violations. Two bits of each byte are flipped; with --all-bits all eight. Most of the zeros that a
journal has for later commits are left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from kafkalog.storage_engine.metadata import journal
from tests.torture import Tally, parser
from tests.torture.scratch import scratch
from tests.torture.stored_damage import StoredJudge
from tests.torture.workers import Workers
from tests.unit.storage_engine.damage import (
    BITS,
    BrokerJudge,
    Judge,
    flipped,
    outcome_lines,
    places,
)
from tests.unit.storage_engine.damage_beside import JUDGES
from tests.unit.storage_engine.sample_root import Root

_OURS: Final = "ours"
_STORE: Final = "store"
_ROOTS: Final = (_OURS, "brokers", *JUDGES, _STORE)
_WRITES: Final = {"brokers": 2}
"""Every how many-th damage is also written upon, where it is not every tenth."""
_QUICK: Final = 120
"""Cases of a sample."""
_PORTION: Final = 20


@dataclass(frozen=True, slots=True)
class Damaged:
    """One damage: of a root's file, what is done to it and at which byte."""

    root: str
    change: str
    """`cut`, `missing`, or `flip-` and the bits."""
    place: int
    name: str
    is_written: bool

    def __str__(self) -> str:
        write = "write" if self.is_written else "read"
        return f"{self.root}:{write}:{self.change}:{self.place}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Damaged:
        """Return the case that `--only` names."""
        root, write, change, place, name = text.split(":", 4)
        return cls(root, change, int(place), name, write == "write")

    def content(self, data: bytes) -> bytes | None:
        """Return a file's content with the damage; None where it is missing."""
        if self.change == "missing":
            return None
        if self.change == "cut":
            return data[: self.place]
        # Each process makes its roots, and there a number in a file may have a digit less.
        place = min(self.place, len(data) - 1)
        return flipped(data, place, int(self.change.removeprefix("flip-")))


class Portion(tuple[Damaged, ...]):
    """Cases that one process judges."""

    __slots__ = ()

    def __str__(self) -> str:
        """Name all of them, as `--only` takes them."""
        return " ".join(map(str, self))

    def __repr__(self) -> str:
        return f"{len(self)} cases from {self[0]} on"


def damages(judge: Judge | StoredJudge, root: str, bits: Sequence[int]) -> Iterator[Damaged]:
    """Yield everything that is done to a root."""
    number = 0
    every = _WRITES.get(root, 10)
    for name in judge.files():
        yield Damaged(root, "missing", 0, str(name), is_written=True)
        for place in places(judge.root.path, name):
            for change in ("cut", *(f"flip-{bit}" for bit in bits)):
                number += 1
                # Not always the same change: the number of changes and this one have no factor.
                is_written = number % (3 * every + 1) < 3
                yield Damaged(root, change, place, str(name), is_written)


@cache
def judge_of(root: str, scratch: str) -> Judge | StoredJudge:
    """Make a root and its judge, in a directory of this process."""
    logging.disable()
    journal._READ_PAUSE_S = 0
    directory = Path(scratch) / f"{os.getpid()}-{root}"
    if root == _STORE:
        return StoredJudge(directory)
    if root in JUDGES:
        return JUDGES[root].of(directory)
    made = Root(directory / "root")
    if root == _OURS:
        return Judge(made, directory / "copy")
    made.give_to_a_broker()
    return BrokerJudge(made, directory / "copy")


def judged(
    portion: Portion, scratch: str
) -> tuple[Counter[tuple[str, str]], list[tuple[str, str]]]:
    """Return the outcomes of some cases, and the (case, fault) of those that are violations."""
    outcomes: Counter[tuple[str, str]] = Counter()
    faults = []
    for case in portion:
        judge = judge_of(case.root, scratch)
        judge.outcomes.clear()
        judge.faults.clear()
        data = (judge.root.path / case.name).read_bytes()
        judge.judge(Path(case.name), case.content(data), case.place, write=case.is_written)
        outcomes += judge.outcomes
        faults += [(str(case), fault) for fault in judge.faults]
    return outcomes, faults


def chosen(options: argparse.Namespace, scratch: str) -> list[Damaged]:
    """Return the cases to be judged: all, a sample by the seed, or those that are named."""
    if options.only:
        return [Damaged.parse(case) for case in options.only.split()]
    bits = [1 << place for place in range(8)] if options.all_bits else BITS
    found = [case for root in _ROOTS for case in damages(judge_of(root, scratch), root, bits)]
    if not options.quick:
        return found
    step = len(found) // _QUICK
    return found[options.seed % step :: step]


def main(arguments: list[str] | None = None) -> None:
    """Damage, judge and report."""
    made = parser("damage", __doc__)
    made.add_argument("--all-bits", action="store_true", help="flip each bit of every byte")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    options = made.parse_args(arguments)
    tally = Tally("damage", "damages of bytes", options)
    outcomes: Counter[tuple[str, str]] = Counter()
    with scratch("damage") as directory:
        cases = chosen(options, str(directory))
        portions = [Portion(cases[at : at + _PORTION]) for at in range(0, len(cases), _PORTION)]
        work = partial(judged, scratch=str(directory))
        # Not forked: each process has threads of Arrow's and locks of its own.
        with tally.deaths(), Workers(options.jobs, kind="spawn") as workers:
            is_alone = options.jobs == 1 or len(portions) == 1
            results = map(work, portions) if is_alone else workers.results(work, portions)
            for found, faults in results:
                outcomes += found
                tally.tried(found.total())
                for case, told in faults:
                    tally.violated(case, told)
    for line in outcome_lines(outcomes):
        print(f"damage: {line}", file=sys.stderr)
    tally.more["kinds_of_files"] = len({kind for kind, _ in outcomes})
    for word in ("whole", "refused", "short", "shifted"):
        tally.more[word] = sum(n for (_, outcome), n in outcomes.items() if outcome == word)
    tally.report()


if __name__ == "__main__":
    main()
