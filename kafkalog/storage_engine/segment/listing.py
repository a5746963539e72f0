"""List the live segments of a partition for a snapshot, and again when they may have changed.

A snapshot of many segments opens several windows, each from a listing under the lock. A listing
looks at every file, so it is reused until the directory's change time shows that a name has
changed. Two changes within one tick of the file system's clock have the same time. A listing
therefore counts only if the directory had rested before it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from kafkalog.errors import StorageError
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.segments import SegmentFiles, file_names, list_segments

REST_S: Final = 2.0
"""The longest tick of a file system (FAT's)."""
_LISTINGS: Final = 100
"""Attempts to list a directory while a broker changes it."""


class _Closable(Protocol):
    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Closable)


class Listing:
    """List one partition's directory. Thread-safe."""

    def __init__(self, directory: Path, *, locked: bool) -> None:
        """A broker's directory is not `locked`, and is listed each time."""
        self._directory = directory
        self._locked = locked
        self._guard = threading.Lock()
        self._changed_ns = -1
        self._seen_at = 0.0
        self._rested: list[SegmentFiles] | None = None
        """The listing after the directory had rested."""

    def open_listed(
        self,
        load_state: Callable[[], PartitionState],
        opened: Callable[[PartitionState, list[SegmentFiles]], _Opened],
    ) -> _Opened:
        """Call `opened` with a state and a listing that belong together.

        Our own processes wait for the lock. A broker does not know it, so the listing counts only
        if a second one agrees, and is repeated if a file vanishes in between.
        """
        directory = self._directory
        if not directory.is_dir():
            raise StorageError(f"{directory}: the directory of the partition is missing")
        for _ in range(_LISTINGS):
            lock = locks.SegmentsLock(directory).shared()
            with (
                files.reading_faults(directory),
                lock if self._locked else contextlib.nullcontext(),
            ):
                rested, changed_ns = self._look()
                try:
                    if rested is not None:
                        return opened(load_state(), rested)
                    names = file_names(directory)
                    state = load_state()
                    listed = list_segments(directory)
                    result = opened(state, listed)
                except FileNotFoundError:
                    self._keep(None, changed_ns)
                    continue
                if file_names(directory) == names:
                    self._keep(listed, changed_ns)
                    return result
                result.close()
        raise StorageError(
            f"{directory}: its segments changed during each of {_LISTINGS} listings; try again"
        )

    def _look(self) -> tuple[list[SegmentFiles] | None, int]:
        """Return the valid listing, or None, and the directory's change time.

        The time is negative if a new listing may not be kept.
        """
        now = time.monotonic()
        changed_ns = self._directory.stat().st_ctime_ns
        with self._guard:
            if changed_ns != self._changed_ns:
                self._changed_ns, self._seen_at, self._rested = changed_ns, now, None
            has_rested = self._locked and now - self._seen_at >= REST_S
            return self._rested, changed_ns if has_rested else -1

    def _keep(self, listed: list[SegmentFiles] | None, changed_ns: int) -> None:
        with self._guard:
            if changed_ns == self._changed_ns:
                self._rested = listed
