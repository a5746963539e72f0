"""A disk that notes each write and each flush, and file systems mounted on it; Linux, as root.

The kernel writes to a loop device, whose file is served by a process of ours through FUSE: a file
system of that one file. So each write that reaches the device, and each flush of its cache, comes
to us one after the other, and is noted (`oracle.Notes`) before the kernel hears that it is done.

From these notes the content of the disk can be made for every moment, and not only one: what was
written since the last flush may still be in the disk's own cache, which loses it, or some of it, in
any order, when the power goes (`image_at`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.torture.oracle import FLUSHED, WRITTEN, Note, Notes
from tests.torture.roles import Process

SIZE: Final = 32 << 20
SECTOR: Final = 512
"""What a disk writes whole or not at all."""
FATES: Final = ("none", "all", "prefix", "some", "torn")
"""What becomes of writes that were not flushed."""
_BLOCK: Final = 4096
_CHUNK: Final = 64 << 10
_NOTHING: Final = bytes(_CHUNK)

_libc = ctypes.CDLL(None, use_errno=True)
_outside: int | None = None
"""The mounts that this process had before it kept its own to itself."""
_CAP_SYS_ADMIN: Final = 21
_CLONE_NEWNS, _MS_PRIVATE_ALL, _MS_NOATIME = 0x20000, 0x44000, 0x400
_LOOP_GET_FREE, _LOOP_CONFIGURE, _LOOP_AUTOCLEAR = 0x4C82, 0x4C0A, 4
_LOOP_CONFIG: Final = struct.Struct("=II52xI240x")  # fd, block size, flags of loop_info64
_IN: Final = struct.Struct("<IIQQIIIHH")
_OUT: Final = struct.Struct("<IiQ")
_SPAN: Final = struct.Struct("<QQI")  # file handle, position, size
_GETATTR, _STATFS, _OPEN, _READ, _WRITE, _RELEASE, _FSYNC, _FLUSH, _INIT = (
    3,
    17,
    14,
    15,
    16,
    18,
    20,
    25,
    26,
)
_UNANSWERED: Final = (2, 36, 42)  # forget, interrupt, batch forget
_UNMOUNTED: Final = (errno.ENODEV, errno.ECONNABORTED)  # the other one with a request half read
_WRITE_MAX: Final = 128 << 10
_PATIENCE_S: Final = 10.0


# --- mounting ------------------------------------------------------------------------------------


def refusal() -> str | None:
    """Say why there can be no such disk here; None where there can."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if not int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1:
        return "needs root, and the right to mount"
    for name in ("/dev/fuse", "/dev/loop-control"):
        if not os.access(name, os.R_OK | os.W_OK):
            return f"needs {name}"
    if shutil.which("mkfs.ext4") is None:
        return "needs mkfs.ext4"
    return None


