"""The processes around a log that is killed or cut: a writer, a cleaner, a reader.

Each runs until it dies, and raises where it finds something wrong. What is written, and what must
be found, is the `oracle`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.schedule.manager import clean_and_retain, clean_filthiest, sweep
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.directory import staged_directory
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import clock, files
from kafkalog.storage_engine.log.results import CommitResult
from kafkalog.storage_engine.metadata.writer import writer_slug
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.torture.oracle import (
    ACKNOWLEDGED,
    ALTER,
    COMMIT,
    CONFIGS,
    FORKED,
    PARTITIONS,
    SENT,
    TABLE,
    Model,
    Notes,
    Partition,
    Row,
    Step,
    Wrong,
    step_of,
)
from tests.torture.workers import die_with_parent
from tests.unit.storage_engine.faults import ACTS

SEGMENT_RUN_SIZE: Final = 12 << 10
"""A task's run of so many bytes becomes a segment here, so that it happens to small ones."""
TINY: Final = 24 * 40
"""Bytes for 36 keys: a cleaning has more, and spills or goes in rounds."""
_IDLE_S: Final = 20
_BUSY_STATES: Final = "RD"
"""Running or runnable; asleep until the disk has answered: as Linux names them."""


# --- processes -----------------------------------------------------------------------------------


class Process:
    """A child that works until it is killed; whatever else ends it is wrong.

    One that `may_kill_itself` leaves a child behind, perhaps (`leave_a_child_behind`).
    """

    def __init__(
        self, work: Callable[[], None], faults: Path, *, may_kill_itself: bool = False
    ) -> None:
        """Fork it; it dies with this process. What it raises is in `faults`."""
        self._faults = faults
        self._may_be_killed = may_kill_itself
        self._status: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            return
        try:
            die_with_parent()
            if os.getppid() == parent:
                work()
        except BaseException:
            faults.write_text(traceback.format_exc())
        os._exit(1)

    def has_ended(self) -> bool:
        """Tell whether it has ended by itself; raises Wrong if it was not to."""
        if self._reap(os.WNOHANG):
            self.check()
            return True
        return False

    def is_busy(self) -> bool:
        """Tell whether a thread of it works, or waits for a processor or the disk."""
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                if stat.read_text().rpartition(") ")[2][0] in _BUSY_STATES:
                    return True
        return False

    def kill(self) -> bool:
        """Kill it, whatever it is doing, and wait for its end; tells whether it was alive."""
        if self._reap(os.WNOHANG):
            return False
        os.kill(self.pid, signal.SIGKILL)
        self._reap(0)
        self._may_be_killed = True
        return self._status == signal.SIGKILL

    def wait(self) -> None:
        """Wait for an end that is to be expected: without a fault, and with status 0."""
        self._reap(0)
        if self._status:
            raise Wrong(self._told())

    def check(self) -> None:
        """Raise Wrong where it has ended otherwise than by being killed."""
        if self._faults.exists() or not (self._may_be_killed and self._status == signal.SIGKILL):
            raise Wrong(self._told())

    def _reap(self, options: int) -> bool:
        if self._status is None:
            ended, status = os.waitpid(self.pid, options)
            self._status = status if ended else None
        return self._status is not None

    def _told(self) -> str:
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        told = self._faults.read_text() if self._faults.exists() else "it raised nothing"
        return f"{self._faults.stem}: a process ended {how}: {told}"


def create(root: Path, *, is_relaxed: bool = False) -> None:
    """Make the log with its topics; where it is relaxed not every commit is synced."""
    more = {"flush.messages": "60"} if is_relaxed else {}
    with DirectoryLog(root) as log:
        for topic, count in PARTITIONS.items():
            log.create_topic(topic, count, {**CONFIGS[topic], **more})


def leave_a_child_behind(notes: Notes, acts: int) -> None:
    """Let this process fork at a durable act, holding what locks it may, and be killed at once."""
    left = acts

    def wrapped(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                heard, told = os.pipe()
                if os.fork() == 0:
                    notes.write(FORKED, os.getpid())  # what a fork does by itself is done by now
                    os.write(told, b".")
                    signal.alarm(_IDLE_S)
                    signal.pause()
                os.read(heard, 1)
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **kwargs)

        return wrapper

    for name in ACTS:
        setattr(files, name, wrapped(getattr(files, name)))


