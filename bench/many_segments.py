"""Cleaning a log of many small segments, next to Kafka's own cleaner on the same segments.

    python -m bench.many_segments [--json] [--quick] [--path DIR]

100, 1,000 and 10,000 segments of 8 records of 100 bytes, of which half are obsolete. Either cleaner
groups neighbours as long as their files fit `segment.bytes` (1 MiB) and their indexes
`segment.index.bytes`. In the first three logs the index of one segment fills that, so each segment
is rewritten and swapped alone: what is measured is the cost of a swap. In the last log the indexes
have their usual room, and the segments become a few.

The peer is the broker of `bench.clean`, with one cleaner thread, and cleans copies in turn with us.
Ours is timed around the call, theirs by the line that it logs, which has tenths of a second: so of
small logs several copies are taken together. Memory is the whole process's. What is left must be
the same, record by record (offset, key and value), and so must the number of segments. The last
claim is about us alone: what a segment costs in the largest log, compared with a tenth of it.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench import (
    LESS,
    MORE,
    Claim,
    compare_figures,
    in_turn,
    kafka_cleaner,
    leave_out,
    program,
    report,
)
from bench.clean import check_alike
from bench.cleaning_process import Cleaning, CleaningProcess
from bench.kafka_cleaner import KafkasCleaner, KafkasCleaning
from bench.overwritten import NOW_MS, TOPIC, link, partition_of, roll, table
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout

RECORDS: Final = 8
"""Records of a segment."""
SEGMENT_SIZE: Final = 1000
"""Bytes that such a segment fills while it is written."""
BUFFER: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A log to be cleaned."""

    segments: int
    rounds: int
    copies: int = 1
    """Copies that are taken together in a round."""
    is_grouped: bool = False

    @property
    def claim(self) -> str:
        """The text of the claim."""
        how = "grouped into large ones" if self.is_grouped else "each swapped alone"
        return f"clean {self.segments:,} segments of {RECORDS} records, {how}"

    @property
    def config(self) -> dict[str, str]:
        """The topic's while it is cleaned, for either side."""
        index = layout.TIME_INDEX_ENTRY.size  # of one segment
        return {
            "cleanup.policy": "compact",
            "compression.type": "producer",
            "segment.bytes": str(1 << 20),  # a broker takes no less
            "file.delete.delay.ms": "1000",
            **({} if self.is_grouped else {"segment.index.bytes": str(index)}),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    options = program("many_segments", __doc__, quick="fewer segments, one round").parse_args(
        arguments
    )
    reason = kafka_cleaner.fault()
    if reason:
        leave_out("Kafka's cleaner", reason)
    with (
        tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch,
        CleaningProcess() as process,
    ):
        found = list[tuple[Case, list[Cleaning]]]()
        for number, case in enumerate(cases(is_quick=options.quick)):
            place = Path(scratch, str(number))
            place.mkdir()
            if reason:
                alone(case, place, process)
            else:
                claim, ours = compared(case, place, process)
                found.append((case, ours))
                report(claim, as_json=options.json)
            shutil.rmtree(place)
    if found:
        report(growth(*found[-3:-1]), as_json=options.json)


def cases(*, is_quick: bool) -> list[Case]:
    """Return the logs of the claims: small, medium and large, and the last one to be grouped.

    A broker holds each segment open, and the system bounds how many copies that allows.
    """
    if is_quick:
        return [Case(10, 1), Case(40, 1), Case(40, 1, is_grouped=True)]
    large = 10_000
    return [Case(100, 3, 10), Case(1_000, 3), Case(large, 1), Case(large, 1, is_grouped=True)]


def growth(before: tuple[Case, list[Cleaning]], after: tuple[Case, list[Cleaning]]) -> Claim:
    """Compare what a segment costs, in ms, as a log grows."""
    few, many = (
        statistics.median(1e3 * took.seconds / case.segments for took in cleanings)
        for case, cleanings in (before, after)
    )
    return compare_figures(
        "cleaning for each small segment, ten times as many of them, each swapped alone",
        [many],
        [few],
        unit="ms",
        peer_name=f"the same for {before[0].segments:,} segments",
        ratio_is=LESS,
        target="<= 1.5",
        ours_mib=max(took.mib for took in after[1]),
        peer_mib=max(took.mib for took in before[1]),
    )


def build(root: Path, case: Case) -> int:
    """Write the log of a case; returns its end."""
    count = case.segments * RECORDS
    numbers = np.random.default_rng(1).permutation(np.arange(count) % (count // 2))
    with DirectoryLog(root) as engine:
        small = {"segment.bytes": str(SEGMENT_SIZE), "compression.type": "uncompressed"}
        engine.create_topic(TOPIC, 1, {"cleanup.policy": "compact", **small})
        rows = table(numbers, 0)
        engine.append(TOPIC, rows, now_ms=NOW_MS, batch_size=SEGMENT_SIZE)  # a batch for each
        end = roll(engine)
        engine.alter_topic(TOPIC, case.config)
    check_count(root, case.segments + 1)  # the active one, which is empty
    return end


def check_count(root: Path, expected: int) -> None:
    """End the program if a partition has another number of segments."""
    found = count_segments(partition_of(root))
    if found != expected:
        raise SystemExit(f"{found} segments, expected {expected}")


def count_segments(directory: Path) -> int:
    """Return how many segments a partition has."""
    return len(list(directory.glob(f"*{layout.LOG}")))


def alone(case: Case, scratch: Path, process: CleaningProcess) -> None:
    """Clean the log without a peer, and say how long it took."""
    build(scratch / "log", case)
    took = cleaned(process, link(scratch / "log", scratch / "copy"))
    print(f"{case.claim}: {took.seconds:.2f} s; no peer", file=sys.stderr, flush=True)


def compared(case: Case, scratch: Path, process: CleaningProcess) -> tuple[Claim, list[Cleaning]]:
    """Let both clean copies of a log in turn, and before that a small one that is not counted.

    Returns our cleanings, too.
    """
    small = Case(min(case.segments, 100), 1, is_grouped=case.is_grouped)
    ends = [build(scratch / "small", small), build(scratch / "log", case)]
    large = partition_of(scratch / "log"), ends[1], case.config
    sources = [(partition_of(scratch / "small"), ends[0], case.config)]
    sources += [large] * case.rounds * case.copies
    ours, theirs = list[list[Cleaning]](), list[list[KafkasCleaning]]()
    with KafkasCleaner(scratch / "broker", sources, buffer_size=BUFFER) as peer:
        cleaned(process, link(scratch / "small", scratch / "warm"))
        peer.clean()
        for turn in range(case.rounds):
            copies = [
                link(scratch / "log", scratch / f"copy-{number}") for number in range(case.copies)
            ]
            for is_ours in in_turn(turn, [True, False]):
                if is_ours:
                    ours.append([cleaned(process, copy) for copy in copies])
                else:
                    theirs.append([peer.clean() for _ in copies])
            for copy, their in zip(copies, theirs[-1], strict=True):
                check_alike(copy, peer.broker.log_dir, their.topic)
                left = count_segments(partition_of(copy))
                if left != count_segments(their.directory):
                    raise SystemExit(f"we left {left} segments, Kafka's cleaner another number")
                shutil.rmtree(copy)
    all_ours = [took for each in ours for took in each]
    mib = [took.mib for each in theirs for took in each if took.mib is not None]
    claim = compare_figures(
        case.claim,
        [sum(took.seconds for took in each) / case.copies for each in ours],
        [sum(took.seconds for took in each) / case.copies for each in theirs],
        unit="s",
        peer_name=kafka_cleaner.NAME,
        ratio_is=MORE,
        is_time=True,
        ours_mib=max(took.mib for took in all_ours),
        peer_mib=max(mib, default=None),
    )
    our_cpu = statistics.mean(took.cpu_seconds for took in all_ours)
    their_cpu = statistics.mean(took.cpu_seconds for each in theirs for took in each)
    told = {"our_CPU_s": round(our_cpu, 2), "CPU_s_of_their_thread": round(their_cpu, 2)}
    return claim.told(**told, segments_left=left - 1), all_ours


def cleaned(process: CleaningProcess, root: Path) -> Cleaning:
    """Clean a log."""
    return process.clean(root, TOPIC, buffer_size=BUFFER, now_ms=2 * NOW_MS)


if __name__ == "__main__":
    main()
