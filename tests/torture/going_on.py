"""Work that goes on after a crash, and is looked at once where many crashes lead to the same log.

Opening a log and trying again what was broken off leaves the same files for most of the states in
which a disk may have been. What comes then follows from those files, so it is done once for each.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from tests.torture.checks import (
    Snapshot,
    faults_of,
    forget,
    is_repeatable,
    later,
    told,
    works,
)
from tests.torture.shown import Shown, Tree, tree
from tests.torture.workloads import OPERATIONS, Moment, Opened

__all__ = ["LATER_MS", "GoingOn"]

LATER_MS: Final = 1_700
"""Who tries again has another time than who was broken off."""


class GoingOn:
    """Opens logs, and does what has to work with every log (`works`), once with each."""

    def __init__(self) -> None:
        self.count = 0
        """How many different logs were worked on."""
        self.shown = Shown()
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
            faults = faults_of(self.shown.snapshot(log.engine), found, None, "none")
            if faults:
                return faults
            expected = found
            if retry is not None:
                expected = self._tried_again(log, retry, found, before, after)
            directories = tree(root)
            known = _digest(directories, expected)
            if known in self._known:
                return []
            shown = self.shown.snapshot(log.engine, directories)
            faults = faults_of(shown, expected, None, "none")
            if faults:
                return [f"after the retry: {fault}" for fault in faults]
            faults = works(log, shown, self.shown.snapshot)
            if not faults:
                self._known.add(known)
                self.count += 1
            return faults
        except Exception as fault:
            return [told(fault)]

    def _tried_again(
        self,
        log: Opened,
        retry: str,
        found: Snapshot,
        before: Snapshot | None,
        after: Snapshot | None,
    ) -> Snapshot:
        """Do an operation again that was broken off; return what the log is to show then."""
        if not is_repeatable(retry) and found != before:
            return found if after is None else after
        log.perform_again(retry, later_ms=LATER_MS)
        kind = OPERATIONS[retry].kind
        if after is None or kind == "none":
            return found
        if kind == "copied":  # with the times of its source
            return after
        return after if found == after else later(after, found, LATER_MS)


def _digest(directories: Tree, expected: Snapshot) -> bytes:
    """Tell logs apart by all that is in them but locks, which are made where they miss."""
    found = hashlib.blake2b(repr(expected).encode(), digest_size=16)
    for path, (digest, _) in sorted(directories.items()):
        found.update(path.encode() + b"\0" + digest)
    return found.digest()