def locks_of(pid: int) -> list[str]:
    """Return the names of the lock files that a process has open; none if it is no more."""
    try:
        links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return []
    return sorted({link.name for link in links if link.name.endswith((".lock", ".turnstile"))})


# --- writing -------------------------------------------------------------------------------------


class Writer:
    """Takes step after step, and notes of each that it was sent and that it was acknowledged.

    With `needs_sync` a step of a relaxed log is acknowledged when a later one has synced it: up to
    then a power cut may take it back.
    """

    def __init__(
        self,
        root: Path,
        seed: str,
        notes: Notes,
        *,
        model: Model | None = None,
        needs_sync: bool = False,
    ) -> None:
        staged_directory.SEGMENT_RUN_SIZE = SEGMENT_RUN_SIZE
        self.model = Model(seed) if model is None else model
        self._root = root
        self._seed = seed
        self._notes = notes
        self._needs_sync = needs_sync
        self._draw = random.Random(f"{seed} {time.monotonic_ns()}")
        self._log = DirectoryLog(root)

    def run(self, acknowledged: int, *, pause_s: float = 0.0) -> None:
        """Go on behind the last step that was acknowledged, for ever."""
        self.resume(acknowledged)
        number = acknowledged + 1
        while True:
            number += 1
            self.take(number)
            if self._draw.random() < 0.02:
                self._log.close()
                self._log = DirectoryLog(self._root)
            if pause_s:
                time.sleep(self._draw.random() * pause_s)

    def resume(self, acknowledged: int) -> None:
        """Take the step whose fate nobody knows: as a retry, or if it did not land."""
        with self._log.transaction() as transaction:  # settled, so this is certain
            done = self.model.steps_in(transaction.state, acknowledged, acknowledged + 1)
        number = acknowledged + 1
        if done < number:
            self.take(number)
            return
        step = step_of(self._seed, number)
        if step.kind == COMMIT:
            self.retry(step)
        self._acknowledge(number)

    def take(self, number: int) -> None:
        """Send a step; it is acknowledged when this returns."""
        step = step_of(self._seed, number)
        self._notes.write(SENT, number)
        self.send(step)
        self._acknowledge(number)
        if step.kind == COMMIT and self._draw.random() < 0.1:
            self.retry(step)

    def _acknowledge(self, number: int) -> None:
        if not (self._needs_sync and self._log.state().unsynced):
            self._notes.write(ACKNOWLEDGED, number)

    def send(self, step: Step) -> None:
        """Do it; raises Wrong where the log says that it went elsewhere."""
        if step.kind == ALTER:
            self._log.alter_topic(step.topic, step.config)
            return
        if step.kind == COMMIT:
            result = self._commit(step)
        else:
            rows = [(key, value) for _, key, value in step.tasks[0]]
            result = self._log.append(step.topic, rows)
        self._check_result(result, step, self.model.offsets(step.number))

    def retry(self, step: Step) -> None:
        """Commit a batch once more; raises Wrong unless the log knows it."""
        result = self._commit(step)
        if not result.skipped:
            raise Wrong(f"batch {step.number} was committed twice: {result}")

    def _check_result(
        self, result: CommitResult, step: Step, expected: dict[Partition, tuple[int, int]]
    ) -> None:
        if result.skipped or dict(result.offsets) != expected:
            raise Wrong(f"step {step.number}: expected the offsets {expected}, found {result}")

    def _commit(self, step: Step) -> CommitResult:
        staged = [self._stage(step, number, rows) for number, rows in enumerate(step.tasks)]
        return self._log.commit(staged, writer=step.writer)

    def _stage(self, step: Step, task: int, rows: Iterable[Row]) -> StagedMessage:
        writer = StagedWriter(
            self._log,
            self._log.state(),
            now_ms=clock.now_ms,
            writer_slug=writer_slug(step.writer.id, step.writer.target),
            batch_id=step.number,
            spark_partition=task,
            attempt=time.monotonic_ns() & 0xFFFF_FFFF,
            batch_size=4096,
        )
        for topic in PARTITIONS:
            mine = [(key, value) for name, key, value in rows if name == topic]
            if mine:
                writer.append(topic, _batch(mine))
        return writer.finish()


