"""A micro-batch after a quiet minute and a half, next to an empty source and sink in Python.

    python -m bench.idle [--json] [--quick] [--path DIR] [--rounds N]

Spark ends Python workers that had nothing to do for 60 s (a constant of its own), so the next
micro-batch pays for new ones. Two queries, each in a process with a Spark of its own, wait at the
same time: `format("kafkalog")` as source and sink, and a source and a sink that do nothing. After
90 s, when neither has a worker left, each gets one row, the one when the other is done, and who
begins changes; told is what Spark says that the micro-batch took (`triggerExecution`). With --quick
nobody waits: the workers are ended as Spark does it, by a signal. Beside it stands a micro-batch
with workers at hand. Memory is the most that one worker had resident, and a claim of its own. In
the end the topic that was written must hold every row.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import kafkalog
from bench import in_turn, program, report
from bench.cold_start import NOW_MS, ROW, over_floor, prepare
from bench.query_process import TOPIC, QueryProcess

IDLE_S: Final = 90
WARM_UPS: Final = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("idle", __doc__, quick="end the workers instead of waiting")
    parser.add_argument("--rounds", type=int, help="rounds")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 3)
    warm_ups = 1 if options.quick else WARM_UPS
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        scratch = Path(directory)
        prepare(scratch)
        with (
            QueryProcess(scratch, "kafkalog", "kafkalog") as ours,
            QueryProcess(scratch, "ready", "ready") as floor,
        ):
            sides = {"ours": ours, "floor": floor}
            for side in sides.values():
                side.ask("session")
                side.ask("first")
            busy, idle = [], []
            for turn in range(warm_ups + rounds):
                busy.append(one_batch(scratch, sides, turn))
            for turn in range(rounds):
                if options.quick:
                    end_workers(sides)
                else:
                    time.sleep(IDLE_S)
                for name, side in sides.items():
                    if left := side.ask("workers"):
                        raise SystemExit(f"{name}: {left} workers are left after the idle time")
                idle.append(one_batch(scratch, sides, turn))
        check(scratch, 1 + warm_ups + 2 * rounds)
    show("a micro-batch after 90 s without one", idle, "<= 0.5", as_json=options.json)
    show("a micro-batch of one row, workers at hand", busy[warm_ups:], "", as_json=options.json)
    show_memory(busy[warm_ups:], as_json=options.json)


def end_workers(sides: Mapping[str, QueryProcess]) -> None:
    """End all workers as Spark does."""
    for name, side in sides.items():
        if not side.ask("drop"):
            raise SystemExit(f"{name}: there was no worker to end")


def one_batch(
    scratch: Path, sides: Mapping[str, QueryProcess], turn: int
) -> dict[str, dict[str, Any]]:
    """Give each side a row, one after the other, and return what they say of the micro-batch."""
    found = {}
    for name, side in in_turn(turn, list(sides.items())):
        before = side.ask("next")["batch"]
        if name == "ours":
            with kafkalog.open(scratch / "log") as log:
                log.append(TOPIC, [ROW], now_ms=NOW_MS)
        else:
            with (scratch / "rows").open("ab") as file:
                file.write(b"1")
        while (told := side.ask("next"))["batch"] == before:
            time.sleep(0.01)
        if told["rows"] != 1:
            raise SystemExit(f"{name}: a micro-batch has {told['rows']} rows")
        found[name] = told
    return found


def check(scratch: Path, count: int) -> None:
    """End the program unless so many rows were written by our sink."""
    with kafkalog.open(scratch / "log", read_only=True) as log:
        batches = list(log.read("out", 0))
    rows = [row for batch in batches for row in batch.select(["key", "value"]).to_pylist()]
    key, value = (text.encode() for text in ROW)
    if rows != [{"key": key, "value": value}] * count:
        raise SystemExit(f"the sink has written {len(rows)} rows, or others than the {count} given")


def show(
    title: str, batches: list[dict[str, dict[str, Any]]], target: str, *, as_json: bool
) -> None:
    """Print what was measured, and the memory of a worker."""
    seconds = {name: [each[name]["seconds"] for each in batches] for name in ("ours", "floor")}
    mib = {name: round(max(each[name]["worker_mib"] for each in batches), 1) for name in seconds}
    claim = over_floor(title, seconds["ours"], seconds["floor"], target)
    claim = dataclasses.replace(
        claim,
        peer_name="an empty source and sink in Python",
        ours_mib=mib["ours"],
        peer_mib=mib["floor"],
    )
    report(claim.told(memory_is="of one worker"), as_json=as_json)


def show_memory(batches: list[dict[str, dict[str, Any]]], *, as_json: bool) -> None:
    """Print how much more memory the largest worker of ours had resident."""
    mib = {name: [each[name]["worker_mib"] for each in batches] for name in ("ours", "floor")}
    claim = over_floor("a worker's memory after a micro-batch", mib["ours"], mib["floor"], "<= 25")
    claim = dataclasses.replace(
        claim, unit="MiB", ratio_is="MiB more", peer_name="an empty source and sink in Python"
    )
    report(claim, as_json=as_json)


if __name__ == "__main__":
    main()
