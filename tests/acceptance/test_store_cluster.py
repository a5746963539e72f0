"""Driver and executors on what Spark takes for different hosts, with nothing but an object store.

Each worker, and the driver, sees its own scratch directory of all temporary files. A worker, an
executor and the driver are killed. KAFKALOG_CLUSTER=full streams 100 micro-batches (`make
store-test`), else 12. KAFKALOG_SEED repeats the choice of moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests import ROOT
from tests.acceptance.cluster import (
    WORKER_HOSTS,
    Cluster,
    Member,
    directory_of_cluster,
    may_isolate,
    wait_until,
)
from tests.acceptance.driver_process import Driver
from tests.acceptance.store_processes import options_of
from tests.object_store_proxy import StoreProxy

pytestmark = [pytest.mark.spark, pytest.mark.slow]
IS_FULL = os.environ.get("KAFKALOG_CLUSTER") == "full"
BATCHES = 100 if IS_FULL else 12
WORKER, EXECUTOR, DRIVER = "a worker", "an executor", "the driver"
KILLS = (
    {15: EXECUTOR, 30: WORKER, 45: DRIVER, 60: WORKER, 75: EXECUTOR, 90: DRIVER}
    if IS_FULL
    else {3: EXECUTOR, 5: WORKER, 8: DRIVER}
)
"""With which micro-batch what is killed."""
PARTITIONS = 3
ROWS_PER_BATCH = 60
AHEAD = 3
"""So many micro-batches of input lie ready."""
WEEK_MS = 8 * 24 * 3600 * 1000


class Site:
    """A cluster, its driver, and a log in a store that they reach through a proxy."""

    def __init__(self, directory: Path, address: StoreAddress) -> None:
        self.scratch = directory / "driver"
        self.scratch.mkdir()
        self.address = address
        self.cluster = Cluster(directory, all_temporary(directory))
        self.cluster.start()
        self.driver = self.started()
        self.hosts: set[str] = set()
        """Hosts whose executors have run a task, for any driver."""

    def started(self) -> Driver:
        """Start a driver."""
        return Driver(self.cluster, self.scratch, self.cluster.prefix(self.scratch))

    def stream(self) -> None:
        """Start the stream, from its checkpoint if there is one."""
        options = {"store": options_of(self.address), "limit": ROWS_PER_BATCH, "meeting": ""}
        self.driver.ask("stream", log=str(self.address), source="source", topic="copy", **options)

    def note_hosts(self) -> None:
        """Note which hosts have run tasks for this driver."""
        executors = self.driver.ask("executors").values()
        self.hosts |= {each["host"] for each in executors if each["tasks"]}

    def kill(self, kind: str, draw: random.Random) -> str:
        """Kill a part, in the midst of a micro-batch, and see to its return; say what it was."""
        begun = self.driver.begun("copy")
        wait_until(lambda: self.driver.begun("copy") > begun, "no micro-batch begins", pause=0.001)
        time.sleep(draw.uniform(0, 0.5))
        if kind == DRIVER:
            count = self.driver.stop()
            self.driver = self.started()
            self.stream()
            return f"the driver with {count} processes"
        worker = draw.choice(self.cluster.workers)
        if kind == WORKER:
            count = worker.kill()
            worker.start()
            return f"the worker {worker.name} with {count} processes"
        wait_until(lambda: executor_of(worker), f"{worker.name} has no executor")
        os.kill(executor_of(worker), signal.SIGKILL)
        return f"the executor of {worker.name}"

    def stop(self) -> None:
        """End all."""
        self.driver.stop()
        self.cluster.stop()


def all_temporary(directory: Path) -> Path:
    """Return the directory of all temporary files, or `directory` if programs are among them."""
    found = Path(tempfile.gettempdir())
    programs = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
    is_free = not any(each.is_relative_to(found) for each in programs)
    return found if is_free and directory.is_relative_to(found) else directory


def executor_of(worker: Member) -> int:
    """Return the process of a worker's executor; 0 for none."""
    for pid in worker.processes():
        with contextlib.suppress(OSError):
            if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


@pytest.fixture
def site(s3_address: StoreAddress) -> Iterator[Site]:
    with directory_of_cluster() as name:
        made = Site(Path(name), s3_address)
        try:
            yield made
        finally:
            made.stop()


def test_a_stream_between_hosts_that_share_a_store_alone_loses_and_doubles_nothing(
    site: Site, store_proxy: StoreProxy
) -> None:
    seed = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    is_isolated = site.cluster.is_isolated
    print(f"\nKAFKALOG_SEED={seed} micro-batches={BATCHES} own mounts={is_isolated}", flush=True)
    draw, began = random.Random(seed), time.monotonic()
    log = ObjectLog(site.address)
    for topic in ("source", "copy"):
        log.create_topic(topic, PARTITIONS, {"cleanup.policy": "delete"})
    store_proxy.reset()
    site.stream()
    if may_isolate():
        site.cluster.check_isolation()
    for number in range(BATCHES):
        site.driver.wait_for_commits("copy", number - AHEAD)
        feed(log, number)
        site.note_hosts()
        if number in KILLS:
            print(f"killed {site.kill(KILLS[number], draw)}", flush=True)
    site.driver.wait_for_commits("copy", BATCHES)
    site.driver.ask("drain")

    source, copy = values(log, "source"), values(log, "copy")
    site.note_hosts()
    log.sweep_staged(now_ms=clock.now_ms() + WEEK_MS)
    print(
        f"{sum(map(len, copy))} rows in {site.driver.committed('copy')} micro-batches, "
        f"{time.monotonic() - began:.0f} s, requests {dict(store_proxy.counts)}",
        flush=True,
    )
    assert sum(map(len, source)) == BATCHES * ROWS_PER_BATCH
    # A task has the new rows of a partition, so each partition is there in its order.
    assert copy == source
    assert {entry.name for entry in log.client.list("data")} == {*log.store_state().objects}
    assert values(log, "copy") == source
    assert site.hosts == set(WORKER_HOSTS)


def feed(log: ObjectLog, number: int) -> None:
    """Append the input of one micro-batch, as many rows to each partition, in one commit."""
    numbers = range(number * ROWS_PER_BATCH, (number + 1) * ROWS_PER_BATCH)
    rows = {
        "key": [f"key-{row % 21}".encode() for row in numbers],
        "value": [f"{row:09d}".encode() for row in numbers],
        "partition": pa.array([row % PARTITIONS for row in numbers], pa.int32()),
    }
    log.append("source", pa.table(rows))


def values(log: ObjectLog, topic: str) -> list[list[bytes]]:
    """Return the values of each partition, in the order of offsets."""
    return [
        [
            value
            for rows in log.read(topic, number, columns=["value"])
            for value in rows["value"].to_pylist()
        ]
        for number in range(PARTITIONS)
    ]
