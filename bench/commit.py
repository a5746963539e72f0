"""How long a small synced append takes, beside the bare syncs that it cannot do without.

    python -m bench.commit [--json] [--quick] [--path DIR]

A topic of 1,000 partitions, and 10,000 writers that the journal knows; each append writes 100
records of 100 bytes into one partition, or one into each of 12, and returns when the commit is
durable. The first peer is the least that could do the same: append the same number of bytes to as
many files and fsync each, then overwrite a piece of one preallocated file and fdatasync it. The
second is SQLite, a commit of as many rows into a table by offset (journal_mode WAL,
synchronous FULL, which syncs at each commit). All take turns, append by append, so that a slow
moment of the disk meets all. Times are medians; the ratio is the median of the appends' ratios.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

import kafkalog
from bench import LESS, MORE, compare_figures, report
from bench.memory import peak_mib, reset_peak

PARTITIONS: Final = 1_000
WRITERS: Final = 10_000
TOUCHED: Final = {1: 100, 12: 1}
"""Records of an append to each of so many partitions."""
RECORD: Final = b"x" * 100
JOURNAL_RECORD_SIZE: Final = 200
JOURNAL_SIZE: Final = 1 << 20
WARM_UP: Final = 10
NOW_MS: Final = 1_700_000_000_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.commit", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer appends, writers, partitions")
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure")
    options = parser.parse_args(arguments)
    repeats = 30 if options.quick else 300
    known = 5 if options.quick else 1
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        for touched, records in TOUCHED.items():
            directory = Path(scratch, str(touched))
            measure(
                directory,
                (touched, records),
                (PARTITIONS // known, WRITERS // known, repeats),
                as_json=options.json,
            )


def measure(
    directory: Path, batch: tuple[int, int], sizes: tuple[int, int, int], *, as_json: bool
) -> None:
    """Time appends of `batch`, so many partitions and records of each, and print the claims."""
    (touched, records), (partitions, writers, repeats) = batch, sizes
    directory.mkdir()
    ours, bare, database = list[float](), list[float](), list[float]()
    table = Table(directory / "table.db", touched * records)
    with kafkalog.open(directory / "log") as log:
        log.create_topic("t", partitions)
        with log.transaction() as transaction:
            for number in range(writers):
                transaction.record_writer(f"query-{number:036d} t", 7, 1_000, NOW_MS)
            transaction.publish(NOW_MS)
        log.append("t", rows(range(WARM_UP * touched), records))  # creates the files
        size = log_size(log.root)
        log.append("t", rows(range(WARM_UP * touched), records))
        files = BareSyncs(
            directory / "bare", touched, (log_size(log.root) - size) // WARM_UP // touched
        )
        reset_peak()
        for turn in range(repeats + WARM_UP):
            places = [turn % WARM_UP * touched + number for number in range(touched)]
            given = rows(places, records)
            ours.append(timed(lambda given=given: log.append("t", given)))
            bare.append(timed(lambda turn=turn: files.append(turn)))
            database.append(timed(lambda turn=turn: table.append(turn)))
        peak = peak_mib()
    what = f"append of {records:,} records to {touched:,} of {partitions:,} partitions"
    what = f"synced {what}, {writers:,} writers known"
    p95 = {"p95_ms": round(statistics.quantiles(ours[WARM_UP:], n=20)[-1], 3)}
    for name, peer, ratio_is, target in (
        ("bare fsyncs", bare, LESS, "<= 1.5"),
        ("SQLite, WAL, synchronous FULL", database, MORE, ""),
    ):
        claim = compare_figures(
            what,
            ours[WARM_UP:],
            peer[WARM_UP:],
            unit="ms",
            peer_name=name,
            ratio_is=ratio_is,
            target=target,
            is_time=True,
            ours_mib=peak,
        )
        report(claim.told(**p95), as_json=as_json)


def rows(places: Sequence[int], records: int) -> pa.Table:
    """Return `records` rows for each of the partitions."""
    partitions = [place for place in places for _ in range(records)]
    return pa.table(
        {
            "key": pa.array([b"key"] * len(partitions), pa.binary()),
            "value": pa.array([RECORD] * len(partitions), pa.binary()),
            "partition": pa.array(partitions, pa.int32()),
        }
    )


def log_size(root: Path) -> int:
    """Return the bytes of all segments."""
    return sum(path.stat().st_size for path in root.glob("t-*/*.log"))


class BareSyncs:
    """The writes and syncs of a commit, and nothing else."""

    def __init__(self, directory: Path, touched: int, size: int) -> None:
        directory.mkdir()
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self.files = [os.open(directory / f"{n}.log", flags) for n in range(touched)]
        self.journal = os.open(directory / "journal", os.O_CREAT | os.O_RDWR)
        self.data = bytes(size)
        os.write(self.journal, bytes(JOURNAL_SIZE))
        os.fsync(self.journal)

    def append(self, turn: int) -> None:
        """Append to every file, sync each, then sync one record of the journal."""
        for file in self.files:
            os.write(file, self.data)
        for file in self.files:
            os.fsync(file)
        position = turn * JOURNAL_RECORD_SIZE % (JOURNAL_SIZE - JOURNAL_RECORD_SIZE)
        os.pwrite(self.journal, bytes(JOURNAL_RECORD_SIZE), position)
        os.fdatasync(self.journal)


class Table:
    """A table of records by offset in SQLite."""

    def __init__(self, path: Path, records: int) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("CREATE TABLE t (place INTEGER PRIMARY KEY, key BLOB, value BLOB)")
        self.records = records

    def append(self, turn: int) -> None:
        """Insert one append's rows and commit."""
        first = turn * self.records
        given = [(first + number, b"key", RECORD) for number in range(self.records)]
        self.connection.execute("BEGIN")
        self.connection.executemany("INSERT INTO t VALUES (?, ?, ?)", given)
        self.connection.execute("COMMIT")


def timed(act: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    started = time.perf_counter()
    act()
    return (time.perf_counter() - started) * 1000


if __name__ == "__main__":
    main()
