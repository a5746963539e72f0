"""Processes that write to a log in an object store as Spark does, to be killed or stopped.

`python -m tests.acceptance.store_processes` is a nursery: it uses no store itself, and forks a
process for each job that it is given, a line of JSON each. A fork has all modules at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import obstore  # noqa: F401 - for the forks

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.schedule import manager
from kafkalog.errors import KafkaLogError, StorageError
from kafkalog.storage_engine.fs.clock import now_ms
from kafkalog.storage_engine.object_store import (
    collector,
    object_log,
    staged_objects,  # noqa: F401 - for the forks
    store_state,
)
from kafkalog.storage_engine.object_store.address import StoreAddress
from tests import ROOT
from tests.object_store_server import StoreServer
from tests.unit.sink.spark_write import Row, SparkWrite

__all__ = [
    "FAILED",
    "KEYED",
    "TASKS",
    "Nursery",
    "digest_of",
    "keyed_rows_of",
    "options_of",
    "rows_of",
]

TASKS = 2
FAILED = 3
"""The status of a process whose job raised a KafkaLogError; its text is in the file `error`."""
PATIENCE_S = 240.0
KEYED = "keyed"
"""A topic that is compacted, of rows as `keyed_rows_of` returns them."""
_SWEPT = "older than a sweep"
"""The refusal of a commit that is slower than the sweep of a collector."""
TINY = 24 * 40
"""Bytes for 36 keys: a cleaning has more."""
_BECOME = "import ctypes; ctypes.CDLL(None).prctl(1, 9)"
"""A nursery dies with the process that started it, by PR_SET_PDEATHSIG."""


def options_of(address: StoreAddress) -> dict[str, str]:
    """Return the options that complete the URL of an address."""
    return {
        "store.endpoint": str(address.endpoint),
        "store.region": str(address.region),
        "store.allow_http": "true",
    }


def rows_of(name: str, batch_id: int, task: int, count: int = 30) -> list[Row]:
    """Return the rows of a task; values of one writer ascend."""
    return [
        {"key": b"%d" % (n % 7), "value": b"%s/%06d/%d/%04d" % (name.encode(), batch_id, task, n)}
        for n in range(count)
    ]


def keyed_rows_of(name: str, batch_id: int, task: int, count: int = 30) -> list[Row]:
    """Return the rows of a task for a compacted topic: no writer has another's keys."""
    rows = []
    for n in range(count):
        key = b"%s/%d/%d" % (name.encode(), batch_id % 20, n % 7)
        value = b"%06d/%d/%04d" % (batch_id, task, n)
        is_deletion = may_be_deleted(key) and batch_id % 3
        rows.append({"key": key, "value": None if is_deletion else value})
    return rows


def may_be_deleted(key: bytes) -> bool:
    """Return whether some of the rows of a key of `keyed_rows_of` are deletions."""
    return key.endswith(b"/6")


