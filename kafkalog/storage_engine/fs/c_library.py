"""Functions of the C library that Python does not have; where one is missing, nothing happens.

macOS names its boot and its hardware: elsewhere both names are empty. glibc gives memory back.
Linux tells of changes in a directory.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, Final

_TEXT_SIZE: Final = 37
"""The bytes of a UUID's text, with the zero at its end."""
_IN_CLOSE_WRITE: Final = 0x8
_IN_MOVED_TO: Final = 0x80


def boot_session() -> str:
    """Name this boot of this Mac, by `sysctl kern.bootsessionuuid`."""
    import ctypes

    ask = _function("sysctlbyname")
    text, size = ctypes.create_string_buffer(_TEXT_SIZE), ctypes.c_size_t(_TEXT_SIZE)
    if ask is None or ask(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0):
        return ""
    return text.value.decode("ascii")


def host_uuid() -> str:
    """Name this Mac, by `gethostuuid`; the name of its node changes with its network."""
    import ctypes

    ask = _function("gethostuuid")
    found, no_wait = ctypes.create_string_buffer(16), (ctypes.c_long * 2)()
    return "" if ask is None or ask(found, no_wait) else str(uuid.UUID(bytes=found.raw))


def give_back_memory() -> None:
    """Give the host back what this process has freed, by glibc's `malloc_trim`.

    The threads of a client of an object store leave some MiB each to nobody.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def watch_directory(directory: Path) -> int:
    """Return a descriptor to read from once a writer closes a file of the directory, or -1.

    A file that is moved there counts too. The events that are read have the file's name.

    Close it after use. inotify(7): a system without it, or a process with too many, gives -1.
    """
    begin, add = _function("inotify_init1"), _function("inotify_add_watch")
    descriptor: int = -1 if begin is None else begin(os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor < 0:
        return -1
    if add(descriptor, os.fsencode(directory), _IN_CLOSE_WRITE | _IN_MOVED_TO) < 0:
        os.close(descriptor)
        return -1
    return descriptor


def _function(name: str) -> Any:
    """Return a function of the C library, or None for an unknown name."""
    import ctypes

    return getattr(ctypes.CDLL(None), name, None)
