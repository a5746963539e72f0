"""Benchmarks: one program per claim, next to a peer that it starts itself, in one run.

Ours and the peer take turns, round by round, so that a slow moment of the machine meets both; a
claim is the two medians and the median of the rounds' ratios. `python -m bench.NAME` prints it as
text, with `--json` as one line; `python -m bench` runs them all, and with `--write` writes
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from bench.memory import peak_mib, reset_peak

__all__ = [
    "LESS",
    "MORE",
    "NO_BYTECODE",
    "Claim",
    "Side",
    "compare",
    "compare_figures",
    "in_turn",
    "leave_out",
    "program",
    "report",
]

MORE: Final = "times as fast"
"""The ratio is the peer's time / ours, or our rate / the peer's: more is better."""
LESS: Final = "of its time"
"""The ratio is our time / the peer's: less is better."""
NO_BYTECODE: Final = "PYTHONDONTWRITEBYTECODE"
"""With it every new process would compile our sources: installed ones are compiled already."""

_T = TypeVar("_T")
_IS_MET: Final = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A result of a measurement.

    `claim` names the work and its size; `ours` and `peer` are medians in `unit`; `ratio` is the
    median of the rounds' ratios, and `ratio_is` says which way: "times as fast" (`MORE`), "of its
    time" (`LESS`), "of its bytes". `target` is what is promised of the ratio, ">= 3" or "<= 1.5",
    or of our figure itself, "ours <= 5".
    The memory is the most that each had resident, in MiB; `more` has what else is worth knowing.
    """

    claim: str
    ours: float
    peer: float
    unit: str
    peer_name: str
    ratio: float
    ratio_is: str = MORE
    target: str = ""
    rounds: int = 1
    ours_mib: float | None = None
    peer_mib: float | None = None
    more: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the target holds; None without a target."""
        if not self.target:
            return None
        *about, sign, bound = self.target.split()
        figure = self.ours if about == ["ours"] else self.ratio
        return bool(_IS_MET[sign](figure, float(bound)))

    def told(self, **more: float | int | str) -> Claim:
        """Return the claim with more to tell."""
        return replace(self, more={**self.more, **more})


def program(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser of the options that programs share; `quick` says what is less then."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure")
    return parser


class Side:
    """One side of a claim: the `seconds` of its calls, and the most MiB resident while at them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mib = 0.0

    def time(self, call: Callable[[], _T], *, is_counted: bool = True) -> _T:
        """Make a call, and return what it returns."""
        reset_peak()
        gc.disable()  # neither side pays for the other's garbage
        try:
            start = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - start
        finally:
            gc.enable()
        if is_counted:
            self.seconds.append(seconds)
            self.mib = max(self.mib, peak_mib())
        return result

    @property
    def ms(self) -> list[float]:
        """The same times in ms."""
        return [seconds * 1000 for seconds in self.seconds]


def in_turn(turn: int, sides: Sequence[_T]) -> list[_T]:
    """Return the sides in the order of a turn: another one begins each time."""
    first = turn % len(sides)
    return [*sides[first:], *sides[:first]]


def compare(
    claim: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    amount: float,
    unit: str,
    rounds: int,
    peer_name: str,
    ratio_is: str = MORE,
    target: str = "",
) -> Claim:
    """Time both, in turn, and compare their rates: `amount` (in `unit` times seconds) per call.

    The first round warms up and is not counted. They begin by turns, round by round. Both
    run in this process, so the memory of each is the most that was resident while it ran, with
    what the process holds for both.
    """
    mine, theirs = Side(), Side()
    for turn in range(rounds + 1):
        for side, call in in_turn(turn, [(mine, ours), (theirs, peer)]):
            gc.collect()
            side.time(call, is_counted=turn > 0)
    return compare_figures(
        claim,
        [amount / seconds for seconds in mine.seconds],
        [amount / seconds for seconds in theirs.seconds],
        unit=unit,
        peer_name=peer_name,
        ratio_is=ratio_is,
        target=target,
        ours_mib=mine.mib,
        peer_mib=theirs.mib,
    )


def compare_figures(
    claim: str,
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    unit: str,
    peer_name: str,
    ratio_is: str = LESS,
    target: str = "",
    is_time: bool = False,
    ours_mib: float | None = None,
    peer_mib: float | None = None,
) -> Claim:
    """Compare figures that were taken in turn, one of each a round.

    The ratio of a round is ours / peer; with `is_time` and `MORE` it is peer / ours, as of two
    times the shorter one is the faster.
    """
    is_inverse = is_time and ratio_is == MORE
    ratios = [b / a if is_inverse else a / b for a, b in zip(ours, peer, strict=True)]
    return Claim(
        claim=claim,
        ours=_rounded(statistics.median(ours)),
        peer=_rounded(statistics.median(peer)),
        unit=unit,
        peer_name=peer_name,
        ratio=_rounded(statistics.median(ratios)),
        ratio_is=ratio_is,
        target=target,
        rounds=len(ratios),
        ours_mib=None if ours_mib is None else round(ours_mib, 1),
        peer_mib=None if peer_mib is None else round(peer_mib, 1),
    )


def report(claim: Claim, *, as_json: bool) -> None:
    """Print one claim as a JSON line or a line to read."""
    if as_json:
        print(json.dumps({**asdict(claim), "is_met": claim.is_met}), flush=True)
        return
    words = [
        f"{claim.claim}: {claim.ours:,} {claim.unit}, {claim.peer_name} {claim.peer:,}",
        f"{claim.ratio:,} {claim.ratio_is}",
    ]
    if claim.target:
        words.append(f"target {claim.target}: {'met' if claim.is_met else 'MISSED'}")
    if claim.ours_mib is not None:
        words.append(f"memory {claim.ours_mib:,} MiB")
    if claim.peer_mib is not None:
        words.append(f"the peer's {claim.peer_mib:,} MiB")
    words += [f"{name.replace('_', ' ')} {value}" for name, value in claim.more.items()]
    print("; ".join(words), flush=True)


def leave_out(what: str, reason: str) -> None:
    """Say that a peer is not to be had here; where CI runs (`CI` is set) that is a failure."""
    print(f"left out: {what}: {reason}", file=sys.stderr, flush=True)
    if os.environ.get("CI"):
        raise SystemExit(1)


def _rounded(figure: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{figure:.4g}")


def _ended(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if sys.argv[0] == "-m":  # a program starts; tests, which import this too, choose for themselves
    os.environ.setdefault("KAFKALOG_PEER", "jars")
    signal.signal(signal.SIGTERM, _ended)  # what it started is ended, its files removed
