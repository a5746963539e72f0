"""Processes that take turns at a log, and count them: time says little on a busy machine.

`python -m tests.acceptance.turn_processes ROLE DIRECTORY SLOT` goes on until the board says stop.
The board is a small file that all of them map; slot 0 is for the word to stop, and each of the
others belongs to one process, which alone writes it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import kafkalog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from tests.builders.log_contents import latest_records, records

__all__ = ["BOARD", "READERS", "TOPIC", "Board", "Onlooker", "readers"]

BOARD: Final = "board"
READERS: Final = 8
TOPIC: Final = "t"
_SLOT: Final = struct.Struct("<q")
_HELD_S: Final = 0.002


class Board:
    """How many turns each reader has had."""

    def __init__(self, directory: Path) -> None:
        path = directory / BOARD
        if not path.exists():
            path.write_bytes(bytes(_SLOT.size * (READERS + 1)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def turns(self) -> list[int]:
        return [_SLOT.unpack_from(self._map, _SLOT.size * n)[0] for n in range(1, READERS + 1)]

    def count(self, slot: int) -> None:
        before = _SLOT.unpack_from(self._map, _SLOT.size * slot)[0]
        _SLOT.pack_into(self._map, _SLOT.size * slot, before + 1)

    def is_over(self) -> bool:
        return bool(_SLOT.unpack_from(self._map, 0)[0])

    def stop(self) -> None:
        _SLOT.pack_into(self._map, 0, 1)


@contextlib.contextmanager
def readers(role: str, directory: Path) -> Iterator[Board]:
    """Start the readers; yields when each of them has had a turn, and stops them in the end."""
    board = Board(directory.parent)
    command = [sys.executable, "-m", "tests.acceptance.turn_processes", role, str(directory)]
    processes = [subprocess.Popen([*command, str(n)]) for n in range(1, READERS + 1)]
    try:
        while not all(board.turns()):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.01)
        yield board
    finally:
        board.stop()
        codes = [process.wait() for process in processes]
    assert codes == [0] * READERS


class Onlooker:
    """Another process that says what it sees in a log, when it is asked."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "tests.acceptance.turn_processes", "look", str(root), "1"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def look(self) -> dict[str, list[list[list[object]]]]:
        """Return, by topic, all records and the latest values."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("look\n")
        self._process.stdin.flush()
        found: dict[str, list[list[list[object]]]] = json.loads(self._process.stdout.readline())
        return found

    def __enter__(self) -> Onlooker:
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


# --- roles ---------------------------------------------------------------------------------------


def lock(directory: Path, board: Board, slot: int) -> None:
    """Hold the segments lock for a moment, again and again."""
    while not board.is_over():
        with locks.SegmentsLock(directory).shared():
            board.count(slot)
            time.sleep(_HELD_S)


def bypass(directory: Path, board: Board, slot: int) -> None:
    """The same without the turnstile, and from hand to hand: somebody holds it all the time."""
    while not board.is_over():
        with locks.FileLock(directory / layout.SEGMENTS_LOCK).shared():
            board.count(slot)
            seen = sum(board.turns())
            while sum(board.turns()) < seen + 2 and not board.is_over():
                time.sleep(0.0002)


def read(directory: Path, board: Board, slot: int) -> None:
    """Read everything, again and again."""
    log = kafkalog.open(directory, read_only=True)
    while not board.is_over():
        records(log, TOPIC)
        latest_records(log, TOPIC)
        board.count(slot)


def look() -> None:
    """Answer each line with what a log that has been open all the time, and a new one, show."""
    root = Path(sys.argv[2])
    opened = kafkalog.open(root, read_only=True)
    for _ in sys.stdin:
        seen = []
        for log in (opened, kafkalog.open(root, read_only=True)):
            seen.append(
                {
                    topic: [
                        [[n, offset, str(key), str(value)] for n, offset, key, value in rows]
                        for rows in (records(log, topic),)
                    ]
                    + [
                        sorted(
                            [str(key), str(value)]
                            for key, value in latest_records(log, topic).items()
                        )
                    ]
                    for topic in log.topics()
                }
            )
        assert seen[0] == seen[1], seen
        print(json.dumps(seen[0]), flush=True)


ROLES: dict[str, Callable[[Path, Board, int], None]] = {
    "lock": lock,
    "bypass": bypass,
    "read": read,
}

if __name__ == "__main__":
    if sys.argv[1] == "look":
        look()
    else:
        place = Path(sys.argv[2])
        ROLES[sys.argv[1]](place, Board(place.parent), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
