"""Benchmarks: one program per claim; each prints JSON lines with --json.

`compare` runs ours and the peer in turn, round by round, so that a slow moment of the machine meets
both, and `report` prints a claim: its two medians and the median of the rounds' ratios.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

__all__ = ["Claim", "compare", "report"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What was measured; `ratio` says how many times faster (rates) ours is."""

    claim: str
    ours: float
    peer: float
    ratio: float
    unit: str


def compare(
    claim: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    amount: float,
    unit: str,
    rounds: int,
) -> Claim:
    """Time both, in turn, and return their rates: `amount` (in `unit` times seconds) per call.

    The first round warms up and is not counted.
    """
    rates = []
    for _ in range(rounds + 1):
        rates.append((amount / _seconds(ours), amount / _seconds(peer)))
    rates = rates[1:]
    return Claim(
        claim,
        round(statistics.median(rate for rate, _ in rates), 3),
        round(statistics.median(rate for _, rate in rates), 3),
        round(statistics.median(mine / theirs for mine, theirs in rates), 2),
        unit,
    )


def report(claim: Claim, *, as_json: bool) -> None:
    """Print one claim as a JSON line or a line to read."""
    if as_json:
        print(json.dumps(asdict(claim)), flush=True)
        return
    print(
        f"{claim.claim}: {claim.ours:.2f} {claim.unit}, peer {claim.peer:.2f}, "
        f"{claim.ratio:.1f} times",
        flush=True,
    )


def _seconds(call: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()  # neither side pays for the other's garbage
    try:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    finally:
        gc.enable()
