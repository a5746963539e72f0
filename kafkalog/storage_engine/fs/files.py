"""Files and directories: opened, listed, read, written, synced, renamed and removed.

The rest of the package calls these functions through the module, as `files.sync_file(...)`. Tests
that let one of them fail replace it here. Tests that give another file system do so in
`file_system`, whose calls all of these make. Locks are in `locks`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import signal
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, ParamSpec, TypeAlias, TypeVar, cast

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import file_system

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_T = TypeVar("_T")
_P = ParamSpec("_P")
_END: Final = object()
_OF_USER: Final = "is_of_kafkalogs_user"
"""An attribute of errors that the user's code raised."""
Buffer: TypeAlias = bytes | bytearray | memoryview

NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""The errors of a process that may only read."""
MORE_FILES: Final = "raise the limit of open files (ulimit -n)"
NOT_OF_A_LOG: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EFBIG})
"""The errors of a link, a pipe or device, a directory, and of a file that is too large."""
WHOLE_SIZE_MAX: Final = 256 << 20
"""The largest file that is read at once: an index, a snapshot of producers, a checkpoint, a note.
Kafka's default for indexes is 10 MiB (segment.index.bytes)."""
_MODE: Final = 0o666
"""The mode of what is made, less the umask."""
_CAREFULLY: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A file of a log may be anything on a rescued disk: follow no link, wait for no other end."""
_RESIDENT_S: Final = 0.002
"""How long what was read of a mapped file stays: a few MiB are read in it."""
_PIECE_SIZE = 1 << 20
_SIDE_BY_SIDE_MIN, _SIDE_BY_SIDE_MAX = 8, 16
"""Fewer syncs are not worth their threads; more at once are no faster."""


class NotOfALogError(OSError):
    """A file has the name of a log's file but can't be one; its number is one of NOT_OF_A_LOG."""

    def __init__(self, number: int, expected: str, found: str, path: str) -> None:
        super().__init__(number, f"expected {expected}, found {found}", path)
        self.expected = expected
        self.found = found


class disk_faults:
    """Raise a StorageError for an OSError; it names the file if the system did, else `place`."""

    _passes: tuple[type[OSError], ...] = ()

    def __init__(self, place: Path) -> None:
        self._place = place

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, fault: BaseException | None, __: object) -> None:
        if isinstance(fault, OSError) and not isinstance(fault, self._passes):
            pass_on(fault)
            raise _storage_error(fault, self._place) from fault


class reading_faults(disk_faults):
    """Do the same, but let FileNotFoundError through: the file may only have been replaced."""

    _passes = (FileNotFoundError,)


def pass_on(fault: BaseException) -> None:
    """Raise an error again that is the user's; call it wherever others are caught.

    It is one of the user's code that we call (`users`), or of their signal handler. A handler runs
    in the main thread while a call of ours waits. There an OSError without an errno is not the
    system's either: TimeoutError is one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_users(fault) or (is_main and isinstance(fault, OSError) and not is_systems(fault)):
        raise fault


def is_users(fault: BaseException) -> bool:
    """Return whether the user's code, called in `users` or as a signal handler, raised an error."""
    return getattr(fault, _OF_USER, False) or _is_of_handler(fault)


@contextlib.contextmanager
def users() -> Iterator[None]:
    """Call the user's code within the block: its errors pass through, as `pass_on` says."""
    try:
        yield
    except Exception as fault:
        with contextlib.suppress(AttributeError):  # a class with slots
            setattr(fault, _OF_USER, True)
        raise


def users_items(items: Iterable[_T]) -> Iterator[_T]:
    """Yield the items of a user's iterable; its errors pass through."""
    with users():
        following = iter(items)
    while True:
        with users():
            item = next(following, _END)
        if item is _END:
            return
        yield cast("_T", item)


