"""The programs that use Spark, one after the other in one process that starts it once.

    python -m bench.together PROGRAM... [ARGUMENT...]

The arguments are those of each program. Spark takes longer to start than a quick program with it,
so `python -m bench --quick` runs them by this one. Nothing is measured here: a program meets the
memory and the compiled code that the others have left. One that breaks is named in the end, and the
others are run nevertheless.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import traceback
from collections.abc import Sequence

from bench.spark import connector_fault, session


def main() -> None:
    """Run the programs; exit with 1 if one broke."""
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    with session(connector=connector_fault() is None):
        broken = run(names, sys.argv[1 + len(names) :])
    if broken:
        raise SystemExit(f"broken: {', '.join(broken)}")


def run(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Run each program, and return those that broke."""
    broken = []
    for name in names:
        print(f"=== {name}", file=sys.stderr, flush=True)
        try:
            importlib.import_module(f"bench.{name}").main(arguments)
        except (Exception, SystemExit):
            traceback.print_exc()
            broken.append(name)
    return broken


if __name__ == "__main__":
    main()
