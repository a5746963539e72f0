"""Real mounts, in a mount namespace of their own: a disk that is small, full, or read-only.

A process that does nothing else keeps the namespace; the tests reach into it by `/proc/PID/root`.
It needs root on Linux. Where that is not allowed the tests are skipped, with the reason; and with
the process, or the one that started it, the mount is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

__all__ = ["BLOCK", "Disk", "disk"]

BLOCK: Final = 4096
"""What a tmpfs gives to files at once."""
_MOUNT = 'mount -t tmpfs -o "$1" none "$2" && echo mounted && exec cat'


class Disk:
    """A mounted tmpfs; `path` is where this process sees it."""

    def __init__(self, keeper: int | str, mount_point: Path) -> None:
        self.path = Path(f"/proc/{keeper}/root{mount_point}")
        self.mount_point = mount_point
        self._enter = ["nsenter", "--target", str(keeper), "--mount", f"--wd={Path.cwd()}"]
        self._ballast = self.path / "ballast"

    def remount(self, options: str) -> None:
        """Change the mount: `ro` or `rw`."""
        command = ["mount", "-o", f"remount,bind,{options}", str(self.mount_point)]
        subprocess.run([*self._enter, *command], check=True)

    def run(self, program: str, *arguments: str) -> str:
        """Run a Python program where the disk is mounted at `mount_point`; return its output.

        For a library that follows links by itself, and so would not find `path`.
        """
        command = [*self._enter, sys.executable, "-c", program, str(self.mount_point), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def free_blocks(self) -> int:
        """Return how many blocks may still be written."""
        return os.statvfs(self.path).f_bfree

    def leave(self, blocks: int) -> None:
        """Fill the disk up, until that many blocks are free."""
        with self._ballast.open("ab") as ballast:
            size = os.fstat(ballast.fileno()).st_size
            os.posix_fallocate(ballast.fileno(), 0, size + (self.free_blocks() - blocks) * BLOCK)
        assert self.free_blocks() == blocks

    def relieve(self) -> None:
        """Remove what filled it."""
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def disk(mount_point: Path, options: str) -> Iterator[Disk]:
    """Mount a tmpfs; skips the test where that cannot be done."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root on Linux, to mount a file system")
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("needs unshare and nsenter, of util-linux")
    mount_point.mkdir()
    keeper = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", options, str(mount_point)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    try:
        if keeper.stdout.readline() != "mounted\n":
            pytest.skip(f"may not mount: {keeper.communicate()[1].strip()}")
        yield Disk(keeper.pid, mount_point)
    finally:
        keeper.communicate()
