"""Waits until a file changes: by inotify where the system has it, else for a time."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path
from typing import Self

from kafkalog.storage_engine.fs import c_library

_EVENTS = 1 << 16


class ChangeSignal:
    """Wakes one waiting thread once a writer of a file closes it.

    A file system that another host writes to gives no events. Look again after each wait, which
    takes at most the seconds given. Linux: inotify(7).
    """

    def __init__(self, path: Path | None) -> None:
        """Without a file, `wait` waits for its time, or until the signal is closed."""
        self._closed = threading.Event()
        self._descriptor = -1 if path is None else c_library.watch_directory(path.parent)
        # In an event, zeros surround the name.
        self._name = b"" if path is None else b"\0%s\0" % os.fsencode(path.name)
        if self._descriptor >= 0:
            self._events = select.poll()
            self._events.register(self._descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for a change, at most so long; return False once the signal is closed."""
        if self._descriptor < 0:
            return not self._closed.wait(seconds)
        if self._closed.is_set():
            return False
        end = time.monotonic() + seconds
        while self._events.poll(max(0.0, end - time.monotonic()) * 1e3):
            if self._name in os.read(self._descriptor, _EVENTS):
                break
        return not self._closed.is_set()

    def close(self) -> None:
        """Let `wait` return False from now on, within its time; may be called by any thread."""
        self._closed.set()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed.is_set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
