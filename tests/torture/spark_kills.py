"""Kill Spark queries and their upserts; log and tables have each record once.

The program runs the suite's tests that kill, with more kills than the suite has. They kill whole
queries into a log, JVM and Python. They kill queries into a log and out of it into tables, as a
whole or one process at a time. That process is a task's, the executor, the committer or the reader.
Each kill aims at a moment, such as between the append and the commit. In addition, processes
without Spark die before and after each durable act of a commit and each statement of an upsert.

    python -m tests.torture.spark_kills [--quick] [--seed N] [--only NAME]

NAME is one of query, steps, upserts. The seed draws delays and victims; Spark's state at that
moment depends on real time. The kill of a whole query counts once, for all of its processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from tests import ROOT
from tests.torture import Tally, parser
from tests.torture.scratch import ending

TARGET: Final = 200
SUITES: Final[Mapping[str, Mapping[str, str]]] = {
    "query": {"KAFKALOG_KILLS": "20"},
    "steps": {"KAFKALOG_STEPS": "every"},
    "upserts": {"KAFKALOG_KILLS": "20", "KAFKALOG_WORKER_KILLS": "70"},
}
"""What is done, and how often; upserts go to databases, and as often to Delta Lake.

A sample is what the suite does.
"""

_PATIENCE_S: Final = 60
_TOLD: Final = 40
"""Last lines of a test that failed."""


def kill(name: str, more: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a test; returns its status and what it says, which is passed on as it comes."""
    path = f"tests/acceptance/test_killed_{name}.py"
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", path]
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **more}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(f"spark_kills: {line}", end="", file=sys.stderr, flush=True)
                lines.append(line.rstrip())
        except BaseException:
            process.send_signal(signal.SIGINT)  # so that it ends what it has started
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            process.kill()
            raise
    return process.returncode, lines


def counted(lines: list[str], kind: str) -> Counter[str]:
    """Add up what the lines say of one kind: `kills`, or what there was `beside` them."""
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith(('{"kills"', '{"beside"')):
            found.update(json.loads(line).get(kind, {}))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run all, or one; report."""
    options = parser("spark_kills", __doc__).parse_args(arguments)
    tally = Tally("spark_kills", "SIGKILLs of Spark's queries and upserts", options, TARGET)
    totals: Counter[str] = Counter()
    with ending():
        for name in [options.only] if options.only else SUITES:
            times = {} if options.quick else SUITES[name]
            status, lines = kill(name, {**times, "KAFKALOG_SEED": str(options.seed)})
            kills = counted(lines, "kills")
            tally.tried(kills.total())
            totals += kills + counted(lines, "beside")
            if status:
                tally.violated(name, "\n".join(lines[-_TOLD:]))
    tally.more |= totals
    tally.report()


if __name__ == "__main__":
    main(sys.argv[1:])
