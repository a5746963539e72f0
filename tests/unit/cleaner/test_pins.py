"""Readers' pins against the cleaner: the moment stays readable, and cleaning goes on after it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kafkalog.cleaner.report.explain import explain
from kafkalog.cleaner.rewrite import round as round_module
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.schedule.manager import clean as cleaner_package
from kafkalog.cleaner.shelves import moment_of
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory import pins
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.pin_file import Pin
from kafkalog.storage_engine.directory.pins import LEASE_MS, Action, LivePins
from kafkalog.storage_engine.directory.transaction import Transaction
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import latest_column

NOW = 1_700_000_000_000
ONE = Action("app", "execution 1")


def append(engine: DirectoryLog, value: str, keys: int = 10) -> None:
    LogBuilder(engine).append_each(*((f"k{i}", value) for i in range(keys)))


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    """What the readers of a test hold."""
    with contextlib.ExitStack() as stack:
        yield stack


def pinned(
    engine: DirectoryLog,
    action: Action = ONE,
    now_ms: int = NOW,
    *,
    held: contextlib.ExitStack | None = None,
) -> Pin:
    found = pins.pin(engine.root, action, engine.state, now_ms, held=held)
    assert found is not None
    return found


def end_of(engine: DirectoryLog, pin: Pin) -> int:
    held = pin.partition("t", engine.describe("t").topic_id, 0)
    assert held is not None
    return held.last_stable_offset


@pytest.mark.parametrize("force", [False, True])
def test_a_cleaning_stops_below_a_pin_and_goes_on_when_its_time_is_over(
    tmp_path: Path, held: contextlib.ExitStack, force: bool
) -> None:
    """It is over with the lease; for a forced cleaning as soon as nobody reads."""
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    append(engine, "old")
    pin = pinned(engine, held=held if force else None)
    append(engine, "new")
    append(engine, "newer", 1)

    clean(engine, "t", force=force, now_ms=NOW)
    cleaned_to = engine.describe("t").partitions[0].cleaned_to
    assert 0 < cleaned_to <= end_of(engine, pin)
    assert set(latest_column(engine, "value", end=end_of(engine, pin)).values()) == {b"old"}

    held.close()
    clean(engine, "t", force=force, now_ms=NOW if force else NOW + LEASE_MS)
    assert engine.describe("t").partitions[0].cleaned_to > end_of(engine, pin)
    with pytest.raises(InvalidInputError, match="as of offset 10 are gone"):
        latest_column(engine, "value", end=end_of(engine, pin))


def test_a_background_cleaner_finds_nothing_due_above_a_pin(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    pinned(engine)
    append(engine, "old")
    append(engine, "new")

    assert clean(engine, now_ms=NOW) == []
    (told,) = explain(moment_of(engine, NOW), "t")
    (finding,) = [one for one in told.findings if one.code == "pin"]
    assert "pinned a snapshot at offset 0" in finding.sentence
    assert finding.until_ms == NOW + LEASE_MS
    assert told.findings[0] == finding
    assert "pin" not in [
        one.code for one in explain(moment_of(engine, NOW + LEASE_MS), "t")[0].findings
    ]


def test_what_a_pin_cannot_hold_back_is_not_told(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    append(engine, "old")
    pinned(engine)
    (told,) = explain(moment_of(engine, NOW), "t")
    assert "pin" not in [one.code for one in told.findings]


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_cleaner_that_a_reader_overtakes_takes_its_word_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: contextlib.ExitStack, place: str
) -> None:
    """`before`: the cleaner has planned and has not told the journal; `between`: it has."""
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    append(engine, "old")
    old = engine.state()
    append(engine, "new")
    looks = 0

    class Overtaken(LivePins):
        def __init__(self, root: Path, now_ms: int, *, held_only: bool = False) -> None:
            nonlocal looks
            looks += 1
            if looks == {"before": 2, "between": 3}[place]:
                monkeypatch.setattr(pins, "_is_passed", lambda then, now: False)
                assert pins.pin(root, ONE, lambda: old, NOW, held=held) is not None
            super().__init__(root, now_ms, held_only=held_only)

    monkeypatch.setattr(cleaner_package_module(), "LivePins", Overtaken)
    before = latest_column(engine, "value", end=10)
    clean(engine, "t", force=True, now_ms=NOW)
    state = engine.describe("t").partitions[0]
    assert (state.cleaning_offset, state.first_dirty_offset) == (0, 0)
    assert latest_column(engine, "value", end=10) == before

    clean(engine, "t", force=True, now_ms=NOW)
    assert 0 < engine.describe("t").partitions[0].cleaned_to <= 10
    assert latest_column(engine, "value", end=10) == before
    assert not [path for path in (tmp_path / "t-0").iterdir() if path.suffix == layout.CLEANED]


def cleaner_package_module() -> object:
    """The module of `clean_round`; the package has a function of the same name."""
    import importlib

    assert callable(cleaner_package)
    return importlib.import_module("kafkalog.cleaner.directory.directory_round")


def test_a_cleaner_that_dies_after_the_journal_record_leaves_no_mixed_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: contextlib.ExitStack
) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    append(engine, "old")
    append(engine, "new")
    publish = Transaction.publish

    class Killed(BaseException):
        pass

    def die(self: Transaction, now_ms: int, **figures: int) -> object:
        state = publish(self, now_ms, **figures)
        if state.topics["t"].partitions[0].cleaning_offset:
            raise Killed
        return state

    monkeypatch.setattr(Transaction, "publish", die)
    with pytest.raises(Killed):
        clean(engine, "t", force=True, now_ms=NOW)
    monkeypatch.undo()

    again = DirectoryLog(tmp_path)
    with pytest.raises(InvalidInputError, match="as of offset 10 are gone"):
        latest_column(again, "value", end=10)
    assert set(latest_column(again, "value", end=20).values()) == {b"new"}
    pin = pinned(again, held=held)
    assert set(latest_column(again, "value", end=end_of(again, pin)).values()) == {b"new"}
    clean(again, "t", force=True, now_ms=NOW)
    assert set(latest_column(again, "value", end=end_of(again, pin)).values()) == {b"new"}


@pytest.mark.slow
def test_no_reader_sees_two_moments_while_a_cleaner_runs_without_pause(tmp_path: Path) -> None:
    """Each value is the same for all keys of a commit: a mixed view has two of them."""
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    engine.append("t", [(f"k{i}", "0") for i in range(10)], now_ms=NOW)
    is_over = threading.Event()
    faults: list[str] = []
    reads = [0]

    def guarded(work: Callable[[DirectoryLog], None]) -> Callable[[], None]:
        def run() -> None:
            own = DirectoryLog(tmp_path)
            try:
                while not is_over.is_set():
                    work(own)
            except Exception as fault:  # told below
                faults.append(repr(fault))
                is_over.set()

        return run

    numbers = iter(range(1, 1_000_000))

    def write(own: DirectoryLog) -> None:
        value = str(next(numbers))
        own.append("t", [(f"k{i}", value) for i in range(10)], now_ms=clock.now_ms())
        time.sleep(0.01)

    def sweep(own: DirectoryLog) -> None:
        clean(own, "t", force=True, now_ms=clock.now_ms())

    def read(own: DirectoryLog) -> None:
        action = Action("app", f"{threading.get_ident()} {time.monotonic_ns()}")
        seen = []
        with contextlib.ExitStack() as reading:
            pin = pinned(own, action, clock.now_ms(), held=reading)
            for _ in range(2):
                time.sleep(random.random() * 0.05)
                deadline = time.monotonic() + 120
                while own.describe("t").partitions[0].cleaned_to > end_of(own, pin):
                    assert time.monotonic() < deadline, "the pin was passed"
                seen.append(latest_column(own, "value", end=end_of(own, pin)))
        assert seen[0] == seen[1]
        assert len(set(seen[0].values())) == 1
        assert len(seen[0]) == 10
        reads[0] += 1

    work = [write, sweep, read, read]
    threads = [threading.Thread(target=guarded(each)) for each in work]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    while reads[0] < 60 and not is_over.wait(0.05) and time.monotonic() < deadline:
        pass
    is_over.set()
    for thread in threads:
        thread.join()

    assert faults == []
    assert reads[0] >= 60
    assert engine.describe("t").partitions[0].cleaned_to > 0


def test_a_round_honours_pins_that_are_younger_than_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    append(engine, "old")
    old = engine.state()
    append(engine, "new")
    append(engine, "newer", 1)
    monotonic, passed_ms = time.monotonic, 0

    def take_long(stats: object) -> None:
        """A stream's reader pins its batch's end, when the round has lasted longer than a lease."""
        nonlocal passed_ms
        if not passed_ms:
            passed_ms = LEASE_MS + 60_000
            assert pins.pin(engine.root, ONE, lambda: old, NOW + passed_ms) is not None

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed_ms / 1e3)
    clean(engine, "t", now_ms=NOW, progress=take_long)
    assert passed_ms
    assert engine.describe("t").partitions[0].cleaned_to <= 10
    assert set(latest_column(engine, "value", end=10).values()) == {b"old"}


def test_a_round_that_changes_no_segment_passes_no_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: contextlib.ExitStack
) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=300).engine
    LogBuilder(engine).append_each(("a", "1"), ("b", "2"))
    old, write = engine.state(), round_module._SecondPass.clean
    LogBuilder(engine).append_each(*((f"k{i}", "new") for i in range(10)))

    def pin_first(second_pass: round_module._SecondPass) -> None:
        assert second_pass.work.end > 2
        assert pins.pin(engine.root, ONE, lambda: old, NOW, held=held) is not None
        write(second_pass)

    monkeypatch.setattr(round_module._SecondPass, "clean", pin_first)
    clean(engine, "t", force=True, now_ms=NOW)
    assert engine.describe("t").partitions[0].cleaned_to <= 2


def test_of_a_pin_whose_lease_is_over_no_end_is_told(
    tmp_path: Path, held: contextlib.ExitStack
) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    pinned(engine, held=held)
    append(engine, "old")
    append(engine, "new")
    (told,) = explain(moment_of(engine, NOW + LEASE_MS), "t")
    (finding,) = [one for one in told.findings if one.code == "pin"]
    assert "no cleaning goes past that as long as a task reads it." in finding.sentence
    assert finding.until_ms is None


def test_a_cleaning_with_a_time_of_the_callers_ends_no_pin(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=300, min_cleanable_dirty_ratio=0).engine
    append(engine, "v")
    action = Action("app", "execution 1")
    first = pins.pin(tmp_path, action, engine.state, clock.now_ms())
    clean(engine, "t", now_ms=clock.now_ms() + 2 * 86_400_000)
    append(engine, "w")
    for number in range(2, 42):  # so many that the lease of most is over
        pins.pin(tmp_path, Action("app", f"execution {number}"), engine.state, clock.now_ms())
    pins.sweep_pins(tmp_path, clock.now_ms())
    assert first is not None
    assert pins.pin(tmp_path, action, engine.state, clock.now_ms()) == first
