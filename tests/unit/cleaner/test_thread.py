"""Several threads, their death, and other settings while they run."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule import thread as thread_module
from kafkalog.cleaner.schedule.manager import clean_filthiest
from kafkalog.cleaner.shelves import moment_of
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from tests.unit.cleaner.naive import dump, offsets
from tests.unit.cleaner.test_manager import corrupt, eventually, filled

QUICK = CleanerConfig(backoff_ms=5)


@contextmanager
def running(
    engine: DirectoryLog, config: CleanerConfig = QUICK, *, wait_s: float = 0.0
) -> Iterator[CleanerThread]:
    thread = CleanerThread(engine, config, clock=lambda: 1_000)
    time.sleep(wait_s)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


# --- several threads -----------------------------------------------------------------------------


def test_several_threads_clean_several_partitions_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(tmp_path, "a", "b", "c")
    met = threading.Barrier(3, timeout=120)
    at_work: list[str] = []

    def meeting(*args: object, **kwargs: object) -> object:
        check = kwargs["check_abort"]

        def wait_for_the_others() -> None:
            check()
            name = threading.current_thread().name + str(threading.get_ident())
            if name not in at_work:
                at_work.append(name)
                met.wait()

        kwargs["check_abort"] = wait_for_the_others
        return clean_filthiest(*args, **kwargs)

    monkeypatch.setattr(thread_module, "clean_filthiest", meeting)
    with running(engine, CleanerConfig(threads=3, backoff_ms=5)) as thread:
        eventually(lambda: thread.cleanings == 3)
        assert len(at_work) == 3
    assert thread.failures == 0
    for topic in ("a", "b", "c"):
        assert offsets(dump(engine, topic)) == [6, 7, 8, 9]


def test_threads_share_the_buffers() -> None:
    config = CleanerConfig(threads=4, dedupe_buffer_size=4096, io_buffer_size=1001)
    share = config.of_one_thread()
    assert (share.dedupe_buffer_size, share.io_buffer_size, share.threads) == (1024, 250, 1)
    assert CleanerConfig().of_one_thread() == CleanerConfig()
    with pytest.raises(InvalidInputError, match="so 192"):
        CleanerConfig(threads=4, dedupe_buffer_size=191)


# --- death ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing that a thread handles."""


def test_where_no_thread_can_be_had_the_dead_are_told_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(tmp_path, "t")
    killed = threading.Event()

    def clock() -> int:
        if not killed.is_set():
            killed.set()
            raise Killed
        return 1_000

    thread = CleanerThread(engine, QUICK, clock=clock)
    original = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if killed.is_set():
            raise RuntimeError("can't start new thread")
        original(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    thread.start()
    eventually(lambda: thread.deaths == 1 and not thread.is_alive)
    assert thread.dead_threads == 1
    monkeypatch.undo()
    thread.start()
    eventually(lambda: thread.cleanings == 1)
    assert thread.dead_threads == 0
    thread.stop()


# --- other settings ------------------------------------------------------------------------------


# --- what is counted -----------------------------------------------------------------------------


def test_what_a_broken_off_round_removed_is_counted_and_the_round_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(tmp_path, "t")
    clean_module = importlib.import_module("kafkalog.cleaner.directory.directory_round")
    before = len(offsets(dump(engine, "t")))
    swapped = threading.Event()
    stopped = threading.Event()
    swap = clean_module.replace_segments

    def slow_swap(*args: object, **kwargs: object) -> None:
        swap(*args, **kwargs)
        swapped.set()
        assert stopped.wait(120)

    monkeypatch.setattr(clean_module, "replace_segments", slow_swap)
    monkeypatch.setattr(clean_module, "GAPS_MAX", 0)  # no swap waits for the rest
    cleaner = CleanerThread(engine, CleanerConfig(backoff_ms=5))
    cleaner.start()
    assert swapped.wait(120)
    cleaner._stop.set()
    stopped.set()
    cleaner.stop()
    removed = before - len(offsets(dump(engine, "t")))
    assert removed > 0
    assert (cleaner.cleanings, cleaner.aborts, cleaner.failures) == (0, 1, 0)
    assert cleaner.records_removed == removed
    assert cleaner.bytes_removed > 0


# --- faults --------------------------------------------------------------------------------------


def test_a_partition_whose_disk_takes_no_mark_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(tmp_path, "bad", "good")
    corrupt(engine, "bad")
    original = files.write_atomically

    def full(path: Path, *args: object, **kwargs: object) -> None:
        if path.name == layout.UNCLEANABLE:
            raise OSError(28, "No space left on device")
        original(path, *args, **kwargs)

    monkeypatch.setattr(files, "write_atomically", full)
    with running(engine) as thread:
        eventually(lambda: thread.cleanings == 1 and thread.failures == 1)
        for _ in range(3):
            for i in range(4):
                engine.append("good", [("a", f"{i}"), ("b", f"{i}")], now_ms=1000)
            eventually(lambda: status(moment_of(engine, 1_000))[1].state == "not due")
        assert thread.failures == 1  # remembered by this process
    bad, good = status(moment_of(engine, 1_000))
    assert (bad.state, good.state) == ("uncleanable", "not due")
    assert "checksum" in str(bad.reason)
    monkeypatch.undo()
    engine.delete_topic("bad", now_ms=1)  # a mark is of the directory, not of the name
    filled_again = filled(tmp_path, "bad")
    assert [s.state for s in status(moment_of(filled_again, 1_000))] == ["dirty", "not due"]