class _Job:
    """The jobs of a fork: micro-batches, a commit of what another process staged, a read.

    And cleaning, collecting, and reading meanwhile.
    """

    def __init__(
        self,
        path: str,
        options: Mapping[str, str],
        name: str,
        run: str,
        kept: str = "",
        snapshot_commits: int = store_state.SNAPSHOT_COMMITS,
        topic: str = "t",
    ) -> None:
        self.name = name
        self.kept = Path(kept)
        self.topic = topic
        self.write = SparkWrite(
            path,
            options={"topic": topic, **options},
            query=name,
            run=run,
            batch_rows=100,
        )
        # A collector has work if there are fewer.
        store_state.SNAPSHOT_COMMITS = snapshot_commits  # type: ignore[misc]  # of this fork alone

    def micro_batch(self, batch_id: int) -> None:
        """Run the tasks, keep their messages, and commit them."""
        write = self.write
        rows = keyed_rows_of if self.topic == KEYED else rows_of
        messages = [
            write.attempt(rows(self.name, batch_id, task), partition=task, batch_id=batch_id)
            for task in range(TASKS)
        ]
        with contextlib.suppress(IsADirectoryError):
            self.kept.write_bytes(pickle.dumps(messages))
        write.commit(messages, batch_id)

    def commit(self, batch_id: int) -> None:
        """Commit what another process has staged; run the tasks if it has not come so far."""
        if not self.kept.exists():
            self.micro_batch(batch_id)
            return
        self.write.commit(pickle.loads(self.kept.read_bytes()), batch_id)

    def micro_batches(self, first: int, until: str) -> None:
        """Write one micro-batch after the other, from `first` on, until there is a file.

        One that a sweep was quicker than is written again.
        """
        batch_id = first
        while not Path(until).exists():
            try:
                self.micro_batch(batch_id)
            except StorageError as fault:
                if _SWEPT not in str(fault):
                    raise
            else:
                batch_id += 1

    def _log(self, *, read_only: bool = False) -> object_log.ObjectLog:
        address = StoreAddress.parse(str(self.write.root), self.write.options)
        return object_log.ObjectLog(address, read_only=read_only)

    def clean(self, until: str, seed: int, told: str) -> None:
        """Regroup and clean until there is a file: what is due, or all that is dirty."""
        log, draw = self._log(), random.Random(seed)
        counts = {"regroups": 0, "rounds": 0, "swept": 0}
        while not Path(until).exists():
            config = CleanerConfig(
                dedupe_buffer_size=draw.choice([TINY, 1 << 20]), spill=draw.random() < 0.7
            )
            is_forced = draw.random() < 0.5
            try:
                done = upkeep.regroup_due(log, now_ms=now_ms(), force=is_forced)
                counts["regroups"] += sum(not each.is_lost for each in done)
                found = manager.clean(log, force=is_forced, now_ms=now_ms(), config=config)
                counts["rounds"] += sum(stats.rounds for stats in found)
            except StorageError as fault:
                if _SWEPT not in str(fault):
                    raise
                counts["swept"] += 1
            Path(told).write_text(json.dumps(counts))

    def collect(self, until: str, told: str, orphan_ms: int) -> None:
        """Delete what nobody needs, also orphans of an age, until there is a file."""
        collector.COMMITS_KEPT_MS = 10_000  # type: ignore[misc]  # of this fork alone, not a day
        log, counts = self._log(), {"dead": 0, "orphans": 0, "commits": 0}
        while not Path(until).exists():
            counts["dead"] += collector.delete_dropped(log, now_ms=now_ms())
            counts["orphans"] += collector.sweep(log, now_ms=now_ms(), age_ms=orphan_ms)
            counts["commits"] += collector.cut_commit_log(log, now_ms=now_ms())
            Path(told).write_text(json.dumps(counts))
            time.sleep(0.5)

    def watch(self, until: str, told: str) -> None:
        """Read the compacted topic again and again until there is a file.

        No record is there twice, and no key's latest record goes, or becomes an older one.
        """
        log, readings = self._log(read_only=True), 0
        latest: dict[bytes, tuple[int, bytes]] = {}
        kept: defaultdict[int, set[bytes]] = defaultdict(set)
        while not Path(until).exists():
            for number in log.offsets(KEYED):
                try:
                    read = [
                        row
                        for rows in log.read(KEYED, number, columns=["offset", "key", "value"])
                        for row in rows.to_pylist()
                    ]
                except StorageError:
                    continue  # an object was replaced, and is deleted: plan again
                offsets = [row["offset"] for row in read]
                assert offsets == sorted({*offsets}), "an offset twice, or out of order"
                found = {row["key"]: (row["offset"], row["value"]) for row in read}
                for key, (offset, value) in found.items():
                    known = latest.get(key, (-1, b""))
                    assert offset >= known[0], f"{key!r}: {value!r} after {known[1]!r}"
                    if offset == known[0]:
                        assert value == known[1], f"{key!r}: {value!r} is not {known[1]!r}"
                gone = kept[number] - found.keys()
                assert not gone, f"the latest record of {gone} is gone"
                latest |= found
                kept[number] |= {key for key in found if not may_be_deleted(key)}
                readings += 1
            Path(told).write_text(json.dumps({"readings": readings}))
            time.sleep(0.05)

    def follow(self, until: str, told: str, is_collected: bool = False) -> None:
        """Read what is new, again and again, until there is a file; then tell what was read.

        Rows of one writer must ascend in each partition. With `is_collected` an object may be gone
        when it is read.
        """
        log = self._log(read_only=True)
        digests: dict[int, Any] = {}
        ends: dict[int, int] = {}
        last: dict[tuple[int, bytes], bytes] = {}
        is_over = False
        while not is_over:
            is_over = Path(until).exists()
            for number, (_, end) in log.offsets("t").items():
                start = ends.setdefault(number, 0)
                try:
                    for rows in log.read("t", number, start, end, columns=["value"]):
                        for value in rows["value"].to_pylist():
                            place = number, value.partition(b"/")[0]
                            assert last.get(place, b"") < value, f"{value!r} after {last[place]!r}"
                            last[place] = value
                            digests.setdefault(number, hashlib.sha256()).update(value)
                        ends[number] += rows.num_rows
                    assert ends[number] == end
                except StorageError:
                    if not is_collected:
                        raise
                    is_over = False  # plan again
            time.sleep(0.05)
        told_of = {number: digest.hexdigest() for number, digest in digests.items()}
        Path(told).write_text(json.dumps([ends, told_of]))


