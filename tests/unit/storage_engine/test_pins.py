"""Pins: the first one wins, everybody reads the same, and a lease ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.directory import ended_pins, pins
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.pin_file import Pin, PinnedPartition
from kafkalog.storage_engine.directory.pins import LEASE_MS, Action, LivePins
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, file_system, files, locks
from kafkalog.storage_engine.fs.file_system import FileSystem
from kafkalog.storage_engine.metadata.state import State
from tests.builders.log_builder import LogBuilder
from tests.unit.storage_engine.faults import Died, each_act

NOW = 1_700_000_000_000
DAY = 86_400_000
ONE = Action("app", "execution 1")
TWO = Action("app", "execution 2")


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    return LogBuilder(tmp_path).topic(partitions=2).fill().engine


def pinned(engine: DirectoryLog, action: Action = ONE, now_ms: int = NOW) -> Pin:
    found = pins.pin(engine.root, action, engine.state, now_ms)
    assert found is not None
    return found


def names(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith(layout.PIN))


def limit(engine: DirectoryLog, now_ms: int, partition: int = 0) -> int:
    return LivePins(engine.root, now_ms).limit("t", engine.describe("t").topic_id, partition)


def key_partition(engine: DirectoryLog) -> int:
    (partition,) = [n for n, (_, end) in engine.offsets("t").items() if end]
    return partition


def test_an_action_keeps_its_first_moment_and_another_one_has_its_own(engine: DirectoryLog) -> None:
    first = pinned(engine)
    LogBuilder(engine).fill(3)
    number = key_partition(engine)
    topic_id = engine.describe("t").topic_id

    assert pinned(engine) == first
    assert first.partition("t", topic_id, number) == PinnedPartition(0, 1, 1)
    assert pinned(engine, TWO).partition("t", topic_id, number) == PinnedPartition(0, 4, 4)
    assert len(names(engine.root)) == 2


def test_what_a_pin_does_not_know_it_does_not_invent(engine: DirectoryLog) -> None:
    pin = pinned(engine)
    assert pin.partition("t", "another id", 0) is None
    assert pin.partition("t", engine.describe("t").topic_id, 2) is None
    assert pin.partition("u", "", 0) is None


def test_of_many_that_pin_at_once_one_wins(engine: DirectoryLog) -> None:
    found: list[Pin] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        own = DirectoryLog(engine.root, read_only=True)
        barrier.wait()
        found.append(pinned(own))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    LogBuilder(engine).fill(5)
    for thread in threads:
        thread.join()

    assert len(found) == 8
    assert len({pin.number for pin in found}) == 1
    assert len(names(engine.root)) == 1


def test_a_pin_holds_for_ten_minutes_after_it_was_renewed(engine: DirectoryLog) -> None:
    pin = pinned(engine)
    number = key_partition(engine)
    LogBuilder(engine).fill()

    assert limit(engine, NOW + LEASE_MS - 1, number) == 1
    assert limit(engine, NOW + LEASE_MS, number) == layout.INT64_MAX
    pins.renew(pin.path, NOW + LEASE_MS)
    assert limit(engine, NOW + LEASE_MS, number) == 1
    assert LivePins(engine.root, NOW + 1).holder(
        "t", engine.describe("t").topic_id, number
    ) == (1, NOW + 2 * LEASE_MS)  # fmt: skip


def test_a_lease_that_ends_far_in_the_future_does_not_count(engine: DirectoryLog) -> None:
    """A host whose clock is wrong must not stop the cleaner for a year."""
    pin = pinned(engine)
    LogBuilder(engine).fill()
    pins.renew(pin.path, NOW + 365 * DAY)
    assert limit(engine, NOW, key_partition(engine)) == layout.INT64_MAX
    assert pins.sweep_pins(engine.root, NOW) == 1


def test_who_reads_by_a_pin_needs_no_lease_and_keeps_it_from_being_swept(
    engine: DirectoryLog,
) -> None:
    number = key_partition(engine)
    with contextlib.ExitStack() as reading:
        pin = pins.pin(engine.root, ONE, engine.state, NOW, held=reading)
        LogBuilder(engine).fill()
        assert limit(engine, NOW + 2 * DAY, number) == 1
        assert pins.sweep_pins(engine.root, NOW + 2 * DAY) == 0
        assert pinned(engine, now_ms=NOW + 2 * DAY) == pin
    assert limit(engine, NOW + 2 * DAY, number) == layout.INT64_MAX
    assert pins.sweep_pins(engine.root, NOW + 2 * DAY) == 1


def test_several_that_ask_at_once_take_nobody_for_a_reader(engine: DirectoryLog) -> None:
    pinned(engine)
    LogBuilder(engine).fill()
    number = key_partition(engine)
    wrong: list[int] = []

    def ask() -> None:
        for _ in range(50):
            held = LivePins(engine.root, NOW, held_only=True)
            wrong.append(held.limit("t", engine.describe("t").topic_id, number))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [layout.INT64_MAX] * 150


@pytest.mark.parametrize(
    "content",
    [b"", b"[" * 200_000, b'{"version":1,"number":1,"topics":{"t":["x",[[1,1,Infinity]]]}}'],
)
def test_a_malformed_pin_holds_nothing_and_stops_nobody(
    engine: DirectoryLog, content: bytes
) -> None:
    pinned(engine).path.write_bytes(content)
    (engine.root / f"{layout.PIN}directory").mkdir()
    assert limit(engine, NOW) == layout.INT64_MAX
    with pytest.raises(CorruptLogError):
        pinned(engine)


def test_the_oldest_live_pin_counts(engine: DirectoryLog) -> None:
    pinned(engine)
    LogBuilder(engine).fill()
    pinned(engine, TWO, NOW + 1)
    number = key_partition(engine)

    assert limit(engine, NOW, number) == 1
    assert limit(engine, NOW + LEASE_MS, number) == 2


def test_a_pin_is_of_a_topic_not_of_a_name(engine: DirectoryLog) -> None:
    pinned(engine)
    engine.delete_topic("t")
    engine.create_topic("t", 2)
    assert limit(engine, NOW) == layout.INT64_MAX


def test_a_moment_that_a_cleaner_passed_while_it_was_pinned_is_not_pinned(
    engine: DirectoryLog,
) -> None:
    number = key_partition(engine)
    old = engine.state()
    LogBuilder(engine).fill(5)
    with engine.transaction() as transaction:
        transaction.change_partition("t", number, cleaning_offset=4)
        transaction.publish(NOW)
    told = iter([old])

    def load_state() -> State:
        return next(told, None) or engine.state()

    found = pins.pin(engine.root, ONE, load_state, NOW)

    assert found is not None
    held = found.partition("t", engine.describe("t").topic_id, number)
    assert held is not None and held.last_stable_offset == 6
    assert len(names(engine.root)) == 1


def test_a_pin_goes_when_its_lease_is_over(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "_SWEEPS_ONE_IN", 1)
    pinned(engine)
    pinned(engine, TWO, NOW + LEASE_MS - 1)
    assert len(names(engine.root)) == 2
    pinned(engine, Action("app", "execution 3"), NOW + LEASE_MS)
    assert len(names(engine.root)) == 2
    assert pins.sweep_pins(engine.root, NOW + 2 * LEASE_MS) == 2
    assert names(engine.root) == []


@pytest.mark.slow
def test_a_look_asks_nothing_of_actions_that_have_ended(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand actions, one a minute: those of the last ten minutes have a file."""
    for n in range(1000):
        pinned(engine, Action("app", f"execution {n}"), NOW + n * 60_000)
        if n % 20 == 19:
            pins.sweep_pins(engine.root, NOW + n * 60_000)
    asked: list[Path] = []
    read_bytes = files.read_file

    def counted(path: Path) -> bytes:
        asked.append(path)
        return read_bytes(path)

    LogBuilder(engine).fill()
    monkeypatch.setattr(files, "read_file", counted)
    assert limit(engine, NOW + 999 * 60_000, key_partition(engine)) == 1
    assert len(names(engine.root)) == len(asked) == 10
    assert (engine.root / layout.ENDED_PINS).stat().st_size < 500_000


