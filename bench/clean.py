"""Cleaning a log, next to Kafka's own cleaner on the same segments: time, rounds, memory, keys.

    python -m bench.clean [--json] [--quick] [--path DIR] [--rounds N]

10,000,000 records of 100 bytes with 1,000,000 keys, as they are and with lz4, and a buffer of
128 MiB, which they fit. And 3,000,000 distinct keys, a tenth of them twice, in a buffer for a
twentieth of them: Kafka ends a round when its map is full, and rewrites the segments up to there
once per filling; all its rounds until nothing is dirty are taken together.

The peer is a broker (`kafka_cleaner` says how it is set up) that cleans copies in turn with us, one
thread each; who begins changes from round to round. We clean in a process that does nothing else
and stays, as the broker does. The first cleaning of either is a smaller log's, and not counted.
Ours is timed around the call, theirs by the line that it logs, which has tenths of a second; the
processor time of our process and of their thread is told as well, which other work on the machine
changes less. Memory is the whole process's: theirs holds a JVM with a heap of 1 GiB. What is left
must be the same, record by record: offset, key and value.

The last claim is about our map alone, which is filled until it is full: what Kafka's holds is
reckoned from its slots and load factor.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

import kafkalog
from bench import (
    MORE,
    Claim,
    compare_figures,
    in_turn,
    kafka_cleaner,
    leave_out,
    overwritten,
    program,
    report,
)
from bench.cleaning_process import Cleaning, CleaningProcess
from bench.kafka_cleaner import KafkasCleaner, KafkasCleaning
from bench.overwritten import TOPIC, Int64s
from kafkalog.cleaner.dedup.offset_map import SLOT_SIZE, OffsetMap

MIB: Final = 1 << 20
BUFFER: Final = 128 * MIB
LOAD_FACTOR: Final = 0.9
FILLINGS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A log to be cleaned."""

    claim: str
    target: str
    numbers: Int64s
    codec: str
    buffer: int
    segment_size: int
    rounds: int
    is_spilled: bool = False
    """Whether its keys do not fit the buffer."""

    @property
    def config(self) -> dict[str, str]:
        """The topic's, for either side."""
        return {
            "cleanup.policy": "compact",
            "compression.type": "producer",
            "segment.bytes": str(self.segment_size),
            "file.delete.delay.ms": "1000",
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("clean", __doc__, quick="small logs, one round")
    parser.add_argument("--rounds", type=int, help="rounds that are counted")
    parser.add_argument("--only", help="only the claims with this word in them")
    options = parser.parse_args(arguments)
    reason = kafka_cleaner.fault()
    if reason:
        leave_out("Kafka's cleaner", reason)
    wanted = [
        case
        for case in cases(is_quick=options.quick, rounds=options.rounds)
        if not options.only or options.only in case.claim
    ]
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        logs = [built(case, Path(scratch, str(number))) for number, case in enumerate(wanted)]
        with CleaningProcess() as process:
            if reason:
                for log in logs:
                    alone(log, process)
            elif logs:
                for claim in compared(logs, Path(scratch), process):
                    report(claim, as_json=options.json)
    if not options.only or options.only in "memory":
        report(keys_in_memory(8 * MIB if options.quick else BUFFER), as_json=options.json)


def cases(*, is_quick: bool, rounds: int | None) -> list[Case]:
    """Return the logs of the claims."""
    count, keys, distinct = 10_000_000, 1_000_000, 3_000_000
    fillings, least = FILLINGS, 10
    if is_quick:
        count, keys, distinct, fillings, least = 400_000, 40_000, 200_000, 5, 2
    dice = np.random.default_rng(1)
    fitting = dice.integers(0, keys, count)
    many = dice.permutation(np.append(np.arange(distinct), np.arange(distinct // 10)))
    slots = distinct / fillings / LOAD_FACTOR
    return [
        *(
            Case(
                claim=f"clean {count:,} records of 100 bytes, {keys:,} keys, {codec or 'none'}",
                target=">= 3",
                numbers=fitting,
                codec=codec or "uncompressed",
                buffer=BUFFER,
                segment_size=1 << 30,
                rounds=rounds or (1 if is_quick else 3),
            )
            for codec in ("", "lz4")
        ),
        Case(
            claim=f"clean {distinct:,} distinct keys, {fillings} times what the buffer holds",
            target=f">= {least}",
            numbers=many,
            codec="uncompressed",
            # Below 1 MiB a broker does not start.
            buffer=max(int(slots * SLOT_SIZE), MIB + 24),
            segment_size=max(MIB, len(many) * 11),
            rounds=rounds or (1 if is_quick else 2),
            is_spilled=True,
        ),
    ]


@dataclass(frozen=True, slots=True)
class Built:
    """The log of a case, and a smaller one to warm up with; where either ends."""

    case: Case
    scratch: Path
    end: int
    small_end: int

    def sources(self) -> list[tuple[Path, int, dict[str, str]]]:
        """Return what the peer cleans: the small log, then one copy for each round."""
        small, large = (overwritten.partition_of(self.scratch / name) for name in _NAMES)
        config = self.case.config
        return [(small, self.small_end, config), *[(large, self.end, config)] * self.case.rounds]


_NAMES: Final = ("small", "large")


def built(case: Case, scratch: Path) -> Built:
    """Write the log of a case."""
    config = {**case.config, "compression.type": case.codec}
    scratch.mkdir()
    small = overwritten.build(scratch / "small", case.numbers[: len(case.numbers) // 5], config)
    return Built(case, scratch, overwritten.build(scratch / "large", case.numbers, config), small)


def alone(log: Built, process: CleaningProcess) -> None:
    """Clean the log without a peer, and say how long it took."""
    overwritten.link(log.scratch / "large", log.scratch / "copy")
    took = cleaned(process, log.scratch / "copy", log.case)
    what = f"{log.case.claim}: {took.seconds:.2f} s, {took.rounds} rewrites; no peer"
    print(what, file=sys.stderr, flush=True)


def compared(logs: Sequence[Built], scratch: Path, process: CleaningProcess) -> Iterator[Claim]:
    """Let both clean copies of each log in turn."""
    sources = [source for log in logs for source in log.sources()]
    with KafkasCleaner(scratch / "broker", sources, buffer_size=logs[0].case.buffer) as peer:
        size = logs[0].case.buffer
        for log in logs:
            if log.case.buffer != size:
                size = log.case.buffer
                peer.resize(size)
            yield from measured(log, process, peer)


def measured(log: Built, process: CleaningProcess, peer: KafkasCleaner) -> Iterator[Claim]:
    """Clean a log's copies in turn."""
    case, copy = log.case, log.scratch / "copy"
    cleaned(process, overwritten.link(log.scratch / "small", log.scratch / "warm"), case)
    peer.clean()
    ours, theirs = list[Cleaning](), list[KafkasCleaning]()
    for turn in range(case.rounds):
        overwritten.link(log.scratch / "large", copy)
        for is_ours in in_turn(turn, [True, False]):
            if is_ours:
                ours.append(cleaned(process, copy, case))
            else:
                theirs.append(peer.clean())
        check_alike(copy, peer.broker.log_dir, theirs[-1].topic)
        shutil.rmtree(copy)
    claim = compare_figures(
        case.claim,
        [took.seconds for took in ours],
        [took.seconds for took in theirs],
        unit="s",
        peer_name=kafka_cleaner.NAME,
        ratio_is=MORE,
        target=case.target,
        is_time=True,
        ours_mib=max(took.mib for took in ours),
        peer_mib=max((took.mib for took in theirs if took.mib is not None), default=None),
    )
    yield claim.told(
        our_rewrites=ours[-1].rounds,
        their_rewrites=theirs[-1].rounds,
        MB_of_log=round(ours[-1].bytes_read / 1e6),
        our_CPU_s=round(statistics.mean(took.cpu_seconds for took in ours), 2),
        CPU_s_of_their_thread=round(statistics.mean(took.cpu_seconds for took in theirs), 2),
        buffer_MiB=round(case.buffer / MIB, 2),
    )
    if case.is_spilled:
        yield compare_figures(
            f"{case.claim}: rewrites of the log",
            [took.rounds for took in ours],
            [took.rounds for took in theirs],
            unit="rewrites",
            peer_name=kafka_cleaner.NAME,
            ratio_is="of its rewrites",
            target="ours <= 1",
        )


def cleaned(process: CleaningProcess, root: Path, case: Case) -> Cleaning:
    """Clean a log."""
    now_ms = 2 * overwritten.NOW_MS
    return process.clean(root, TOPIC, buffer_size=case.buffer, now_ms=now_ms)


def check_alike(ours: Path, theirs: Path, topic: str) -> None:
    """End the program if the two logs differ in any record."""
    with kafkalog.open(ours, read_only=True) as log:
        expected = overwritten.digest(log.read(TOPIC, 0))
    with kafkalog.open(theirs, read_only=True) as log:
        found = overwritten.digest(log.read(topic, 0))
    if expected != found:
        raise SystemExit(f"we left {expected}, Kafka's cleaner {found}")


def keys_in_memory(buffer: int) -> Claim:
    """Fill our map until it says that it is full; Kafka's holds 90 % of a slot per 24 bytes."""
    offset_map = OffsetMap.for_records(1 << 40, budget_bytes=buffer, load_factor=LOAD_FACTOR)
    put, step = 0, 1 << 16
    dice = np.random.default_rng(1)
    while not offset_map.is_full:
        hashes = dice.integers(0, 1 << 64, (step, 2), dtype=np.uint64)
        sizes, offsets = np.full(step, 8, dtype=np.int64), np.arange(put, put + step)
        stop, _ = offset_map.put(hashes, sizes, offsets)
        put += stop
        if not (offset_map.get(hashes[:stop]) == offsets[:stop]).all():
            raise SystemExit("the map has lost a key")
    theirs = int(buffer // SLOT_SIZE * LOAD_FACTOR)
    claim = Claim(
        claim=f"keys in {buffer // MIB} MiB before anything is written to disk",
        ours=offset_map.size,
        peer=theirs,
        unit="keys",
        peer_name="SkimpyOffsetMap, slots * load factor",
        ratio=round(offset_map.size / theirs, 4),
        ratio_is="times as many",
        target=">= 1",
    )
    return claim.told(bytes_per_slot=SLOT_SIZE, hash_bits=128, beyond_that="spilled, no limit")


if __name__ == "__main__":
    main()
