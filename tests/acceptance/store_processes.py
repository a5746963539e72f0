"""Processes that write to a log in an object store as Spark does, to be killed or stopped.

`python -m tests.acceptance.store_processes` is a nursery: it uses no store itself, and forks a
process for each job that it is given, a line of JSON each. A fork has all modules at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import obstore  # noqa: F401 - for the forks

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.object_store import (
    object_log,
    staged_objects,  # noqa: F401 - for the forks
    store_state,
)
from kafkalog.storage_engine.object_store.address import StoreAddress
from tests import ROOT
from tests.object_store_server import StoreServer
from tests.unit.sink.spark_write import Row, SparkWrite

__all__ = ["FAILED", "TASKS", "Nursery", "digest_of", "options_of", "rows_of"]

TASKS = 2
FAILED = 3
"""The status of a process whose job raised a KafkaLogError; its text is in the file `error`."""
PATIENCE_S = 240.0
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


class _Job:
    """The jobs of a fork: micro-batches, a commit of what another process staged, a read."""

    def __init__(
        self,
        path: str,
        options: Mapping[str, str],
        name: str,
        run: str,
        kept: str = "",
        snapshot_commits: int = store_state.SNAPSHOT_COMMITS,
    ) -> None:
        self.name = name
        self.kept = Path(kept)
        self.write = SparkWrite(
            path,
            options={"topic": "t", **options},
            query=name,
            run=run,
            batch_rows=100,
        )
        # The constant is final, but a fork may have fewer, so that a collector has work.
        store_state.SNAPSHOT_COMMITS = snapshot_commits  # type: ignore[misc]

    def micro_batch(self, batch_id: int) -> None:
        """Run the tasks, keep their messages, and commit them."""
        write = self.write
        messages = [
            write.attempt(rows_of(self.name, batch_id, task), partition=task, batch_id=batch_id)
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
        """Write one micro-batch after the other, from `first` on, until there is a file."""
        batch_id = first
        while not Path(until).exists():
            self.micro_batch(batch_id)
            batch_id += 1

    def follow(self, until: str, told: str) -> None:
        """Read what is new, again and again, until there is a file; then tell what was read.

        Rows of one writer must ascend in each partition.
        """
        address = StoreAddress.parse(str(self.write.root), self.write.options)
        log = object_log.ObjectLog(address, read_only=True)
        digests: dict[int, Any] = {}
        ends: dict[int, int] = {}
        last: dict[tuple[int, bytes], bytes] = {}
        is_over = False
        while not is_over:
            is_over = Path(until).exists()
            for number, (_, end) in log.offsets("t").items():
                for rows in log.read("t", number, ends.get(number, 0), end, columns=["value"]):
                    for value in rows["value"].to_pylist():
                        place = number, value.partition(b"/")[0]
                        assert last.get(place, b"") < value, f"{value!r} after {last[place]!r}"
                        last[place] = value
                        digests.setdefault(number, hashlib.sha256()).update(value)
                ends[number] = end
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
        """Start a process with a job; return its id. `kept` and `snapshot_commits` are settings."""
        settings = {key: more.pop(key) for key in ("kept", "snapshot_commits") if key in more}
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
