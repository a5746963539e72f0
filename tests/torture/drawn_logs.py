"""What the programs share that draw logs by number: portions of them go to several processes."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from tests.torture import Tally, parser
from tests.torture.workers import Workers

__all__ = ["Judged", "judge", "options_of"]

Cases = tuple[int, ...]


@dataclass
class Judged:
    """What came of some logs."""

    count: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """What a program counts besides, by words of its own."""
    faults: list[tuple[int, str]] = field(default_factory=list)
    """A case, and what is wrong."""


def options_of(
    program: str, doc: str | None, arguments: list[str] | None, *, logs: int
) -> argparse.Namespace:
    """Return what was asked for; `logs` is how many a full run draws."""
    made = parser(program, doc)
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    made.add_argument("--logs", type=int, default=logs, help=f"logs to be drawn ({logs:,})")
    return made.parse_args(arguments)


def judge(
    judged: Callable[..., Judged],
    directory: str,
    options: argparse.Namespace,
    tally: Tally,
    *,
    quick: int,
    size: int,
) -> Counter[str]:
    """Judge the drawn logs, `size` of them at a time, and return what was counted besides.

    Faults go to the tally as violations. One portion, or one job, is done in this process.
    """
    work = partial(judged, seed=options.seed, directory=directory)
    portions = [*_portions(options, quick, size)]
    counts: Counter[str] = Counter()
    with tally.deaths(), Workers(options.jobs, kind="spawn") as workers:
        is_alone = options.jobs == 1 or len(portions) == 1
        for result in map(work, portions) if is_alone else workers.results(work, portions):
            tally.tried(result.count)
            counts += result.counts
            for case, told in result.faults:
                tally.violated(str(case), told)
    return counts


def _portions(options: argparse.Namespace, quick: int, size: int) -> Iterator[Cases]:
    """Yield the numbers of drawn logs, some at a time: those of `--only`, a sample, or all."""
    if options.only:
        yield tuple(map(int, options.only.split()))
        return
    count = quick if options.quick else options.logs
    for first in range(0, count, size):
        yield tuple(range(first, min(first + size, count)))
