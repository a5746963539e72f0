"""Fuzz every decoder with malformed bytes, which it may only refuse.

    python -m tests.torture.fuzz [--quick] [--seconds S] [--target NAME] [--engine NAME] [--jobs N]
    python -m tests.torture.fuzz --only FILE

A decoder returns a value or raises a documented error. Anything else is a violation: another error,
a death of the interpreter, more memory than its bound, or more than 2 s of CPU (20 s under
`coverage`). The memory is not measured under AddressSanitizer.

Five engines share the seconds. These are CPU seconds of all jobs and all decoders together (an hour
in a full run). The engine `coverage` (atheris) looks for inputs that reach new lines, with the
kernels as Python. The engine `hypothesis` puts numbers and pieces into seeds, and `mutation`
changes seeds; both use the ordinary kernels. Two more engines are `mutation`: `bounds` with kernels
that check bounds, and `sanitizers` under AddressSanitizer and UBSan. All engines but `coverage`
start from the seeds and the findings of `coverage`, and build on inputs that end at a new place.
Most changed inputs get valid checksums again. A full run is incomplete, and ends with 1, if it
spends less, leaves out a decoder, or has no atheris.

The seed determines the draws; the number of draws in these seconds depends on the machine. The
program keeps the input of a violation in tests/torture/findings/TARGET/, where a test replays it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.torture import Tally, parser
from tests.torture.fuzz_children import KEPT, Finding, Piece, run_piece
from tests.torture.fuzz_targets import targets
from tests.torture.scratch import memory_disk, scratch

_QUICK_SECONDS: Final = 10.0
"""For all targets; the rest of half a minute is for the start of a process or two."""
_FULL_SECONDS: Final = 3600.0
_SHARES: Final = {
    "coverage": 0.4,
    "hypothesis": 0.15,
    "mutation": 0.15,
    "bounds": 0.15,
    "sanitizers": 0.15,
}
_REPLAYS: Final = ("replay", "replay-sanitizers")
_CORPUS_MAX: Final = 300
"""Inputs of the coverage engine that the others begin with, the latest ones."""


_NO_COVERAGE: Final = "the engine coverage: atheris is not installed; pip install -e '.[fuzz]'"


@dataclass
class Run:
    """What came of a run so far."""

    tally: Tally
    findings: Path
    executions: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the processor, by engine."""
    only_plain: int = 0

    def count(self, engine: str, executions: dict[str, int]) -> None:
        """Count executions, by target and engine."""
        for name, number in executions.items():
            of_target = self.executions.setdefault(name, {})
            of_target[engine] = of_target.get(engine, 0) + number
            self.tally.tried(number)

    @contextlib.contextmanager
    def timed(self, engine: str) -> Iterator[None]:
        """Count the seconds of the processor that an engine's processes take."""
        before = _seconds_of_children()
        try:
            yield
        finally:
            self.seconds[engine] = _seconds_of_children() - before

    def keep(self, finding: Finding) -> None:
        """Keep the input of a finding for good, and tell it."""
        place = self.findings / finding.target
        place.mkdir(parents=True, exist_ok=True)
        kept = place / finding.path.name
        if finding.path.resolve() != kept.resolve():
            shutil.copyfile(finding.path, kept)
        shown = kept.relative_to(Path.cwd()) if kept.is_relative_to(Path.cwd()) else kept
        self.tally.more["inputs_kept_in"] = str(place.parent)
        self.tally.violated(str(shown), f"{finding.target}: {finding.told} [{finding.place}]")


def fuzz(options: argparse.Namespace, run: Run) -> None:
    """Run all engines over the targets."""
    names = options.target or list(targets())
    engines = options.engine or _engines(quick=options.quick)
    seconds = options.seconds or (_QUICK_SECONDS if options.quick else _FULL_SECONDS)
    with scratch("fuzz") as place:
        corpus: dict[str, list[str]] = {}
        for engine in engines:
            weights = sum(targets()[name].weight for name in names)
            share = seconds * _SHARES[engine] / sum(_SHARES[each] for each in engines)
            groups = [names] if options.quick else [[name] for name in names]
            pieces = [
                Piece(
                    engine=engine,
                    targets=group,
                    seconds=share / weights,
                    seed=options.seed,
                    directory=Path(place) / f"{engine}-{group[0]}",
                    inputs={name: corpus[name] for name in group if name in corpus},
                    plant=options.plant,
                )
                for group in groups
            ]
            with run.timed(engine), ThreadPoolExecutor(options.jobs) as pool:
                for piece, (executions, found) in zip(
                    pieces, pool.map(run_piece, pieces), strict=True
                ):
                    run.count(engine, executions)
                    for finding in found:
                        if engine != "coverage" or _is_confirmed(finding, options):
                            run.keep(finding)
                        else:
                            run.only_plain += 1
                    if engine == "coverage":
                        corpus.update(_corpus(piece))


