"""Three cleaners, a collector, eight writers, readers and a stream on one log in an object store.

Any of the writers, cleaners and collectors is killed at any moment, and started again. Half of the
writers write to a topic of which every row must stay, once; cleaners regroup it. The others write
to a compacted topic, which must end as a model says. At the end nothing is an orphan, nothing is
missing, and `verify` finds no damage.

KAFKALOG_SECONDS is how long it takes (8; `make store-test`: 600). A stream of Spark takes part from
60 seconds on. KAFKALOG_SEED repeats the draw.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.schedule import manager
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs.clock import now_ms
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.collector import collect
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.store_state import stored_names
from tests.acceptance.store_processes import (
    KEYED,
    TASKS,
    Nursery,
    digest_of,
    keyed_rows_of,
    may_be_deleted,
    rows_of,
)
from tests.acceptance.test_store_writers import copying, last_batch, partitions
from tests.object_store_server import StoreServer

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("KAFKALOG_SECONDS", "8"))
WITH_STREAM_S = 60
WRITERS, CLEANERS, PARTITIONS = 8, 3, 3
KILL_EACH_S = 2.0
DELAY_MS = 20_000 if SECONDS >= WITH_STREAM_S else 1_000
"""`file.delete.delay.ms`: who reads for longer plans again; a stream of Spark is started again."""
ORPHAN_MS = max(5_000, DELAY_MS)
CONFIGS = {
    "t": {"cleanup.policy": "delete", "file.delete.delay.ms": str(DELAY_MS)},
    KEYED: {
        "cleanup.policy": "compact",
        "file.delete.delay.ms": str(DELAY_MS),
        "delete.retention.ms": "1000",
        "segment.bytes": "20000",
    },
    "copy": {"cleanup.policy": "delete", "file.delete.delay.ms": str(DELAY_MS)},
}
DAY_MS = 86_400_000


class Processes:
    """The processes of the test; one that is killed is started again."""

    def __init__(self, nursery: Nursery, address: StoreAddress, scratch: Path) -> None:
        self.nursery, self.address, self.scratch = nursery, address, scratch
        self.until = {what: str(scratch / f"end of {what}") for what in ("writers", "others")}
        self.running: dict[str, int] = {}
        self.started: Counter[str] = Counter()
        self._starts: dict[str, Callable[[], int]] = {}

    def add(self, name: str, **job: Any) -> None:
        """Start a process; those of a name that ends in a digit tell in a file of that name."""

        def start() -> int:
            self.started[name] += 1
            more = {what: each() if callable(each) else each for what, each in job.items()}
            if "told" in more:
                more["told"] = str(self.scratch / f"{name}-{self.started[name]}")
            run = secrets.token_hex(4)
            return self.nursery.start(self.address, name, run=run, **more)

        self._starts[name] = start
        self.running[name] = start()

    def kill(self, name: str) -> None:
        """Kill a process, and start another one in its place."""
        os.kill(self.running[name], signal.SIGKILL)
        status = self.nursery.wait(self.running[name])
        assert status == -signal.SIGKILL, self.nursery.error(self.running[name])
        self.running[name] = self._starts[name]()

    def end(self, what: str, names: list[str]) -> None:
        """Let processes end, and wait for them."""
        Path(self.until[what]).touch()
        for name in names:
            status = self.nursery.wait(self.running[name])
            assert status == 0, f"{name}: {self.nursery.error(self.running[name])}"

    def told(self, name: str) -> Counter[str]:
        """Return what all processes of a name have told, added up."""
        found: Counter[str] = Counter()
        for number in range(1, self.started[name] + 1):
            path = self.scratch / f"{name}-{number}"
            if path.exists() and (text := path.read_text()):  # it may be killed while it writes
                found.update(json.loads(text))
        return found


def test_whatever_is_killed_no_row_is_lost_or_doubled_and_no_object_left(
    request: pytest.FixtureRequest,
    store_server: StoreServer,
    s3_address: StoreAddress,
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"\nKAFKALOG_SEED={seed} seconds={SECONDS:g}", flush=True)
    draw = random.Random(seed)
    log = ObjectLog(s3_address)
    for topic, config in CONFIGS.items():
        log.create_topic(topic, PARTITIONS, config)
    names = {f"w{number}": ("t", KEYED)[number % 2] for number in range(WRITERS)}
    with Nursery(tmp_path, store_server, ["nice"]) as nursery:
        running = Processes(nursery, s3_address, tmp_path)
        for name, topic in names.items():
            running.add(
                name,
                do="micro_batches",
                topic=topic,
                first=lambda name=name, topic=topic: max(0, last_batch(log, name, topic)),
                until=running.until["writers"],
            )
        for number in range(CLEANERS):
            others = running.until["others"]
            draws = lambda: draw.randrange(1 << 32)  # noqa: E731
            running.add(f"cleaner{number}", do="clean", seed=draws, told="", until=others)
        running.add("collector", do="collect", told="", orphan_ms=ORPHAN_MS, until=others)
        running.add("watcher", do="watch", told="", until=others)
        read = str(tmp_path / "read")
        running.add("reader", do="follow", told="", until=read, is_collected=True)
        stream = Stream(request, s3_address, tmp_path) if SECONDS >= WITH_STREAM_S else None
        mortal = [name for name in running.running if name not in ("watcher", "reader")]
        kills, began = Counter[str](), time.monotonic()
        while time.monotonic() - began < SECONDS or any(
            last_batch(log, name, topic) < 1 for name, topic in names.items()
        ):
            time.sleep(KILL_EACH_S * draw.uniform(0.5, 1.5))
            name = draw.choice(mortal)
            running.kill(name)
            kills[name.rstrip("0123456789")] += 1
            if stream is not None:
                stream.keep_going()
        running.end("writers", [*names])
        if stream is not None:
            stream.finish()
        running.end("others", [each for each in mortal if each not in names] + ["watcher"])
        Path(read).touch()
        status = nursery.wait(running.running["reader"])
        assert status == 0, nursery.error(running.running["reader"])
        seconds = time.monotonic() - began
    acts = sum((running.told(f"cleaner{number}") for number in range(CLEANERS)), Counter())
    print(
        f"{seconds:.0f} s, {log.state().number} commits, kills {dict(kills)}",
        f"  batches {[last_batch(log, name, topic) + 1 for name, topic in names.items()]}",
        f"  cleaners {dict(acts)}, collector {dict(running.told('collector'))}, "
        f"readings {running.told('watcher')['readings']}",
        f"  stream {None if stream is None else stream.said}",
        sep="\n",
        flush=True,
    )
    check_no_object_is_left_or_missing(log)
    check_every_row_is_there_once(log, {n for n, topic in names.items() if topic == "t"})
    if stream is not None:
        assert partitions(log, "copy") == partitions(log, "t")
    ends, digests = json.loads(Path(tmp_path / "reader-1").read_text())
    found = partitions(log, "t")
    for number in range(PARTITIONS):
        assert ends.get(str(number), 0) == len(found[number])
        assert digests.get(str(number), digest_of([])) == digest_of(found[number])
    check_model(log, {n for n, topic in names.items() if topic == KEYED})
    check_no_object_is_left_or_missing(log)


class Stream:
    """A query of Spark that copies topic `t`; it is started again when an object was too old."""

    def __init__(
        self, request: pytest.FixtureRequest, address: StoreAddress, scratch: Path
    ) -> None:
        spark = request.getfixturevalue("spark")
        self._start = lambda: copying(spark, address, scratch)
        self._query = self._start()
        self.restarts = 0
        request.addfinalizer(self.stop)

    def stop(self) -> None:
        """Stop the query that runs last."""
        self._query.stop()

    def keep_going(self) -> None:
        """Start the query again if it has failed."""
        if not self._query.isActive:
            self.restarts += 1
            self._query = self._start()

    def finish(self) -> None:
        """Let it copy the rest."""
        for _ in range(20):
            self.keep_going()
            try:
                self._query.processAllAvailable()
                break
            except Exception as fault:
                print(f"the stream has failed: {str(fault)[:300]}", flush=True)
        self.said = f"{self._query.lastProgress['batchId']} micro-batches, {self.restarts} restarts"
        self._query.stop()


def check_no_object_is_left_or_missing(log: ObjectLog) -> None:
    """Collect all, far in the future; then the store has what the log names, and nothing else."""
    collect(log, now_ms=now_ms() + 8 * DAY_MS)
    state = log.store_state()
    named = {name for entry, each in state.objects.items() for name in stored_names(entry, each)}
    assert not state.dropped
    listed = {
        each.name
        for folder in (layout.STORED_DATA, layout.STORED_SEGMENTS)
        for each in log.client.list(folder)
    }
    assert listed - named == set(), "orphans"
    assert named - listed == set(), "dangling references"
    assert [*verify_store(log, deep=True)] == []


def check_every_row_is_there_once(log: ObjectLog, names: set[str]) -> None:
    """Compare topic `t` with what its writers have committed; rows of a writer ascend."""
    by_writer: dict[bytes, Counter[bytes]] = {}
    for part in partitions(log, "t"):
        previous: dict[bytes, bytes] = {}
        for value in part:
            name = value.partition(b"/")[0]
            assert previous.get(name, b"") < value
            previous[name] = value
            by_writer.setdefault(name, Counter())[value] += 1
    for name in names:
        batches = range(last_batch(log, name, "t") + 1)
        expected = (r["value"] for b in batches for t in range(TASKS) for r in rows_of(name, b, t))
        assert by_writer.pop(name.encode()) == Counter(expected)
    assert not by_writer


def check_model(log: ObjectLog, names: set[str]) -> None:
    """Clean the compacted topic; each key must have its latest record, and no other."""
    model: dict[bytes, bytes | None] = {}
    for name in names:
        for batch_id in range(last_batch(log, name, KEYED) + 1):
            for task in range(TASKS):
                for row in keyed_rows_of(name, batch_id, task):
                    model[row["key"]] = row["value"]
    found = records(log)
    assert all(model[key] == values[-1] for key, values in found.items())
    assert {key for key in model.keys() - found.keys() if not may_be_deleted(key)} == set()
    at_ms = now_ms()
    for round_ms in (at_ms, at_ms + DAY_MS, at_ms + 2 * DAY_MS):
        stats = manager.clean(log, KEYED, force=True, now_ms=round_ms)
        assert [each.error for each in stats] == [None] * len(stats)
    expected = {key: [value] for key, value in model.items() if value is not None}
    assert records(log) == expected


def records(log: ObjectLog) -> dict[bytes, list[bytes | None]]:
    """Return the values of each key of the compacted topic, in the order of offsets."""
    found: dict[bytes, list[bytes | None]] = {}
    for number in range(PARTITIONS):
        for rows in log.read(KEYED, number, columns=["key", "value"]):
            for row in rows.to_pylist():
                found.setdefault(row["key"], []).append(row["value"])
    return found
