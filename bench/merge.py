"""Size and read speed of a cleaned log, next to the log that Kafka's own cleaner leaves.

    python -m bench.merge [--json] [--quick] [--path DIR]

Keys are overwritten 20 times, with JSON values, in batches of 16 KiB before compression (lz4), once
with all keys alike and once as in a power law with exponent 1.2. Then the log is cleaned twice from
the same bytes: by us, who merge what is left of batches, and by a broker, which leaves every batch
in its place (`kafka_cleaner` says how it is set up). Both results are read by the same code, ours,
in this process and in turn, when the broker is stopped; they must be the same, record by record.
1,000,000 keys; 50,000 with --quick. Bytes and batches are counted once: they do not change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

import kafkalog
from bench import (
    Claim,
    compare,
    compare_figures,
    kafka_cleaner,
    leave_out,
    overwritten,
    program,
    report,
)
from bench.kafka_cleaner import KafkasCleaner
from bench.overwritten import TOPIC
from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.schedule.manager import clean, sweep
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format.batch import iterate_headers

TIMES: Final = 20
STEP: Final = 100_000
BATCH_SIZE: Final = 16 * 1024
EXPONENT: Final = 1.2
NOW_MS: Final = 1_700_000_000_000
CONFIG: Final = {
    "cleanup.policy": "compact",
    "compression.type": "lz4",
    "segment.bytes": str(256 << 20),
}
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Law:
    """How keys are drawn, and what is promised then."""

    name: str
    draw: Callable[[int], npt.NDArray[np.int64]]
    bytes_target: str
    batches_target: str = ""
    time_target: str = ""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A log after its cleaning: its root and topic, and what is in its segments."""

    root: Path
    topic: str
    size: int
    batches: int
    records: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    options = program("merge", __doc__, quick="fewer keys and rounds").parse_args(arguments)
    key_count = 50_000 if options.quick else 1_000_000
    rounds = 1 if options.quick else 5
    reason = kafka_cleaner.fault()
    if reason:
        leave_out("Kafka's cleaner", reason)
        return
    laws = (
        Law("uniform", uniform, "<= 0.85", "<= 0.2", ">= 1.5"),
        Law("zipf(1.2)", zipf, "<= 0.6"),
    )
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        scratch = Path(directory)
        sources, ours = [], []
        for law in laws:
            root = scratch / law.name
            end = build(root, law.draw(key_count))
            sources.append((overwritten.partition_of(root), end, CONFIG))
            ours.append(cleaned(overwritten.link(root, scratch / f"{law.name}-ours")))
        with KafkasCleaner(scratch / "broker", sources, buffer_size=128 * MIB) as peer:
            places = [peer.clean() for _ in laws]
            peer.broker.stop()
            found = [counted(peer.broker.log_dir, place.topic) for place in places]
            for law, mine, theirs in zip(laws, ours, found, strict=True):
                for claim in compared(law, mine, theirs, rounds):
                    report(claim, as_json=options.json)


def compared(law: Law, ours: Cleaned, theirs: Cleaned, rounds: int) -> Iterator[Claim]:
    """Compare two cleaned logs, which hold the same records."""
    keys = f"{law.name} keys"
    name = kafka_cleaner.NAME
    yield compare_figures(
        f"bytes after cleaning, {keys}",
        [ours.size / MIB],
        [theirs.size / MIB],
        unit="MiB",
        peer_name=name,
        ratio_is="of its bytes",
        target=law.bytes_target,
    )
    yield compare_figures(
        f"batches after cleaning, {keys}",
        [ours.batches],
        [theirs.batches],
        unit="batches",
        peer_name=name,
        ratio_is="of its batches",
        target=law.batches_target,
    )
    with (
        kafkalog.open(ours.root, read_only=True) as mine,
        kafkalog.open(theirs.root, read_only=True) as other,
    ):
        expected = overwritten.digest(mine.read(ours.topic, 0))
        if overwritten.digest(other.read(theirs.topic, 0)) != expected:
            raise SystemExit("Kafka's cleaner has left other records")
        yield compare(
            f"reading a cleaned log, {keys}",
            partial(read, mine, ours.topic),
            partial(read, other, theirs.topic),
            amount=ours.records / 1e6,
            unit="million records/s",
            rounds=rounds,
            peer_name=f"the log that {name} left, read by the same code",
            target=law.time_target,
        )


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


def build(root: Path, keys: npt.NDArray[np.int64]) -> int:
    """Write the log; returns its end."""
    dice = np.random.default_rng(2)
    with DirectoryLog(root) as engine:
        engine.create_topic(TOPIC, 1, CONFIG)
        for start in range(0, len(keys), STEP):
            part = keys[start : start + STEP]
            names = pa.array(part).cast(pa.string())
            columns = {
                "key": pc.binary_join_element_wise("user-", names, ""),
                "value": values(names, start, dice),
            }
            engine.append(TOPIC, pa.table(columns), now_ms=NOW_MS + start, batch_size=BATCH_SIZE)
        return overwritten.roll(engine)


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


def cleaned(root: Path) -> Cleaned:
    """Clean a log."""
    with DirectoryLog(root) as engine:
        (stats,) = clean(engine, TOPIC, force=True, now_ms=NOW_MS * 2, config=CleanerConfig())
        sweep(engine, now_ms=NOW_MS * 3)
    if stats.error is not None:
        raise SystemExit(stats.error)
    return counted(root, TOPIC)


def counted(root: Path, topic: str) -> Cleaned:
    """Count what is in the segments of a topic's first partition."""
    size = batches = records = 0
    for path in sorted((root / f"{topic}-0").glob("*.log")):
        data = path.read_bytes()
        counts = [header.records_count for _, header in iterate_headers(data)]
        size += len(data)
        batches += len(counts)
        records += sum(counts)
    return Cleaned(root, topic, size, batches, records)


def read(log: KafkaLog, topic: str) -> int:
    """Read all records; returns how many."""
    return sum(batch.num_rows for batch in log.read(topic, 0))


if __name__ == "__main__":
    main()
