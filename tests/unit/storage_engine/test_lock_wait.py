"""Who waits long for a lock says who holds it; the user's own errors pass through a wait."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

import kafkalog
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.fs import file_system, locks
from tests.other_platform import needs_linux

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Let another process hold a lock."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            yield holder.pid
        finally:
            holder.kill()


def message_of(
    caplog: pytest.LogCaptureFixture, wait: Callable[[], AbstractContextManager[object]]
) -> str:
    """Wait in another thread until a warning is logged; return it."""

    def work() -> None:
        with suppress(FileNotFoundError), wait():  # the test may be over by then
            pass

    with caplog.at_level(logging.WARNING, "kafkalog"):
        threading.Thread(target=work, daemon=True).start()
        while not caplog.messages:
            time.sleep(0.01)
    return caplog.messages[-1]


def waits(directory: Path) -> dict[str, tuple[str, Callable[[], AbstractContextManager[object]]]]:
    """By name: the file that somebody holds, and who waits for it."""
    lock = locks.FileLock(directory / "kl-commit.lock", patience_s=0.02)
    segments = locks.SegmentsLock(directory, patience_s=0.02)
    return {
        "a commit": ("kl-commit.lock", lock.exclusive),
        "a reader of a lock": ("kl-commit.lock", lock.shared),
        "a reader of a partition": ("kl-segments.lock", segments.shared),
        "a writer of a partition": ("kl-segments.lock", segments.exclusive),
        "a reader before the turnstile": ("kl-segments.turnstile", segments.shared),
    }


@needs_linux
@pytest.mark.parametrize("name", waits(Path()))
def test_who_waits_names_the_process_its_command_and_that_it_is_stopped(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, wait = waits(tmp_path)[name]
    with held(tmp_path / file) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        text = message_of(caplog, wait)
    assert text.startswith(f"{tmp_path / file}: waiting for this lock for 0 s: process {pid} (")
    assert "fcntl.flock" in text and f"is stopped: continue it (`kill -CONT {pid}`)" in text


@needs_linux
def test_a_reader_behind_a_writer_names_the_process_for_which_both_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patient = locks.SegmentsLock(tmp_path, patience_s=60)

    def write() -> None:
        with patient.exclusive():
            pass

    with held(tmp_path / "kl-segments.lock") as pid:
        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        while not locks.FileLock(tmp_path / "kl-segments.turnstile").is_held_alone():
            time.sleep(0.01)
        text = message_of(caplog, locks.SegmentsLock(tmp_path, patience_s=0.02).shared)
    thread.join(60)
    assert "another thread of this process holds it and process" in text
    assert f"process {pid} (" in text and "stopped" not in text


def test_where_no_holder_is_listed_the_message_says_how_to_find_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.storage_engine.fs.lock_wait._LOCKS", tmp_path / "none")
    path = tmp_path / "kl-commit.lock"
    with held(path):
        text = message_of(caplog, locks.FileLock(path, patience_s=0.02).exclusive)
    assert text.endswith(f"another process holds it; `lsof {path}` names it")


def test_a_wait_is_reported_again_each_time_after_twice_as_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kl-commit.lock"
    with held(path):
        message_of(caplog, locks.FileLock(path, patience_s=0.01).shared)
        while len(caplog.messages) < 4:
            time.sleep(0.01)
    times = [record.created for record in caplog.records]
    assert times[3] - times[2] > times[1] - times[0]


class Deadline(OSError):
    """A user's error."""


@pytest.mark.parametrize(
    "fault",
    [
        TimeoutError("my own deadline"),
        pytest.param(Deadline("enough"), marks=pytest.mark.slow),
        KeyboardInterrupt(),
        pytest.param(ConnectionError(), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("lock", ["kl-commit.lock", "t-0/kl-segments.lock"])
@pytest.mark.parametrize("act", ["append", "clean", "read"])
def test_the_error_of_a_users_alarm_passes_through_a_wait_for_a_lock(
    act: str, lock: str, fault: BaseException, tmp_path: Path
) -> None:
    log = kafkalog.open(tmp_path)
    log.create_topic("t", config={"segment.bytes": "100"})
    log.append("t", [("a", "1" * 90)])
    acts: dict[str, Callable[[], object]] = {
        "append": lambda: log.append("t", [("b", "1" * 90)]),
        "clean": lambda: log.clean("t", force=True),
        "read": lambda: list(log.read("t", 0, 0)),
    }
    if (act, lock) == ("read", "kl-commit.lock"):
        acts[act]()
        return  # no reader takes it

    def ring(*_: object) -> None:
        raise fault

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with held(tmp_path / lock):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(type(fault)) as found:
                acts[act]()
        assert found.value is fault
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    log.append("t", [("c", "1")])
    keys = [k for b in log.read("t", 0, 0) for k in b["key"].to_pylist()]
    assert keys == [b"a", b"c"]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "fdatasync", "open", "listdir"])
def test_a_users_error_at_any_call_of_an_append_is_the_users_and_the_log_goes_on(
    call: str, tmp_path: Path
) -> None:
    log = kafkalog.open(tmp_path)
    log.create_topic("t", config={"segment.bytes": "100"})
    fault, left, number, returned = TimeoutError("mine"), 0, 0, 0

    def rung(self: file_system.FileSystem, *arguments: object, **named: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise fault
        return getattr(super(type(self), self), call)(*arguments, **named)

    broken = type("Rung", (file_system.FileSystem,), {call: rung})()
    while left <= 0:
        number += 1
        left = number
        try:
            with file_system.replaced(broken):
                log.append("t", [("a", "1" * 60)])
            returned += 1
        except TimeoutError as found:
            assert found is fault
        assert returned <= log.offsets("t")[0][1] <= number
    assert [found for found in verify(tmp_path) if found.is_damage] == []


@needs_linux
@pytest.mark.parametrize("odd", ["a\nWARNING b", "\x1b[2J", "\x1b]0;title\x07", "\u202eevil"])
def test_the_command_of_a_holder_forges_no_line(
    odd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kl-commit.lock"
    command = [odd, "-c", HOLD, str(path)]
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        message = message_of(caplog, locks.FileLock(path, patience_s=0.02).exclusive)
        holder.kill()
    assert f"process {holder.pid}" in message
    assert message.isprintable()
