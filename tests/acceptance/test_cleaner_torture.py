"""A log that is written, cleaned by two processes at once without a pause, cut and read all along.

KAFKALOG_SECONDS sets how long (20; `make torture-cleaner`: 300), KAFKALOG_SEED repeats what is
written, when it is deleted and with how much memory it is cleaned.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.log import KafkaLog
from tests.acceptance.torture_processes import Reader, take
from tests.acceptance.torture_script import PARTITIONS, TOPIC, WRONG, Script

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("KAFKALOG_SECONDS", "20"))
CONFIG = {
    "cleanup.policy": "compact,delete",
    "retention.ms": "-1",
    "segment.bytes": "6000",
    "min.cleanable.dirty.ratio": "0.01",
    # Tombstones, markers and replaced files go within the test, not within a day.
    "delete.retention.ms": "1000",
    "file.delete.delay.ms": "500",
}


@pytest.fixture
def seed() -> int:
    number = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"\nKAFKALOG_SEED={number}")
    return number


@contextmanager
def running(path: Path, seed: int, *roles: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a process for each role; none is left at the end."""
    processes = []
    try:
        for number, role in enumerate(roles):
            own_seed = seed if role in ("append", "read") else seed + number
            command = [sys.executable, "-m", "tests.acceptance.torture_processes"]
            command += [role, str(path), str(SECONDS), str(own_seed)]
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a process; returns what it has counted."""
    output, errors = process.communicate(timeout=SECONDS + 120)
    assert process.returncode == 0, errors[-4000:]
    result: dict[str, Any] = json.loads(output)
    return result


class Watch:
    """Follows checkpoints and the published state: neither ever goes back."""

    def __init__(self, log: KafkaLog) -> None:
        self.log = log
        self.checkpoints: dict[str, int] = {}
        self.looks = 0

    def look(self) -> None:
        found = self.read()
        for name, offset in self.checkpoints.items():
            assert found.get(name, -1) >= offset, (name, offset, found)
        self.checkpoints = found
        self.looks += 1

    def read(self) -> dict[str, int]:
        """Return the cleaner's checkpoint file, Kafka's, as it is."""
        try:
            lines = (self.log.root / "cleaner-offset-checkpoint").read_text().splitlines()
        except FileNotFoundError:
            return {}
        assert lines[0] == "0" and int(lines[1]) == len(lines) - 2
        entries = (line.rsplit(" ", 1) for line in lines[2:])
        return {name: int(offset) for name, offset in entries}


def check_end(log: KafkaLog, script: Script, starts: list[int]) -> int:
    """Clean the rest, twice, for tombstones and markers to go: what is left is right, and small."""
    now_ms = time.time_ns() // 1_000_000
    for later in (0, 60_000, 120_000):
        assert [
            s.error for s in log.clean(TOPIC, force=True, now_ms=now_ms + later) if s.error
        ] == []
    for number in range(PARTITIONS):
        assert log.describe(TOPIC).partitions[number].log_start_offset >= starts[number]
    found = Reader(log, script).check(is_over=True)
    checkpoints = Watch(log).read()
    for number, state in enumerate(log.describe(TOPIC).partitions):
        assert state.first_dirty_offset == state.high_watermark == script.partitions[number].end
        assert checkpoints[f"{TOPIC} {number}"] == state.first_dirty_offset
        values = [value for _, value in found[number].values()]
        assert None not in values and len(values) == len(set(found[number].values()))
    paths = [path for path in log.root.glob(f"{TOPIC}-*/*") if path.suffix == ".log"]
    assert paths and not any(WRONG in path.read_bytes() for path in paths)
    names = [path.name for path in log.root.glob(f"{TOPIC}-*/*")]
    assert not [n for n in names if n.endswith((".cleaned", ".swap")) or n.startswith("kl-spill")]
    return sum(len(rows) for rows in found)


def finished(log: KafkaLog, seed: int, steps: int) -> Script:
    """End the transactions that the appender has left open; returns the whole script."""
    script = Script(seed)
    while script.steps < steps:
        script.next()
    for step in script.end():
        take(log, step)
    return script


def test_two_cleaners_and_deletions_at_once_lose_nothing_and_bring_nothing_back(
    tmp_path: Path, seed: int
) -> None:
    with kafkalog.open(tmp_path) as log:
        log.create_topic(TOPIC, PARTITIONS, CONFIG)
        watch = Watch(log)
        roles = ("append", "clean", "clean", "delete", "read", "read")
        with running(tmp_path, seed, *roles) as processes:
            while any(process.poll() is None for process in processes):
                watch.look()
                time.sleep(0.01)
            append, *cleaners, delete, first, second = map(ended, processes)
        script = finished(log, seed, append["steps"])
        assert [cleaner["errors"] for cleaner in cleaners] == [[], []]
        assert sum(cleaner["rounds"] for cleaner in cleaners) > 2
        assert sum(cleaner["spilled"] for cleaner in cleaners) > 0
        assert all(start > 0 for start in delete["starts"])
        kept = check_end(log, script, delete["starts"])
    print(
        f"{sum(p.end for p in script.partitions)} offsets in {append['steps']} steps, "
        f"{cleaners}, {first['readings'] + second['readings']} readings, {watch.looks} looks, "
        f"{kept} records kept"
    )


@pytest.mark.spark
def test_a_streaming_query_over_a_log_that_is_cleaned_all_the_time_gets_every_record_once(
    tmp_path: Path, seed: int, spark: Any
) -> None:
    path = tmp_path / "log"
    with kafkalog.open(path) as log:
        log.create_topic(TOPIC, PARTITIONS, CONFIG)
        query = (
            spark.readStream.format("kafkalog")
            .option("path", str(path))
            .option("subscribe", TOPIC)
            .option("startingOffsets", "earliest")
            .load()
            .select("partition", "offset", "key", "value")
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "rows"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(processingTime="100 milliseconds")
            .start()
        )
        try:
            query.processAllAvailable()  # the first micro-batch takes its time
            with running(path, seed, "append", "clean", "read") as processes:
                while any(process.poll() is None for process in processes):
                    assert query.isActive, query.exception()
                    time.sleep(0.1)
                append, cleaner, reader = map(ended, processes)
            script = finished(log, seed, append["steps"])
            query.processAllAvailable()
            batches = len([p for p in query.recentProgress if p["numInputRows"]])
        finally:
            query.stop()
        rows = spark.read.parquet(str(tmp_path / "rows")).toArrow().to_pydict()
        assert cleaner["errors"] == []
        assert cleaner["rounds"] > 0
        check_streamed(rows, script)
        kept = check_end(log, script, [0] * PARTITIONS)
    print(
        f"{sum(p.end for p in script.partitions)} offsets, {len(rows['offset'])} rows in {batches} "
        f"micro-batches, {cleaner}, {reader['readings']} readings, {kept} records kept"
    )


def check_streamed(rows: dict[str, list[Any]], script: Script) -> None:
    """Nothing wrong, nothing twice; what a key holds at the end was seen."""
    found: list[dict[int, Any]] = [{} for _ in range(PARTITIONS)]
    columns = (rows[name] for name in ("partition", "offset", "key", "value"))
    for number, offset, key, value in zip(*columns, strict=True):
        assert offset not in found[number]
        found[number][offset] = (key, value)
    for number, partition in enumerate(script.partitions):
        written = {o: r for o, r in enumerate(partition.visible) if r is not None}
        assert all(written.get(o) == record for o, record in found[number].items())
        latest = {key: o for o, (key, _) in written.items()}
        # A tombstone may go before a follower that is late has come to it.
        needed = {o for o in latest.values() if written[o][1] is not None}
        assert needed <= found[number].keys()
