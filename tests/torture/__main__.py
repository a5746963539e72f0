"""Run the programs, one after the other, and write docs/reliability.md.

    python -m tests.torture [PROGRAM ...] [--quick] [--write] [--seed N]

Without a name, all of them. --quick takes a sample of each, in minutes for all; power cuts, which
mount file systems, and kills of Spark, which take longer, only by their names. With --write what
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
from contextlib import suppress
from typing import Any

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
    everything = [name for name in PROGRAMS if not (options.quick and name in UNASKED)]
    for name in options.programs or everything:
        counts, status = run(name, options.seed, is_quick=options.quick)
        if status or not counts:
            wrong.append(name)
        skipped += [f"{name}: {count['skipped']}" for count in counts if count.get("skipped")]
        if options.write and counts:
            results = Results.load()
            results.add(name, counts, machine())
            results.save()
    if options.write:
        Results.load().render()
    print(f"=== {round(time.monotonic() - started)} s", file=sys.stderr, flush=True)
    for told in skipped:
        print(f"=== skipped: {told}", file=sys.stderr, flush=True)
    if wrong:
        raise SystemExit(f"violated, below its target, or broken: {', '.join(wrong)}")


def run(name: str, seed: int, *, is_quick: bool) -> tuple[list[dict[str, Any]], int]:
    """Run a program, pass on what it says, and return its counts and its status."""
    arguments = ["-m", f"tests.torture.{name}", "--seed", str(seed)]
    arguments += ["--quick"] if is_quick else []
    print(f"=== python {' '.join(arguments)}", file=sys.stderr, flush=True)
    counts = []
    command = [sys.executable, *arguments, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("{"):
                    counts.append(json.loads(line))
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            raise
    return counts, process.returncode


def _ended(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