def _batch(rows: list[tuple[bytes, bytes | None]]) -> pa.RecordBatch:
    keys, values = zip(*rows, strict=True)
    columns = {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
    return pa.RecordBatch.from_pydict(columns)


# --- cleaning ------------------------------------------------------------------------------------


def clean(root: Path, seed: str, *, pause_s: float = 0.01) -> None:
    """Clean, retain and sweep for ever: by calls, or by the background cleaner."""
    draw = random.Random(seed)
    if draw.random() < 0.4:
        _clean_in_background(root, draw)
    with DirectoryLog(root) as log:
        while True:
            clean_once(log, draw)
            time.sleep(draw.random() * pause_s)


def clean_once(log: DirectoryLog, draw: random.Random) -> None:
    """One thing that a cleaner does; raises Wrong where it could not."""
    config = _config(draw)
    now_ms = clock.now_ms()
    act = draw.choices(("force", "due", "retain", "sweep"), (2, 4, 3, 1))[0]
    errors: list[str | None] = []
    if act == "force":
        results = clean_and_retain(log, TABLE, force=True, config=config)
        errors = [stats.error for stats in results]
    elif act == "due":
        stats = clean_filthiest(log, now_ms=now_ms, config=config)
        errors = [stats.error] if stats is not None else []
    elif act == "retain":
        errors = [entry.error for entry in log.apply_retention()]
    else:
        sweep(log, now_ms=now_ms)
    if any(errors):
        raise Wrong(f"cleaning failed: {errors}")


def _config(draw: random.Random, **more: int) -> CleanerConfig:
    return CleanerConfig(
        dedupe_buffer_size=draw.choice((TINY, TINY, 1 << 20)) * more.get("threads", 1),
        io_buffer_size=draw.choice((4096, 1 << 20)),
        spill=draw.random() < 0.7,
        merge_batches=draw.random() < 0.7,
        **more,  # type: ignore[arg-type]
    )


class _Told(logging.Handler):
    """Keeps what was logged, for the message of a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _clean_in_background(root: Path, draw: random.Random) -> None:
    told = _Told()
    logging.getLogger("kafkalog").addHandler(told)
    threads = draw.choice((1, 2))
    config = _config(draw, threads=threads, backoff_ms=3, retention_check_interval_ms=20)
    with KafkaLog(root, cleaner=config) as log:
        while True:
            time.sleep(0.005)
            assert log.cleaner is not None
            if log.cleaner.failures or log.cleaner.deaths:
                raise Wrong(f"the background cleaner failed: {told.lines}")


# --- reading -------------------------------------------------------------------------------------


def read(root: Path, seed: str) -> None:
    """Read and look up for ever; nothing that was seen ever goes back."""
    model, draw = Model(seed), random.Random(f"{seed} {time.monotonic_ns()}")
    steps = 0
    seen: dict[Partition, tuple[int, int, int]] = {}
    with DirectoryLog(root, read_only=True) as log, KeyLookup(log, TABLE) as lookup:
        while True:
            steps = model.steps_like(log.state(), steps)
            for partition in draw.sample(list(model.records), 2):
                with log.snapshot(*partition, whole=True) as snapshot:
                    model.check_snapshot(snapshot)
                    state = snapshot.state
                now = (state.high_watermark, state.log_start_offset, state.cleaned_to)
                before = seen.get(partition, (0, 0, 0))
                if not all(map(int.__le__, before, now)):
                    raise Wrong(f"{partition}: the log went back from {before} to {now}")
                seen[partition] = now
            _look_up(log, lookup, model, draw)
            time.sleep(draw.random() * 0.02)


def _look_up(log: DirectoryLog, lookup: KeyLookup, model: Model, draw: random.Random) -> None:
    partition = TABLE, draw.randrange(PARTITIONS[TABLE])
    before = log.describe(TABLE).partitions[partition[1]].high_watermark
    model.extend_to(partition, before)
    known = dict(model.latest_records(partition, before))
    if not known:
        return
    key = draw.choice(sorted(known))
    found = lookup.get(key)
    after = log.describe(TABLE).partitions[partition[1]].high_watermark
    model.extend_to(partition, after)
    records = model.records[partition]
    later = [offset for offset in range(before, after) if records[offset][0] == key]
    allowed = {o: records[o][1] for o in (known[key], *later)}
    if found is None and None not in allowed.values():
        raise Wrong(f"{partition}: {key!r} was not found, expected one of {sorted(allowed)}")
    if found is not None and (found.offset not in allowed or found.value != allowed[found.offset]):
        raise Wrong(f"{partition}: expected {key!r} at one of {sorted(allowed)}, found {found}")
