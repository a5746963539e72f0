"""Run the programs, and write docs/reliability.md.

    python -m tests.torture [PROGRAM ...] [--quick] [--write] [--seed N]

Without a name, all of them, one after the other. --quick takes a sample of each, two programs at a
time; power cuts, which mount file systems, and kills of Spark, which take longer, only by their
names. With --write what
was counted is kept in docs/reliability.json, in place of what the programs counted before, and the
page is made from that file. A program that finds a violation, tries less than its target, or
breaks, is named in the end, and the others are run nevertheless.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.__main__ import end
from tests.torture import SEED
from tests.torture.page import PROGRAMS, UNASKED, Results, machine


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for; exit with 1 if anything was violated, was too little, or broke."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--quick", action="store_true", help="a sample of each")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    parser.add_argument("--seed", type=int, default=SEED, help="of all that is drawn (1)")
    options = parser.parse_args(arguments)
    unknown = sorted({*options.programs} - {*PROGRAMS})
    if unknown:
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    if options.quick and options.write:
        parser.error("--quick is a sample, and nothing to be written down")
    signal.signal(signal.SIGTERM, _ended)
    wrong, skipped, started = [], [], time.monotonic()
    tried_on = machine()  # a later commit is not what the programs try
    everything = [name for name in PROGRAMS if not (options.quick and name in UNASKED)]
    names = options.programs or everything
    programs = Programs(options.seed, is_quick=options.quick)
    at_once = ThreadPoolExecutor(2 if options.quick else 1)
    try:
        for name, (counts, status) in zip(names, at_once.map(programs.run, names), strict=True):
            if status or not counts:
                wrong.append(name)
            skipped += [f"{name}: {count['skipped']}" for count in counts if count.get("skipped")]
            if options.write and counts:
                results = Results.load()
                results.add(name, counts, tried_on)
                results.save()
    finally:
        at_once.shutdown(wait=False, cancel_futures=True)
        programs.end()
    if options.write:
        Results.load().render()
    print(f"=== {round(time.monotonic() - started)} s", file=sys.stderr, flush=True)
    for told in skipped:
        print(f"=== skipped: {told}", file=sys.stderr, flush=True)
    if wrong:
        raise SystemExit(f"violated, below its target, or broken: {', '.join(wrong)}")


class Programs:
    """Runs programs, and ends those that are not wanted any more."""

    def __init__(self, seed: int, *, is_quick: bool) -> None:
        self._arguments = ["--seed", str(seed), *(["--quick"] if is_quick else [])]
        self._running = set[subprocess.Popen[str]]()
        self._is_over = False

    def run(self, name: str) -> tuple[list[dict[str, Any]], int]:
        """Run a program, pass on what it says, and return its counts and its status."""
        arguments = ["-m", f"tests.torture.{name}", *self._arguments]
        print(f"=== python {' '.join(arguments)}", file=sys.stderr, flush=True)
        counts = []
        process = subprocess.Popen(
            [sys.executable, *arguments, "--json"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that all it has started can be ended with it
        )
        self._running.add(process)
        if self._is_over:
            end(process)
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("{"):
                    counts.append(json.loads(line))
        self._running.discard(process)
        return counts, process.returncode

    def end(self) -> None:
        """End all that run, and those that start from now on."""
        self._is_over = True
        for process in [*self._running]:
            end(process)


def _ended(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
