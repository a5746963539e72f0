"""A process whose children clean a log and die by SIGKILL at a chosen step, while others read it.

It imports and compiles everything once and then forks, so that hundreds of deaths take seconds.
`Zygote` is its other end. A step is a durable act (a write counts twice, it can also be torn in
the middle). A death before a sync leaves what a death before the next act leaves, and so does one
while the cleaner looks whether it shall go on, with every chunk of both passes and every part of a
spill: with KAFKALOG_STEPS=every these are steps too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
from tests.unit.storage_engine.faults import ACTS

NOBODY = 65534
WHOLE = 64
"""Writes of so few bytes, such as the journal's published end, no kill can tear."""
IS_EVERY = os.environ.get("KAFKALOG_STEPS") == "every"
STEPS = [name for name in ACTS if IS_EVERY or not name.startswith("sync")]
Row = tuple[int, bytes, bytes | None]
"""Offset, key, value."""


class Zygote:
    """Starts the process, and asks it for one death after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.acceptance.killed_cleaning"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)

    def kill(self, root: Path, step: int, now_ms: int, config: dict[str, Any]) -> dict[str, Any]:
        """Clean `root` and die at a step; what the readers said is in `faults`.

        `died` is False when the cleaning has fewer steps; then it is through.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        command = {"root": str(root), "step": step, "now_ms": now_ms, "config": config}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


# --- the one that dies ---------------------------------------------------------------------------


class Death:
    """Counts steps, and kills the process at one of them."""

    def __init__(self, step: int) -> None:
        self._left = step
        self._counting = threading.Lock()  # syncs may run side by side
        for name in STEPS:
            setattr(files, name, self._wrapped(name, getattr(files, name)))

    def step(self) -> None:
        with self._counting:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def _wrapped(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.step()
            if name in ("write_at", "create") and len(args) > 1 and len(args[1]) > WHOLE:
                if self._left == 1:
                    half = bytes(args[1])[: len(args[1]) // 2]
                    act(args[0], half, *args[2:], **kwargs)
                self.step()
            return act(*args, **kwargs)

        return wrapper


def clean_until_death(command: dict[str, Any]) -> None:
    death = Death(command["step"])
    config = CleanerConfig(**command["config"])
    (stats,) = clean(
        DirectoryLog(command["root"]),
        "t",
        force=True,
        now_ms=command["now_ms"],
        config=config,
        check_abort=death.step if IS_EVERY else lambda: None,
    )
    assert stats.error is None, stats.error


# --- those that read -----------------------------------------------------------------------------


def rows_of(snapshot: PartitionSnapshot) -> list[Row]:
    """What a reader of the changelog gets."""
    found: list[Row] = []
    for rows in snapshot.read(0, snapshot.state.high_watermark, schema=changelog_schema()):
        columns = (rows[name].to_pylist() for name in ("offset", "key", "value"))
        found += zip(*columns, strict=True)
    return found


def expected_rows(rows: list[Row]) -> list[Row]:
    """The latest record of every key, in the order of the log."""
    return sorted({key: (offset, key, value) for offset, key, value in rows}.values())


def latest_rows(snapshot: PartitionSnapshot) -> list[Row]:
    """What the view of the latest values gives, in the order of the log."""
    found: list[Row] = []
    end = snapshot.state.high_watermark
    for rows in latest(snapshot, end, budget_bytes=1 << 20, schema=changelog_schema()):
        columns = (rows[name].to_pylist() for name in ("offset", "key", "value"))
        found += zip(*columns, strict=True)
    return sorted(found)


def check_reading(engine: DirectoryLog, before: list[Row]) -> list[Row]:
    """Read all of it; nothing may be wrong, missing or doubled beside what was there before."""
    with engine.snapshot("t", 0, whole=True) as snapshot:
        rows = rows_of(snapshot)
        values = latest_rows(snapshot)
    offsets = [offset for offset, _, _ in rows]
    assert offsets == sorted(set(offsets)), offsets
    assert set(rows) <= set(before), set(rows) - set(before)
    latest_records = expected_rows(before)
    assert expected_rows(rows) == latest_records
    assert values == [row for row in latest_records if row[2] is not None]
    return rows


def read_until_told(root: str, user: int | None, ready: int, stop: int) -> dict[str, Any]:
    """Read again and again; before the first and after the last time through one same view."""
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        assert not os.access(root, os.W_OK)
    engine = DirectoryLog(root, read_only=True)
    count = 0
    with engine.snapshot("t", 0, whole=True) as snapshot:
        before = rows_of(snapshot)
        os.write(ready, b".")
        is_over = False
        while not is_over:
            is_over = bool(select.select([stop], [], [], 0)[0])
            check_reading(engine, before)
            count += 1
            time.sleep(0.003)  # or the cleaner gets no turn
        assert rows_of(snapshot) == before
    return {"count": count}


# --- the process ---------------------------------------------------------------------------------


class Reader:
    """A child that reads."""

    def __init__(self, root: str, user: int | None) -> None:
        is_ready, ready = os.pipe()
        stop, self._stop = os.pipe()
        self._result, result = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._stop)
            run_child(lambda: read_until_told(root, user, ready, stop), result)
        for fd in (ready, stop, result):
            os.close(fd)
        os.read(is_ready, 1)  # nothing where it has died
        os.close(is_ready)

    def stop(self) -> dict[str, Any]:
        """Let it read once more, from now on; returns what it says."""
        with contextlib.suppress(BrokenPipeError):  # it has found a fault and ended
            os.write(self._stop, b".")
        with os.fdopen(self._result) as result:
            answer: dict[str, Any] = json.loads(result.read() or '{"fault": "died"}')
        os.close(self._stop)
        os.waitpid(self._pid, 0)
        return answer


def run_child(work: Callable[[], Any], result: int) -> None:
    """Do the work of a forked child, tell what came of it, and end."""
    status = 0
    try:
        answer = work()
    except BaseException:
        answer, status = {"fault": traceback.format_exc()}, 1
    os.write(result, json.dumps(answer).encode()[:65_000])
    os._exit(status)


def obey(command: dict[str, Any]) -> dict[str, Any]:
    """Do one death."""
    users = [None, NOBODY] if os.getuid() == 0 else [None]
    readers = [Reader(command["root"], user) for user in users]
    faults_read, faults_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        run_child(lambda: clean_until_death(command), faults_write)
    os.close(faults_write)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(faults_read) as said:
        fault = said.read()
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    answers = [reader.stop() for reader in readers]
    faults = [answer["fault"] for answer in answers if "fault" in answer]
    if not died and os.WEXITSTATUS(status):
        faults.append(fault)
    return {
        "died": died,
        "faults": faults,
        "readings": [answer.get("count", 0) for answer in answers],
    }


def warm() -> None:
    """Import what children need, without threads that a fork would lose."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory, DirectoryLog(directory) as engine:
        engine.create_topic("t", 1, {})
        for number in range(20):
            engine.append("t", [(f"k{number % 15}", None if number % 9 == 0 else "v")], now_ms=1)
        for size in (24 * 5, 1 << 16):
            engine.append("t", [("k", "v")], now_ms=1)
            (stats,) = clean(
                engine, force=True, now_ms=1, config=CleanerConfig(dedupe_buffer_size=size)
            )
            assert stats.error is None, stats.error
        with engine.snapshot("t", 0, whole=True) as snapshot:
            rows_of(snapshot)
            latest_rows(snapshot)


def main() -> None:
    warm()
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
