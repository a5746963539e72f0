"""Work that goes on after a crash, and is looked at once where many crashes lead to the same log.

Opening a log and trying again what was broken off leaves the same files for most of the states in
which a disk may have been. What comes then follows from those files, so it is done once for each.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kafkalog.storage_engine import layout
from tests.torture.checks import (
    Snapshot,
    faults_of,
    forget,
    is_repeatable,
    snapshot,
    told,
    works,
)
from tests.torture.workloads import OPERATIONS, Moment, Opened

__all__ = ["GoingOn"]

_LOCKS = (
    layout.CLEANER_LOCK,
    layout.COMMIT_LOCK,
    layout.ROOT_LOCK,
    layout.SEGMENTS_LOCK,
    layout.SEGMENTS_TURNSTILE,
)


class GoingOn:
    """Opens logs, and does what has to work with every log (`works`), once with each."""

    def __init__(self) -> None:
        self.count = 0
        """How many different logs were worked on."""
        self._known: set[bytes] = set()

    def faults(
        self,
        root: Path,
        found: Snapshot,
        moment: Moment,
        *,
        retry: str | None = None,
        before: Snapshot | None = None,
        after: Snapshot | None = None,
    ) -> list[str]:
        """Open a log that shows `found`, try again, and work on; return what is wrong."""
        forget()
        try:
            log = Opened(root, moment)
            faults = faults_of(snapshot(log.engine), found, None, "none")
            if faults:
                return faults
            expected = found
            if retry is not None:
                if is_repeatable(retry) or found == before:
                    log.perform_again(retry)
                if after is not None and OPERATIONS[retry].kind != "none":
                    expected = after
            known = _digest(root) + hashlib.blake2b(repr(expected).encode()).digest()
            if known in self._known:
                return []
            shown = snapshot(log.engine)
            faults = faults_of(shown, expected, None, "none")
            if faults:
                return [f"after the retry: {fault}" for fault in faults]
            faults = works(log, shown)
            if not faults:
                self._known.add(known)
                self.count += 1
            return faults
        except Exception as fault:
            return [told(fault)]


def _digest(root: Path) -> bytes:
    """Tell directories apart by all that is in them but locks, which are made where they miss."""
    found = hashlib.blake2b()
    waiting = [str(root)]
    while waiting:
        directory = waiting.pop()
        with os.scandir(directory) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
        for entry in inside:
            if entry.name in _LOCKS:
                continue
            found.update(entry.path[len(str(root)) :].encode() + b"\0")
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
                continue
            fd = os.open(entry.path, os.O_RDONLY)
            data = os.read(fd, os.fstat(fd).st_size)
            os.close(fd)
            found.update(len(data).to_bytes(8, "big"))
            found.update(data)
    return found.digest()
