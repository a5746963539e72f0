"""Linux without its own names: how kafkalog works on a system that has none of them.

`become` removes from `os` and `fcntl` what macOS lacks, and gives `sys.platform` its name. It comes
before the first import of kafkalog's file system. The kernel stays Linux, so `fcntl` translates
macOS's `struct flock` for it. What differs in the kernel itself is not shown here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import sys

import pytest

VARIABLE = "KAFKALOG_PLATFORM"
"""The variable that names the platform of a test run."""

needs_linux = pytest.mark.skipif(
    VARIABLE in os.environ,
    reason="needs one kernel's view of flock and fcntl locks: Linux's own, or that of a Mac",
)

_OS = (
    *("copy_file_range", "eventfd", "eventfd_read", "eventfd_write", "fdatasync", "getrandom"),
    *("getresgid", "getresuid", "getxattr", "listxattr", "memfd_create", "pidfd_open", "pipe2"),
    *("posix_fadvise", "posix_fallocate", "removexattr", "sched_getaffinity", "sched_getparam"),
    *("sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity", "sched_setparam"),
    *("sched_setscheduler", "setns", "setresgid", "setresuid", "setxattr", "splice", "unshare"),
    *("waitid", "O_DIRECT", "O_LARGEFILE", "O_NOATIME", "O_PATH", "O_RSYNC", "O_TMPFILE"),
)
_FCNTL = ("F_OFD_", "F_SEAL_", "F_ADD_", "F_GET_", "F_GETPIPE", "F_SETPIPE", "F_NOTIFY", "DN_")
_FCNTL_MORE = ("F_GETLEASE", "F_SETLEASE", "F_GETSIG", "F_SETSIG", "F_GETLK64", "F_SETLK64")
_BSD = struct.Struct("qqihh")
"""l_start, l_len, l_pid, l_type, l_whence (XNU: bsd/sys/fcntl.h)."""
_LINUX = struct.Struct("hhqqi4x")


def become(platform: str) -> None:
    """Make this process one of another platform, for kafkalog and for its tests."""
    _import_what_asks_for_the_platform()
    early = [name for name in sys.modules if name.startswith("kafkalog.storage_engine")]
    assert not early, f"imported before the platform is another one: {early}"
    for name in _OS:
        if hasattr(os, name):
            delattr(os, name)
    for name in dir(fcntl):
        if name.startswith(_FCNTL) or name in _FCNTL_MORE:
            delattr(fcntl, name)
    shutil._copyxattr = lambda *_, **__: None  # as where `os` has no attributes of files
    fcntl.fcntl = _translated(fcntl.fcntl)
    sys.platform = platform


def _import_what_asks_for_the_platform() -> None:
    """Import what is not under test, and would look for parts of the other system."""
    import asyncio
    import ctypes.util
    import multiprocessing.synchronize
    import subprocess
    import tempfile
    import urllib.request
    import uuid

    import hypothesis
    import numpy
    import psutil
    import pyarrow.compute

    assert all((asyncio, ctypes.util, multiprocessing.synchronize, subprocess, tempfile))
    assert all((urllib.request, uuid, hypothesis, numpy, psutil, pyarrow.compute))


def _translated(call):
    """Return `fcntl.fcntl` that takes, and answers, macOS's `struct flock`."""

    def fcntl_call(fd, command, argument=0):
        if command not in {fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW}:
            return call(fd, command, argument)
        start, length, process, kind, whence = _BSD.unpack(argument)
        answer = call(fd, command, _LINUX.pack(kind, whence, start, length, process))
        kind, whence, start, length, process = _LINUX.unpack(answer)
        return _BSD.pack(start, length, process, kind, whence)

    return fcntl_call
