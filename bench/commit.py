"""The time of a small synced append, next to the bare syncs that it needs.

    python -m bench.commit [--json] [--quick] [--path DIR]

A topic of 1,000 partitions, and 10,000 writers that the journal knows; each append writes 100
records of 100 bytes into one partition, or one into each of 12, and returns when the commit is
durable; ten such appends go round over as many partitions, and begin again. The first peer is the
least that could do the same: append the same number of bytes to as many files, go round likewise,
fsync each, eight or more in the same threads as ours, then overwrite a piece of one preallocated
file and fdatasync it. The second is SQLite, a commit of as many rows into a table by offset
(journal_mode WAL, synchronous FULL, which syncs at each commit). All take turns, append by append,
so that a slow moment of the disk meets all, and another begins each time. What all hold afterwards
is counted. Times are medians; the ratio is the median of the appends' ratios. All run in one
process, whose memory is told for each.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from bench import LESS, MORE, Side, compare_figures, in_turn, program, report
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files

PARTITIONS: Final = 1_000
WRITERS: Final = 10_000
TOUCHED: Final = {1: 100, 12: 1}
"""Records of an append to each of so many partitions."""
RECORD: Final = b"x" * 100
JOURNAL_RECORD_SIZE: Final = 200
JOURNAL_SIZE: Final = 1 << 20
WARM_UP: Final = 10
"""Appends that are not counted; also, after how many the partitions come round."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    options = program("commit", __doc__, quick="fewer appends, writers, partitions").parse_args(
        arguments
    )
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
    ours, bare, database = Side(), Side(), Side()
    table = Table(directory / "table.db")
    with DirectoryLog(directory / "log") as log:
        log.create_topic("t", partitions)
        now_ms = time.time_ns() // 1_000_000
        with log.transaction() as transaction:
            for number in range(writers):
                transaction.record_writer(f"query-{number:036d} t", 7, 1_000, now_ms)
            transaction.publish(now_ms)
        log.append("t", rows(range(WARM_UP * touched), records))  # creates the files
        size = log_size(log.root)
        log.append("t", rows(range(WARM_UP * touched), records))
        syncs = BareSyncs(
            directory / "bare", touched, (log_size(log.root) - size) // WARM_UP // touched
        )
        for turn in range(repeats + WARM_UP):
            places = [turn % WARM_UP * touched + number for number in range(touched)]
            first = turn * touched * records
            rows_of_table = [(first + n, b"key", RECORD) for n in range(touched * records)]
            sides: list[tuple[Side, Callable[[], object]]] = [
                (ours, partial(log.append, "t", rows(places, records))),
                (bare, partial(syncs.append, turn)),
                (database, partial(table.append, rows_of_table)),
            ]
            for side, append in in_turn(turn, sides):
                side.time(append, is_counted=turn >= WARM_UP)
        expected = (repeats + WARM_UP) * touched * records
        check(log, expected + 2 * WARM_UP * touched * records)
        table.check(expected)
        syncs.check(repeats + WARM_UP)
    what = f"append of {records:,} records to {touched:,} of {partitions:,} partitions"
    what = f"synced {what}, {writers:,} writers known"
    for name, peer, ratio_is, target in (
        ("bare fsyncs", bare, LESS, "<= 1.8"),
        ("SQLite, WAL, synchronous FULL", database, MORE, ""),
    ):
        claim = compare_figures(
            what,
            ours.ms,
            peer.ms,
            unit="ms",
            peer_name=name,
            ratio_is=ratio_is,
            target=target,
            is_time=True,
            ours_mib=ours.mib,
            peer_mib=peer.mib,
        )
        report(claim.told(p95_ms=p95(ours.ms), peer_p95_ms=p95(peer.ms)), as_json=as_json)


def p95(times: Sequence[float]) -> float:
    """Return what 95 of 100 times stay below."""
    return round(statistics.quantiles(times, n=20)[-1], 3)


def check(log: DirectoryLog, expected: int) -> None:
    """End the program unless the log holds so many records."""
    found = sum(end - start for start, end in log.offsets("t").values())
    if found != expected:
        raise SystemExit(f"wrong: expected {expected} records in the log, found {found}")


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
        self.rounds = [
            [os.open(directory / f"{place}-{n}.log", flags) for n in range(touched)]
            for place in range(WARM_UP)
        ]
        self.journal = os.open(directory / "journal", os.O_CREAT | os.O_RDWR)
        self.data = bytes(size)
        os.write(self.journal, bytes(JOURNAL_SIZE))
        os.fsync(self.journal)

    def append(self, turn: int) -> None:
        """Append to the files that come next, sync each, then sync one record of the journal."""
        logs = self.rounds[turn % WARM_UP]
        for log in logs:
            os.write(log, self.data)
        files.all_at_once([partial(os.fsync, log) for log in logs])
        position = turn * JOURNAL_RECORD_SIZE % (JOURNAL_SIZE - JOURNAL_RECORD_SIZE)
        os.pwrite(self.journal, bytes(JOURNAL_RECORD_SIZE), position)
        os.fdatasync(self.journal)

    def check(self, turns: int) -> None:
        """End the program unless all was written."""
        found = sum(os.fstat(log).st_size for logs in self.rounds for log in logs)
        if found != turns * len(self.rounds[0]) * len(self.data):
            raise SystemExit(f"wrong: {found} bytes in the bare files")


class Table:
    """A table of records by offset in SQLite."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("CREATE TABLE t (place INTEGER PRIMARY KEY, key BLOB, value BLOB)")

    def append(self, given: Sequence[tuple[int, bytes, bytes]]) -> None:
        """Insert one append's rows and commit."""
        self.connection.execute("BEGIN")
        self.connection.executemany("INSERT INTO t VALUES (?, ?, ?)", given)
        self.connection.execute("COMMIT")

    def check(self, expected: int) -> None:
        """End the program unless the table holds so many rows."""
        ((found,),) = self.connection.execute("SELECT count(*) FROM t")
        if found != expected:
            raise SystemExit(f"wrong: expected {expected} rows in SQLite, found {found}")


if __name__ == "__main__":
    main()
