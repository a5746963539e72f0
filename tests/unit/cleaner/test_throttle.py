"""The rate of bytes that cleaning threads keep to, on a clock that moves when one waits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.schedule import thread as thread_module
from kafkalog.cleaner.schedule.partition_cleaner import PartitionCleaner
from kafkalog.cleaner.schedule.throttle import Throttler, bytes_moved
from kafkalog.cleaner.shelf import CleaningAborted
from kafkalog.cleaner.shelves import shelf_of
from tests.unit.cleaner.naive import dump, offsets
from tests.unit.cleaner.test_manager import eventually, filled


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def throttler(clock: Clock, rate: float) -> Throttler:
    return Throttler(rate, clock=clock, sleep=clock.sleep)


def nothing() -> None:
    pass


def test_within_the_interval_nobody_waits() -> None:
    clock = Clock()
    paced = throttler(clock, 10)
    for _ in range(3):
        clock.now += 0.09
        paced.count(1_000_000)
        paced.wait(nothing)
    assert clock.naps == []


def test_after_the_interval_one_waits_until_the_rate_is_kept() -> None:
    clock = Clock()
    paced = throttler(clock, 100)
    clock.now += 0.5
    paced.count(150)
    paced.wait(nothing)
    assert clock.now == pytest.approx(1001.5)
    assert max(clock.naps) <= 0.1  # in naps, so that a stop is noticed


def test_below_the_rate_nobody_waits() -> None:
    clock = Clock()
    paced = throttler(clock, 100)
    for _ in range(10):
        clock.now += 1
        paced.count(99)
        paced.wait(nothing)
    assert clock.naps == []


@pytest.mark.parametrize("step", [0.01, 0.07, 0.4, 2.0])
@pytest.mark.parametrize("size", [1, 50, 4000])
def test_over_a_long_time_the_rate_is_kept_whatever_the_sizes(step: float, size: int) -> None:
    clock = Clock()
    paced = throttler(clock, 1000)
    total = 0
    while total < 200 * size or clock.now < 1060:
        clock.now += step
        total += size
        paced.count(size)
        paced.wait(nothing)
    elapsed = clock.now - 1000
    natural = total / size * step
    # What was counted since the last check, less than an interval ago, is not waited for yet.
    unchecked = size * (0.3 / step + 1)
    assert (total - unchecked) / elapsed <= 1000 * 1.001
    assert elapsed <= max(natural, total / 1000) * 1.2 + 1


def test_all_threads_wait_for_the_same_moment() -> None:
    clock = Clock()
    paced = throttler(clock, 100)
    clock.now += 0.5
    paced.count(150)
    clock.now += 0.25  # another thread comes, and has read nothing itself
    paced.wait(nothing)
    assert clock.now == pytest.approx(1001.5)


def test_a_changed_rate_holds_at_once_and_resets_the_count() -> None:
    clock = Clock()
    paced = throttler(clock, float("inf"))
    clock.now += 1
    paced.count(10**12)
    paced.wait(nothing)
    assert clock.naps == []
    paced.bytes_per_second = 1000
    clock.now += 1
    paced.count(3000)
    paced.wait(nothing)
    assert clock.now == pytest.approx(1004)
    clock.now += 1
    paced.count(10**9)
    paced.bytes_per_second = 10**6
    paced.wait(nothing)
    assert clock.now == pytest.approx(1005)


def test_who_is_asked_to_stop_while_waiting_stops() -> None:
    clock = Clock()
    paced = throttler(clock, 1)
    clock.now += 1
    paced.count(1_000_000)

    def stop() -> None:
        if clock.now > 1002:
            raise CleaningAborted("asked to")

    with pytest.raises(CleaningAborted):
        paced.wait(stop)
    assert clock.now < 1003


def test_threads_count_together() -> None:
    clock = Clock()
    paced = throttler(clock, 1000)

    def count() -> None:
        for _ in range(1000):
            paced.count(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.now += 0.5
    paced.count(0)
    paced.wait(nothing)
    assert clock.now == pytest.approx(1000 + 4000 / 1000)


def test_all_that_a_cleaning_reads_and_writes_is_counted(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t", "u")
    clock = Clock()
    paced = throttler(clock, 1000)

    def tick() -> None:
        clock.now += 0.01

    cleaner = PartitionCleaner(shelf=shelf_of(engine), now_ms=1, throttler=paced, check_abort=tick)
    moved = 0
    for topic in ("t", "u"):
        stats = cleaner.clean(topic, 0)
        assert stats is not None and stats.error is None
        moved += stats.map_bytes_read + stats.bytes_read + stats.bytes_written
        assert offsets(dump(engine, topic)) == [6, 7, 8, 9]
    clock.now += 0.31
    paced.count(0)
    paced.wait(nothing)  # also for what came after the last look around
    assert clock.now - 1000 == pytest.approx(moved / 1000, abs=0.02)
    assert moved > 1000


def test_what_is_spilled_is_counted_when_written_and_when_read(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")
    clock = Clock()
    paced = throttler(clock, 1000)
    config = CleanerConfig(dedupe_buffer_size=24 * 3)
    cleaner = PartitionCleaner(shelf=shelf_of(engine), now_ms=1, throttler=paced, config=config)
    clock.now += 0.01  # all of it is counted within one interval
    stats = cleaner.clean("t", 0)
    assert stats is not None and stats.error is None
    assert stats.spilled_bytes > 0
    # Each key is written once and read once, and again as an offset that is sorted and asked for.
    assert stats.spill_bytes_moved >= 2 * stats.spilled_bytes
    moved = stats.map_bytes_read + stats.bytes_read + stats.bytes_written + stats.spill_bytes_moved
    clock.now += 0.3
    paced.count(0)
    paced.wait(nothing)
    assert clock.now - 1000 == pytest.approx(moved / 1000, abs=0.001)


def test_all_threads_of_a_cleaner_count_in_one_throttler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Counting] = []
    both = threading.Barrier(2)

    class Counting(Throttler):
        def __init__(self, rate: float) -> None:
            super().__init__(rate)
            self.counted: dict[int, int] = {}
            made.append(self)

        def count(self, size: int) -> None:
            me = threading.get_ident()
            if me not in self.counted:
                both.wait(120)  # neither is done before the other one has begun
            self.counted[me] = self.counted.get(me, 0) + size
            super().count(size)

    monkeypatch.setattr(thread_module, "Throttler", Counting)
    engine = filled(tmp_path, "t", "u")
    cleaner = CleanerThread(engine, CleanerConfig(threads=2, io_max_bytes_per_second=1e9))
    cleaner.start()
    try:
        eventually(lambda: cleaner.cleanings == 2)
        moved = [bytes_moved(stats) for stats in cleaner.last_stats]
    finally:
        cleaner.stop()
    (shared,) = made
    assert sorted(shared.counted.values()) == sorted(moved)
    assert len(moved) == 2 and min(moved) > 0


def test_a_rate_is_a_number_above_zero() -> None:
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="io_max_bytes_per_second"):
            CleanerConfig(io_max_bytes_per_second=wrong)
