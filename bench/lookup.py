"""Looking single keys up in a compacted topic, without Spark.

    python -m bench.lookup [--json] [--quick] [--keys N]

A topic with N keys (1,000,000; 50,000 with --quick), JSON values of about 125 bytes, lz4, segments
of 64 MiB, each key written three times, is cleaned. Keys are drawn, a tenth of them unknown, and
every answer is compared with what was written. The peers: the same lookups with the key indexes
taken away, so that segments are scanned; and the same table in SQLite, whose pages stay in the
same memory. Told besides: what the indexes take on disk, and a lookup while a hundredth of the keys
has been written anew since the cleaning, which is the part that has to be scanned.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

import kafkalog
from bench import Claim, report
from bench.merge import values
from kafkalog import KTable
from kafkalog.storage_engine import layout

TOPIC: Final = "t"
CONFIG: Final = {
    "cleanup.policy": "compact",
    "compression.type": "lz4",
    "segment.bytes": str(64 << 20),
}
STEP: Final = 100_000
TIMES: Final = 3
NOW_MS: Final = 1_700_000_000_000
MIB: Final = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.lookup", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer keys and lookups")
    parser.add_argument("--keys", type=int, default=0, help="how many keys")
    options = parser.parse_args(arguments)
    key_count = options.keys or (50_000 if options.quick else 1_000_000)
    lookups = 500 if options.quick else 5_000
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as directory:
        root = Path(directory, "log")
        written = build(root, key_count)
        database = copy(written, Path(directory, "table.db"))
        wanted = drawn(key_count, lookups)
        with KTable(None, root, TOPIC) as table:
            ours = rate(lambda key: value_of(table, key), wanted, written)
        peer = rate(lambda key: row_of(database, key), wanted, written)
        claims = [claim("lookups in a cleaned topic; peer: SQLite", ours, peer)]
        indexes = list(root.glob(f"*/*{layout.KEYS}"))
        logs = list(root.glob(f"*/*{layout.LOG}"))
        sizes = [sum(path.stat().st_size for path in paths) / MIB for paths in (indexes, logs)]
        claims.append(
            Claim(
                "bytes of the key indexes; peer: the segments beside them",
                round(sizes[0], 2),
                round(sizes[1], 2),
                round(sizes[1] / sizes[0], 1),
                "MiB",
            )
        )
        with kafkalog.open(root) as log:
            fresh = {f"user-{number}": f"{number}" for number in range(0, key_count, 100)}
            log.append(TOPIC, list(fresh.items()), now_ms=NOW_MS)
        written.update(fresh)
        with KTable(None, root, TOPIC) as table:
            dirty = rate(lambda key: value_of(table, key), wanted[: lookups // 5], written)
        claims.append(
            claim("lookups with a hundredth of the keys not cleaned yet; peer: none", dirty, ours)
        )
        for path in indexes:
            path.unlink()
        with KTable(None, root, TOPIC) as table:
            scan = rate(lambda key: value_of(table, key), wanted[:5], written)
        claims.append(claim("lookups in a cleaned topic; peer: a scan", ours, scan))
        for one in claims:
            report(one, as_json=options.json)


def build(root: Path, key_count: int) -> dict[str, str]:
    """Write the topic and clean it; returns the table that it is."""
    written: dict[str, str] = {}
    dice = np.random.default_rng(3)
    with kafkalog.open(root) as log:
        log.create_topic(TOPIC, 1, CONFIG)
        for _ in range(TIMES):
            order = dice.permutation(key_count)
            for start in range(0, key_count, STEP):
                names = pa.array(order[start : start + STEP]).cast(pa.string())
                keys = [f"user-{name}" for name in names.to_pylist()]
                documents = values(names, start, dice)
                log.append(TOPIC, pa.table({"key": keys, "value": documents}), now_ms=NOW_MS)
                written.update(zip(keys, documents.to_pylist(), strict=True))
        (stats,) = log.clean(TOPIC, force=True, now_ms=NOW_MS)
        if stats.error is not None:
            raise SystemExit(stats.error)
    return written


def copy(written: dict[str, str], path: Path) -> sqlite3.Connection:
    """Write the same table into SQLite, keyed by the key."""
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE t (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
    rows = ((key.encode(), value.encode()) for key, value in written.items())
    database.executemany("INSERT INTO t VALUES (?, ?)", rows)
    database.commit()
    return database


def drawn(key_count: int, count: int) -> list[str]:
    """Draw keys, a tenth of them unknown."""
    dice = np.random.default_rng(4)
    return [f"user-{number}" for number in dice.integers(0, key_count * 10 // 9, count).tolist()]


def value_of(table: KTable, key: str) -> str | None:
    """Ask the topic."""
    record = table.lookup(key)
    return None if record is None or record.value is None else record.value.decode()


def row_of(database: sqlite3.Connection, key: str) -> str | None:
    """Ask SQLite."""
    row = database.execute("SELECT value FROM t WHERE key = ?", (key.encode(),)).fetchone()
    return None if row is None else row[0].decode()


def rate(
    look_up: Callable[[str], str | None], wanted: Sequence[str], written: dict[str, str]
) -> float:
    """Return lookups a second; the first one, which opens the files, is not counted."""
    look_up(wanted[0])
    start = time.perf_counter()
    answers = [look_up(key) for key in wanted]
    seconds = time.perf_counter() - start
    if answers != [written.get(key) for key in wanted]:
        raise SystemExit("a lookup has found another value than the newest")
    return len(wanted) / seconds


def claim(text: str, ours: float, peer: float) -> Claim:
    """Return a claim about two rates."""
    return Claim(text, round(ours, 1), round(peer, 1), round(ours / peer, 2), "lookups/s")


if __name__ == "__main__":
    main()
