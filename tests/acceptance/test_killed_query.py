"""A query killed again and again, JVM and workers included: each input record lands exactly once.

KAFKALOG_KILLS says how often (`make kill-test`: 20), KAFKALOG_SEED repeats the choice of delays.
Without it the test is skipped: `test_killed_upserts.py` kills such a query among others, and a test
of `test_spark_writes.py` starts one from an older checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata.journal import Journal
from tests.acceptance.cluster import session_processes
from tests.acceptance.independent_reader import read_log
from tests.acceptance.killed_query import FILES_PER_BATCH, PARTITIONS, TOPIC

KILLS = int(os.environ.get("KAFKALOG_KILLS", "0"))
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(not KILLS, reason="runs with make kill-test"),
]
RECORDS_PER_FILE = 120
KEYS = 300
BACKLOG = 8
"""So many micro-batches of input files lie ready, always."""
PATIENCE_S = 200
AIMS = (
    ("batch", (0.1, 3.0)),
    ("staged", (0.0, 0.08)),
    ("batch", (0.1, 3.0)),
    ("appended", (0.0, 0.01)),
)
"""After what a kill comes (Spark has noted a new batch, a task stages, a segment has grown), and
how many seconds after it. A sink's commit takes milliseconds: without aim few kills would meet one.
"""


class Feed:
    """Adds files of records, values unique, as fast as the query takes them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.source, self.checkpoint = root / "source", root / "checkpoint"
        self.source.mkdir()
        self.random = random.Random(seed)
        self.files = 0
        self.records: Counter[tuple[str, str]] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            if self.files < (last_batch(self.checkpoint / "offsets") + BACKLOG) * FILES_PER_BATCH:
                self.add()

    def add(self) -> None:
        first = self.files * RECORDS_PER_FILE
        rows = [
            (f"key-{self.random.randrange(KEYS)}", f"value-{number:09d}")
            for number in range(first, first + RECORDS_PER_FILE)
        ]
        lines = [json.dumps({"key": key, "value": value}) for key, value in rows]
        hidden = self.source / f".{self.files:07d}"
        hidden.write_text("\n".join(lines))
        hidden.rename(self.source / f"{self.files:07d}.json")
        self.files += 1
        self.records.update(rows)


class Driver:
    """The query's processes: a session of their own, so that all can be found and killed."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.output = root / "driver.log"
        command = [sys.executable, "-m", "tests.acceptance.killed_query", str(root), *arguments]
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self, order: random.Random) -> int:
        """Kill every process of the session, in random order; returns how many there were."""
        killed: set[int] = set()
        while found := session_processes(self.process.pid):
            order.shuffle(found)
            for pid in found:
                killed.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.poll()
            time.sleep(0.005)
        self.process.wait()
        return len(killed)

    def finish(self, timeout: float = 600) -> int:
        """Wait for the end; returns the exit status."""
        return self.process.wait(timeout)

    def check_alive(self) -> None:
        assert self.process.poll() is None, self.output.read_text()[-8000:]


def last_batch(directory: Path) -> int:
    """Return the last batch id that Spark noted in `offsets` or `commits`; -1 for none."""
    try:
        return max((int(name) for name in os.listdir(directory) if name.isdigit()), default=-1)
    except FileNotFoundError:
        return -1


class Killer:
    """Chooses the moments, kills, and tells from what is left where the kill landed."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.log, self.checkpoint = root / "log", root / "checkpoint"
        self.random = random.Random(seed)
        self.aims = itertools.cycle(self.random.sample(AIMS, len(AIMS)))
        self.landed: Counter[str] = Counter()

    def strike(self, driver: Driver) -> None:
        """Kill a query that has made progress, at a moment of the kinds that `AIMS` lists."""
        committed = last_batch(self.checkpoint / "commits")
        wait_for(driver, lambda: last_batch(self.checkpoint / "commits") > committed)
        aim, range_s = next(self.aims)
        look = {"batch": self.begun, "staged": self.staged, "appended": self.size}[aim]
        before = look()
        wait_for(driver, lambda: bool(look()) and look() != before, pause=0.0005)
        delay = self.random.uniform(*range_s)
        time.sleep(delay)
        driver.check_alive()
        count = driver.kill(self.random)
        phase = self.phase()
        self.landed[phase] += 1
        print(
            f"kill {self.landed.total():2d}: {count} processes, micro-batch {self.begun()}, "
            f"{delay:.4f} s after {aim}: {phase}",
            flush=True,
        )

    def begun(self) -> int:
        return last_batch(self.checkpoint / "offsets")

    def size(self) -> int:
        """Return the size of all segments."""
        return sum(path.stat().st_size for path in self.log.glob(f"{TOPIC}-*/*.log"))

    def staged(self) -> set[str]:
        return {name for name in os.listdir(self.log) if name.endswith(".staged")}

    def phase(self) -> str:
        """Name the step of the micro-batch at which everything stopped; only looks, never opens."""
        batch = self.begun()
        if last_batch(self.checkpoint / "commits") == batch:
            return "between micro-batches"
        journal = Journal(self.log / "commit")
        state = journal.published()
        if not journal.is_recovered():
            return "recorded, not published"
        if max(writer.batch_id for writer in state.writers.values()) == batch:
            return "published, Spark not told"
        for number, partition in enumerate(state.topics[TOPIC].partitions):
            segments = sorted((self.log / f"{TOPIC}-{number}").glob("*.log"))
            if (int(segments[-1].stem), segments[-1].stat().st_size) != (
                partition.active_base,
                partition.active_size,
            ):
                return "appended, not recorded"
        return "staged, not appended" if self.staged() else "planned, not staged"