def mount(source: str, target: Path, kind: str, options: str) -> None:
    """Mount, without times of access; raises OSError."""
    if _libc.mount(source.encode(), bytes(target), kind.encode(), _MS_NOATIME, options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def unmount(target: Path) -> None:
    """Unmount; raises OSError where a file is open."""
    if _libc.umount2(bytes(target), 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def keep_mounts_private() -> None:
    """Mount for this process and its children alone: nothing stays mounted when they end."""
    global _outside
    _outside = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(b"none", b"/", b"", _MS_PRIVATE_ALL, b""):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextmanager
def mounted(image: Path, target: Path, options: str) -> Iterator[None]:
    """Mount the ext4 file system of an image by a loop device, which goes with the mount."""
    device, fd = _attach(image)
    try:
        mount(device, target, "ext4", options)
    finally:
        os.close(fd)
    try:
        yield
    finally:
        unmount(target)


def _attach(image: Path) -> tuple[str, int]:
    control, file = os.open("/dev/loop-control", os.O_RDWR), os.open(image, os.O_RDWR)
    try:
        while True:
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(file, 0, _LOOP_AUTOCLEAR))
                return device, fd
            except OSError as fault:
                os.close(fd)
                if fault.errno != errno.EBUSY:  # somebody else took it
                    raise
    finally:
        os.close(control)
        os.close(file)


def make_file_system(path: Path) -> bytes:
    """Return the image of an empty ext4."""
    path.unlink(missing_ok=True)
    command = ["mkfs.ext4", "-q", "-F", "-b", str(_BLOCK), "-N", "2048", "-J", "size=4"]
    command += ["-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0"]
    command += ["-O", "^resize_inode", str(path), f"{SIZE >> 10}k"]
    subprocess.run(command, check=True, capture_output=True)
    return path.read_bytes()


# --- the disk ------------------------------------------------------------------------------------


@contextmanager
def recorded_disk(image: bytes, path: Path, notes: Notes) -> Iterator[None]:
    """Let `path` be a disk with that content, whose writes and flushes are noted."""
    path.touch()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=100600,user_id=0,group_id=0,max_read={_WRITE_MAX}"
    mount("kafkalog-torture", path, "fuse", options)
    try:
        server = Process(
            lambda: _serve(device, bytearray(image), notes), path.with_suffix(".fault")
        )
    finally:
        os.close(device)
    try:
        yield
    finally:
        _unmount_disk(path)  # which ends the server
        server.wait()


def _unmount_disk(path: Path) -> None:
    """Unmount it as soon as its loop device has gone.

    That stays for a moment where somebody else, looking for a free one, has just opened it.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return unmount(path)
        except OSError as fault:
            if fault.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _serve(device: int, image: bytearray, notes: Notes) -> None:
    # Were it the last one that dies of those that see the mounts, the kernel would write what is
    # left to the disk in its name, wait for its answer, and so for ever.
    if _outside is not None and _libc.setns(_outside, _CLONE_NEWNS):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    while True:
        try:
            request = memoryview(os.read(device, _WRITE_MAX + 4096))
        except OSError as fault:
            if fault.errno in _UNMOUNTED:
                os._exit(0)
            if fault.errno == errno.ENOENT:  # the request was taken back
                continue
            raise
        _, act, number, *_ = _IN.unpack_from(request)
        if act in _UNANSWERED:
            continue
        code, answer = 0, b""
        body = request[_IN.size :]
        if act == _WRITE:
            _, position, size = _SPAN.unpack_from(body)
            data = body[40 : 40 + size]
            notes.write(WRITTEN, position, data)
            image[position : position + size] = data
            answer = struct.pack("<II", size, 0)
        elif act == _FSYNC:
            notes.write(FLUSHED, 0)
        elif act == _READ:
            _, position, size = _SPAN.unpack_from(body)
            answer = bytes(image[position : position + size])
        elif act == _INIT:
            answer = struct.pack("<IIIIHHI", 7, 31, 0, 1 << 5, 16, 12, _WRITE_MAX).ljust(64, b"\0")
        elif act == _GETATTR:
            inode = struct.pack("<QQQ24x12xII20x", 1, SIZE, SIZE // SECTOR, 0o100600, 1)
            answer = struct.pack("<Q8x", 3600) + inode
        elif act == _OPEN:
            answer = struct.pack("<QII", 0, 1, 0)  # past the page cache, each write by itself
        elif act not in (_RELEASE, _FLUSH):
            code = -errno.ENOSYS
        with suppress(FileNotFoundError):  # who asked was killed, and waits no more
            os.write(device, _OUT.pack(_OUT.size + len(answer), code, number) + answer)


# --- power cuts ----------------------------------------------------------------------------------


class CutDisk:
    """What a recorded disk holds after a power cut, at one moment after the other."""

    def __init__(self, image: bytes) -> None:
        self._durable = bytearray(image)
        self._cached: list[tuple[int, bytes]] = []
        self._chunks = {p for p in range(0, SIZE, _CHUNK) if image[p : p + _CHUNK] != _NOTHING}

    def take(self, notes: Sequence[Note]) -> None:
        """Go on to a later moment."""
        for note in notes:
            if note.kind == WRITTEN:
                self._cached.append((note.number, note.data))
            elif note.kind == FLUSHED:
                for position, data in self._cached:
                    self._durable[position : position + len(data)] = data
                    self._note_chunks(position, data)
                self._cached.clear()

    @property
    def is_cached(self) -> bool:
        """Whether something was written and not flushed."""
        return bool(self._cached)

    def survivors(self, fate: str, draw: random.Random) -> list[tuple[int, bytes]]:
        """Draw what is left of the writes since the last flush."""
        if fate == "all":
            return list(self._cached)
        if fate == "prefix":
            return self._cached[: draw.randint(0, len(self._cached))]
        if fate == "some":
            return [write for write in self._cached if draw.random() < 0.5]
        if fate == "torn":
            return [part for part in self._parts() if draw.random() < 0.5]
        return []

    def _parts(self) -> Iterator[tuple[int, bytes]]:
        """Yield what is written whole: sectors, and ext4's superblock, half of which is none."""
        for position, data in self._cached:
            first = max(0, min(len(data), _BLOCK - position))
            if first:
                yield position, data[:first]
            for start in range(first, len(data), SECTOR):
                yield position + start, data[start : start + SECTOR]

    def write_image(self, path: Path, survivors: Sequence[tuple[int, bytes]]) -> bytes:
        """Write the disk's content, holes where it is empty; returns its digest."""
        found = hashlib.sha1(usedforsecurity=False)
        with path.open("wb+") as file, memoryview(self._durable) as durable:
            os.truncate(file.fileno(), SIZE)
            for position in sorted(self._chunks):
                os.pwrite(file.fileno(), durable[position : position + _CHUNK], position)
            for position, data in survivors:
                os.pwrite(file.fileno(), data, position)
                self._note_chunks(position, data)
            for position in sorted(self._chunks):
                if (data := os.pread(file.fileno(), _CHUNK, position)) != _NOTHING:
                    found.update(b"%d " % position)
                    found.update(data)
        return found.digest()

    def _note_chunks(self, position: int, data: bytes) -> None:
        first = position // _CHUNK * _CHUNK
        self._chunks.update(range(first, position + len(data), _CHUNK))


def write_back_some(root: Path, draw: random.Random) -> None:
    """Let the kernel write back what nobody has synced: of one file, or of all and their names."""
    if draw.random() < 0.3:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        _libc.syncfs(fd)
        os.close(fd)
        return
    paths = [path for path in root.rglob("*") if path.is_file()]
    for path in draw.sample(paths, min(3, len(paths))):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)
        os.close(fd)
