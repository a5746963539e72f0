"""Eight writers on two hosts that share nothing but an object store, with readers and a stream.

The hosts are network namespaces. Writers are killed and go on from what the log knows of them.
KAFKALOG_SECONDS is how long it takes (5; `make store-test`: 600), and until each writer has
committed two micro-batches. KAFKALOG_SEED repeats the draw.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.acceptance.networks import host
from tests.acceptance.store_processes import TASKS, Nursery, digest_of, options_of, rows_of
from tests.object_store_proxy import StoreProxy
from tests.object_store_server import BUCKET, StoreServer

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SECONDS = float(os.environ.get("KAFKALOG_SECONDS", "5"))
HOSTS = 2
WRITERS = 8
PARTITIONS = 3
KILL_EACH_S = 2.0
WITH_DELETE = {"cleanup.policy": "delete"}


class Site:
    """A host with its nursery, and the proxy by which it finds the store."""

    def __init__(self, opened: ExitStack, scratch: Path, server: StoreServer, prefix: str) -> None:
        self.host = opened.enter_context(host())
        self.proxy = opened.enter_context(StoreProxy(server.port, self.host.address))
        # Spark gives up on workers that the writers leave no processor.
        prefix_of_nursery = [*self.host.prefix, "nice"]
        self.nursery = opened.enter_context(Nursery(scratch, server, prefix_of_nursery))
        self.address = address_of(prefix, self.host.address, self.proxy.port)

    def finds(self, address: str, port: int) -> bool:
        """Return whether a port can be reached from there."""
        program = f"exec 3<>/dev/tcp/{address}/{port}"
        command = [*self.host.prefix, "bash", "-c", program]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def address_of(prefix: str, host: str, port: int) -> StoreAddress:
    return StoreAddress.parse(
        f"s3://{BUCKET}/{prefix}",
        {
            "store.endpoint": f"http://{host}:{port}",
            "store.region": "us-east-1",
            "store.allow_http": "true",
        },
    )


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_writers_on_two_hosts_lose_and_double_nothing_and_keep_their_order(
    spark: Any,
    store_server: StoreServer,
    store_proxy: StoreProxy,
    tmp_path: Path,
    opened: ExitStack,
) -> None:
    seed = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"\nKAFKALOG_SEED={seed} seconds={SECONDS:g} writers={WRITERS} hosts={HOSTS}", flush=True)
    draw, prefix = random.Random(seed), secrets.token_hex(8)
    log = ObjectLog(address_of(prefix, "127.0.0.1", store_server.port))
    for topic in ("t", "copy"):
        log.create_topic(topic, PARTITIONS, WITH_DELETE)
    scratches = [tmp_path / f"host{number}" for number in range(HOSTS)]
    for scratch in scratches:
        scratch.mkdir()
    sites = [Site(opened, scratch, store_server, prefix) for scratch in scratches]
    for site in sites:
        assert site.finds(site.host.address, site.proxy.port)
        assert not site.finds("127.0.0.1", store_server.port)
        site.proxy.reset()
    written, read = tmp_path / "written", tmp_path / "read"

    def write(name: str) -> int:
        """Start a writer with the last micro-batch that the log has of it: Spark may forget."""
        first = max(0, last_batch(log, name))
        site, run = site_of[name], secrets.token_hex(4)
        return site.nursery.start(
            site.address, name, do="micro_batches", run=run, first=first, until=str(written)
        )

    site_of = {f"w{number}": sites[number % HOSTS] for number in range(WRITERS)}
    stream = copying(spark, address_of(prefix, "127.0.0.1", store_proxy.port), tmp_path)
    opened.callback(stream.stop)
    readers = [
        site.nursery.start(
            *(site.address, "reader"), do="follow", run="r", until=str(read), told=f"{read}{number}"
        )
        for number, site in enumerate(sites)
    ]
    store_proxy.reset()
    running = {name: write(name) for name in site_of}
    first_commit, began = log.state().number, time.monotonic()
    kills = 0
    while time.monotonic() - began < SECONDS or min(last_batch(log, name) for name in site_of) < 1:
        time.sleep(KILL_EACH_S)
        name = draw.choice([*running])
        os.kill(running[name], signal.SIGKILL)
        assert site_of[name].nursery.wait(running[name]) == -signal.SIGKILL
        running[name] = write(name)
        kills += 1
    written.touch()
    for name, pid in running.items():
        status = site_of[name].nursery.wait(pid)
        assert status == 0, site_of[name].nursery.error(pid)
    seconds = time.monotonic() - began
    read.touch()
    for site, pid in zip(sites, readers, strict=True):
        assert site.nursery.wait(pid) == 0, site.nursery.error(pid)
    stream.processAllAvailable()
    micro_batches = stream.lastProgress["batchId"]
    stream.stop()

    found = {topic: partitions(log, topic) for topic in ("t", "copy")}
    commits = log.state().number - first_commit
    print(
        f"{sum(map(len, found['t']))} rows, {commits} commits ({commits / seconds:.1f} a second), "
        f"{kills} kills, {micro_batches} micro-batches of the stream, {seconds:.0f} s",
        f"  micro-batches by writer: {[last_batch(log, name) + 1 for name in site_of]}",
        *(
            f"  requests of {what}: {sum(proxy.counts.values())}, {dict(proxy.counts)}"
            for what, proxy in [
                *((f"host {number}", site.proxy) for number, site in enumerate(sites)),
                ("Spark", store_proxy),
            ]
        ),
        sep="\n",
        flush=True,
    )
    by_writer: dict[bytes, Counter[bytes]] = {}
    for part in found["t"]:
        last: dict[bytes, bytes] = {}
        for value in part:
            name = value.partition(b"/")[0]
            assert last.get(name, b"") < value
            last[name] = value
            by_writer.setdefault(name, Counter())[value] += 1
    for name in site_of:
        batches = range(last_batch(log, name) + 1)
        expected = (r["value"] for b in batches for t in range(TASKS) for r in rows_of(name, b, t))
        assert by_writer.pop(name.encode()) == Counter(expected)
    assert not by_writer
    assert found["copy"] == found["t"]
    for number in range(HOSTS):
        ends, digests = json.loads(Path(f"{read}{number}").read_text())
        assert [ends[str(part)] for part in range(PARTITIONS)] == [*map(len, found["t"])]
        assert [digests[str(part)] for part in range(PARTITIONS)] == [*map(digest_of, found["t"])]


def copying(spark: Any, address: StoreAddress, scratch: Path) -> Any:
    """Start a stream that copies topic `t`."""
    options = options_of(address)
    reader = spark.readStream.format("kafkalog").options(**options, subscribe="t")
    rows = reader.option("startingOffsets", "earliest").load(str(address))
    writer = rows.select("key", "value", "partition").writeStream.format("kafkalog")
    writer = writer.options(topic="copy", path=str(address), **options)
    return writer.option("checkpointLocation", str(scratch / "checkpoint")).start()


def last_batch(log: ObjectLog, name: str, topic: str = "t") -> int:
    """Return the last micro-batch that the log has of a writer; -1 for none."""
    known = log.state().writers.get(Writer(name, topic, 0).name)
    return -1 if known is None else known.batch_id


def partitions(log: ObjectLog, topic: str) -> list[list[bytes]]:
    """Return the values of each partition, in the order of offsets."""
    return [
        [
            value
            for rows in log.read(topic, number, columns=["value"])
            for value in rows["value"].to_pylist()
        ]
        for number in range(PARTITIONS)
    ]
