"""Driver and executors in different processes, on what Spark takes for different hosts.

KAFKALOG_CLUSTER=full streams 100 micro-batches with three restarts of a worker (`make
cluster-test`), else 12 with one. KAFKALOG_SEED repeats the choice of moments.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.acceptance.cluster import (
    WORKER_HOSTS,
    Cluster,
    Member,
    directory_of_cluster,
    may_isolate,
    wait_until,
)
from tests.acceptance.cluster_driver import NEVER
from tests.acceptance.cluster_straggler import LARGE_ROWS, LATE, TIED
from tests.acceptance.driver_process import Driver
from tests.acceptance.independent_reader import read_log

pytestmark = [pytest.mark.spark, pytest.mark.slow]
IS_FULL = os.environ.get("KAFKALOG_CLUSTER") == "full"
BATCHES = 100 if IS_FULL else 12
RESTARTS = {20: 0, 45: 1, 70: 0} if IS_FULL else {4: 0}
"""With which micro-batch a worker is killed, and which one."""
PARTITIONS = 3
ROWS_PER_BATCH = 60
AHEAD = 3
"""So many micro-batches of input lie ready."""
AT_ONE = 5
"""So many micro-batches after it a restarted worker is waited for."""


@dataclass
class Site:
    """A cluster, a driver, and the directory that they share."""

    cluster: Cluster
    driver: Driver
    log: Path

    def staged(self) -> set[str]:
        """Return what tasks have staged, in the root and in partitions."""
        return {str(path.relative_to(self.log)) for path in self.log.rglob("kl-*.staged*")}

    def wait_for_executors(self) -> None:
        """Wait until each worker has an executor, of each of its starts one."""
        starts = sum(worker.starts for worker in self.cluster.workers)

        def are_all_here() -> bool:
            for worker in self.cluster.workers:
                worker.check_alive()
            found = self.driver.ask("executors").values()
            active = {each["host"] for each in found if each["is_active"]}
            return len(found) == starts and active == set(WORKER_HOSTS)

        wait_until(are_all_here, "a worker has no executor", pause=0.2)

    def partitions(self, topic: str) -> list[list[tuple[bytes, bytes]]]:
        """Return the keys and values of each partition, in the order of offsets."""
        found: list[list[tuple[bytes, bytes]]] = []
        with DirectoryLog(self.log, read_only=True) as engine:
            for number in range(PARTITIONS):
                found.append([])
                for rows in engine.read(topic, number, columns=["key", "value"]):
                    pairs = (rows["key"].to_pylist(), rows["value"].to_pylist())
                    found[number] += zip(*pairs, strict=True)
        return found


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with directory_of_cluster() as name:
        yield from site_in(Path(name))


def site_in(directory: Path) -> Iterator[Site]:
    """Yield the site of a directory, and end its processes."""
    hidden, log = directory / "driver", directory / "log"
    hidden.mkdir()
    log.mkdir()
    cluster = Cluster(directory, hidden)
    driver: Driver | None = None
    try:
        cluster.start()
        driver = Driver(cluster, hidden)
        yield Site(cluster, driver, log)
    finally:
        if driver is not None:
            driver.stop()
        cluster.stop()


def test_a_worker_sees_of_the_drivers_machine_only_the_log(site: Site) -> None:
    if not may_isolate():
        pytest.skip("only root on Linux, where namespaces can be made, hides things from a worker")
    assert site.cluster.is_isolated
    site.wait_for_executors()
    site.cluster.check_isolation()
    for worker in site.cluster.workers:
        log = Path(f"/proc/{worker.processes()[-1]}/root") / site.log.relative_to("/")
        assert log.samefile(site.log)


def test_what_executors_of_two_hosts_write_they_read(site: Site) -> None:
    log, rows = str(site.log), 2000
    for version in (1, 1, 2):
        site.driver.ask("write", log=log, topic="batch", rows=rows, version=version)
    written = [[f"key-{number % 97}", str(number)] for number in range(rows)]

    assert site.driver.ask("read", log=log, topic="batch", view="changelog") == sorted(written * 2)
    latest_records = site.driver.ask("read", log=log, topic="batch", view="latest")
    assert [key for key, _ in latest_records] == sorted({key for key, _ in written})
    survivors = read_log(site.log, "batch")["batch"].latest_records
    assert latest_records == sorted(
        [key.decode(), value.decode()] for key, value in survivors.items()
    )
    assert not site.staged()
    hosts = {each["host"] for each in site.driver.ask("executors").values() if each["tasks"]}
    assert hosts == set(WORKER_HOSTS)


def test_a_stream_whose_workers_are_killed_and_restarted_loses_and_doubles_nothing(
    site: Site,
) -> None:
    seed = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    print(
        f"\nKAFKALOG_SEED={seed} micro-batches={BATCHES} restarts={len(RESTARTS)} "
        f"workers' own mounts={site.cluster.is_isolated}",
        flush=True,
    )
    draw, began = random.Random(seed), time.monotonic()
    log = str(site.log)
    with DirectoryLog(site.log) as engine:
        engine.create_topic("source", PARTITIONS, {"cleanup.policy": "delete"})
    arguments = {"source": "source", "topic": "copy", "limit": ROWS_PER_BATCH, "meeting": ""}
    site.driver.ask("stream", log=log, **arguments)
    for number in range(BATCHES):
        site.driver.wait_for_commits("copy", number - AHEAD)
        if number - AT_ONE in RESTARTS:
            # What comes now is for the new executor too.
            site.wait_for_executors()
        feed(site.log, number)
        if number in RESTARTS:
            restart(site, site.cluster.workers[RESTARTS[number]], draw.uniform(0, 0.5))
    site.driver.wait_for_commits("copy", BATCHES)
    site.driver.ask("drain")

    source, copy = site.partitions("source"), site.partitions("copy")
    executors = site.driver.ask("executors")
    print(
        f"{sum(map(len, copy))} rows in {site.driver.committed('copy')} micro-batches, "
        f"{time.monotonic() - began:.0f} s",
        *(f"  executor {name}: {what}" for name, what in executors.items()),
        sep="\n",
        flush=True,
    )
    assert sum(map(len, source)) == BATCHES * ROWS_PER_BATCH
    # A task has the new rows of a partition, so each partition is there in its order.
    assert copy == source
    assert not site.staged()
    assert site.driver.committed("copy") >= BATCHES
    assert len(executors) == len(WORKER_HOSTS) + len(RESTARTS)
    assert all(each["tasks"] for each in executors.values())
    assert read_log(site.log, "copy")["copy"].records == BATCHES * ROWS_PER_BATCH


def feed(log: Path, number: int) -> None:
    """Append the input of one micro-batch, as many rows to each partition, in one commit."""
    first = number * ROWS_PER_BATCH
    numbers = range(first, first + ROWS_PER_BATCH)
    partitions = [row % PARTITIONS for row in numbers]
    rows = pa.table(
        {
            "key": [f"key-{row % 21}".encode() for row in numbers],
            "value": [f"{row:09d}".encode() for row in numbers],
            "partition": pa.array(partitions, pa.int32()),
        }
    )
    with DirectoryLog(log) as engine:
        engine.append("source", rows)


def restart(site: Site, worker: Member, delay: float) -> None:
    """Kill a worker with its executor, in the midst of a micro-batch; start it again."""
    begun = site.driver.begun("copy")
    wait_until(lambda: site.driver.begun("copy") > begun, "no micro-batch begins", pause=0.001)
    time.sleep(delay)
    count = worker.kill()
    print(
        f"killed {worker.name} with {count} processes, {delay:.3f} s after the beginning of "
        f"micro-batch {site.driver.begun('copy') - 1}; "
        f"{site.driver.committed('copy')} were committed",
        flush=True,
    )
    worker.start()


def test_a_straggler_and_its_copy_on_another_host_leave_one_copy_of_each_row(site: Site) -> None:
    meeting = site.log.parent / "meeting"
    meeting.mkdir()
    with DirectoryLog(site.log) as engine:
        engine.create_topic("steps", PARTITIONS, {"cleanup.policy": "delete"})
        engine.create_topic("strides", PARTITIONS, {"cleanup.policy": "delete"})
    site.wait_for_executors()
    arguments = {"source": "steps", "topic": "strides", "limit": None, "meeting": str(meeting)}
    for batch_id in (LATE, TIED, 2):
        # What a killed copy has staged goes with the next commit, so the last one has no copies,
        # be the machine as slow as it may.
        site.driver.ask("copy_tasks", beyond="1.5" if batch_id in {LATE, TIED} else NEVER)
        append_steps(site.log, batch_id)
        if batch_id == 0:
            site.driver.ask("stream", log=str(site.log), **arguments)
        site.driver.wait_for_commits("strides", batch_id + 1)
        attempts = {path.name: path.read_text() for path in meeting.glob(f"{batch_id}-*")}
        print(f"micro-batch {batch_id}: {attempts or 'no straggler'}", flush=True)
        if batch_id in {LATE, TIED}:
            assert set(attempts) == {f"{batch_id}-0", f"{batch_id}-1"}
            assert set(attempts.values()) == set(WORKER_HOSTS)
    site.driver.ask("drain")

    short = [
        [(key, value.rstrip(b"\0")) for key, value in rows] for rows in site.partitions("strides")
    ]
    assert short == site.partitions("steps")
    assert sum(len(value) > 100 for _, value in site.partitions("strides")[0]) == LARGE_ROWS
    assert not site.staged()


def append_steps(log: Path, batch_id: int) -> None:
    """Append many rows to partition 0, and a few to the others."""
    partitions = [0] * LARGE_ROWS + [1, 2] * 5
    rows = pa.table(
        {
            "key": [f"{number}".encode() for number in range(len(partitions))],
            "value": [f"{batch_id}-{number}".encode() for number in range(len(partitions))],
            "partition": pa.array(partitions, pa.int32()),
        }
    )
    with DirectoryLog(log) as engine:
        engine.append("steps", rows)
