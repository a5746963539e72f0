"""Many processes at one log: nobody starves, and whoever looks sees one published state."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.cleaner.schedule.manager import sweep
from kafkalog.errors import OffsetOutOfRangeError
from kafkalog.log import KafkaLog
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.retention import retain_partition
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, files, locks
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.reading import directory_snapshot
from tests.acceptance.turn_processes import TOPIC, Onlooker, readers
from tests.acceptance.two_mounts import Mounts, two_mounts  # noqa: F401 - a fixture
from tests.acceptance.two_processes import APPENDER, CLEANER, ZOMBIE, two
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import damage, latest_records, records
from tests.unit.storage_engine.faults import ACTS

TURNS_MAX = 400
"""That many turns of 8 readers a writer may have to wait for: 50 of each. One of each is to be
expected, but the system lets whom it likes go first."""
SLEPT_MAX = 2
"""So often more may pass, since the writer was not run at all meanwhile: the machine is busy."""
LONGEST = 100
"""Times as many at the most, even so: a writer that starves waits for ever."""
NOW_MS = 1_750_000_000_000
WINDOW = 16
"""Segments that a reader has open at once, here."""


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and syncs are what takes time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


# --- turns ---------------------------------------------------------------------------------------


def are_few(waited: list[int]) -> bool:
    is_bounded = max(waited) <= LONGEST * TURNS_MAX
    return is_bounded and sum(turns > TURNS_MAX for turns in waited) <= SLEPT_MAX


def in_lock(directory: Path) -> None:
    with locks.SegmentsLock(directory).exclusive():
        pass


@pytest.mark.slow
def test_eight_readers_let_a_writer_in_after_few_turns(tmp_path: Path) -> None:
    directory = tmp_path / "partition"
    directory.mkdir()
    waited = []
    with readers("lock", directory) as board:
        for _ in range(30):
            before = sum(board.turns())
            in_lock(directory)
            waited.append(sum(board.turns()) - before)
    assert are_few(waited), waited


@pytest.mark.slow
def test_without_the_turnstile_a_writer_would_starve(tmp_path: Path) -> None:
    """So that the test above can fail."""
    directory = tmp_path / "partition"
    directory.mkdir()
    with readers("bypass", directory) as board:
        before = sum(board.turns())
        writer = threading.Thread(target=in_lock, args=(directory,))
        writer.start()
        while sum(board.turns()) - before <= TURNS_MAX and writer.is_alive():
            time.sleep(0.01)
        is_starved = writer.is_alive()
    writer.join()
    assert is_starved


@pytest.mark.slow
def test_eight_reading_processes_let_commits_rolls_and_cleanings_pass(tmp_path: Path) -> None:
    root = tmp_path / "log"
    log = kafkalog.open(root)
    log.create_topic(TOPIC, 1, {"segment.bytes": "14"})  # every commit rolls
    log.append(TOPIC, [("k", "v")])
    waited = []
    with readers("read", root) as board:
        for number in range(20):
            before = sum(board.turns())
            log.append(TOPIC, [(f"k{number % 3}", f"{number}")])
            if number % 5 == 4:
                (stats,) = log.clean(TOPIC, force=True)
                assert stats.error is None
            waited.append(sum(board.turns()) - before)
    assert are_few(waited), waited
    assert len(latest_records(log, TOPIC)) == 4


# --- one published state -------------------------------------------------------------------------


def opened(root: Path) -> KafkaLog:
    log = LogBuilder(root, now_ms=NOW_MS)
    log.topic(TOPIC, 2, segment_bytes=200, policy="compact,delete")
    keys = [f"k{i}" for i in range(4)]
    return log.rounds(6, keys, value=lambda number: f"{number}" * 20).log


WORK: dict[str, Callable[[KafkaLog], object]] = {
    "commit and roll": lambda log: log.append(TOPIC, [(f"k{i}", "x" * 60) for i in range(9)]),
    "clean and swap": lambda log: log.clean(TOPIC, force=True, now_ms=NOW_MS),
    "delete records": lambda log: log.delete_records(TOPIC, 0, 3),
    "retention": lambda log: retain_partition(
        directory_log_of(log), TOPIC, 0, now_ms=NOW_MS + 10**10
    ),
    "delete": lambda log: log.delete_topic(TOPIC),
    "create": lambda log: log.create_topic("new", 2),
    "alter": lambda log: log.alter_topic(TOPIC, {"segment.bytes": "300"}),
}


def at_every_act(root: Path, work: Callable[[], object], look: Callable[[], Any]) -> list[Any]:
    """Return what `look` sees before each durable act of some work at which it is let in."""
    seen: list[Any] = []
    looking = threading.Lock()

    def is_let_in() -> bool:
        return not any(
            locks.FileLock(directory / name, create=False).is_held_alone()
            for directory in root.glob("*-*/")
            for name in (layout.SEGMENTS_TURNSTILE, layout.SEGMENTS_LOCK)
        )

    def watched(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if looking.acquire(blocking=False):
                try:
                    if is_let_in():
                        seen.append(look())
                finally:
                    looking.release()
            return act(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in ACTS:
            patch.setattr(files, name, watched(getattr(files, name)))
        work()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_another_process_sees_the_state_before_or_after_at_every_act(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / "log"
    log = opened(root)
    with Onlooker(root) as onlooker:
        before = onlooker.look()
        seen = at_every_act(root, lambda: WORK[name](log), onlooker.look)
        after = onlooker.look()
    if name == "clean and swap":
        check_compacted(before, after, seen)
    else:
        assert [*map([before, after].index, seen)] == sorted(map([before, after].index, seen))
    assert before in seen
    assert name == "alter" or before != after


def check_compacted(before: Any, after: Any, seen: list[Any]) -> None:
    """The latest values stay; of the others each look finds no more than the one before it."""
    assert len(after[TOPIC][0]) < len(before[TOPIC][0])
    last = before[TOPIC][0]
    for found, values in [*(look[TOPIC] for look in seen), after[TOPIC]]:
        assert values == before[TOPIC][1]
        assert all(record in last for record in found)
        last = found


# --- two writers, two cleaners -------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_that_take_themselves_for_one_writer_write_every_batch_once(
    mounts: Mounts, tmp_path: Path
) -> None:
    root = mounts[0]
    log = kafkalog.open(root)
    log.create_topic("t", 3)
    landed = two(ZOMBIE, mounts, tmp_path / "gate")
    assert sum(landed) == 25
    keys = [key for _, _, key, _ in records(log, "t") if key is not None]
    assert sorted(keys) == sorted(b"%d-%d" % (n, row) for n in range(25) for row in range(10))
    log.close()
    assert damage(root) == []


@pytest.mark.slow
def test_the_records_of_two_processes_that_append_are_there_once_and_in_order(
    mounts: Mounts, tmp_path: Path
) -> None:
    log = kafkalog.open(mounts[0])
    log.create_topic("t", 1, {"segment.bytes": "2000"})
    two(APPENDER, mounts, tmp_path / "gate")
    keys = [key for _, _, key, _ in records(log, "t") if key is not None]
    for number in range(2):
        own = [key for key in keys if key.startswith(b"%d-" % number)]
        assert own == [b"%d-%d-%d" % (number, n, row) for n in range(25) for row in range(10)]
    log.close()
    assert damage(mounts[1]) == []


@pytest.mark.slow
def test_two_cleaners_clean_nothing_twice_and_lose_nothing(mounts: Mounts, tmp_path: Path) -> None:
    root = mounts[0]
    log = kafkalog.open(root)
    log.create_topic("t", 3, {"segment.bytes": "2000"})
    for number in range(30):
        log.append("t", [(f"k{i}", f"{number}-{i}") for i in range(40)])
    before, latest = records(log, "t"), latest_records(log, "t")
    removed = two(CLEANER, mounts, tmp_path / "gate")
    after = records(log, "t")
    assert latest_records(log, "t") == latest and len(after) == 40
    assert sum(removed) == len(before) - len(after)
    assert set(after) <= set(before)
    assert not [*root.rglob("*.cleaned"), *root.rglob("*.swap")]
    log.close()
    assert damage(root) == []


# --- a reader that sleeps ------------------------------------------------------------------------


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KafkaLog:
    """A partition of more segments than a reader has open at once, all keys twice."""
    monkeypatch.setattr(directory_snapshot, "WINDOW", WINDOW)
    log = LogBuilder(tmp_path / "log", now_ms=NOW_MS)
    log.topic(segment_bytes=14, file_delete_delay_ms=1_000)
    numbers = range(2 * WINDOW + 8)
    return log.append_each(*((f"k{number // 2}", f"{number}") for number in numbers)).log


def clean_and_remove(log: KafkaLog) -> None:
    """A whole cleaning, and its file.delete.delay.ms."""
    directory = directory_log_of(log).partition_directory("t", 0)
    (stats,) = log.clean("t", force=True)
    assert stats.error is None
    assert list(directory.glob("*.log.deleted"))
    sweep(directory_log_of(log), now_ms=clock.now_ms() + 1001)
    assert not list(directory.glob("*.log.deleted"))


def values(batches: Iterator[Any]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for rows in batches:
        pairs = zip(rows["offset"].to_pylist(), rows["value"].to_pylist(), strict=True)
        found += [(offset, value.decode()) for offset, value in pairs]
    return found


def test_a_view_of_one_moment_sleeps_through_a_cleaning_and_the_removal(long: KafkaLog) -> None:
    with directory_log_of(long).snapshot("t", 0, whole=True) as snapshot:
        end = snapshot.state.high_watermark
        clean_and_remove(long)
        found = values(snapshot.read(0, end, schema=changelog_schema()))
        assert found == [(offset, f"{offset}") for offset in range(end)]
    assert len(records(long, "t")) == end // 2


@pytest.mark.parametrize("taken", [1, WINDOW - 1, WINDOW, WINDOW + 1])
def test_a_reader_that_wakes_up_goes_on_with_what_is_left(long: KafkaLog, taken: int) -> None:
    """In order, nothing twice, and no latest record of a key is missed."""
    reading = long.read("t", 0)
    found = values(islice(reading, taken))
    clean_and_remove(long)
    found += values(reading)
    offsets = [offset for offset, _ in found]
    assert offsets == sorted(set(offsets))
    assert all(value == f"{offset}" for offset, value in found)
    assert set(offsets) >= {offset for _, offset, _, _ in records(long, "t")}


def test_a_reader_whose_records_were_deleted_while_it_slept_is_told_the_range(
    long: KafkaLog,
) -> None:
    long.alter_topic("t", {"cleanup.policy": "compact,delete", "retention.ms": "-1"})
    end = long.offsets("t")[0][1]
    reading = long.read("t", 0)
    assert values(iter([next(reading)])) == [(0, "0")]
    long.delete_records("t", 0, end - 2)
    directory_log_of(long).apply_retention("t")
    sweep(directory_log_of(long), now_ms=clock.now_ms() + 1001)
    with pytest.raises(OffsetOutOfRangeError, match=rf"valid range is \[{end - 2}, {end}\]"):
        values(reading)


def test_a_view_outlives_its_topic_and_the_removal_of_its_directory(long: KafkaLog) -> None:
    with directory_log_of(long).snapshot("t", 0, whole=True) as snapshot:
        end = snapshot.state.high_watermark
        long.delete_topic("t")
        sweep(directory_log_of(long), now_ms=clock.now_ms() + 1001)
        assert not list(long.root.glob("t-0*"))
        assert len(values(snapshot.read(0, end, schema=changelog_schema()))) == end
