"""One side of the lookups, in a process of its own, so that its memory is its alone.

    python -m bench.lookup_process WAY PATH

`WAY` is `kafkalog`, whose topic `t` lies in the log PATH, or `sqlite`, whose table `t` lies in the
file PATH. Each line on the standard input is a JSON list of keys, answered by a line of JSON: the
values, how many milliseconds each took, and the most MiB that the process had resident.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from bench.memory import peak_mib

__all__ = ["Answer", "LookupProcess"]

TOPIC: Final = "t"
_CACHE_SIZE: Final = 2 << 30
_LAST_S: Final = 60
"""How long it may take to end."""
LookUp = Callable[[str], str | None]


class Answer(NamedTuple):
    """The values found, the milliseconds of each, and the memory."""

    values: list[str | None]
    ms: list[float]
    mib: float


class LookupProcess:
    """The process, as its parent sees it; a context manager."""

    def __init__(self, way: str, path: Path) -> None:
        command = [sys.executable, "-m", __name__, way, str(path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process as process:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_LAST_S)
            except BaseException:
                process.kill()
                raise
        if kind is None and process.returncode:
            raise SystemExit(f"the lookups' process has ended with {process.returncode}")

    def ask(self, keys: Sequence[str]) -> Answer:
        """Look keys up, one after the other."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(keys), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the lookups' process has ended with {self._process.wait()}")
        return Answer(*json.loads(answer))


def serve(look_up: LookUp) -> None:
    """Answer list by list, until there are no more."""
    for line in sys.stdin:
        answer = Answer([], [], 0.0)
        for key in json.loads(line):
            start = time.perf_counter()
            value = look_up(key)
            answer.ms.append((time.perf_counter() - start) * 1000)
            answer.values.append(value)
        print(json.dumps(answer._replace(mib=peak_mib())), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Open what is asked for, and answer."""
    way, path = arguments
    if way == "sqlite":
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            # The whole table fits into either: no lookup waits for the disk twice.
            database.execute(f"PRAGMA cache_size = {-_CACHE_SIZE // 1024}")
            database.execute(f"PRAGMA mmap_size = {_CACHE_SIZE}")
            serve(lambda key: _row(database, key))
        return
    from kafkalog import KTable

    with KTable(None, path, TOPIC) as table:
        serve(lambda key: _record(table.lookup(key)))


def _row(database: sqlite3.Connection, key: str) -> str | None:
    row = database.execute("SELECT value FROM t WHERE key = ?", (key.encode(),)).fetchone()
    return None if row is None else row[0].decode()


def _record(record: object) -> str | None:
    value: bytes | None = getattr(record, "value", None)
    return None if value is None else value.decode()


if __name__ == "__main__":
    main(sys.argv[1:])
