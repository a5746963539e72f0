"""Syncs of a file that is still being written, in threads: the disk works while more is encoded.

The sync that a commit waits for then finds most of the file on the disk. It is still done: an early
sync makes nothing durable that anybody relies on.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from typing import Final

from kafkalog.storage_engine.fs import files

_SIZE: Final = 4 << 20
"""Bytes that are worth a thread."""
_room = threading.BoundedSemaphore(16)
"""Threads at once; more are no faster."""


class EarlySync:
    """The early syncs of one open file; call `wait` before another sync and before `close`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unsynced = 0
        self._thread: threading.Thread | None = None
        self._fault: OSError | None = None

    def note_written(self, size: int) -> None:
        """Begin a sync if enough was written since the last one, and none is under way."""
        self._unsynced += size
        if self._unsynced < _SIZE or (self._thread is not None and self._thread.is_alive()):
            return
        if not _room.acquire(blocking=False):
            return
        work = contextvars.copy_context().run
        thread = threading.Thread(target=work, args=(self._sync,), name="kafkalog-early-sync")
        try:
            thread.start()
        except RuntimeError:  # no more threads
            _room.release()
            return
        self._thread, self._unsynced = thread, 0

    def wait(self) -> None:
        """Wait until no sync is under way; raise the OSError of one that failed.

        After a failed sync the next one would succeed and prove nothing.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            raise self._fault

    def end(self) -> None:
        """Wait likewise, before the file is closed, and raise nothing."""
        with contextlib.suppress(OSError):
            self.wait()

    def _sync(self) -> None:
        try:
            files.sync_file(self._fd)
        except OSError as fault:
            self._fault = self._fault or fault
        finally:
            _room.release()
