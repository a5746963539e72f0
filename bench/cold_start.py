"""The first micro-batch of a query in a new process, next to an empty source in Python.

    python -m bench.cold_start [--json] [--quick] [--path DIR] [--rounds N]

Each start is a process of its own with a Spark of its own. Timed is what lies between the query's
start and the end of its first micro-batch, which has one row, into Spark's `noop` sink: with
`format("kafkalog")`, and with a source that gives a row without looking at anything, the least that
any source in Python costs. They take turns, and who begins changes from round to round. Memory is
the sum of what each of a start's processes had resident at most: the driver's Python, its JVM, the
workers.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import kafkalog
from bench import Claim, in_turn, program, report
from bench.query_process import TOPIC, QueryProcess

OVER: Final = "s more"
NOW_MS: Final = 1_700_000_000_000
ROW: Final = ("key", "value")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("cold_start", __doc__, quick="one round")
    parser.add_argument("--rounds", type=int, help="rounds")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 7)
    starts: dict[str, list[Start]] = {"floor": [], "kafkalog": []}
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        for turn in range(rounds):
            for name in in_turn(turn, list(starts)):
                starts[name].append(first(Path(directory, f"{name}-{turn}"), name))
        show(starts["kafkalog"], starts["floor"], as_json=options.json)


@dataclass(frozen=True, slots=True)
class Start:
    """The time of the first micro-batch, and the memory of the processes."""

    seconds: float
    mib: float


def first(scratch: Path, name: str) -> Start:
    """Start a query in a new process."""
    scratch.mkdir(parents=True)
    prepare(scratch)
    way = "ready" if name == "floor" else "kafkalog"
    with QueryProcess(scratch, way, "noop") as process:
        process.ask("session")
        seconds = float(process.ask("first"))
        told = process.ask("next")
        if told["rows"] != 1:
            raise SystemExit(f"{name}: the first micro-batch has not one row")
    return Start(seconds, told["all_mib"])


def prepare(scratch: Path) -> None:
    """Write one row for either source."""
    (scratch / "rows").write_bytes(b"1")
    with kafkalog.open(scratch / "log") as log:
        log.create_topic(TOPIC)
        log.append(TOPIC, [ROW], now_ms=NOW_MS)
        assert sum(batch.num_rows for batch in log.read(TOPIC, 0)) == 1


def show(ours: Sequence[Start], floor: Sequence[Start], *, as_json: bool) -> None:
    """Print what was measured."""
    claim = over_floor(
        "first micro-batch of a query in a new process",
        [start.seconds for start in ours],
        [start.seconds for start in floor],
        "<= 0.3",
    )
    ours_mib, peer_mib = (max(start.mib for start in side) for side in (ours, floor))
    claim = replace(claim, ours_mib=round(ours_mib, 1), peer_mib=round(peer_mib, 1))
    report(claim, as_json=as_json)


def over_floor(title: str, ours: Sequence[float], floor: Sequence[float], target: str) -> Claim:
    """Return a claim of how many seconds ours takes more."""
    more = [mine - theirs for mine, theirs in zip(ours, floor, strict=True)]
    return Claim(
        claim=title,
        ours=round(statistics.median(ours), 3),
        peer=round(statistics.median(floor), 3),
        unit="s",
        peer_name="an empty source in Python",
        ratio=round(statistics.median(more), 3),
        ratio_is=OVER,
        target=target,
        rounds=len(more),
    )


if __name__ == "__main__":
    main()
