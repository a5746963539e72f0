"""Random logs, cleaned in a directory and in an object store: the same records survive.

Keys that come back and keys that do not, deletions, records without a key, transactions, records
deleted by offset, small segments, small maps, every codec, batches left apart. Several cleanings
follow each other, with appends between. `KAFKALOG_CLEANER_SEEDS` says how many logs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.rewrite import unchanged_segments
from kafkalog.cleaner.schedule import manager
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.unit.cleaner.store_copy import copy_segments
from tests.unit.cleaner.transactional_log import Log as WrittenLog
from tests.unit.storage_engine.store_log import WithoutProbe, memory_address

SEEDS = int(os.environ.get("KAFKALOG_CLEANER_SEEDS", "12"))
CODECS = ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")
LARGE = 1 << 20


@pytest.fixture(autouse=True)
def _without_syncs() -> Iterator[None]:
    """No power is cut here."""
    with files.without_syncs():
        yield


def new_log(monkeypatch: pytest.MonkeyPatch) -> ObjectLog:
    from kafkalog.storage_engine.object_store import object_log

    with monkeypatch.context() as patch:
        patch.setattr(object_log, "ObjectClient", WithoutProbe)
        return ObjectLog(memory_address())


def records(log: Log, partition: int, level: str) -> list[dict[str, Any]]:
    found = log.read("t", partition, include_headers=True, isolation_level=level)
    return [row for batch in found for row in batch.to_pylist()]


def compare(local: DirectoryLog, stored: ObjectLog, partitions: int) -> int:
    """Compare all records, as readers of both isolation levels see them; return how many."""
    count = 0
    for partition in range(partitions):
        states = [log.describe("t").partitions[partition] for log in (local, stored)]
        for name in ("log_start_offset", "high_watermark", "last_stable_offset"):
            assert getattr(states[0], name) == getattr(states[1], name), name
        for level in ("read_committed", "read_uncommitted"):
            expected = records(local, partition, level)
            assert records(stored, partition, level) == expected
            count += len(expected)
    return count


def cleaner_config(draw: random.Random) -> CleanerConfig:
    return CleanerConfig(
        merge_batches=draw.random() < 0.9,
        spill=draw.random() < 0.7,
        dedupe_buffer_size=draw.choice([LARGE, LARGE, 24 * 100]),
        io_buffer_size=draw.choice([700, LARGE]),
    )


def topic_config(draw: random.Random) -> dict[str, str]:
    return {
        "segment.bytes": draw.choice(["1500", "4000", "1000000"]),
        "compression.type": draw.choice(CODECS),
        "delete.retention.ms": draw.choice(["0", "500"]),
        "file.delete.delay.ms": "0",
        "cleanup.policy": draw.choice(["compact", "compact,delete"]),
        "retention.ms": "-1",
    }


def clean_both(local: DirectoryLog, stored: ObjectLog, now_ms: int, config: CleanerConfig) -> None:
    found = manager.clean(local, "t", force=True, now_ms=now_ms, config=config)
    other = manager.clean(stored, "t", force=True, now_ms=now_ms, config=config)
    assert [stats.error for stats in (*found, *other)] == [None] * len([*found, *other])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_tasks_append_survives_alike(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(unchanged_segments, "WORTHWHILE", draw.choice([0, 2]))
    config, partitions = topic_config(draw), draw.choice([1, 1, 3])
    local, stored = DirectoryLog(tmp_path / "log"), new_log(monkeypatch)
    for log in (local, stored):
        log.create_topic("t", partitions, config)
    now_ms, count = 1_000, 0
    for _ in range(draw.randrange(2, 5)):
        for _ in range(draw.choice([1, 3, 8])):
            rows = appended(draw)
            for log in (local, stored):
                log.append("t", rows, now_ms=now_ms)
            now_ms += draw.choice([0, 1, 50])
        if "delete" in config["cleanup.policy"] and draw.random() < 0.3:
            partition = draw.randrange(partitions)
            start, end = local.offsets("t")[partition]
            before = draw.randrange(start, end + 1)
            for log in (local, stored):
                log.delete_records("t", partition, before, now_ms=now_ms)
        now_ms += draw.choice([0, 100, 400, 3_000, 2 * 86_400_000])
        clean_both(local, stored, now_ms, cleaner_config(draw))
        count += compare(local, stored, partitions)
    assert count


def appended(draw: random.Random) -> list[tuple[Any, ...]]:
    """Draw records: skewed keys or ones that do not come back, with deletions and headers."""
    size = draw.choice([1, 10, 50])
    if draw.random() < 0.5:
        keys = [int(draw.paretovariate(0.5)) % draw.choice([3, 50, 900]) for _ in range(size)]
    else:
        first = draw.randrange(1_000, 10_000)
        keys = [*range(first, first + size)]
    tombstones = draw.choice([0.0, 0.1, 0.6])
    return [
        (
            b"%d" % key,
            None if draw.random() < tombstones else draw.randbytes(draw.choice([0, 8, 90])),
            [("h", draw.randbytes(2))] if draw.random() < 0.1 else [],
        )
        for key in keys
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_transactions_that_were_copied_survive_alike(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(1_000_000 + seed)
    monkeypatch.setattr(unchanged_segments, "WORTHWHILE", draw.choice([0, 2]))
    local, stored = WrittenLog(DirectoryLog(tmp_path / "log")), new_log(monkeypatch)
    config = topic_config(draw)
    for log in (local.engine, stored):
        log.create_topic("t", 1, config)
    local.end = draw.choice([0, (1 << 31) - 100, 1 << 40])
    now_ms, count = 1_000, 0
    for _ in range(draw.randrange(2, 7)):
        for _ in range(draw.choice([1, 5, 20])):
            append_transactional(draw, local, now_ms)
        now_ms += draw.choice([0, 100, 400, 3_000, 2 * 86_400_000])
        with local.engine.transaction() as transaction:
            transaction.roll("t", 0, now_ms)
            transaction.publish(now_ms)
        copy_segments(local.engine, stored, "t", 0)
        clean_both(local.engine, stored, now_ms, cleaner_config(draw))
        count += compare(local.engine, stored, 1)
    assert count


def append_transactional(draw: random.Random, log: WrittenLog, now_ms: int) -> None:
    """Append a batch or a marker."""
    producer = draw.randrange(3)
    keys: list[int | None] = [draw.randrange(draw.choice([3, 30, 900])) for _ in range(9)]
    if draw.random() < 0.1:
        keys[draw.randrange(9)] = None
    match draw.randrange(6):
        case 0:
            log.data(*keys, producer=producer + 10, time=now_ms)
        case 1 | 2:
            log.data(*keys, producer=producer, transactional=True, time=now_ms)
        case 3 if producer in log.running:
            log.abort(producer, time=now_ms)
        case 4 if producer in log.running:
            log.commit(producer, time=now_ms)
        case _:
            log.data(*keys, tombstones=draw.random() < 0.3, time=now_ms)
