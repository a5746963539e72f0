"""Lookups of single keys in a compacted topic, without Spark.

    python -m bench.lookup [--json] [--quick] [--keys N] [--path DIR]

A topic with N keys (10,000,000; 50,000 with --quick), JSON values of about 125 bytes, lz4, segments
of 64 MiB, each key written twice, is cleaned. Keys are drawn, a tenth of them unknown, and every
answer is compared with what was written last. The first peer is the same table in SQLite, keyed by
the key, with a cache and a map that hold all of it. Each runs in a process of its own, which times
itself; both are warmed by the same other keys, and take turns after 50 keys: after each single one
a process would find the processor's caches cold, which costs SQLite more. Then, not in turn: the
same lookups while a hundredth of the keys has been written again since the cleaning, which is the
part that has to be scanned, beside those before; and those before beside the ones without the key
indexes, where segments are scanned. Told besides: what the indexes take on disk.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import kafkalog
from bench import MORE, Claim, compare_figures, in_turn, program, report
from bench.lookup_process import LookupProcess
from bench.memory import MIB
from bench.merge import values
from kafkalog.storage_engine.format import layout

TOPIC: Final = "t"
CONFIG: Final = {
    "cleanup.policy": "compact",
    "compression.type": "lz4",
    "segment.bytes": str(64 << 20),
}
STEP: Final = 100_000
TIMES: Final = 2
TURN: Final = 50
"""Keys after which the other side is asked."""
NOW_MS: Final = 1_700_000_000_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("lookup", __doc__, quick="fewer keys and lookups")
    parser.add_argument("--keys", type=int, default=0, help="how many keys")
    options = parser.parse_args(arguments)
    key_count = options.keys or (50_000 if options.quick else 10_000_000)
    lookups = 500 if options.quick else 5_000
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        root, database = Path(directory, "log"), Path(directory, "table.db")
        wanted = drawn(key_count, lookups)
        written = build(root, key_count, wanted)
        copy(root, database)
        for claim in claims(root, database, wanted, written, key_count):
            report(claim, as_json=options.json)


def claims(
    root: Path, database: Path, wanted: list[str], written: dict[str, str], key_count: int
) -> list[Claim]:
    """Measure, and return what was found."""
    text, found = f"lookup of one key in {key_count:,}", list[Claim]()
    others = drawn(key_count, max(1, len(wanted) // 10), seed=5)
    ours, peer = asked({"kafkalog": root, "sqlite": database}, others, wanted, written)
    indexes = list(root.glob(f"*/*{layout.KEYS}"))
    logs = list(root.glob(f"*/*{layout.LOG}"))
    index_size, log_size = (sum(p.stat().st_size for p in paths) / MIB for paths in (indexes, logs))
    claim = compare_figures(
        text,
        ours.ms,
        peer.ms,
        unit="ms",
        peer_name="SQLite, by its primary key",
        ratio_is=MORE,
        target="ours < 5",
        is_time=True,
        ours_mib=ours.mib,
        peer_mib=peer.mib,
    )
    p99 = round(statistics.quantiles(ours.ms, n=100)[-1], 3)
    sizes = {"key_indexes_mib": round(index_size, 1), "segments_mib": round(log_size, 1)}
    found.append(claim.told(p99_ms=p99, **sizes, sqlite_mib=database.stat().st_size // MIB))
    with kafkalog.open(root) as log:
        fresh = {f"user-{number}": f"{number}" for number in range(0, key_count, 100)}
        log.append(TOPIC, list(fresh.items()), now_ms=NOW_MS)
    written |= {key: fresh[key] for key in wanted if key in fresh}
    (dirty,) = asked({"kafkalog": root}, others, wanted[: len(wanted) // 5], written)
    found.append(
        compare_figures(
            f"{text}, a hundredth of them not cleaned yet",
            dirty.ms,
            ours.ms[: len(dirty.ms)],
            unit="ms",
            peer_name="the same before, all of it cleaned",
            ours_mib=dirty.mib,
            peer_mib=ours.mib,
        )
    )
    for path in indexes:
        path.unlink()
    (scan,) = asked({"kafkalog": root}, others[:1], wanted[:5], written)
    found.append(
        compare_figures(
            text,
            ours.ms[: len(scan.ms)],
            scan.ms,
            unit="ms",
            peer_name="a scan, without the key indexes",
            ratio_is=MORE,
            is_time=True,
            ours_mib=ours.mib,
            peer_mib=scan.mib,
        )
    )
    return found


@dataclass(slots=True)
class Asked:
    """The times of one side, for each key."""

    ms: list[float] = field(default_factory=list)
    mib: float = 0.0


def asked(
    places: dict[str, Path], others: Sequence[str], wanted: Sequence[str], written: dict[str, str]
) -> list[Asked]:
    """Ask the ways of `places` for the wanted keys, in turn; first for the others."""
    with ExitStack() as stack:
        processes = [stack.enter_context(LookupProcess(way, places[way])) for way in places]
        sides = [(process, Asked()) for process in processes]
        for process in processes:
            process.look_up(others)
        for turn, first in enumerate(range(0, len(wanted), TURN)):
            keys = wanted[first : first + TURN]
            for process, side in in_turn(turn, sides):
                answer = process.look_up(keys)
                if answer.values != [written.get(key) for key in keys]:
                    raise SystemExit("a lookup has found another value than the latest")
                side.ms += answer.ms
                side.mib = answer.mib
    return [side for _, side in sides]


def build(root: Path, key_count: int, wanted: Sequence[str]) -> dict[str, str]:
    """Write the topic and clean it; returns the last value of the wanted keys."""
    written: dict[str, str] = {}
    dice = np.random.default_rng(3)
    asked = pa.array(sorted(set(wanted)))
    with kafkalog.open(root) as log:
        log.create_topic(TOPIC, 1, CONFIG)
        for _ in range(TIMES):
            order = dice.permutation(key_count)
            for start in range(0, key_count, STEP):
                names = pa.array(order[start : start + STEP]).cast(pa.string())
                keys = pc.binary_join_element_wise("user-", names, "")
                documents = values(names, start, dice)
                log.append(TOPIC, pa.table({"key": keys, "value": documents}), now_ms=NOW_MS)
                kept = pc.is_in(keys, asked)
                pairs = (keys.filter(kept).to_pylist(), documents.filter(kept).to_pylist())
                written.update(zip(*pairs, strict=True))
        (stats,) = log.clean(TOPIC, force=True, now_ms=NOW_MS)
        if stats.error is not None:
            raise SystemExit(stats.error)
    return written


def copy(root: Path, path: Path) -> None:
    """Write the same table into SQLite, keyed by the key."""
    with sqlite3.connect(path) as database, kafkalog.open(root, read_only=True) as log:
        database.execute(f"PRAGMA cache_size = {-(2 << 20)}")
        database.execute("CREATE TABLE t (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        for latest in log.latest(TOPIC):
            rows = latest.sort_by("key")  # in pieces that are in order it goes faster
            pairs = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
            database.executemany("INSERT INTO t VALUES (?, ?)", pairs)


def drawn(key_count: int, count: int, *, seed: int = 4) -> list[str]:
    """Draw keys, a tenth of them unknown."""
    dice = np.random.default_rng(seed)
    return [f"user-{number}" for number in dice.integers(0, key_count * 10 // 9, count).tolist()]


if __name__ == "__main__":
    main()
