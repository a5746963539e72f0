"""Systems that are no Linux: syncs, room, locks and names by other calls, and one that is refused.

`make test-platform` runs these and others with the names of Linux removed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from kafkalog.errors import InvalidInputError, LockedByBrokerError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.new_directories import DeletionUnfinishedError
from kafkalog.storage_engine.fs import c_library, file_system, files, locks
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from tests.unit.storage_engine.test_files import answer, broker, stop

FULL_SYNC, GET_PATH = 51, 50
"""F_FULLFSYNC and F_GETPATH of macOS (XNU: bsd/sys/fcntl.h)."""


@pytest.fixture
def without_linux_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fdatasync", "posix_fallocate"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(locks, "_HAS_DESCRIPTION_LOCKS", False)
    monkeypatch.setattr(locks, "_GET_LOCK", fcntl.F_GETLK)


@pytest.mark.usefixtures("without_linux_names")
def test_content_is_synced_by_fsync_where_there_is_nothing_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with files.closing(files.open_empty(tmp_path / "file")) as fd:
        files.sync_data(fd)
        assert synced == [fd]


@pytest.mark.parametrize(
    ("fault", "is_synced_otherwise"),
    [(None, False), (errno.ENOTSUP, True), (errno.ENOTTY, True), (errno.EIO, False)],
)
def test_a_mac_syncs_the_cache_of_the_disk_if_the_file_system_can(
    fault: int | None, is_synced_otherwise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    synced: list[int] = []

    def full_sync(fd: int, command: int) -> None:
        asked.append((fd, command))
        if fault is not None:
            raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", synced.append)
    with files.closing(files.open_empty(tmp_path / "file")) as fd:
        if fault == errno.EIO:
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                files.sync_file(fd)
        else:
            files.sync_file(fd)
        assert asked == [(fd, FULL_SYNC)]
        assert synced == ([fd] if is_synced_otherwise else [])


@pytest.mark.usefixtures("without_linux_names")
def test_room_is_made_by_zeros_beyond_the_end_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system, "_ZEROS_SIZE", 4096)
    with files.closing(files.open_empty(tmp_path / "file")) as fd:
        files.write_at(fd, b"content", 0)
        files.preallocate(fd, 10_000)
        assert os.fstat(fd).st_blocks * 512 >= 10_000
        files.preallocate(fd, 5)  # it has more
    assert files.read_file(tmp_path / "file") == b"content" + bytes(10_000 - 7)


@pytest.mark.parametrize("tells_of_holes", [True, False])
def test_zeros_are_written_up_to_the_end_whether_or_not_the_system_tells_of_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tells_of_holes: bool
) -> None:
    if not tells_of_holes:
        monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    os.truncate(path, 1 << 20)
    with files.closing(files.open_to_write(path)) as fd:
        assert files.data_from(fd, 3) == 3
        assert files.data_from(fd, 1 << 19) == (1 << 20 if tells_of_holes else 1 << 19)
        files.write_zeros(fd, 4000)
    assert path.read_bytes() == b"x" * 4000 + bytes((1 << 20) - 4000)


def test_a_file_in_an_error_has_the_path_that_the_system_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fcntl, "F_GETPATH", GET_PATH, raising=False)
    monkeypatch.setattr(
        fcntl, "fcntl", lambda fd, command, room: b"/log/commit" + room[len("/log/commit") :]
    )
    assert file_system.path_of(7) == "/log/commit"


@pytest.mark.usefixtures("without_linux_names")
class TestARootLockByFlock:
    def test_sharers_keep_out_who_wants_it_alone(self, tmp_path: Path) -> None:
        lock = locks.RootLock(tmp_path)
        with lock.shared(), lock.shared():
            assert not lock.is_held_alone()
            with pytest.raises(LockedByBrokerError), lock.exclusive():
                pass
        with lock.exclusive():
            assert locks.RootLock(tmp_path).is_held_alone()
            with pytest.raises(LockedByBrokerError), locks.RootLock(tmp_path).shared():
                pass
        assert not lock.is_held_alone()

    def test_a_broker_that_holds_the_directory_keeps_us_out(self, tmp_path: Path) -> None:
        lock = locks.RootLock(tmp_path)
        with lock.shared():
            pass
        process = broker(tmp_path)
        assert answer(process) == b"locked"
        for taken in (lock.shared(), lock.exclusive()):
            with pytest.raises(LockedByBrokerError, match="a Kafka broker holds"), taken:
                pass
        assert lock.is_held_alone()
        stop(process)
        with lock.exclusive():
            pass

    def test_our_own_lock_is_not_a_brokers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a Mac the question finds locks of `flock` too, which belong to no process."""
        monkeypatch.setattr(locks, "_conflicting", lambda fd, kind: (fcntl.F_WRLCK, -1))
        with locks.RootLock(tmp_path).exclusive():
            pass


def test_struct_flock_is_that_of_the_system() -> None:
    """Linux: include/uapi/asm-generic/fcntl.h; macOS: bsd/sys/fcntl.h of XNU."""
    packed = locks._whole_file(fcntl.F_WRLCK)
    size, place = (32, 0) if sys.platform == "linux" else (24, 20)
    assert len(packed) == size
    assert packed[place : place + 2] == fcntl.F_WRLCK.to_bytes(2, sys.byteorder)
    assert not any(packed[:place] + packed[place + 2 :])


def test_a_mac_names_its_boot_and_its_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    number = uuid.UUID("12345678-9abc-4def-8123-456789abcdef")

    def sysctlbyname(name: bytes, text: ctypes.Array[ctypes.c_char], *_: object) -> int:
        assert name == b"kern.bootsessionuuid"
        text.value = str(number).encode()
        return 0

    def gethostuuid(
        found: ctypes.Array[ctypes.c_char], no_wait: ctypes.Array[ctypes.c_long]
    ) -> int:
        assert list(no_wait) == [0, 0]
        found.raw = number.bytes
        return 0

    library = SimpleNamespace(sysctlbyname=sysctlbyname, gethostuuid=gethostuuid)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert c_library.boot_session() == c_library.host_uuid() == str(number)
    library.sysctlbyname = library.gethostuuid = lambda *_: -1
    assert c_library.boot_session() == c_library.host_uuid() == ""


def test_only_a_mac_has_the_name_of_a_mac() -> None:
    assert c_library.boot_session() == c_library.host_uuid() == ""


def test_the_import_says_on_windows_what_to_do() -> None:
    program = "import sys; sys.platform = 'win32'; import kafkalog"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("Run Python in WSL2, or in a container.")


def test_a_topic_that_the_file_system_takes_for_another_is_refused(tmp_path: Path) -> None:
    """The second name leads to the first one's directory, as where case is ignored."""
    engine = DirectoryLog(tmp_path)
    engine.create_topic("orders")
    engine.create_topic("ORDERS")  # here it is another directory
    (tmp_path / "Orders-0").symlink_to("orders-0")
    with pytest.raises(InvalidInputError, match=r"'Orders': this file system .* from 'orders'"):
        engine.create_topic("Orders", partitions=2)
    assert engine.topics() == ["ORDERS", "orders"]


def test_a_topic_waits_until_a_deleted_one_of_another_case_is_away(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("orders")
    with engine.transaction() as transaction:
        transaction.delete_topic("orders", now_ms=0)
        transaction.publish(now_ms=0)
    (tmp_path / "Orders-0").symlink_to("orders-0")
    with engine.transaction() as transaction, pytest.raises(DeletionUnfinishedError) as raised:
        transaction.create_topic("Orders", NewTopic.of(1, {}))
    assert raised.value.topic == "orders"