def wait_for(driver: Driver, is_true: Callable[[], bool], pause: float = 0.01) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        driver.check_alive()
        assert time.monotonic() < deadline, driver.output.read_text()[-8000:]
        time.sleep(pause)


def topic_records(root: Path) -> Counter[tuple[str, str]]:
    """Return every record of the topic and how often it is there; offsets must have no gap."""
    found: Counter[tuple[str, str]] = Counter()
    engine = DirectoryLog(root / "log", read_only=True)
    for partition, (start, end) in engine.offsets(TOPIC).items():
        offsets: list[int] = []
        for rows in engine.read(TOPIC, partition, columns=["key", "value", "offset"]):
            offsets += rows["offset"].to_pylist()
            pairs = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
            found.update((key.decode(), value.decode()) for key, value in pairs)
        assert offsets == list(range(end))
        assert start == 0 < end
    return found


def contents(directory: Path) -> dict[str, str]:
    """Return the checksum of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Start drivers, and let none outlive the test."""
    started: list[Driver] = []

    def start(*arguments: str) -> Driver:
        started.append(Driver(tmp_path, *arguments))
        return started[-1]

    yield start
    for driver in started:
        driver.kill(random.Random(0))


def test_a_query_killed_at_random_moments_writes_every_record_exactly_once(
    tmp_path: Path, drivers: Callable[..., Driver]
) -> None:
    seed = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"\nKAFKALOG_SEED={seed} KAFKALOG_KILLS={KILLS}", flush=True)
    began = time.monotonic()
    killer = Killer(tmp_path, seed)
    old_checkpoint = tmp_path / "old-checkpoint"
    with Feed(tmp_path, seed) as feed:
        for kill in range(KILLS):
            killer.strike(drivers())
            if kill == 0:
                shutil.copytree(killer.checkpoint, old_checkpoint)
    driver = drivers("--to-the-end")
    assert driver.finish() == 0, driver.output.read_text()[-8000:]

    found = topic_records(tmp_path)
    doubled = sum(count - 1 for count in found.values())
    missing = len(feed.records - found)
    print(
        f"{KILLS} kills in {time.monotonic() - began:.0f} s, "
        f"{last_batch(killer.checkpoint / 'offsets') + 1} micro-batches, "
        f"{feed.records.total()} records fed, {found.total()} in the topic, "
        f"{doubled} doubled, {missing} missing",
        *(f"  {count:3d} {phase}" for phase, count in killer.landed.most_common()),
        json.dumps({"kills": {"of whole queries": killer.landed.total()}}),
        sep="\n",
        flush=True,
    )
    assert found == feed.records
    assert len({value for _, value in found}) == len(found)
    assert not killer.staged()
    read_by_another = read_log(tmp_path / "log")[TOPIC]
    assert read_by_another.records == feed.records.total()
    assert len(list((tmp_path / "log").glob(f"{TOPIC}-*"))) == PARTITIONS

    refuse_older_checkpoint(tmp_path, old_checkpoint, drivers)


def refuse_older_checkpoint(root: Path, checkpoint: Path, drivers: Callable[..., Driver]) -> None:
    """Start the query from an early copy of its checkpoint: an error, and an untouched log."""
    (writer,) = DirectoryLog(root / "log", read_only=True).state().writers.values()
    first = last_batch(checkpoint / "commits") + 1
    assert first < writer.batch_id
    before = contents(root / "log")
    driver = drivers("--checkpoint", str(checkpoint), "--to-the-end")
    assert driver.finish() != 0
    match = re.search(
        r"this checkpoint is older than the log: committed (\d+) at \d\d:\d\d.*?, got (\d+)",
        driver.output.read_text(),
    )
    assert match, driver.output.read_text()[-8000:]
    assert [int(number) for number in match.groups()] == [writer.batch_id, first]
    assert contents(root / "log") == before
    print(match.group(), flush=True)
