"""What a cleaned log takes, and how fast it is read, with merged batches and without.

    python -m bench.merge [--json] [--quick]

Keys are overwritten 20 times, with JSON values, in batches of 16 KiB before compression (lz4),
once with all keys alike and once as in a power law with exponent 1.2. Then the log is cleaned twice
from the same bytes: as we do it, and with `kafkalog.cleaner.merge.batches=false`, which leaves
every batch in its place, as Kafka does. 1,000,000 keys; 50,000 with --quick.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bench import Claim, compare, report
from kafkalog.cleaner import CleanerConfig, clean
from kafkalog.storage_engine.batch import iterate_headers
from kafkalog.storage_engine.engine import Engine

TIMES: Final = 20
STEP: Final = 100_000
BATCH_SIZE: Final = 16 * 1024
EXPONENT: Final = 1.2
NOW_MS: Final = 1_700_000_000_000
TOPIC: Final = "t"
CONFIG: Final = {
    "cleanup.policy": "compact",
    "compression.type": "lz4",
    "segment.bytes": str(256 << 20),
}
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A log after its cleaning."""

    root: Path
    size: int
    batches: int
    records: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.merge", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer keys and rounds")
    options = parser.parse_args(arguments)
    key_count = 50_000 if options.quick else 1_000_000
    rounds = 3 if options.quick else 5
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as directory:
        for name, law in (("uniform", uniform), ("zipf(1.2)", zipf)):
            source = Path(directory, "source")
            build(source, law(key_count))
            ours = cleaned(source, Path(directory, "merged"), is_merged=True)
            peer = cleaned(source, Path(directory, "apart"), is_merged=False)
            shutil.rmtree(source)
            if read(ours) != read(peer):
                raise SystemExit("merging has changed what is read")
            claims = [
                Claim(
                    f"bytes after cleaning, {name} keys",
                    round(ours.size / MIB, 2),
                    round(peer.size / MIB, 2),
                    round(peer.size / ours.size, 2),
                    "MiB",
                ),
                Claim(
                    f"batches after cleaning, {name} keys",
                    ours.batches,
                    peer.batches,
                    round(peer.batches / ours.batches, 1),
                    "batches",
                ),
                compare(
                    f"reading a cleaned log, {name} keys",
                    partial(read, ours),
                    partial(read, peer),
                    amount=ours.records / 1e6,
                    unit="million records/s",
                    rounds=rounds,
                ),
            ]
            for claim in claims:
                report(claim, as_json=options.json)
            for log in (ours, peer):
                shutil.rmtree(log.root)


def uniform(key_count: int) -> npt.NDArray[np.int64]:
    """Draw all keys alike."""
    return np.random.default_rng(1).integers(0, key_count, key_count * TIMES)


def zipf(key_count: int) -> npt.NDArray[np.int64]:
    """Draw the k-th most frequent key with a probability proportional to k^-1.2."""
    dice = np.random.default_rng(1)
    shares = np.cumsum(np.arange(1, key_count + 1, dtype=np.float64) ** -EXPONENT)
    ranks = np.searchsorted(shares / shares[-1], dice.random(key_count * TIMES))
    names: npt.NDArray[np.int64] = dice.permutation(key_count)[ranks]
    return names


def build(root: Path, keys: npt.NDArray[np.int64]) -> None:
    """Write the log."""
    dice = np.random.default_rng(2)
    with Engine(root) as engine:
        engine.create_topic(TOPIC, 1, CONFIG)
        for start in range(0, len(keys), STEP):
            part = keys[start : start + STEP]
            names = pa.array(part).cast(pa.string())
            columns = {
                "key": pc.binary_join_element_wise("user-", names, ""),
                "value": values(names, start, dice),
            }
            engine.append(TOPIC, pa.table(columns), now_ms=NOW_MS + start, batch_size=BATCH_SIZE)


def values(names: pa.Array, start: int, dice: np.random.Generator) -> pa.Array:
    """JSON documents of about 125 bytes."""
    count = len(names)
    states = np.array(["active", "blocked", "new"])[dice.integers(0, 3, count)]
    balances = pa.array(dice.integers(0, 10_000_000, count)).cast(pa.string())
    updated = pa.array(np.arange(NOW_MS + start, NOW_MS + start + count)).cast(pa.string())
    parts = (
        '{"id": ', names, ', "name": "user ', names, '", "email": "user', names,
        '@example.org", "balance": ', balances, ', "status": "', pa.array(states),
        '", "updated_at": ', updated, "}",
    )  # fmt: skip
    return pc.binary_join_element_wise(*parts, "")


def cleaned(source: Path, root: Path, *, is_merged: bool) -> Cleaned:
    """Clean a copy of the log."""
    shutil.copytree(source, root)
    with Engine(root) as engine:
        config = CleanerConfig(merge_batches=is_merged)
        (stats,) = clean(engine, TOPIC, force=True, now_ms=NOW_MS * 2, config=config)
    if stats.error is not None:
        raise SystemExit(stats.error)
    size = batches = records = 0
    for path in sorted(root.rglob("*.log")):
        data = path.read_bytes()
        counts = [header.records_count for _, header in iterate_headers(data)]
        size += len(data)
        batches += len(counts)
        records += sum(counts)
    return Cleaned(root, size, batches, records)


def read(log: Cleaned) -> tuple[int, int, int]:
    """Read all records; returns how many, the sum of their offsets, the bytes of their values."""
    count = offsets = size = 0
    with Engine(log.root, read_only=True) as engine:
        for batch in engine.read(TOPIC, 0):
            count += batch.num_rows
            offsets += pc.sum(batch["offset"]).as_py()
            size += pc.sum(pc.binary_length(batch["value"])).as_py()
    return count, offsets, size


if __name__ == "__main__":
    main()
