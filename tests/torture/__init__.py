"""Reliability, proved by breaking it: programs that try, count, and say what went wrong.

    python -m tests.torture [PROGRAM ...] [--quick] [--write] [--seed N]
    python -m tests.torture.PROGRAM [--quick] [--json] [--seed N] [--only CASE]

Each program breaks the log in one way as often as it can, and checks after each time that nothing
that was acknowledged is lost, nothing that was not is half there, and work goes on. What it tries
follows from its seed alone, which it prints; a violation comes with the command that repeats it,
and nothing else (`--only`). Programs end with 1 if there was a violation, and then name the first
ones, and if a full run has tried less often than its target says. `python -m tests.torture --write`
keeps the counts in docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from tests.torture.workers import WorkerDied

__all__ = ["Count", "Tally", "parser"]

SEED: Final = 1
SHOWN: Final = 5
"""Violations that are told in full; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What was tried, how often, and how often it went wrong.

    `what` is a plural, "crash states"; `target` is the least that has to be tried by a full run, 0
    where none is named; `more` tells what is worth knowing besides, by words; `skipped` why nothing
    could be tried here.
    """

    what: str
    count: int
    violations: int
    target: int = 0
    seed: int = SEED
    seconds: float = 0.0
    more: Mapping[str, int | float | str] = field(default_factory=dict)
    skipped: str = ""

    @property
    def is_enough(self) -> bool:
        """Whether it was tried as often as a full run has to, or could not be tried at all."""
        return self.count >= self.target or (bool(self.skipped) and not self.count)


class Tally:
    """Counts what a program tries, shows how far it is, and reports in the end.

    `target` is that of a full run; one that is asked for less (--quick, --only) has none.
    """

    def __init__(
        self,
        program: str,
        what: str,
        options: argparse.Namespace,
        target: int = 0,
    ) -> None:
        self.count = 0
        self.violations = 0
        self.more: dict[str, int | float | str] = {}
        self.skipped = ""
        """Why nothing can be tried here."""
        is_full = not (options.quick or options.only)
        self._program = program
        self._what = what
        self._target = target if is_full else 0
        self._options = options
        self._started = time.monotonic()
        self._told = self._started

    def tried(self, count: int = 1) -> None:
        """Count tries; a line a minute says that they go on."""
        self.count += count
        now = time.monotonic()
        if now - self._told > 60:
            self._told = now
            self._say(f"{self.count:,} {self._what}, {self.violations} violations")

    def violated(self, case: str, told: str) -> None:
        """Count a violation; `case` is what `--only` takes to repeat it."""
        self.violations += 1
        if self.violations <= SHOWN:
            self._say(f"VIOLATION: {told}")
            self._say_how(case)

    def _say_how(self, case: str) -> None:
        command = f"python -m tests.torture.{self._program} --seed {self._options.seed}"
        command += " --quick" if self._options.quick else ""
        self._say(f"replay: {command} --only '{case}'")

    @contextlib.contextmanager
    def deaths(self) -> Iterator[None]:
        """Count a process that dies in the middle of its work as a violation, and go on behind."""
        try:
            yield
        except WorkerDied as death:
            first, *others = map(str, death.tasks)
            self.violated(first, str(death))
            for other in others:
                self._say_how(other)

    @property
    def seconds(self) -> float:
        """Return the seconds since the program began."""
        return time.monotonic() - self._started

    def report(self) -> None:
        """Print the count, as a line to read or as JSON.

        Exits with 1 if there was a violation, or if it was not tried often enough.
        """
        found = Count(
            what=self._what,
            count=self.count,
            violations=self.violations,
            target=self._target,
            seed=self._options.seed,
            seconds=round(self.seconds, 1),
            more=self.more,
            skipped=self.skipped,
        )
        if self.skipped:
            self._say(f"skipped: {self.skipped}")
        if self._options.json:
            print(json.dumps(asdict(found)), flush=True)
        else:
            more = "".join(
                f"; {name.replace('_', ' ')} {value}" for name, value in self.more.items()
            )
            print(
                f"{found.count:,} {found.what}, {found.violations} violations; seed {found.seed}, "
                f"{found.seconds:,} s{more}",
                flush=True,
            )
        if not found.is_enough:
            self._say(f"BELOW ITS TARGET: {self.count:,} of {self._target:,} {self._what}")
        if self.violations or not found.is_enough:
            raise SystemExit(1)

    def _say(self, line: str) -> None:
        print(f"{self._program}: {line}", file=sys.stderr, flush=True)


def parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """Return what all programs understand; a program adds its own."""
    made = argparse.ArgumentParser(
        prog=f"python -m tests.torture.{program}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="a sample, in half a minute")
    made.add_argument("--json", action="store_true", help="print one JSON line")
    made.add_argument("--seed", type=int, default=SEED, help="of all that is drawn (1)")
    made.add_argument("--only", metavar="CASE", help="repeat one case, as a violation names it")
    return made