def replay(path: Path, options: argparse.Namespace, run: Run) -> None:
    """Decode one kept input, with each build of the kernels."""
    name = options.target[0] if options.target else path.resolve().parent.name
    for engine in _REPLAYS:
        executions, found = _replayed(name, path, engine, options)
        run.count(engine, executions)
        for finding in found:
            run.keep(finding)


def _is_confirmed(finding: Finding, options: argparse.Namespace) -> bool:
    """Tell whether compiled kernels do it too: as plain Python they overflow elsewhere."""
    return any(_replayed(finding.target, finding.path, engine, options)[1] for engine in _REPLAYS)


def _replayed(
    name: str, path: Path, engine: str, options: argparse.Namespace
) -> tuple[dict[str, int], list[Finding]]:
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory_disk()) as place:
        piece = Piece(
            engine=engine,
            targets=[name],
            directory=Path(place),
            inputs={name: [str(path.resolve())]},
            plant=options.plant,
        )
        return run_piece(piece)


def _corpus(piece: Piece) -> dict[str, list[str]]:
    found = {}
    for name in piece.targets:
        files = [
            path for path in (piece.directory / "corpus" / name).glob("*") if path.stat().st_size
        ]
        files.sort(key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
        found[name] = [str(path) for path in files[:_CORPUS_MAX]]
    return found


def _engines(*, quick: bool) -> list[str]:
    """Return the engines that can run here."""
    if quick:
        return ["hypothesis", "mutation"]
    return [engine for engine in _SHARES if engine != "coverage" or _has_atheris()]


def _has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _show(run: Run) -> None:
    """Print the executions of every target, by engine."""
    width = max(map(len, run.executions), default=0)
    for name, by_engine in run.executions.items():
        told = ", ".join(f"{engine} {number:,}" for engine, number in by_engine.items())
        print(f"fuzz: {name:{width}} {sum(by_engine.values()):>12,}  ({told})", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Fuzz, or replay, and report."""
    made = parser("fuzz", __doc__)
    made.add_argument("--seconds", type=float, help="of the processor, for all targets together")
    made.add_argument("--target", action="append", metavar="NAME", help="only this decoder")
    made.add_argument("--engine", action="append", choices=_SHARES, help="only this one")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    made.add_argument("--findings", type=Path, default=KEPT, help="where inputs are kept")
    made.add_argument("--plant", default="", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    for name in options.target or ():
        if name not in targets():
            made.error(f"--target: expected one of {', '.join(targets())}, found {name}")
    run = Run(Tally("fuzz", "inputs decoded", options), options.findings)
    if options.only:
        replay(Path(options.only), options, run)
    else:
        if not (options.quick or options.engine or _has_atheris()):
            print(f"fuzz: without {_NO_COVERAGE}", file=sys.stderr)
        fuzz(options, run)
        _show(run)
    run.tally.more["decoders"] = len(run.executions)
    run.tally.more["fewest_of_one"] = min(
        (sum(by_engine.values()) for by_engine in run.executions.values()), default=0
    )
    if run.only_plain:
        run.tally.more["findings_of_kernels_as_plain_Python_alone"] = run.only_plain
    for engine, seconds in run.seconds.items():
        run.tally.more[f"processor_seconds_of_{engine}"] = round(seconds)
    missing = [] if options.quick or options.only else _missing(run, options)
    if missing:
        run.tally.more["missing"] = "; ".join(missing)
    run.tally.report()
    if missing:
        raise SystemExit(f"fuzz: NOT COMPLETE: {'; '.join(missing)}")


def _missing(run: Run, options: argparse.Namespace) -> list[str]:
    """Say what a full run has not done, of all that was asked for."""
    found = []
    if not (options.engine or _has_atheris()):
        found.append(_NO_COVERAGE)
    untried = {*(options.target or targets())} - {*run.executions}
    found += [f"no input of {name}" for name in sorted(untried)]
    spent = sum(run.seconds.values())
    if options.seconds is None and spent < _FULL_SECONDS:
        found.append(f"{spent:.0f} of {_FULL_SECONDS:.0f} seconds of the processor")
    return found


if __name__ == "__main__":
    main()
