"""The cost of cleaning a log that is all dirty, while it grows to 100 times its size.

    python -m bench.growth_curve [--json] [--quick] [--path DIR] [--scales N,...] [--limit S]

A log of 1,000,000 records of 100 bytes with 500,000 keys, each of which comes twice, in random
order; one of ten and one of a hundred times as many. Nothing of it is clean yet. The buffer is
128 MiB throughout: it holds the keys of the second log, and a tenth of those of the third. Measured
is the time of a cleaning for each byte of the log. The small log is the peer of the others.

Kafka's cleaner (`kafka_cleaner`) gets the same logs, after ours. It rewrites the log for each
filling of its buffer. After `--limit` seconds it is cut short, and its figure is what it had taken
by then: the true one is higher. Of the log that we leave, each offset must be that of the last
record of a key. In the two smaller logs, Kafka's must have the same records.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

import kafkalog
from bench import (
    LESS,
    MORE,
    Claim,
    compare_figures,
    kafka_cleaner,
    leave_out,
    overwritten,
    program,
    report,
)
from bench.clean import check_alike
from bench.cleaning_process import Cleaning, CleaningProcess
from bench.kafka_cleaner import KafkasCleaner, KafkasCleaning
from bench.overwritten import TOPIC, Int64s

RECORDS: Final = 1_000_000
BUFFER: Final = 128 << 20
CONFIG: Final = {
    "cleanup.policy": "compact",
    "compression.type": "uncompressed",
    "segment.bytes": str(1 << 30),
    "file.delete.delay.ms": "1000",
}
ROUNDS: Final = 3
"""Cleanings of a log, of which the median counts; the largest log is cleaned once."""
LIMIT_S: Final = 240
"""Kafka's cleaner needs some twenty rewrites of the largest log."""
COMPARED_MAX: Final = 10
"""The largest scale whose records are compared one by one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the cleanings of one log took."""

    scale: int
    size: int
    """Bytes of the log, all dirty."""
    ours: Sequence[Cleaning]
    theirs: Sequence[KafkasCleaning]

    @property
    def seconds_per_gb(self) -> float:
        """Our seconds for 10^9 dirty bytes."""
        return statistics.median(took.seconds for took in self.ours) / self.size * 1e9


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("growth_curve", __doc__, quick="a fiftieth of the records, no largest log")
    parser.add_argument("--scales", default="1,10,100", help="sizes, as multiples of the first")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for Kafka's cleaner")
    options = parser.parse_args(arguments)
    scales = [int(scale) for scale in options.scales.split(",")]
    records = RECORDS
    if options.quick:
        scales, records = scales[:2], RECORDS // 50
    costs = list[Cost]()
    with (
        tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch,
        CleaningProcess() as process,
    ):
        for scale in scales:
            place = Path(scratch, str(scale))
            place.mkdir()
            costs.append(measured(scale, records, place, process, options.limit))
            shutil.rmtree(place)  # the next one needs the room
            for claim in told(costs[-1], costs[0], records):
                report(claim, as_json=options.json)


