"""Where compiled kernels are kept, and how a process gets them: without numba if it can.

numba writes beside the source file, else into the user's cache directory, and fails at import when
neither can be written (a read-only installation run without a home). `prepare` finds that out
first, and names a temporary directory that only this user can write: a cache holds code. Images of
the machine code (`machine_code`) lie in the same places; one beside the sources is also found where
nothing can be written.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

__all__ = ["STORAGE_ENGINE", "load", "prepare"]

VARIABLE: Final = "NUMBA_CACHE_DIR"
STORAGE_ENGINE: Final = "kafkalog.storage_engine.kernels"
_HARMLESS: Final = {VARIABLE, "NUMBA_NUM_THREADS"}
"""Of numba's settings those that change nothing of what it compiles."""


@cache
def prepare() -> None:
    """Make sure that numba can cache; call it before a `kernels` module is imported."""
    if os.environ.get(VARIABLE):
        return
    if any(_is_writable(directory) for directory in _places(__file__)):
        return
    directory = str(_private_directory())
    os.environ[VARIABLE] = directory  # for this process's children too
    if "numba" in sys.modules:  # it has read its environment already
        sys.modules["numba"].config.CACHE_DIR = directory


@cache
def load(module: str = STORAGE_ENGINE) -> Any:
    """Return a `kernels` module, or its image, at the first call: 0.7 s, or a twentieth of it."""
    if module in sys.modules:  # so the tests have what they look at themselves
        return importlib.import_module(module)  # whole: another thread may still be importing it
    is_plain = not any(name.startswith("NUMBA_") for name in os.environ.keys() - _HARMLESS)
    if not is_plain:
        prepare()
        return importlib.import_module(module)
    from kafkalog.storage_engine import machine_code

    source = str(Path(__file__).parents[2].joinpath(*module.split(".")))
    image = machine_code.find_image(module, _places(source))
    if image is None:
        prepare()  # maybe another directory
        image = machine_code.find_image(module, [*_places(source), _beside(source)])
    if image is not None:
        return image
    fingerprint = None
    with suppress(OSError):
        fingerprint = machine_code.fingerprint_of(module)
    found = importlib.import_module(module)
    for directory in _places(source):
        if fingerprint is not None and _is_writable(directory):
            machine_code.save_image(module, directory, fingerprint)
            break
    return found


def _places(source: str) -> list[Path]:
    """Return where numba keeps what is compiled of a source file, the first that can be written."""
    if chosen := os.environ.get(VARIABLE):
        return [Path(chosen)]
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return [_beside(source), user_cache / "numba"]


def _beside(source: str) -> Path:
    return Path(source).parent / "__pycache__"


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
