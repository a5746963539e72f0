"""How long a small synced append takes, beside the bare syncs that it cannot do without.

    python -m bench.commit [--json] [--quick] [--path DIR]

A topic of 1,000 partitions; each append writes one record into each of 1 or 12 of them and returns
when the commit is durable. The peer is the least that could do the same: append the same number of
bytes to as many files and fsync each, then overwrite a piece of one preallocated file and fdatasync
it. Both take turns, append by append, so that a slow moment of the disk meets both. Figures are
medians in milliseconds; the ratio is ours / peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

import kafkalog

PARTITIONS: Final = 1_000
RECORD: Final = b"x" * 100
BATCH_SIZE: Final = 61 + 110
JOURNAL_RECORD_SIZE: Final = 200
JOURNAL_SIZE: Final = 1 << 20
WARM_UP: Final = 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.commit", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer appends")
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure")
    options = parser.parse_args(arguments)
    repeats = 30 if options.quick else 300
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        for touched in (1, 12):
            ours, peer = measure(Path(scratch) / str(touched), touched, repeats)
            report(touched, ours, peer, as_json=options.json)


def measure(directory: Path, touched: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return the times in ms of `repeats` appends to `touched` partitions: ours and the peer's."""
    directory.mkdir()
    bare = BareSyncs(directory / "bare", touched)
    ours, peer = [], []
    with kafkalog.open(directory / "log") as log:
        log.create_topic("t", partitions=PARTITIONS)
        for turn in range(repeats + WARM_UP):
            # The first round creates the segments' files, the rounds after it are measured.
            partitions = [(turn % WARM_UP * touched + number) * 7 for number in range(touched)]
            rows = pa.table(
                {
                    "key": pa.array([b"key"] * touched, pa.binary()),
                    "value": pa.array([RECORD] * touched, pa.binary()),
                    "partition": pa.array(partitions, pa.int32()),
                }
            )
            ours.append(timed(partial(log.append, "t", rows)))
            peer.append(timed(partial(bare.append, turn)))
    return ours[WARM_UP:], peer[WARM_UP:]


class BareSyncs:
    """The writes and syncs of a commit, and nothing else."""

    def __init__(self, directory: Path, touched: int) -> None:
        directory.mkdir()
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self.files = [os.open(directory / f"{n}.log", flags) for n in range(touched)]
        self.journal = os.open(directory / "journal", os.O_CREAT | os.O_RDWR)
        os.write(self.journal, bytes(JOURNAL_SIZE))
        os.fsync(self.journal)

    def append(self, turn: int) -> None:
        """Append to every file, sync each, then sync one record of the journal."""
        for file in self.files:
            os.write(file, bytes(BATCH_SIZE))
        for file in self.files:
            os.fsync(file)
        position = turn * JOURNAL_RECORD_SIZE % (JOURNAL_SIZE - JOURNAL_RECORD_SIZE)
        os.pwrite(self.journal, bytes(JOURNAL_RECORD_SIZE), position)
        os.fdatasync(self.journal)


def timed(act: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    started = time.perf_counter()
    act()
    return (time.perf_counter() - started) * 1000


def report(touched: int, ours: list[float], peer: list[float], *, as_json: bool) -> None:
    """Print the medians, as text or as a JSON line."""
    claim = f"small synced append, {touched} of {PARTITIONS:,} partitions touched"
    figures = {
        "claim": claim,
        "ours": round(statistics.median(ours), 3),
        "peer": round(statistics.median(peer), 3),
        "ratio": round(statistics.median(ours) / statistics.median(peer), 2),
        "unit": "ms",
        "peer_name": "bare fsyncs",
        "ours_p95": round(statistics.quantiles(ours, n=20)[-1], 3),
        "peer_p95": round(statistics.quantiles(peer, n=20)[-1], 3),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if as_json:
        print(json.dumps(figures))
    else:
        print(
            f"{claim}: {figures['ours']} ms, bare syncs {figures['peer']} ms ({figures['ratio']}x)"
        )


if __name__ == "__main__":
    main()
