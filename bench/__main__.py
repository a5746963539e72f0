"""Run the benchmarks, each in a process of its own, and write docs/benchmarks.md.

    python -m bench [PROGRAM ...] [--quick] [--write] [--path DIR]

Without a name, all of them. With --write the figures are kept in docs/benchmarks.json, in place of
those that the programs gave before. The page, its charts and the numbers in README.md are made from
that file; so a part can be measured again alone. What is written is complete: a program that lacks
its peer is broken then. With --quick inputs are small, two processes run at a time, none for more
than ten minutes a program, those with Spark together in one, and what is printed is no measurement:
it shows that they work. One that ends with an error ends the run, after the others. SIGTERM and
Ctrl-C end the programs too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from bench import readme
from bench.page import PROGRAMS, WITH_SPARK, Result, Results, has_path, machine
from tests import class_archives

QUICK_LIMIT_S: Final = 600
LAST_WORDS_S: Final = 30
"""What a program has to end its brokers and remove its files."""


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
    started, broken = time.monotonic(), list[str]()
    runs = grouped(names) if options.quick else [[name] for name in names]
    runner = Runner(options.path, is_quick=options.quick, needs_peers=options.write)
    at_once = ThreadPoolExecutor(2 if options.quick else 1)
    try:
        for run, result in zip(runs, at_once.map(runner.run, runs), strict=True):
            if result is None:
                broken += run
            elif options.write:
                results = Results.load()
                results.add(result)
                results.save()
    finally:
        at_once.shutdown(wait=False, cancel_futures=True)
        runner.end()
    if options.write:
        results = Results.load()
        results.render()
        readme.write(results)
    seconds = round(time.monotonic() - started)
    print(f"=== {len(names)} programs: {seconds} s", file=sys.stderr, flush=True)
    if broken:
        raise SystemExit(f"broken: {', '.join(broken)}")


def grouped(names: Sequence[str]) -> list[list[str]]:
    """Return what is run in one process each: the programs with Spark, and each of the others.

    What takes longest is first, so that it is not alone in the end.
    """
    with_spark = [name for name in WITH_SPARK if name in names]
    others = [[name] for name in names if name not in with_spark]
    return [with_spark, *others] if with_spark else others


class Runner:
    """Runs programs, and ends those that run too long or are not wanted any more."""

    def __init__(self, path: Path | None, *, is_quick: bool, needs_peers: bool) -> None:
        self._path = path
        self._is_quick = is_quick
        self._needs_peers = needs_peers
        self._running = set[subprocess.Popen[str]]()
        self._lock = threading.Lock()
        self._is_over = False

    def run(self, names: Sequence[str]) -> Result | None:
        """Run a program, pass its lines on, and return what it found; None if it broke.

        Several are run together. The result, which is for the page, says where it was found if it
        is to be kept.
        """
        name = names[0] if len(names) == 1 else "together"
        arguments = ["-m", f"bench.{name}", *(names if len(names) > 1 else [])]
        arguments += ["--quick"] if self._is_quick else []
        path = ["--path", str(self._path)] if self._path and all(map(has_path, names)) else []
        print(f"=== python {' '.join([*arguments, *path])}", file=sys.stderr, flush=True)
        started, claims = time.monotonic(), list[dict[str, Any]]()
        with self._start([sys.executable, *arguments, *path, "--json"]) as process:
            limit = threading.Timer(QUICK_LIMIT_S * len(names), end, [process])
            limit.daemon = True
            if self._is_quick:
                limit.start()
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith("{"):
                        claims.append(json.loads(line))
                        print(line, end="", flush=True)
                    else:
                        print(line, end="", file=sys.stderr, flush=True)
                process.wait()
            finally:
                limit.cancel()
                end(process)
        self._running.discard(process)
        seconds = round(time.monotonic() - started)
        print(f"=== {name}: {seconds} s", file=sys.stderr, flush=True)
        if process.returncode or not claims:
            return None
        place = self._path or Path(tempfile.gettempdir())
        seen = machine(place) if self._needs_peers else {}
        return Result(name, " ".join(["python", *arguments]), seconds, seen, claims)

    def end(self) -> None:
        """End all that run; no more is started."""
        with self._lock:
            self._is_over = True
            running = [*self._running]
        for process in running:
            end(process)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, **({"CI": "1"} if self._needs_peers else {})}
        if self._is_quick:
            words = [*class_archives.QUICK_JVM, *class_archives.options(class_archives.SPARK)]
            environment["JAVA_TOOL_OPTIONS"] = " ".join(words)
        with self._lock:
            if self._is_over:
                raise SystemExit("not started: the run is over")
            # In a session of its own, so that all it has started can be ended with it.
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
        return process


def end(process: subprocess.Popen[str]) -> None:
    """Let a program clean up if it still runs, then end what is left of it."""
    if process.poll() is None:
        print(f"=== ending process {process.pid}", file=sys.stderr, flush=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
