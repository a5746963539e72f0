"""The host, its boot, and the memory that it gives this process.

The journal asks for the first two: what may a power cut have taken?
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kafkalog.storage_engine.fs import c_library


@functools.cache
def boot_id() -> str:
    """Name this boot of this host: unsynced bytes survive exactly as long as it lasts."""
    return _text(Path("/proc/sys/kernel/random/boot_id")).strip() or c_library.boot_session()


@functools.cache
def host_id() -> str:
    """Name this host."""
    return _text(Path("/etc/machine-id")).strip() or c_library.host_uuid() or os.uname().nodename


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups of this process may use; None without a limit.

    `root` is the directory with `proc` and `sys`.
    """
    limit = min(_group_limits(root), default=None)
    if limit is None or limit >= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return None
    return limit


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the groups of version 2 and 1, and of those above them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        place = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        path = PurePosixPath(group)
        for above in (path, *path.parents):
            limit = _text(place / above.relative_to("/") / name).strip()
            if limit.isdigit():  # else "max"
                yield int(limit)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