def test_an_application_leaves_few_pins_however_fast_its_actions_end(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody reads by stays, and so does another application's."""
    monkeypatch.setattr(pins, "_SWEEPS_ONE_IN", 1)
    other, held = Action("other", "execution 1"), Action("app", "held")
    with contextlib.ExitStack() as reading:
        pinned(engine, other)
        kept = pins.pin(engine.root, held, engine.state, NOW, held=reading)
        made = [pinned(engine, Action("app", f"execution {n}"), NOW + n) for n in range(120)]
        LogBuilder(engine).fill()
        assert len(names(engine.root)) == 2 + 32
        assert {other.file_name(), held.file_name()} < set(names(engine.root))
        assert pinned(engine, held) == kept
    assert [pinned(engine, Action("app", f"execution {n}"), NOW) for n in range(120)] == made


def test_a_late_task_of_an_ended_action_reads_as_of_its_moment(engine: DirectoryLog) -> None:
    first = pinned(engine)
    LogBuilder(engine).fill(3)
    late = NOW + LEASE_MS
    assert pins.sweep_pins(engine.root, late) == 1

    assert pinned(engine, now_ms=late) == first
    assert limit(engine, late, key_partition(engine)) == 1
    assert pinned(engine, TWO, late).number == first.number + 3
    assert pins.sweep_pins(engine.root, late + LEASE_MS) == 2
    assert pinned(engine, now_ms=late + LEASE_MS) == first


def test_a_late_task_whose_moment_is_kept_no_more_is_refused(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of the youngest is kept, as far as there is room; the names are for a day."""
    pinned(engine)
    size = names_size(engine)
    pins.sweep_pins(engine.root, NOW + LEASE_MS)
    monkeypatch.setattr(ended_pins, "_CONTENT_MAX", size)
    second = pinned(engine, TWO, NOW + LEASE_MS)
    pins.sweep_pins(engine.root, NOW + 2 * LEASE_MS)

    LogBuilder(engine).fill()
    assert pinned(engine, TWO, NOW + 2 * LEASE_MS) == second
    with pytest.raises(
        StorageError, match="the snapshot they read is no longer kept; run the action"
    ):
        pinned(engine, now_ms=NOW + 2 * LEASE_MS)
    pins.sweep_pins(engine.root, NOW + DAY + 2 * LEASE_MS)
    assert pinned(engine, now_ms=NOW + DAY + 2 * LEASE_MS).number == second.number + 1


def names_size(engine: DirectoryLog) -> int:
    """Return the size of all pins."""
    return sum((engine.root / name).stat().st_size for name in names(engine.root))


def test_a_pin_that_was_damaged_and_has_ended_is_refused_as_before(engine: DirectoryLog) -> None:
    pinned(engine).path.write_bytes(b"{}\n{}\n")
    pins.sweep_pins(engine.root, clock.now_ms() + DAY)
    with pytest.raises(StorageError, match="run the action again"):
        pinned(engine)


@pytest.mark.parametrize("content", [b"x", b"kl-ended-pins 1 00000000\nkl-pin-x 1 {}\n"])
def test_who_cannot_tell_whether_a_pin_has_ended_makes_none(
    engine: DirectoryLog, content: bytes
) -> None:
    (engine.root / layout.ENDED_PINS).write_bytes(content)
    with pytest.raises(CorruptLogError, match=r"kl-ended-pins: .*remove it when no action runs$"):
        pinned(engine)
    assert names(engine.root) == []


def test_who_may_not_read_what_has_ended_makes_no_pin(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user wrote it, with a umask that hides it; read without a pin is any moment."""
    read_bytes = files.read_file

    def refused(path: Path) -> bytes:
        if path.name == layout.ENDED_PINS:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_bytes(path)

    monkeypatch.setattr(files, "read_file", refused)
    with pytest.raises(StorageError, match="run all executors as one user, or with a umask"):
        pinned(engine)


def test_who_may_not_lock_what_has_ended_makes_no_pin_and_says_so(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user made the file, with a umask that hides it; the root itself can be written."""
    (engine.root / layout.ENDED_PINS).touch()
    shared = locks.FileLock.shared

    def refused(lock: locks.FileLock) -> Any:
        if lock.path.name == layout.ENDED_PINS:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(lock.path))
        return shared(lock)

    monkeypatch.setattr(locks.FileLock, "shared", refused)
    with pytest.raises(StorageError, match="run all executors as one user, or with a umask"):
        pinned(engine)


def test_tasks_that_come_while_their_pin_ends_see_one_moment(engine: DirectoryLog) -> None:
    """A sweeper that takes every pin for ended, a writer, and tasks of the same actions."""
    is_over = threading.Event()
    seen: dict[int, set[int]] = {}
    faults: list[BaseException] = []

    def repeat(work: Callable[[DirectoryLog], object]) -> None:
        own = DirectoryLog(engine.root)
        try:
            while not is_over.is_set():
                work(own)
        except BaseException as fault:
            faults.append(fault)

    def read() -> None:
        own = DirectoryLog(engine.root, read_only=True)
        try:
            for n in range(60):
                for _ in range(3):
                    with contextlib.ExitStack() as reading:
                        action = Action("app", f"execution {n}")
                        found = pins.pin(own.root, action, own.state, NOW, held=reading)
                        assert found is not None
                        seen.setdefault(n, set()).add(found.number)
        except BaseException as fault:
            faults.append(fault)

    works = (
        lambda own: LogBuilder(own).fill(),
        lambda own: pins.sweep_pins(own.root, NOW + 2 * LEASE_MS),
    )
    beside = [threading.Thread(target=repeat, args=(work,)) for work in works]
    readers = [threading.Thread(target=read) for _ in range(3)]
    for thread in (*beside, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    is_over.set()
    for thread in beside:
        thread.join()
    assert faults == []
    assert len(seen) == 60 and all(len(numbers) == 1 for numbers in seen.values())
    assert len(set().union(*seen.values())) > 1


@pytest.mark.parametrize("hours", [25, -25])
def test_a_pin_of_a_clock_that_is_a_day_off_does_not_end_at_once(
    engine: DirectoryLog, hours: int
) -> None:
    """Who sweeps has the file system's clock; who pinned has not."""
    now_ms = clock.now_ms()
    first = pinned(engine, now_ms=now_ms + hours * 3_600_000)
    LogBuilder(engine).fill()
    assert pins.sweep_pins(engine.root, now_ms) == 0
    assert pinned(engine, now_ms=now_ms) == first
    assert pins.sweep_pins(engine.root, now_ms + 3 * DAY) == 1


def test_a_look_keeps_one_offset_of_a_partition_however_many_pins_are_live(
    engine: DirectoryLog,
) -> None:
    pinned(engine)
    one = LivePins(engine.root, NOW)
    for n in range(20):
        LogBuilder(engine).fill()
        pinned(engine, Action("app", f"more {n}"))
    assert len(pickle.dumps(LivePins(engine.root, NOW))) == len(pickle.dumps(one))
    assert limit(engine, NOW, key_partition(engine)) == 1


@pytest.mark.parametrize("held_only", [False, True])
def test_who_takes_hold_of_an_ended_pin_is_seen_by_the_next_look(
    engine: DirectoryLog, held_only: bool
) -> None:
    first = pinned(engine)
    LogBuilder(engine).fill()
    now_ms = NOW + DAY // 2

    def seen(later_ms: int) -> int:
        found = LivePins(engine.root, now_ms + later_ms, held_only=held_only)
        return found.limit("t", engine.describe("t").topic_id, key_partition(engine))

    assert seen(0) == layout.INT64_MAX
    with contextlib.ExitStack() as reading:
        assert pins.pin(engine.root, ONE, engine.state, now_ms + 1, held=reading) == first
        assert seen(2) == 1
        assert seen(2 * LEASE_MS) == 1
    assert seen(2 * LEASE_MS) == layout.INT64_MAX


def refuse_alone(monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[int], bool]) -> None:
    """Refuse exclusive locks on some descriptors, as network file systems do."""

    class Emulated(FileSystem):
        def flock(self, fd: int, operation: int) -> None:
            if operation & fcntl.LOCK_EX and is_refused(fd):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            super().flock(fd, operation)

    monkeypatch.setattr(file_system, "current", Emulated())


def test_where_only_what_may_be_written_is_locked_alone_readers_of_a_pin_are_seen(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system makes `flock` of POSIX locks."""
    refuse_alone(
        monkeypatch, lambda fd: fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    )
    number = key_partition(engine)
    with contextlib.ExitStack() as reading:
        pins.pin(engine.root, ONE, engine.state, NOW, held=reading)
        LogBuilder(engine).fill()
        assert limit(engine, NOW + 2 * DAY, number) == 1
        assert pins.sweep_pins(engine.root, NOW + 2 * DAY) == 0
    assert pins.sweep_pins(engine.root, NOW + 2 * DAY) == 1


def test_of_a_pin_that_cannot_be_asked_about_only_the_lease_counts(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = key_partition(engine)
    pinned(engine, Action("app", "execution 1", "query", 1))
    LogBuilder(engine).fill()
    refuse_alone(monkeypatch, lambda fd: layout.PIN in os.readlink(f"/proc/self/fd/{fd}"))
    pinned(engine, Action("app", "execution 2", "query", 2))
    assert len(names(engine.root)) == 1
    assert limit(engine, NOW + LEASE_MS - 1, number) == 2
    assert limit(engine, NOW + LEASE_MS, number) == layout.INT64_MAX
    assert pins.sweep_pins(engine.root, NOW + 2 * DAY) == 1


def test_who_holds_a_pin_is_seen_while_it_gets_its_name(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleaner that listed it under its maker's name asks, and in between it is linked."""
    is_held = locks.FileLock.is_held
    for n in range(20):
        path = engine.root / Action("app", str(n)).file_name()
        candidate = path.with_name(f"{path.name}.00ff")
        files.create(candidate)

        def then_linked(
            self: locks.FileLock, candidate: Path = candidate, path: Path = path
        ) -> bool:
            answer = is_held(self)
            if candidate.exists():
                files.link(candidate, path)
                files.remove(candidate)
            return answer

        monkeypatch.setattr(locks.FileLock, "is_held", then_linked)
        with contextlib.ExitStack() as reading:
            pins.hold(candidate, reading, NOW)
            assert pins._is_held(candidate)


def test_a_batch_of_a_stream_replaces_the_pins_of_earlier_ones(engine: DirectoryLog) -> None:
    for batch in (9, 10, 11):
        pinned(engine, Action("app", f"execution {batch}", "query", batch))
        pinned(engine, Action("app", f"other {batch}", "query", batch))
    pinned(engine, Action("app", "x", "another", 0))
    pinned(engine, ONE)
    assert len(names(engine.root)) == 4


def test_a_root_that_cannot_be_written_has_no_pins(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: int) -> Callable[..., None]:
        def create(path: Path, data: bytes = b"") -> None:
            raise OSError(code, os.strerror(code), str(path))

        return create

    monkeypatch.setattr(files, "create", refuse(errno.EROFS))
    assert pins.pin(engine.root, ONE, engine.state, NOW) is None
    monkeypatch.setattr(files, "create", refuse(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"No space .*; free space, or give endingOffsets"):
        pinned(engine)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_has_no_pins(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def link(source: Path, target: Path) -> bool:
        raise OSError(code, os.strerror(code), str(source))

    monkeypatch.setattr(files, "link", link)
    assert pins.pin(engine.root, ONE, engine.state, NOW) is None
    assert names(engine.root) == []


def test_who_never_gets_a_pin_is_told_to_run_the_action_again(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "link", lambda source, target: False)
    with pytest.raises(StorageError, match="or was passed, 100 times; run the action again"):
        pinned(engine)


def test_a_pin_of_a_later_release_holds_cleaners_and_cannot_be_read_at(
    engine: DirectoryLog,
) -> None:
    path = pinned(engine).path
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps({**content, "version": 2}))
    files.set_times(path, NOW * 1_000_000)

    assert limit(engine, NOW) == 0
    with pytest.raises(
        CorruptLogError, match=r"a pin of version 1, .*; run one release everywhere$"
    ):
        pinned(engine)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"version":1}', b'{"version":1,"topics":3}'])
def test_an_unfinished_pin_holds_nobody_and_is_refused(engine: DirectoryLog, data: bytes) -> None:
    path = pinned(engine).path
    path.write_bytes(data)
    files.set_times(path, NOW * 1_000_000)

    assert limit(engine, NOW) == layout.INT64_MAX
    with pytest.raises(CorruptLogError, match=r"JSON of a pin, .*; remove it and run the action"):
        pinned(engine)


def test_who_dies_while_pinning_leaves_a_pin_or_none(tmp_path: Path) -> None:
    for n in range(1, 50):
        root = tmp_path / str(n)
        engine = DirectoryLog(root)
        engine.create_topic("t", 1)
        LogBuilder(engine).fill()

        def work(log: DirectoryLog = engine) -> None:
            pinned(log)

        fired = each_act(work, n, Died(), after=True)
        before = LivePins(root, NOW).limit("t", engine.describe("t").topic_id, 0)
        LogBuilder(engine).fill()
        found = pinned(engine).partition("t", engine.describe("t").topic_id, 0)
        assert found is not None
        assert found.last_stable_offset in (1, 2)
        if found.last_stable_offset == 1:
            assert before == 1
        if not fired:
            return
    raise AssertionError("it has more acts than were tried")