def digest_of(values: Sequence[bytes]) -> str:
    """Return the digest of a partition, as `follow` tells it."""
    return hashlib.sha256(b"".join(values)).hexdigest()


def _fork(job: Mapping[str, Any], error: Path) -> int:
    """Fork a process that does a job; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the nursery
        settings, call = dict(job["settings"]), dict(job["call"])
        getattr(_Job(**settings), call.pop("do"))(**call)
        os._exit(0)
    except BaseException as fault:
        error.write_text(traceback.format_exc())
        os._exit(FAILED if isinstance(fault, KafkaLogError) else 1)


def _import_all() -> None:
    """Import what a micro-batch needs, by one into a directory: no client may be made here."""
    with tempfile.TemporaryDirectory() as scratch:
        _Job(f"{scratch}/log", {}, "q", "run-1", f"{scratch}/kept").micro_batch(0)


def main() -> int:
    """Fork for each job; say the process id at once, and its status when asked to wait."""
    _import_all()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            status = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            print(json.dumps(status), flush=True)
        else:
            print(json.dumps(_fork(request, Path(request["error"]))), flush=True)
    return 0


class Nursery:
    """A running nursery; a context manager. Threads may share it."""

    def __init__(self, scratch: Path, server: StoreServer, prefix: Sequence[str] = ()) -> None:
        """`prefix` is what stands before its command, as of another namespace."""
        self._scratch = scratch
        self._lock = threading.Lock()
        self._started = 0
        self._errors: dict[int, Path] = {}
        program = f"{_BECOME}; import runpy; runpy.run_module({__name__!r}, run_name='__main__')"
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, **server.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(self, address: StoreAddress, name: str, *, do: str, run: str, **more: Any) -> int:
        """Start a process with a job; return its id.

        `kept`, `snapshot_commits` and `topic` are settings.
        """
        of_settings = "kept", "snapshot_commits", "topic"
        settings = {key: more.pop(key) for key in of_settings if key in more}
        settings |= {"path": str(address), "options": options_of(address), "name": name, "run": run}
        with self._lock:
            self._started += 1
            error = self._scratch / f"error-{self._started}"
            request = {"settings": settings, "call": {"do": do, **more}, "error": str(error)}
            pid = int(self._ask(request))
            self._errors[pid] = error
            return pid

    def wait(self, pid: int) -> int:
        """Wait for the end of a process; return its status, a signal's number below 0."""
        deadline = time.monotonic() + PATIENCE_S
        while not _has_ended(pid):
            assert time.monotonic() < deadline, f"process {pid} does not end"
            time.sleep(0.005)
        with self._lock:
            return int(self._ask({"wait": pid}))

    def error(self, pid: int) -> str:
        """Return the error that a process has ended with."""
        path = self._errors[pid]
        return path.read_text() if path.exists() else ""

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nursery has ended"
        return json.loads(line)


def _has_ended(pid: int) -> bool:
    """Return whether a process is a zombie, which waits for its nursery to take its status."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


if __name__ == "__main__":
    sys.exit(main())
