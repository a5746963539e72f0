"""A log that one process writes, one cleans (and is killed at it), one reads: nothing goes wrong.

KAFKALOG_SEED repeats the records and the choice of moments, KAFKALOG_SECONDS sets how long at
the least (10).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.partitioner import murmur2

import kafkalog
from kafkalog.log import KafkaLog
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.place import directory_log_of
from tests.acceptance.cleaning_processes import COMMIT_RECORDS, TOPIC, Record, draw_commit
from tests.acceptance.independent_reader import read_log
from tests.acceptance.two_mounts import Mounts, two_mounts  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow
PARTITIONS = 4
SECONDS = float(os.environ.get("KAFKALOG_SECONDS", "10"))
KILLS_MIN = 2
COMMITS_MIN = 100
"""A machine that needs longer for so many gets it."""
LONGEST = 20
"""Times as long, at the most."""
CONFIG = {
    "segment.bytes": "8000",
    "min.cleanable.dirty.ratio": "0.01",
    # Tombstones and replaced files go within the test, not within a day.
    "delete.retention.ms": "500",
    "file.delete.delay.ms": "100",
}


class Model:
    """What every offset of every partition was given, whether it is still there or not."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.commits = 0
        self.partitions: list[list[Record]] = [[] for _ in range(PARTITIONS)]

    def extend(self) -> None:
        """Add the next commit; Kafka's partitioner, in aiokafka's words, places each record."""
        for key, value in draw_commit(self.seed, self.commits):
            number = (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
            self.partitions[number].append((key, value))
        self.commits += 1

    def extend_to(self, partition: int, high_watermark: int) -> None:
        while len(self.partitions[partition]) < high_watermark:
            self.extend()

    def latest_offsets(self, partition: int, end: int) -> dict[bytes, int]:
        records = self.partitions[partition]
        return {records[offset][0]: offset for offset in range(end)}


def check_state(log: KafkaLog, model: Model) -> None:
    """One state is whole commits: every partition ends where the same commit ends."""
    ends = [end for _, end in log.offsets(TOPIC).values()]
    assert sum(ends) % COMMIT_RECORDS == 0
    while model.commits * COMMIT_RECORDS < sum(ends):
        model.extend()
    if model.commits * COMMIT_RECORDS == sum(ends):
        assert [len(records) for records in model.partitions] == ends


def check_changelog(log: KafkaLog, model: Model, partition: int) -> None:
    """Read a partition from 0: nothing but what was written, nothing twice, no latest one gone."""
    with directory_log_of(log).snapshot(TOPIC, partition) as snapshot:
        state = snapshot.state
        found: dict[int, Record] = {}
        for rows in snapshot.read(0, state.high_watermark, schema=changelog_schema()):
            offsets = rows["offset"].to_pylist()
            assert offsets == sorted(set(offsets)) and not (found and offsets[0] <= max(found))
            pairs = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
            found.update(zip(offsets, pairs, strict=True))
    end = state.high_watermark
    model.extend_to(partition, end)
    written = model.partitions[partition]
    assert all(record == written[offset] for offset, record in found.items())
    cleaned_to = max(state.first_dirty_offset, state.cleaning_offset)
    assert found.keys() >= set(range(cleaned_to, end))
    latest_records = model.latest_offsets(partition, end)
    # Only a tombstone may be gone that is the latest of its key.
    gone = {offset for offset in latest_records.values() if offset not in found}
    assert all(written[offset][1] is None and offset < cleaned_to for offset in gone)
    clean_keys = [key for offset, (key, _) in found.items() if offset < state.first_dirty_offset]
    assert len(clean_keys) == len(set(clean_keys))


def check_latest(log: KafkaLog, model: Model) -> None:
    """Read the latest values: those of one moment between before and after, in each partition."""
    before = log.offsets(TOPIC)
    found: list[dict[bytes, bytes]] = [{} for _ in range(PARTITIONS)]
    for rows in log.latest(TOPIC):
        columns = (rows[name].to_pylist() for name in ("partition", "key", "value"))
        for number, key, value in zip(*columns, strict=True):
            assert key not in found[number]
            found[number][key] = value
    after = log.offsets(TOPIC)
    for number in range(PARTITIONS):
        first, last = before[number][1], after[number][1]
        model.extend_to(number, last)
        written = model.partitions[number]
        expected: dict[bytes, bytes] = {}
        moments = []
        for offset in range(last + 1):
            if offset >= first:
                moments.append(expected == found[number])
            if offset < last:
                key, value = written[offset]
                expected.pop(key, None)
                if value is not None:
                    expected[key] = value
        assert any(moments), f"partition {number}: no moment in [{first}, {last}] has these values"


class Cleaner:
    """The process that cleans, killed now and then."""

    def __init__(self, path: Path, log: KafkaLog, seed: int) -> None:
        self.path, self.log = path, log
        self.random = random.Random(seed)
        self.kills = self.half_swapped = 0
        self.start()

    def start(self) -> None:
        self.process = start("clean", self.path, 2 * LONGEST * SECONDS)  # it is killed before
        self.cleaned = self.first_dirty_offsets()
        self.kill_at = float("inf")

    def first_dirty_offsets(self) -> list[int]:
        return [state.first_dirty_offset for state in self.log.describe(TOPIC).partitions]

    def names(self, *suffixes: str) -> list[str]:
        directories = self.path.glob(f"{TOPIC}-*")
        return [
            name for path in directories for name in os.listdir(path) if name.endswith(suffixes)
        ]

    def kill_when_due(self) -> None:
        """Kill it once it has cleaned something; half the time amid a rewrite or a swap."""
        assert self.process.poll() is None
        if self.kill_at == float("inf"):
            if self.first_dirty_offsets() != self.cleaned:
                self.kill_at = time.monotonic() + self.random.uniform(0, 0.5)
            return
        if time.monotonic() < self.kill_at:
            return
        aim = self.random.choice([None, ".cleaned", ".swap", ".swap"])
        deadline = time.monotonic() + 1
        while aim and time.monotonic() < deadline and not self.names(aim):
            time.sleep(0.0002)
        end(self.process)
        self.kills += 1
        self.half_swapped += bool(self.names(".swap"))
        self.start()


def start(role: str, path: Path, argument: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.acceptance.cleaning_processes"]
    command += [role, str(path), str(argument)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    """Kill -9, if there is still something to kill."""
    process.kill()
    process.wait()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def seed() -> Iterator[int]:
    number = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"\nKAFKALOG_SEED={number}")
    yield number


def test_no_record_is_wrong_missing_or_doubled_while_a_log_is_written_and_cleaned(
    mounts: Mounts, seed: int
) -> None:
    path, elsewhere = mounts
    model = Model(seed)
    log = kafkalog.open(path)
    log.create_topic(TOPIC, PARTITIONS, CONFIG)
    appender = start("append", elsewhere, seed)
    cleaner = Cleaner(path, log, seed)
    reads = 0
    began = time.monotonic()

    def is_enough() -> bool:
        took = time.monotonic() - began
        is_met = cleaner.kills >= KILLS_MIN and model.commits >= COMMITS_MIN
        return took >= (SECONDS if is_met else LONGEST * SECONDS)

    try:
        while not is_enough():
            assert appender.poll() is None
            check_state(log, model)
            for partition in range(PARTITIONS):
                check_changelog(log, model, partition)
                cleaner.kill_when_due()
            check_latest(log, model)
            reads += 1
        commits = int(appender.communicate()[0])
        assert appender.returncode == 0
    finally:
        end(appender)
        end(cleaner.process)
    check_state(log, model)
    assert model.commits == commits

    # What was left half-done is finished, and all are of one mind: dict, kafkalog and aiokafka.
    counts = start("clean", path, 3)
    assert json.loads(counts.communicate()[0])["failures"] == 0
    assert [stats.error for stats in log.clean(TOPIC, force=True)] == [None] * PARTITIONS
    check_latest(log, model)
    for partition in range(PARTITIONS):
        check_changelog(log, model, partition)
    log.close()
    kept = read_log(elsewhere)[TOPIC]
    expected = {}
    for partition, records in enumerate(model.partitions):
        for key, offset in model.latest_offsets(partition, len(records)).items():
            expected[key] = records[offset][1]
    assert kept.latest_records == {
        key: value for key, value in expected.items() if value is not None
    }
    assert kept.records < commits * COMMIT_RECORDS / 4
    assert not cleaner.names(".cleaned", ".swap")
    print(
        f"{commits * COMMIT_RECORDS} records in {commits} commits, {reads} rounds of reading, "
        f"{cleaner.kills} kills ({cleaner.half_swapped} amid a swap), {kept.records} records kept"
    )
    assert cleaner.kills >= KILLS_MIN
