"""Whoever waits long for a lock logs a warning, which names the process that holds it.

Linux lists the holders in `/proc/locks`. Elsewhere the message names the program that finds them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_logger = logging.getLogger(__name__)
PATIENCE_S: Final = 10.0
"""How long a process waits for a lock before it says so; then each time twice as long."""
_LOCKS: Final = Path("/proc/locks")
_STOPPED: Final = frozenset("Tt")
_COMMAND_MAX: Final = 120
_LOOKS: Final = 10
"""How often the list is read: while others lock and unlock, a reading may miss a line."""


@contextlib.contextmanager
def reported(paths: Sequence[str], patience_s: float) -> Iterator[None]:
    """Log a warning while the block waits for the lock of the first file, again and again.

    The holder of that lock may itself wait for those of the other files, so their holders are named
    too.
    """
    begun = time.monotonic()
    is_over = threading.Event()

    def report() -> None:
        pause = patience_s
        while not is_over.wait(pause):
            waited = time.monotonic() - begun
            _logger.warning(
                "%s: waiting for this lock for %.0f s: %s", paths[0], waited, _held(paths)
            )
            pause *= 2

    thread = threading.Thread(target=report, name="kafkalog-lock-wait", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads: then it waits in silence
        thread.start()
    try:
        yield
    finally:
        is_over.set()


def _held(paths: Sequence[str]) -> str:
    for _ in range(_LOOKS):
        found = dict.fromkeys(pid for path in paths for pid in holders(path))
        if found:
            return " and ".join(map(_described, found))
    return f"another process holds it; `lsof {paths[0]}` names it"


def holders(path: str) -> list[int]:
    """Return the processes that hold a lock of a file, as far as the system names them."""
    try:
        named = os.stat(path)
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return []
    exact, alike = list[int](), list[int]()
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF; a "->" marks one that waits.
        fields = line.split()
        if len(fields) < 6 or fields[1] == "->":
            continue
        major, minor, inode = fields[5].split(":")
        if int(inode) != named.st_ino or int(fields[4]) <= 0:
            continue
        is_exact = os.makedev(int(major, 16), int(minor, 16)) == named.st_dev
        (exact if is_exact else alike).append(int(fields[4]))
    return exact or alike  # some file systems have another number of the device there


def _described(pid: int) -> str:
    if pid == os.getpid():
        return "another thread of this process holds it"
    command, state = "", ""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        # Another user may have chosen it, to forge a line of a log.
        command = "".join(each if each.isprintable() else " " for each in command)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    text = f"process {pid} ({command.strip()[:_COMMAND_MAX]}) holds it"
    if state in _STOPPED:
        return f"{text} and is stopped: continue it (`kill -CONT {pid}`), or end it"
    return text
