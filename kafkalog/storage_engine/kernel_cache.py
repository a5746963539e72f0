"""Where numba keeps compiled kernels when the package's directory cannot be written.

numba writes beside the source file, else into the user's cache directory, and fails at import when
neither can be written (a read-only installation run without a home). `prepare` finds that out
first, and names a temporary directory that only this user can write: a cache holds code.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["load", "prepare"]

VARIABLE = "NUMBA_CACHE_DIR"


@cache
def prepare() -> None:
    """Make sure that numba can cache; call it before a `kernels` module is imported."""
    if os.environ.get(VARIABLE):
        return
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    if _is_writable(Path(__file__).parent / "__pycache__") or _is_writable(user_cache / "numba"):
        return
    directory = str(_private_directory())
    os.environ[VARIABLE] = directory  # for this process's children too
    if "numba" in sys.modules:  # it has read its environment already
        sys.modules["numba"].config.CACHE_DIR = directory


def load() -> Any:
    """Return the storage engine's `kernels` module, imported at the first call (0.7 s)."""
    prepare()
    from kafkalog.storage_engine import kernels

    return kernels


def _is_writable(directory: Path) -> bool:
    for place in (directory, *directory.parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


def _private_directory() -> Path:
    directory = Path(tempfile.gettempdir()) / f"kafkalog-kernels-{os.getuid()}"
    with suppress(FileExistsError):  # by us, or by somebody else: look at it
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    is_private = found.st_uid == os.getuid() and found.st_mode & 0o077 == 0
    if is_private and stat.S_ISDIR(found.st_mode):
        return directory
    return Path(tempfile.mkdtemp(prefix="kafkalog-kernels-"))
