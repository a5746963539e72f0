"""Run any steps in any order, and compare the log with a model after each of them.

    python -m tests.torture.model [--quick] [--seed N] [--only SEED]

The test draws logs of all codecs, segment sizes, timestamp types and budgets, with up to 50 steps
each. Steps create, change and delete topics, append, run transactions and read. They clean, apply
retention and delete records. They copy the log to an object store and back, kill the process, or
use another one. Examples are drawn in groups. Each group has its own seed, which repeats it. A
violation is printed as the shortest script that shows it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Final

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import get_state_machine_test

from tests.torture import Tally, parser
from tests.torture.model_draws import CELLS
from tests.torture.model_machine import LogMachine

__all__ = ["STEPS", "examples"]

TARGET: Final = 40_000
GROUP: Final = 20
"""Examples of one seed, about a thousand steps."""
STEPS: Final = 50
PHASES: Final = (Phase.generate, Phase.shrink)


def examples(seed: int, count: int, *, phases: Sequence[Phase] = PHASES) -> None:
    """Run as many examples from a seed; raises what the first one that fails does."""
    chosen = hypothesis.settings(
        max_examples=count,
        stateful_step_count=STEPS,
        phases=phases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    hypothesis.seed(seed)(get_state_machine_test(LogMachine, settings=chosen))()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run groups of examples until there are enough steps; a sample is one group."""
    options = parser("model", __doc__).parse_args(arguments)
    logging.disable(logging.WARNING)  # a batch that came again, a partition that was put right
    tally = Tally("model", "steps held against a model", options, TARGET)
    try:
        for number in range(1 << 30):
            seed = int(options.only or options.seed * 1_000_000 + number)
            before = LogMachine.counts["steps"]
            try:
                examples(seed, GROUP)
            except Exception as fault:
                tally.violated(str(seed), "".join(traceback.format_exception(fault)))
            tally.tried(LogMachine.counts["steps"] - before)
            if options.only or options.quick or tally.count >= TARGET:
                break
    finally:
        LogMachine.end()
    for name in ("examples", "partitions_cleaned", "deaths", "copies"):
        tally.more[name] = LogMachine.counts[name]
    tally.more["cells_of_the_matrix"] = f"{len(LogMachine.cells)} of {CELLS}"
    tally.report()


if __name__ == "__main__":
    main()
