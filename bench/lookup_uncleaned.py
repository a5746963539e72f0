"""Lookups of single keys next to 200,000 uncleaned records, while a writer and a cleaner run.

    python -m bench.lookup_uncleaned [--json] [--quick] [--path DIR]

A topic has 200,000 keys (20,000 with --quick), cleaned, and then as many records of 100 bytes that
no cleaning has taken yet. Its dirty ratio keeps it so. Meanwhile this process commits 100 records
to it ten times a second, and the background cleaner cleans another topic, to which as many are
written. Each second the same records go to a table of SQLite (WAL), keyed by the key. DuckDB lets
no other process write while one reads, so its table rests.

Lookups run in a process for each side, which measures its own CPU time, in turns of ten keys. The
writer writes keys that nobody asks for, so that every answer can be compared with what was written.
Also reported: the first lookups, which scan the records and then index them, the 95th percentile,
and lookups that each come after a commit, so that files are opened again.
"""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

import kafkalog
from bench import MORE, Claim, compare_figures, program, report
from bench.lookup import TOPIC, asked, copy, copy_to_duckdb, latest
from bench.lookup_process import LookupProcess
from kafkalog.cleaner import CleanerConfig
from kafkalog.log import KafkaLog

OTHER: Final = "other"
CONFIG: Final = {"min.cleanable.dirty.ratio": "1.0"}
COMMIT: Final = 100
PAUSE_S: Final = 0.1
TURN: Final = 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("lookup_uncleaned", __doc__, quick="fewer keys and lookups")
    options = parser.parse_args(arguments)
    key_count = 20_000 if options.quick else 200_000
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        root = Path(directory, "log")
        config = CleanerConfig(backoff_ms=100)
        with kafkalog.open(root, cleaner=config) as log:
            fill(log, key_count)
            for claim in claims(log, root, key_count, 200 if options.quick else 2_000):
                report(claim, as_json=options.json)


def fill(log: KafkaLog, key_count: int) -> None:
    """Write the topic: all keys cleaned, and as many records that are not."""
    log.create_topic(TOPIC, 1, CONFIG)
    log.create_topic(OTHER, 1, {"segment.bytes": "100000"})
    dice = np.random.default_rng(3)
    log.append(TOPIC, records(dice.permutation(key_count), 0))
    (stats,) = log.clean(TOPIC, force=True)
    if stats.error is not None:
        raise SystemExit(stats.error)
    for first in range(0, key_count, 2_000):
        log.append(TOPIC, records(dice.integers(0, key_count, 2_000), first))


def records(numbers: np.ndarray[tuple[int], np.dtype[np.int64]], start: int) -> pa.Table:
    """Return records of keys with these numbers; their values differ from all others."""
    values = [f"{start + place:0100d}" for place in range(len(numbers))]
    return pa.table({"key": [f"user-{number}" for number in numbers], "value": values})


def claims(log: KafkaLog, root: Path, key_count: int, lookups: int) -> Iterator[Claim]:
    """Measure next to both databases, and yield what was found."""
    database, other = root.with_name("table.db"), root.with_name("table.duckdb")
    copy(root, database)
    copy_to_duckdb(root, other)
    odd = 2 * np.random.default_rng(4).integers(0, key_count * 10 // 18, lookups) + 1
    wanted = [f"user-{number}" for number in odd.tolist()]
    written = latest(root, wanted)
    first, fresh = at_first(log, root, wanted[:100], key_count)
    with written_to(log, database, key_count) as commits:
        places = {"kafkalog": root, "sqlite": database, "duckdb": other}
        ours, *peers = asked(places, wanted[:TURN], wanted[TURN:], written, turn=TURN)
    for peer, name in zip(peers, ("SQLite, by its primary key", "DuckDB, at rest"), strict=True):
        claim = compare_figures(
            f"lookup of one key, {key_count:,} records uncleaned, writer and cleaner running",
            ours.cpu_ms,
            peer.cpu_ms,
            unit="ms of CPU",
            peer_name=name,
            ratio_is=MORE,
            target="ours <= 1",
            is_time=True,
            ours_mib=ours.mib,
            peer_mib=peer.mib,
        )
        p95 = round(statistics.quantiles(ours.cpu_ms, n=20)[-1], 3)
        yield claim.told(
            p95_ms=p95, first_ms=first[0], second_ms=first[1], fresh_ms=fresh, commits=commits[0]
        )


def at_first(
    log: KafkaLog, root: Path, keys: Sequence[str], key_count: int
) -> tuple[list[float], float]:
    """Return the CPU of the first two lookups, and of one after a commit (ms)."""
    with LookupProcess("kafkalog", root) as process:
        first = [round(process.look_up([key]).cpu_ms[0], 1) for key in keys[:2]]
        fresh = []
        for key in keys[2:]:
            log.append(TOPIC, [(f"user-{key_count}", "v")])
            fresh += process.look_up([key]).cpu_ms
    return first, round(statistics.median(fresh), 3)


@contextlib.contextmanager
def written_to(log: KafkaLog, database: Path, key_count: int) -> Iterator[list[int]]:
    """Commit to the log and to SQLite meanwhile; yields how many commits there were."""
    done, count, faults = threading.Event(), [0], list[BaseException]()

    def write() -> None:
        dice = np.random.default_rng(9)
        with contextlib.closing(sqlite3.connect(database)) as table:
            table.execute("PRAGMA journal_mode = WAL")
            while not done.wait(PAUSE_S):
                rows = records(2 * dice.integers(0, key_count // 2, COMMIT), count[0] * COMMIT)
                log.append(TOPIC, rows)
                log.append(OTHER, rows)
                pairs = ((row["key"].encode(), row["value"].encode()) for row in rows.to_pylist())
                table.executemany("INSERT OR REPLACE INTO t VALUES (?, ?)", pairs)
                table.commit()
                count[0] += 1

    def guarded() -> None:
        try:
            write()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=guarded)
    thread.start()
    time.sleep(10 * PAUSE_S)
    try:
        yield count
    finally:
        done.set()
        thread.join()
        if faults:
            raise faults[0]


if __name__ == "__main__":
    main()
