"""Queries into a log and out of it into tables, killed in part and as a whole: exactly once.

KAFKALOG_KILLS says how often all of the driver is killed (1), KAFKALOG_WORKER_KILLS how often one
process alone (1): a task's Python, the executor's JVM, the process that commits for the sink, or
that reads for the source. PostgreSQL is killed once for every ten of these. `make kill-test` does
40 and 100, for tables in PostgreSQL and SQLite and again for tables in Delta Lake. KAFKALOG_SEED
repeats the choice of moments and victims.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kafkalog.sink.query import checkpoint_query_id
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests import delta_spark
from tests.acceptance.cluster import kill_session, session_processes
from tests.acceptance.input_files import Feed
from tests.acceptance.killed_upserts import COUNTS, FILES_PER_BATCH, SINK
from tests.acceptance.micro_batches import Row, check_table, check_topic, running_counts
from tests.acceptance.test_killed_query import last_batch
from tests.acceptance.upserted_tables import DatabaseTables, DeltaTables, Position, Tables
from tests.postgres_server import PostgresServer

pytestmark = [pytest.mark.spark, pytest.mark.slow]
KILLS = int(os.environ.get("KAFKALOG_KILLS", "1"))
TARGETS = ["databases", "delta"]
"""Where the tables are."""
PARTITIONS = 2
PATIENCE_S = 300
QUERIES = (SINK, COUNTS, "upserts")
AIMS = (
    ("upserted", (0.0, 0.02)),
    ("batch", (0.0, 3.0)),
    ("staged", (0.0, 0.08)),
    ("upserted", (0.0, 0.3)),
    ("appended", (0.0, 0.01)),
)
"""After what a driver is killed (a table has advanced, Spark has noted a micro-batch, a task
stages or writes a file of Delta's, a segment has grown), and how many seconds after it."""
VICTIMS = {
    "task": ("task", "batch", (0.0, 2.0)),
    "executor": ("executor", "batch", (0.0, 2.0)),
    "commit": ("commit", "staged", (0.0, 0.1)),
    "staging task": ("task", "staged", (0.0, 0.02)),
    "source": ("source", "batch", (0.0, 1.0)),
    "staging executor": ("executor", "staged", (0.0, 0.05)),
    "daemon": ("daemon", "batch", (0.0, 2.0)),
    "commit after append": ("commit", "appended", (0.0, 0.01)),
}
"""Which process is killed alone, after what, and how many seconds after it."""


class Driver:
    """The queries' processes: a session of their own, so that all can be found and killed."""

    def __init__(self, site: Site, environment: dict[str, str], *arguments: str) -> None:
        self.output = site.root / "driver.log"
        module = "tests.acceptance.killed_upserts"
        command = [sys.executable, "-m", module, str(site.root), site.tables.target, *arguments]
        with self.output.open("ab") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def check_alive(self) -> None:
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        """Return the end of what the drivers have said."""
        return self.output.read_text(errors="replace")[-8000:]

    def processes(self, kind: str) -> list[int]:
        """Return the processes of a kind that `VICTIMS` names."""
        found = session_processes(self.process.pid)
        return [pid for pid in found if kind_of(command_of(pid), group_of(pid) == pid) == kind]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def kind_of(command: str, leads_group: bool) -> str:
    """Name the part that a process of Spark's plays.

    A daemon leads its group. Workers that it has forked stay in the group, and outlive it.
    """
    for part, kind in {
        "CoarseGrainedExecutorBackend": "executor",
        "pyspark.daemon pyspark.worker": "daemon" if leads_group else "task",
        "python_streaming_sink_runner": "commit",
        "python_streaming_source_runner": "source",
    }.items():
        if part in command:
            return kind
    return ""


class Site:
    """The directory of a log, its checkpoints and the tables, seen from outside."""

    def __init__(self, root: Path, tables: Tables) -> None:
        self.root, self.log = root, root / "log"
        self.tables = tables

    def begun(self) -> tuple[int, ...]:
        return tuple(self.noted(name, "offsets") for name in QUERIES)

    def noted(self, name: str, kind: str) -> int:
        return last_batch(self.root / "checkpoints" / name / kind)

    def staged(self) -> set[str]:
        return {path.name for path in self.log.rglob("kl-*.staged*")}

    def appended(self) -> int:
        """Return the size of all segments."""
        return sum(path.stat().st_size for path in self.log.glob("*-*/*.log"))

    def upserted(self) -> dict[str, Position]:
        """Return the last micro-batch, and the end offsets, that each table holds."""
        return self.tables.positions()

    def phase(self) -> str:
        """Name the steps of the queries' micro-batches at which everything stopped."""
        begun, done = self.noted("upserts", "offsets"), self.noted("upserts", "commits")
        held = [name for name, (number, _) in self.upserted().items() if number == begun]
        upserts = f"in {len(held)} of {self.tables.count} tables, Spark not told"
        if begun == done:
            upserts = "between"
        writers = DirectoryLog(self.log, read_only=True).state().writers
        known = {name.rpartition(" ")[2]: writer.batch_id for name, writer in writers.items()}
        parts = []
        for name in (SINK, COUNTS):
            begun, done = self.noted(name, "offsets"), self.noted(name, "commits")
            in_log = "in the log, Spark not told" if known.get(name) == begun else "begun"
            parts.append(f"{name}: {'between' if begun == done else in_log}")
        return "; ".join([*parts, f"upserts: {upserts}"])


class Killer:
    """Chooses moments and processes, and kills."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.random = random.Random(seed)
        self.aims = itertools.cycle(self.random.sample(AIMS, len(AIMS)))
        self.victims = itertools.cycle(self.random.sample([*VICTIMS], len(VICTIMS)))
        self.drivers = self.workers = self.servers = 0
        self.landed: Counter[str] = Counter()
        self.spent: dict[str, list[float]] = {}
        """Seconds from one kill to the next, by what died before."""
        self._last, self._last_s = "driver", time.monotonic()
        self._before = self.committed()
        """What the queries had committed when the driver started."""

    def committed(self) -> dict[str, int]:
        return {name: self.site.noted(name, "commits") for name in QUERIES}

    def meet(self, driver: Driver) -> None:
        """Take a driver that has just been started."""
        driver.check_alive()
        self._before = self.committed()

    def kill_driver(self, driver: Driver) -> None:
        """Kill every process of a driver whose queries have all made progress."""
        self.wait_for_progress(driver, self._before, QUERIES)
        aim, range_s = next(self.aims)
        delay = self.aim(driver, aim, range_s)
        count = kill_session(driver.process)
        self.drivers += 1
        self.landed[f"driver: {aim}"] += 1
        self.tell(f"driver, {count} processes", aim, delay)

    def kill_worker(self, driver: Driver) -> None:
        """Kill one process, once a query, each in its turn, has got over the kill before."""
        self.wait_for_turn(driver)
        name = next(self.victims)
        kind, aim, range_s = VICTIMS[name]
        pids: list[int] = []

        def is_there() -> bool:
            pids[:] = driver.processes(kind)
            return bool(pids)

        while True:
            wait_for(driver, is_there, f"no process: {kind}")
            delay = self.aim(driver, aim, range_s)
            pids = driver.processes(kind) or pids
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), signal.SIGKILL)
                break
        self.workers += 1
        self.landed[f"worker: {name}"] += 1
        self.tell(name, aim, delay)

    def kill_server(self, driver: Driver, server: PostgresServer) -> None:
        """End PostgreSQL as a crash does, and start it again while the query has no patience."""
        self.wait_for_turn(driver)
        delay = self.aim(driver, "batch", (0.0, 1.0))
        server.stop(signal.SIGQUIT)
        time.sleep(self.random.uniform(0.1, 2.0))
        server.start()
        self.servers += 1
        self.landed["PostgreSQL"] += 1
        self.tell("PostgreSQL", "batch", delay)

    def wait_for_turn(self, driver: Driver) -> None:
        query = QUERIES[(self.workers + self.servers) % len(QUERIES)]
        self.wait_for_progress(driver, self.committed(), [query])

    def wait_for_progress(
        self, driver: Driver, before: dict[str, int], queries: Sequence[str]
    ) -> None:
        def is_done() -> bool:
            return all(self.site.noted(name, "commits") > before[name] for name in queries)

        wait_for(driver, is_done, f"no progress of {queries} since {before}")

    def aim(self, driver: Driver, aim: str, range_s: tuple[float, float]) -> float:
        """Wait for a moment of a kind; returns how many seconds after it this is."""
        look: Callable[[], Any] = {
            "batch": self.site.begun,
            "staged": lambda: self.site.staged() | self.site.tables.staged(),
            "appended": self.site.appended,
            "upserted": self.site.upserted,
        }[aim]
        before = look()
        wait_for(driver, lambda: bool(look()) and look() != before, f"none {aim}", pause=0.0005)
        delay = self.random.uniform(*range_s)
        time.sleep(delay)
        driver.check_alive()
        return delay

    def tell(self, victim: str, aim: str, delay: float) -> None:
        number = self.drivers + self.workers + self.servers
        text = f"kill {number:3d}: {victim}, {delay:.3f} s after {aim}"
        now_s = time.monotonic()
        took_s, self._last_s = now_s - self._last_s, now_s
        self.spent.setdefault(self._last, []).append(took_s)
        self._last = victim.partition(",")[0]
        print(f"{text}; {took_s:.1f} s; {self.site.phase()}", flush=True)


def wait_for(
    driver: Driver, is_true: Callable[[], object], otherwise: str, pause: float = 0.02
) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        driver.check_alive()
        assert time.monotonic() < deadline, f"{otherwise} in {PATIENCE_S} s\n{driver.text()}"
        time.sleep(pause)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> PostgresServer | None:
    """Return the server that has tables; None if those of Delta Lake are tested."""
    if request.param != "delta":
        found: PostgresServer = request.getfixturevalue("postgres_server")
        return found
    delta_spark.require()
    return None


@pytest.fixture
def site(tmp_path: Path, server: PostgresServer | None, request: pytest.FixtureRequest) -> Site:
    engine = DirectoryLog(tmp_path / "log")
    small = {"segment.bytes": "20000"}
    engine.create_topic(SINK, PARTITIONS, {"cleanup.policy": "delete", **small})
    engine.create_topic(COUNTS, PARTITIONS, {"cleanup.policy": "compact", **small})
    if server is None:
        return Site(tmp_path, DeltaTables(tmp_path, (SINK, COUNTS)))
    return Site(tmp_path, DatabaseTables(tmp_path, request.getfixturevalue("postgres")))


@pytest.fixture
def drivers(site: Site) -> Iterator[Callable[..., Driver]]:
    """Start drivers, and let none outlive the test."""
    started: list[Driver] = []
    environment = site.tables.environment(site.root)

    def start(*arguments: str) -> Driver:
        started.append(Driver(site, environment, *arguments))
        return started[-1]

    yield start
    for driver in started:
        kill_session(driver.process)


@pytest.mark.parametrize("server", TARGETS, indirect=True)
def test_whatever_is_killed_log_and_tables_have_every_record_exactly_once(
    site: Site, drivers: Callable[..., Driver], server: PostgresServer | None
) -> None:
    seed = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    workers = int(os.environ.get("KAFKALOG_WORKER_KILLS", "1"))
    print(f"\nKAFKALOG_SEED={seed} KAFKALOG_KILLS={KILLS} KAFKALOG_WORKER_KILLS={workers}")
    began = time.monotonic()
    killer = Killer(site, seed)
    with Feed(site.root, (SINK, COUNTS), FILES_PER_BATCH, seed) as feed:
        for life in range(max(KILLS, 1)):
            driver = drivers()
            killer.meet(driver)
            for _ in range(workers * life // KILLS, workers * (life + 1) // KILLS):
                killer.kill_worker(driver)
                if server and killer.servers <= (killer.workers + killer.drivers) // 10:
                    killer.kill_server(driver, server)
            killer.kill_driver(driver)
        took = time.monotonic() - began
        feed.end()
        driver = drivers("--to-the-end")
        assert driver.process.wait(600) == 0, driver.text()

    print(
        f"{killer.drivers} drivers, {killer.workers} workers and {killer.servers} servers killed "
        f"in {took:.0f} s, then {time.monotonic() - began - took:.0f} s to the end; "
        f"micro-batches {site.begun()}; "
        f"{feed.records.total()} records",
        *(f"  {count:3d} {what}" for what, count in killer.landed.most_common()),
        *(
            f"  after {what}: {statistics.mean(seconds):.1f} s until the next kill, "
            f"{max(seconds):.1f} s at most"
            for what, seconds in sorted(killer.spent.items())
        ),
        json.dumps(
            {
                "kills": {
                    "of queries and upserts": killer.drivers,
                    "of one process of theirs": killer.workers,
                },
                "beside": {"PostgreSQL ended": killer.servers} if server else {},
            }
        ),
        sep="\n",
        flush=True,
    )
    check_log(site, feed)
    check_tables(site)


def topic_rows(site: Site, topic: str) -> dict[int, list[Row]]:
    """Return keys and values in the order of each partition; offsets must have no gap."""
    engine = DirectoryLog(site.log, read_only=True)
    found: dict[int, list[Row]] = {}
    for partition, (start, end) in engine.offsets(topic).items():
        offsets: list[int] = []
        found[partition] = []
        for rows in engine.read(topic, partition, columns=["key", "value", "offset"]):
            offsets += rows["offset"].to_pylist()
            pairs = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
            found[partition] += [(key.decode(), value and value.decode()) for key, value in pairs]
        assert offsets == list(range(end))
        assert start == 0
    return found


def check_log(site: Site, feed: Feed) -> None:
    """Both topics have what each micro-batch made, once and in order: records, and counts."""
    batches = {name: feed.batches[name].rows() for name in (SINK, COUNTS)}
    for name, rows in batches.items():
        assert Counter(row for each in rows for row in each) == feed.records, name
        assert len(rows) == 1 + site.noted(name, "commits")
    check_topic(SINK, topic_rows(site, SINK), batches[SINK])
    check_topic(COUNTS, topic_rows(site, COUNTS), running_counts(batches[COUNTS]))
    assert not site.staged()
    writers = DirectoryLog(site.log, read_only=True).state().writers.values()
    assert sorted(writer.batch_id for writer in writers) == sorted(
        site.noted(name, "commits") for name in (SINK, COUNTS)
    )


def check_tables(site: Site) -> None:
    """All tables hold the latest record of each key, and know that this is all there is."""
    partitions = {topic: topic_rows(site, topic) for topic in (SINK, COUNTS)}
    for topic, rows in partitions.items():
        for database, found in site.tables.rows(topic).items():
            check_table(f"{database}: {topic}_table", found, rows)
    ends = {
        topic: {str(number): len(rows) for number, rows in found.items()}
        for topic, found in partitions.items()
    }
    last = site.noted("upserts", "commits")
    reached = site.upserted()
    assert len(reached) == site.tables.count
    assert all(position == (last, ends) for position in reached.values()), reached
    query_id = checkpoint_query_id(str(site.root / "checkpoints" / "upserts"))
    assert site.tables.query_ids() == {query_id}
    site.tables.check_remains()
