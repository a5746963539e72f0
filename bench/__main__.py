"""Run the benchmarks, each in a process of its own, and write docs/benchmarks.md.

    python -m bench [PROGRAM ...] [--quick] [--write] [--path DIR]

Without a name, all of them. With --write the figures are kept in docs/benchmarks.json, in place of
those that the programs gave before, and the page and its charts are made from that file; so a part
can be measured again alone. With --quick inputs are small and what is printed is no measurement: it
shows that the programs work. A program that ends with an error ends the run, after the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.page import PROGRAMS, Result, Results, machine


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for; exit with 1 if a program broke, never for a figure."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--quick", action="store_true", help="small inputs, in seconds")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure")
    options = parser.parse_args(arguments)
    names = options.programs or list(PROGRAMS)
    unknown = sorted({*names} - {*PROGRAMS})
    if unknown:
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    if options.quick and options.write:
        parser.error("--quick measures nothing that could be written down")
    broken = []
    for name in names:
        more = ["--quick"] if options.quick else []
        more += ["--path", str(options.path)] if options.path else []
        result = run(name, more)
        if result is None:
            broken.append(name)
        elif options.write:
            results = Results.load()
            results.add(result)
            results.save()
    if options.write:
        Results.load().render()
    if broken:
        raise SystemExit(f"broken: {', '.join(broken)}")


def run(name: str, more: Sequence[str]) -> Result | None:
    """Run a program, pass its lines on, and return what it found; None if it broke."""
    arguments = ["-m", f"bench.{name}", *more]
    print(f"=== python {' '.join(arguments)}", file=sys.stderr, flush=True)
    started, claims = time.monotonic(), list[dict[str, Any]]()
    command = [sys.executable, *arguments, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                claims.append(json.loads(line))
                print(line, end="", flush=True)
    seconds = round(time.monotonic() - started)
    print(f"=== {name}: {seconds} s", file=sys.stderr, flush=True)
    if process.returncode or not claims:
        return None
    return Result(name, "python " + " ".join(arguments[:2]), seconds, machine(), claims)


if __name__ == "__main__":
    main()
