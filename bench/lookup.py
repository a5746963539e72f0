"""Lookups of single keys in a compacted topic, without Spark.

    python -m bench.lookup [--json] [--quick] [--keys N] [--path DIR]

A topic with N keys (10,000,000; 50,000 with --quick), JSON values of about 125 bytes, lz4, segments
of 64 MiB, each key written twice, is cleaned. Keys are drawn, a tenth of them unknown, and every
answer is compared with what was written last. The first peer is the same table in SQLite, keyed by
the key, with a cache and a map that hold all of it. Each runs in a process of its own, which times
itself; both are warmed by the same other keys, and take turns after 50 keys: after each single one
a process would find the processor's caches cold, which costs SQLite more. Then, not in turn: the
same lookups while a hundredth of the keys has been written again since the cleaning, which is the
part that has to be scanned, next to those before; and those before next to the ones without the key
indexes, where segments are scanned. Also reported: what the indexes take on disk.

Keys by the thousand are asked for at once too, by `KTable.lookup_many`, by one SELECT of SQLite and
one of DuckDB, in turn. The time is that of the call, divided by its keys. Also reported: the time
of what no lookup in compressed batches can leave out: to read a batch, to compare its checksum, and
to decompress it.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

import kafkalog
from bench import MORE, Claim, compare_figures, in_turn, program, report
from bench.lookup_process import LookupProcess
from bench.memory import MIB
from bench.merge import values
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.format.compression import SIZE_MAX, decompress
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.locate import headers

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
        at_once = drawn(key_count, 2 * lookups, seed=6)
        written |= latest(root, at_once)
        for claim in at_once_claims(root, database, at_once, written, key_count):
            report(claim, as_json=options.json)
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


def at_once_claims(
    root: Path, database: Path, wanted: list[str], written: dict[str, str], key_count: int
) -> Iterator[Claim]:
    """Measure keys that are asked for by the thousand, and yield what was found."""
    turn = min(1000, len(wanted) // 5)
    table = database.with_suffix(".duckdb")
    copy_to_duckdb(root, table)
    places = {
        "kafkalog-at-once": root, "sqlite-at-once": database, "duckdb-at-once": table
    }  # fmt: skip
    ours, *peers = asked(places, wanted[:turn], wanted[turn:], written, turn=turn)
    names = ("SQLite, one SELECT", "DuckDB, one SELECT")
    for peer, name in zip(peers, names, strict=True):
        claim = compare_figures(
            f"lookup of {turn:,} keys at once in {key_count:,}, a key",
            [1000 * each for each in ours.ms],
            [1000 * each for each in peer.ms],
            unit="us",
            peer_name=name,
            ratio_is=MORE,
            target="ours <= 20",
            is_time=True,
            ours_mib=ours.mib,
            peer_mib=peer.mib,
        )
        yield claim.told(batch_us=round(batch_us(root), 1))


def batch_us(root: Path) -> float:
    """Return the time to read, check and decompress a batch of the log, some of them in turn."""
    path = max(root.glob(f"{TOPIC}-0/*{layout.LOG}"), key=lambda each: each.stat().st_size)
    source = FileBytes(files.open_to_read(path))
    places = [(place, header.size) for place, header in headers(source, 0, source.size())]
    chosen = np.random.default_rng(8).permutation(len(places))[:1000]
    times = []
    for place, size in (places[number] for number in chosen):
        start = time.perf_counter()
        data = source.read_at(size, place)
        crc32c(memoryview(data)[layout.ATTRIBUTES_POSITION :])
        codec = parse_header(data).codec
        decompress(codec, memoryview(data)[layout.BATCH_OVERHEAD :], limit=SIZE_MAX)
        times.append(time.perf_counter() - start)
    source.close()
    return 1e6 * statistics.median(times)


def latest(root: Path, keys: Sequence[str]) -> dict[str, str]:
    """Return the value of each key that has one, by reading all of the table."""
    wanted, found = pa.array(sorted({key.encode() for key in keys})), dict[str, str]()
    with kafkalog.open(root, read_only=True) as log:
        for batch in log.latest(TOPIC):
            rows = batch.filter(pc.is_in(batch["key"], wanted)).select(["key", "value"])
            for row in rows.to_pylist():
                found[row["key"].decode()] = row["value"].decode()
    return found


def copy_to_duckdb(root: Path, path: Path) -> None:
    """Write the same table into DuckDB, keyed by the key."""
    import duckdb

    with duckdb.connect(str(path)) as database, kafkalog.open(root, read_only=True) as log:
        database.execute("CREATE TABLE t (key BLOB PRIMARY KEY, value BLOB)")
        reader = pa.RecordBatchReader.from_batches(
            pa.schema([("key", pa.binary()), ("value", pa.binary())]),
            (batch.select(["key", "value"]) for batch in log.latest(TOPIC)),
        )
        database.register("rows", reader)
        database.execute("INSERT INTO t SELECT key, value FROM rows")


@dataclass(slots=True)
class Asked:
    """The times of one side, for each key."""

    ms: list[float] = field(default_factory=list)
    mib: float = 0.0
    cpu_ms: list[float] = field(default_factory=list)


def asked(
    places: dict[str, Path],
    others: Sequence[str],
    wanted: Sequence[str],
    written: dict[str, str],
    *,
    turn: int = TURN,
) -> list[Asked]:
    """Ask the ways of `places` for the wanted keys, in turn; first for the others."""
    with ExitStack() as stack:
        processes = [stack.enter_context(LookupProcess(way, places[way])) for way in places]
        sides = [(process, Asked()) for process in processes]
        for process in processes:
            process.look_up(others)
        for number, first in enumerate(range(0, len(wanted), turn)):
            keys = wanted[first : first + turn]
            for process, side in in_turn(number, sides):
                answer = process.look_up(keys)
                if answer.values != [written.get(key) for key in keys]:
                    raise SystemExit("a lookup has found another value than the latest")
                side.ms += answer.ms
                side.cpu_ms += answer.cpu_ms
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