def users_call(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a user's callback whose errors pass through."""

    @functools.wraps(call)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _T:
        with users():
            return call(*arguments, **named)

    return called


def _is_of_handler(fault: BaseException) -> bool:
    """Return whether a signal handler in Python raised an error."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    traceback = fault.__traceback__
    while traceback is not None and codes:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code(handler: object) -> object:
    """Return the code of a handler: of a function, a method, a partial, or an object's call."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    found = getattr(handler, "__code__", None)
    return found or getattr(vars(type(handler)).get("__call__"), "__code__", None)


def is_systems(fault: BaseException) -> bool:
    """Return whether an error is one of the system's, which has a number."""
    return isinstance(fault, OSError) and fault.errno is not None


@contextlib.contextmanager
def ignoring(*more: type[Exception]) -> Iterator[None]:
    """Ignore the system's errors within the block, and errors of `more`; others pass."""
    try:
        yield
    except Exception as fault:
        if not isinstance(fault, (OSError, *more)):
            raise
        pass_on(fault)


def _storage_error(fault: OSError, place: Path) -> StorageError:
    where = fault.filename or place
    if fault.errno == errno.EMFILE:
        return StorageError(f"{where}: cannot be opened: {fault.strerror}; {MORE_FILES}")
    if fault.errno in NOT_OF_A_LOG:
        return StorageError(
            f"{where}: {fault.strerror}. Move it away, and put the log's own file there."
        )
    return StorageError(f"{where}: the disk refused ({fault.strerror})")


class _named:
    """Add the file's name to an OSError: the system leaves it out for a descriptor."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, fault: BaseException | None, __: object) -> None:
        if isinstance(fault, OSError):
            _name(fault, self._fd)


def _name(fault: OSError, fd: int) -> None:
    if fault.filename is None:
        with contextlib.suppress(OSError):  # nothing in it waits
            fault.filename = file_system.path_of(fd)


# --- opening and listing -------------------------------------------------------------------------
# A descriptor is this process's alone: a process that it starts inherits none.


def open_to_read(path: str | Path) -> int:
    """Open a file to read it; raises OSError, of NOT_OF_A_LOG for a link, a pipe or a directory."""
    return _open(path, os.O_RDONLY)


def open_to_write(path: str | Path, *, create: bool = False, within_limit: bool = False) -> int:
    """Open a file to read and write it; raises OSError.

    With `create`, make an empty file if it is missing. With `within_limit`, leave the limit of open
    files as it is: for a caller that closes other files instead.
    """
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    if within_limit:
        return _opened(path, flags)
    return _open(path, flags)


def open_empty(path: str | Path, *, exclusive: bool = False) -> int:
    """Make an empty file, or empty the file of that name, and open it; raises OSError.

    With `exclusive`, raise FileExistsError if something has that name.
    """
    return _open(path, os.O_RDWR | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC))


def open_listed(path: Path, advice: str = "") -> int:
    """Open a file to read it; raises StorageError, and FileNotFoundError if it is gone.

    `advice` is for a process with too many open files.
    """
    try:
        return open_to_read(path)
    except FileNotFoundError:
        raise
    except OSError as fault:
        pass_on(fault)
        more = f"; {MORE_FILES}{advice}" if fault.errno == errno.EMFILE else ""
        raise StorageError(f"{path}: cannot be opened: {fault.strerror}{more}") from fault


class closing:
    """Close an open file at the end of the block; a class, because a commit does it often."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def open_stream(path: Path) -> BinaryIO:
    """Open a file to read it from its beginning, as a user's file that may be a pipe needs it.

    Raises OSError.
    """
    return open(path, "rb", opener=_open_users)


def _open(path: str | Path, flags: int) -> int:
    """Open a file of a log; raise the limit of open files first if there are too many.

    The limit is the whole process's. But a reader needs its files at once, and cannot close any.
    """
    return _within_limit(_opened, path, flags)


def _opened(path: str | Path, flags: int) -> int:
    """Open a regular file; raises OSError, of NOT_OF_A_LOG for anything else."""
    try:
        fd = file_system.current.open(path, flags | _CAREFULLY, _MODE)
    except OSError as fault:
        if fault.errno in NOT_OF_A_LOG:
            _check_regular(os.lstat(path).st_mode, path)
        raise
    try:
        _check_regular(os.fstat(fd).st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def size_of(path: str | Path, *, as_a_whole: bool = False) -> int:
    """Return the size of a closed file of a log; raises OSError, of NOT_OF_A_LOG as `open_to_read`.

    A link is not followed, so nobody takes another file's size for the log's. A file that is read
    `as_a_whole` may have WHOLE_SIZE_MAX bytes.
    """
    known = os.lstat(path)
    _check_regular(known.st_mode, path)
    if as_a_whole and known.st_size > WHOLE_SIZE_MAX:
        raise _too_large(known.st_size, path)
    return known.st_size


def _check_regular(mode: int, path: str | Path) -> None:
    if stat.S_ISREG(mode):
        return
    number, kind = _KINDS.get(stat.S_IFMT(mode), (errno.ENXIO, "a device"))
    raise NotOfALogError(number, "a regular file", kind, str(path))


_KINDS: Final = {
    stat.S_IFLNK: (errno.ELOOP, "a symbolic link, which is not followed"),
    stat.S_IFDIR: (errno.EISDIR, "a directory"),
    stat.S_IFIFO: (errno.ENXIO, "a pipe"),
    stat.S_IFSOCK: (errno.ENXIO, "a socket"),
}


def _open_users(path: str | Path, flags: int) -> int:
    return _within_limit(file_system.current.open, path, flags | os.O_CLOEXEC, _MODE)


def _within_limit(call: Callable[..., _T], *arguments: Any) -> _T:
    """Open something; raise the limit of open files first if there are too many."""
    try:
        return call(*arguments)
    except OSError as fault:
        if fault.errno != errno.EMFILE or not raise_descriptor_limit():
            raise
    return call(*arguments)


def descriptor_limit() -> float:
    """Return how many files this process may have open as it is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> bool:
    """Raise the soft limit of open files to the hard one; tells whether there are more now.

    It is the whole process's, and its child processes inherit it. This is the last resort, for a
    caller that needs files at once and can close none of ours.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # a system whose hard limit is unlimited only in name
        return False
    return True


def scan(directory: str | Path) -> contextlib.AbstractContextManager[Iterator[os.DirEntry[str]]]:
    """Open a directory, to go through its entries; raises OSError.

    Raise the limit of open files if there are too many, as for a file.
    """
    return _within_limit(file_system.current.scandir, directory)


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory, or a link to one; a link that leads nowhere is not.

    A link like that, or one that may not be followed, costs its own entry alone.
    """
    found = False
    with ignoring():
        found = entry.is_dir()
    return found


def list_names(directory: str | Path) -> list[str]:
    """Return the names in a directory, in no order; raises OSError."""
    return file_system.current.listdir(directory)


def read_at(fd: int, size: int, position: int) -> bytes:
    """Read `size` bytes at `position`; fewer only at the end of the file."""
    try:
        data = file_system.current.pread(fd, size, position)
        while 0 < len(data) < size:
            part = file_system.current.pread(fd, size - len(data), position + len(data))
            if not part:
                break
            data += part
    except OSError as fault:
        _name(fault, fd)
        raise
    return data


def read_into(fd: int, target: memoryview, position: int) -> int:
    """Fill `target` with the bytes at `position`; return how many, fewer only at the file's end."""
    filled = 0
    with _named(fd):
        while filled < len(target):
            count = file_system.current.preadv(fd, target[filled:], position + filled)
            if not count:
                break
            filled += count
    return filled


def read_users_file(path: Path) -> bytes:
    """Return the content of a file that the user names, which may be a link; raises OSError."""
    with open_stream(path) as stream:
        return stream.read()


def whole_size(fd: int) -> int:
    """Return the size of an open file that is read at once; raises OSError above WHOLE_SIZE_MAX.

    A sparse file takes no room on a rescued disk, and its zeros would take all the memory.
    """
    size = os.fstat(fd).st_size
    if size > WHOLE_SIZE_MAX:
        raise _too_large(size, file_system.path_of(fd))
    return size


def _too_large(size: int, path: str | Path) -> NotOfALogError:
    expected = f"at most {WHOLE_SIZE_MAX} bytes"
    return NotOfALogError(errno.EFBIG, expected, f"{size} bytes", str(path))


def data_from(fd: int, position: int) -> int:
    """Return where the first byte at or after `position` is that lies in no hole, or the size.

    `position` where the system does not tell; raises OSError.
    """
    with _named(fd):
        return file_system.current.data_from(fd, position)


def read_file(path: str | Path) -> bytes:
    """Return the content of a file, up to its end as it is then; raises OSError.

    It is of EFBIG for a file above WHOLE_SIZE_MAX.
    """
    with closing(open_to_read(path)) as fd:
        size = whole_size(fd) + 1
        data = read_at(fd, size, 0)
        while len(data) == size:  # the file has grown since
            size += _PIECE_SIZE
            data += read_at(fd, size - len(data), len(data))
        return data


def write_at(fd: int, data: Buffer, position: int) -> None:
    """Write all of `data` at `position`, in as many calls as the system needs."""
    with _named(fd):
        count = file_system.current.pwrite(fd, data, position) if data else 0
        while count < len(data):
            with memoryview(data) as view:
                count += file_system.current.pwrite(fd, view[count:], position + count)


def truncate(fd: int, size: int) -> None:
    """Truncate an open file to `size` bytes, or extend it with zeros."""
    with _named(fd):
        file_system.current.ftruncate(fd, size)


def preallocate(fd: int, size: int) -> None:
    """Give an open file at least `size` bytes of disk, zeros beyond its end; raises OSError."""
    with _named(fd):
        file_system.current.posix_fallocate(fd, 0, size)


def free_space(directory: Path) -> int:
    """Return how many bytes may still be written to the file system of a directory."""
    found = file_system.current.statvfs(directory)
    return found.f_bavail * found.f_frsize


def sync_file(fd: int) -> None:
    """Make the content and the size of an open file durable."""
    with _named(fd):
        file_system.current.fsync(fd)


def sync_data(fd: int) -> None:
    """Make the content of an open file durable; for files that do not grow."""
    with _named(fd):
        file_system.current.fdatasync(fd)


def sync_path(path: Path) -> None:
    """Make the content of a closed file durable."""
    with closing(open_to_read(path)) as fd:
        sync_file(fd)


def sync_directory(path: Path) -> None:
    """Make durable which names a directory has."""
    with closing(open_directory(path)) as fd, _named(fd):
        file_system.current.fsync(fd)


def open_directory(path: Path) -> int:
    """Open a directory, to sync or lock it; raises OSError."""
    return _open_users(path, os.O_RDONLY | os.O_DIRECTORY)


def all_at_once(syncs: Sequence[Callable[[], None]], *, at_least: int | None = None) -> None:
    """Do many syncs side by side: a disk does several for the price of one.

    All of them have ended when this returns, or raises the error of the first that failed. Each
    sync is done once: after a failed sync the next one would succeed and prove nothing. Long ones
    pay for their threads even if they are fewer than usual, `at_least`.
    """
    if len(syncs) < (at_least or _SIDE_BY_SIDE_MIN):
        for sync in syncs:
            sync()
        return
    waiting = deque(enumerate(syncs))
    faults: dict[int, BaseException] = {}

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                number, sync = waiting.popleft()
                try:
                    sync()
                except BaseException as fault:
                    faults[number] = fault

    helpers: list[Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # no more threads: fewer at once, then
            for _ in range(min(len(syncs), _SIDE_BY_SIDE_MAX) - 1):
                helpers.append(_helpers().submit(work))
        work()
    finally:
        waiting.clear()
        for helper in helpers:
            if not helper.cancel():  # it works, or has ended
                helper.exception()
    if faults:
        raise faults[min(faults)]


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """Return the threads that help to sync; they are kept, because making them costs a commit more.

    A commit of 12 partitions took almost twice the processor time with threads of its own.
    """
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(2 * _SIDE_BY_SIDE_MAX, thread_name_prefix="kafkalog-sync")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # a child has none of these threads


def rename(source: Path, target: Path) -> None:
    """Rename a file, over any file of the target's name; durable after `sync_directory`."""
    file_system.current.replace(source, target)


def link(source: Path, target: Path) -> bool:
    """Give a file a second name; False if something has that name. Raises OSError."""
    try:
        file_system.current.link(source, target)
    except FileExistsError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        file_system.current.unlink(path)


def remove_directory(path: Path) -> None:
    """Remove a directory and the files in it; of a symbolic link only the link."""
    if path.is_symlink():
        remove(path)
        return
    for name in sorted(list_names(path)):
        remove(path / name)
    file_system.current.rmdir(path)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory for temporary files, and remove it with them; raises OSError."""
    path = Path(file_system.current.mkdtemp())
    try:
        yield path
    finally:
        file_system.current.rmtree(path)


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Yield the content of a file, while little of it is resident; it outlives the file's name.

    The bytes are the system's copy of the file. While they are read by other threads or in C, one
    gives back what was read, every few milliseconds; a byte that is read again comes again. Raises
    OSError.
    """
    with closing(open_to_read(path)) as fd:
        size = os.fstat(fd).st_size
        content = file_system.current.mmap(fd, size) if size else None
    if content is None:
        yield memoryview(b"")
        return
    is_over = threading.Event()

    def give_back() -> None:
        while not is_over.wait(_RESIDENT_S):
            file_system.current.give_back(content)

    thread = threading.Thread(target=give_back, name="kafkalog-mapped", daemon=True)
    thread.start()
    try:
        yield memoryview(content)
    finally:
        is_over.set()
        thread.join()
        file_system.current.give_back(content)


def make_directory(path: Path) -> None:
    """Create a directory; its parents must exist."""
    file_system.current.mkdir(path)


def make_directories(path: Path) -> None:
    """Create a directory and those above it, where they are not there yet; raises OSError."""
    for directory in (*reversed(path.parents), path):
        if directory.is_dir():
            continue
        try:
            file_system.current.mkdir(directory)
        except OSError:  # another process may have made it
            if not directory.is_dir():
                raise


def create(path: Path, data: Buffer = b"") -> None:
    """Write a new file, content synced; its name is durable after `sync_directory`."""
    with closing(open_empty(path)) as fd:
        if data:
            write_at(fd, data, 0)
            sync_file(fd)


def write_zeros(fd: int, position: int) -> None:
    """Write zeros from a position to an open file's end, except into holes."""
    size = os.fstat(fd).st_size
    while (position := data_from(fd, position)) < size:
        count = min(_PIECE_SIZE, size - position)
        write_at(fd, bytes(count), position)
        position += count


def write_pieces(fd: int, pieces: Iterable[Buffer]) -> None:
    """Write pieces one after the other, from the beginning of an open file; no sync."""
    position = 0
    for piece in pieces:
        write_at(fd, piece, position)
        position += len(piece)


def write_atomically(path: Path, data: Buffer, *, temporary_name: str = "") -> None:
    """Put a whole file in place: temporary file, sync, rename, sync of the directory."""
    temporary = path.with_name(temporary_name or path.name + layout.TEMPORARY)
    create(temporary, data)
    rename(temporary, path)
    sync_directory(path.parent)


def set_times(path: Path, mtime_ns: int) -> None:
    """Set a file's times of access and modification."""
    file_system.current.utime(path, (mtime_ns, mtime_ns))


def checksum(fd: int, size: int, crc: Callable[[bytes, int], int]) -> int:
    """Return the checksum of the first `size` bytes of a file, read in pieces."""
    value = position = 0
    while position < size and (piece := read_at(fd, min(_PIECE_SIZE, size - position), position)):
        value = crc(piece, value)
        position += len(piece)
    return value
