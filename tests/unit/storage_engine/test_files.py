"""Files and locks: between processes, between threads, against a broker, and over forks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalog.errors import LockedByBrokerError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import file_system, files, locks
from kafkalog.storage_engine.fs.file_system import FileSystem
from tests.other_platform import needs_linux

# What Java's FileChannel.tryLock does: an exclusive POSIX lock on the whole file.
BROKER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("refused", flush=True)
else:
    print("locked", flush=True)
    sys.stdin.read()
"""


def broker(root: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", BROKER, str(root / layout.ROOT_LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def answer(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.communicate(timeout=120)


def test_a_log_held_by_a_broker_is_not_written_but_read(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t")
    engine.append("t", [("k", "v")])
    process = broker(tmp_path)
    assert answer(process) == b"locked"
    with pytest.raises(LockedByBrokerError, match="a Kafka broker holds this directory"):
        engine.append("t", [("k", "w")])
    assert sum(b.num_rows for b in DirectoryLog(tmp_path, read_only=True).read("t", 0)) == 1
    stop(process)
    engine.append("t", [("k", "w")])


@needs_linux
def test_a_broker_is_kept_out_while_we_write(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    with engine.transaction():
        process = broker(tmp_path)
        assert answer(process) == b"refused"
        stop(process)
    process = broker(tmp_path)
    assert answer(process) == b"locked"
    stop(process)


def test_two_sharers_do_not_exclude_each_other(tmp_path: Path) -> None:
    lock = locks.RootLock(tmp_path)
    with lock.shared(), lock.shared():
        pass


@needs_linux
def test_the_root_lock_survives_closing_another_descriptor_of_the_file(tmp_path: Path) -> None:
    with locks.RootLock(tmp_path).shared():
        with open(tmp_path / layout.ROOT_LOCK, "rb"):
            pass  # a plain POSIX lock would be gone now
        process = broker(tmp_path)
        assert answer(process) == b"refused"
        stop(process)


def test_a_lock_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    with locks.RootLock(tmp_path).shared() as check:
        check()
        os.unlink(tmp_path / layout.ROOT_LOCK)  # what a broker does when it shuts down
        with pytest.raises(LockedByBrokerError, match="was replaced while it was held"):
            check()


def test_an_exclusive_lock_excludes_threads_of_the_same_process(tmp_path: Path) -> None:
    lock = locks.FileLock(tmp_path / "lock")
    taken: list[bool] = []

    def take() -> None:
        with locks.FileLock(tmp_path / "lock").exclusive(wait=False) as is_free:
            taken.append(is_free)

    with lock.exclusive():
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert taken == [False, True]


def test_an_exclusive_lock_waits_for_sharers_of_other_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locks.FileLock(path).shared(), locks.FileLock(path).exclusive(wait=False) as is_free:
        assert not is_free


def test_asking_whether_a_lock_is_held_alone_does_not_count_as_holding_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = locks.FileLock(path)
    assert not lock.is_held_alone()
    with locks.FileLock(path).shared():
        assert not lock.is_held_alone()
    with locks.FileLock(path).exclusive():
        assert lock.is_held_alone()
    with locks.FileLock(path).exclusive(wait=False) as is_free:
        assert is_free


def test_a_lock_is_held_by_sharers_too(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = locks.FileLock(path)
    assert not lock.is_held()
    with locks.FileLock(path).shared():
        assert lock.is_held()
    with locks.FileLock(path).exclusive():
        assert lock.is_held()
    assert not lock.is_held()


def test_readers_pass_the_turnstile_one_by_one(tmp_path: Path) -> None:
    entered = threading.Event()

    def read() -> None:
        with locks.SegmentsLock(tmp_path).shared():
            entered.set()

    reader = threading.Thread(target=read)
    with locks.FileLock(tmp_path / layout.SEGMENTS_TURNSTILE).shared():  # as a reader before it
        reader.start()
        assert not entered.wait(0.2)
    reader.join()
    assert entered.is_set()


def test_a_stream_of_readers_does_not_starve_a_writer(tmp_path: Path) -> None:
    stop_reading = threading.Event()

    def read() -> None:
        while not stop_reading.is_set():
            with locks.SegmentsLock(tmp_path).shared():
                time.sleep(0.002)

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            with locks.SegmentsLock(tmp_path).exclusive():
                pass
    finally:
        stop_reading.set()
        for reader in readers:
            reader.join()


def test_a_forked_child_does_not_keep_its_parents_locks_alive(tmp_path: Path) -> None:
    holder = """
import os, sys, time
from pathlib import Path
from kafkalog.storage_engine.fs import locks
with locks.FileLock(Path(sys.argv[1])).exclusive():
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)  # it has closed what it inherited
        os.close(1)
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""
    path = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", holder, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with locks.FileLock(path).exclusive(wait=False) as is_free:
            assert not is_free
        process.kill()
        process.wait()
        with locks.FileLock(path).exclusive(wait=False) as is_free:
            assert is_free
    finally:
        os.kill(child, 9)
        process.stdout.close()


def test_what_a_forked_child_inherits_never_lets_go_of_a_lock_of_its_own(tmp_path: Path) -> None:
    """The child's descriptor may bear the number that the parent's had."""

    def holding() -> Iterator[None]:
        with locks.FileLock(tmp_path / "parent's").shared():
            yield

    inherited = holding()
    next(inherited)
    lock = locks.FileLock(tmp_path / "child's")
    child = os.fork()
    if child == 0:
        with lock.exclusive():
            inherited.close()
            os._exit(0 if lock.is_held() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locks.FileLock(tmp_path / "parent's").is_held()
    inherited.close()
    assert not locks.FileLock(tmp_path / "parent's").is_held()


class ReadOnlyNfs(FileSystem):
    """Lets nothing be opened to be written, and locks nothing alone that is not open so."""

    def open(self, path: file_system.Place, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return super().open(path, flags, mode)

    def flock(self, fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        super().flock(fd, operation)


def test_who_may_only_read_passes_the_turnstile_of_nfs_unless_a_writer_has_it(
    tmp_path: Path,
) -> None:
    lock = locks.SegmentsLock(tmp_path)
    entered = threading.Event()

    def read() -> None:
        with lock.shared():
            entered.set()

    with lock.exclusive():
        pass
    reader = threading.Thread(target=read)
    with contextlib.ExitStack() as writing:
        writing.enter_context(lock.exclusive())
        with file_system.replaced(ReadOnlyNfs()):
            reader.start()
            assert not entered.wait(0.2)
            writing.close()
            reader.join(120)
    assert entered.is_set()


class Hasty(FileSystem):
    """Reads and writes three bytes at a time."""

    def pread(self, fd: int, size: int, position: int) -> bytes:
        return super().pread(fd, min(size, 3), position)

    def preadv(self, fd: int, target: memoryview, position: int) -> int:
        return super().preadv(fd, target[:3], position)

    def pwrite(self, fd: int, data: files.Buffer, position: int) -> int:
        return super().pwrite(fd, bytes(data[:3]), position)


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with file_system.replaced(Hasty()):
        files.create(path, b"0123456789")
        assert files.read_file(path) == b"0123456789"
        with files.closing(files.open_to_read(path)) as fd:
            memory = bytearray(9)
            assert files.read_into(fd, memoryview(memory), 4) == 6  # up to the file's end
            assert memory == b"456789\0\0\0"
    assert path.read_bytes() == b"0123456789"


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")

    class Growing(FileSystem):
        def pread(self, fd: int, size: int, position: int) -> bytes:
            if position == 0:
                with path.open("ab") as file:
                    file.write(b"second")
            return super().pread(fd, size, position)

    with file_system.replaced(Growing()):
        assert files.read_file(path) == b"firstsecond"


def test_another_file_system_sees_what_is_done_until_it_is_taken_away(tmp_path: Path) -> None:
    synced: list[int] = []

    class Watched(FileSystem):
        def fsync(self, fd: int) -> None:
            synced.append(fd)

    with file_system.replaced(Watched()):
        files.sync_directory(tmp_path)
    files.sync_directory(tmp_path)
    assert len(synced) == 1


def test_directories_are_made_with_those_above_them(tmp_path: Path) -> None:
    for _ in range(2):
        files.make_directories(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        files.make_directories(tmp_path / "file")


@needs_linux
def test_a_directory_that_a_file_system_refuses_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):  # so says Linux of a new name in /proc
        files.make_directories(Path("/proc/kafkalog/log"))


def test_a_pipe_is_read_as_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"lines",))
    writer.start()
    with files.open_stream(path) as stream:
        assert stream.read() == b"lines"
    writer.join()


def test_an_exclusive_new_file_replaces_none(tmp_path: Path) -> None:
    os.close(files.open_empty(tmp_path / "file", exclusive=True))
    with pytest.raises(FileExistsError):
        files.open_empty(tmp_path / "file", exclusive=True)


def test_a_lock_is_one_of_the_file_that_bears_its_name_when_it_is_got(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    lock = locks.FileLock(directory / "lock")
    got: list[bool] = []

    def wait() -> None:
        with lock.shared(), locks.FileLock(lock.path).exclusive(wait=False) as is_held:
            got.append(is_held)

    with lock.exclusive():
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)
        files.rename(directory, tmp_path / "moved")
        directory.mkdir()
    thread.join(120)
    # The waiter holds the new directory's lock, so nobody else gets it alone.
    assert got == [False]
    files.rename(directory, tmp_path / "moved too")
    with pytest.raises(FileNotFoundError), lock.exclusive():
        pass


@pytest.mark.slow
def test_a_fork_while_threads_lock_keeps_no_lock(tmp_path: Path) -> None:
    """A child that lives on must not hold what a thread of its parent was just letting go."""
    is_over = threading.Event()

    def work(number: int) -> None:
        lock = locks.FileLock(tmp_path / f"lock{number}")
        while not is_over.is_set():
            with lock.exclusive():
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    kept = 0
    try:
        for _ in range(100):
            child = os.fork()
            if child == 0:
                names = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64) if _is_open(fd)]
                os._exit(int(any(str(tmp_path) in name for name in names)))
            kept += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert kept == 0


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_many_syncs_are_done_at_once_and_all_have_ended_when_one_fails() -> None:
    ended: list[int] = []
    gate = threading.Barrier(8)

    def sync(number: int) -> None:
        gate.wait(120)  # passes only if as many are under way at the same time
        if number == 3:
            raise OSError(errno.EIO, "no")
        ended.append(number)

    with pytest.raises(OSError, match="no"):
        files.all_at_once([functools.partial(sync, number) for number in range(8)])
    assert sorted(ended) == [0, 1, 2, 4, 5, 6, 7]


def test_few_syncs_are_done_in_their_order() -> None:
    done: list[int] = []
    files.all_at_once([functools.partial(done.append, number) for number in range(7)])
    assert done == [*range(7)]


def syncing_threads(count: int) -> set[int]:
    """Return the threads of so many syncs, all of which are under way at the same time."""
    gate, found = threading.Barrier(count), list[int]()

    def sync() -> None:
        gate.wait(120)
        found.append(threading.get_ident())

    files.all_at_once([sync] * count)
    return {*found}


def test_the_threads_that_sync_are_kept() -> None:
    assert syncing_threads(8) & syncing_threads(8) > {threading.get_ident()}


def test_a_forked_child_syncs_side_by_side_in_threads_of_its_own() -> None:
    syncing_threads(8)
    child = os.fork()
    if child == 0:
        os._exit(0 if len(syncing_threads(8)) == 8 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("threads", [0, 1, 5])
def test_each_sync_is_done_once_where_threads_run_out(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The second sync of a file whose first one failed would succeed."""
    start, started, done = threading.Thread.start, list[object](), list[int]()

    def scarce(thread: threading.Thread) -> None:
        if len(started) == threads:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def sync(number: int) -> None:
        done.append(number)
        if number == 3 and done.count(3) == 1:
            raise OSError(errno.EIO, "no")

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(OSError, match="no"):
        files.all_at_once([functools.partial(sync, number) for number in range(20)])
    assert sorted(done) == [*range(20)]


# --- mapped files --------------------------------------------------------------------------------


@needs_linux
def test_little_of_a_mapped_file_stays_resident(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 32 << 20
    files.create(path, bytes(range(256)) * (size // 256))
    with files.mapped(path) as data:
        assert hashlib.sha256(data).digest() == hashlib.sha256(path.read_bytes()).digest()
        deadline = time.monotonic() + 120
        while (left := resident_of(path)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left == 0
        assert data[-256:] == bytes(range(256))


def test_an_empty_file_is_mapped(tmp_path: Path) -> None:
    files.create(tmp_path / "file")
    with files.mapped(tmp_path / "file") as data:
        assert not data


def resident_of(path: Path) -> int:
    """Return how many KiB of a mapped file this process has."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.endswith(str(path)))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])