def measured(
    scale: int, records: int, place: Path, process: CleaningProcess, limit_s: float
) -> Cost:
    """Build a log of one scale, and let both clean it."""
    count = records * scale
    numbers = np.random.default_rng(1).permutation(count) % (count // 2)
    log, copy = place / "log", place / "copy"
    end = overwritten.build(log, numbers, CONFIG)
    segments = [*overwritten.partition_of(log).glob("*.log")]
    size = sum(path.stat().st_size for path in segments)
    rounds = ROUNDS if scale <= COMPARED_MAX else 1
    if scale == 1:  # the first cleaning of a process is not counted
        cleaned(process, overwritten.link(log, copy))
        shutil.rmtree(copy)
    ours = []
    for turn in range(rounds):
        ours.append(cleaned(process, overwritten.link(log, copy)))
        if not turn:
            check(copy, numbers)
        if turn + 1 < rounds or scale > COMPARED_MAX:
            shutil.rmtree(copy)
    del numbers
    theirs = list[KafkasCleaning]()
    reason = kafka_cleaner.fault()
    if reason:
        leave_out("Kafka's cleaner", reason)
        return Cost(scale, size, ours, theirs)
    source = (overwritten.partition_of(log), end, CONFIG)
    warm_up = int(scale == 1)
    with KafkasCleaner(place / "broker", [source] * (rounds + warm_up), buffer_size=BUFFER) as peer:
        if warm_up:
            peer.clean()
        for _ in range(rounds):
            theirs.append(peer.clean(limit_s=limit_s))
        if scale <= COMPARED_MAX:
            check_alike(copy, peer.broker.log_dir, theirs[-1].topic)
    return Cost(scale, size, ours, theirs)


def told(cost: Cost, small: Cost, records: int) -> Iterator[Claim]:
    """Return what a log's cost shows, compared with Kafka's and with the small log's."""
    count = records * cost.scale
    what = f"cleaning {count:,} records, {count // 2:,} keys, all dirty"
    ours = [took.seconds / cost.size * 1e9 for took in cost.ours]
    our_mib = max(took.mib for took in cost.ours)
    if cost.theirs:
        is_cut = any(took.is_cut_short for took in cost.theirs)
        yield compare_figures(
            what,
            ours,
            [took.seconds / cost.size * 1e9 for took in cost.theirs],
            unit="s/GB",
            peer_name=f"{kafka_cleaner.NAME}{', cut short' if is_cut else ''}",
            ratio_is=MORE,
            is_time=True,
            ours_mib=our_mib,
            peer_mib=max((took.mib for took in cost.theirs if took.mib is not None), default=None),
        ).told(
            MB_of_log=round(cost.size / 1e6),
            our_CPU_s=round(statistics.median(took.cpu_seconds for took in cost.ours), 2),
            CPU_s_of_their_thread=round(
                statistics.median(took.cpu_seconds for took in cost.theirs), 2
            ),
            our_rewrites=cost.ours[-1].rounds,
            their_rewrites=cost.theirs[-1].rounds,
            **({"they_had_cleaned": f"{cost.theirs[-1].end / count:.0%}"} if is_cut else {}),
        )
    if cost.scale > small.scale:
        yield Claim(
            claim=f"{what}, for each byte",
            ours=float(f"{cost.seconds_per_gb:.4g}"),
            peer=float(f"{small.seconds_per_gb:.4g}"),
            unit="s/GB",
            peer_name=f"the same for {records * small.scale:,} records",
            ratio=float(f"{cost.seconds_per_gb / small.seconds_per_gb:.4g}"),
            ratio_is=LESS,
            target="<= 1.5",
            rounds=len(cost.ours),
            ours_mib=round(our_mib, 1),
            peer_mib=round(max(took.mib for took in small.ours), 1),
        ).told(of_CPU_time=f"{cpu(cost) / cpu(small):.2f} of its time")


def cpu(cost: Cost) -> float:
    """Return our seconds on a processor for each byte."""
    return statistics.median(took.cpu_seconds for took in cost.ours) / cost.size


def cleaned(process: CleaningProcess, root: Path) -> Cleaning:
    """Clean a log."""
    return process.clean(root, TOPIC, buffer_size=BUFFER, now_ms=2 * overwritten.NOW_MS)


def check(root: Path, numbers: Int64s) -> None:
    """End the program unless the last record of each key is left, and no other."""
    latest = np.empty(len(numbers) // 2, dtype=np.int64)
    latest[numbers] = np.arange(len(numbers))  # of equal indexes the last one counts
    latest.sort()
    place = 0
    with kafkalog.open(root, read_only=True) as log:
        for rows in log.read(TOPIC, 0):
            offsets = np.asarray(rows["offset"])
            if not np.array_equal(latest[place : place + len(offsets)], offsets):
                raise SystemExit(f"other records than the last ones are left at {offsets[0]:,}")
            place += len(offsets)
    if place != len(latest):
        raise SystemExit(f"{place:,} records are left of {len(latest):,} keys")


if __name__ == "__main__":
    main()
