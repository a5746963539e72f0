"""One side of the lookups, in a process of its own, so that its memory is its alone.

    python -m bench.lookup_process WAY PATH

`WAY` is `kafkalog`, whose topic `t` lies in the log PATH, or `sqlite` or `duckdb`, whose table `t`
lies in the file PATH. Each line on the standard input is a JSON list of keys, answered by a line of
JSON: the values, how many milliseconds each took, and the most MiB that the process had resident.
With `-at-once` behind the way, the keys of a line are asked for at once: the time is one, divided
by their number.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.answering_process import AnsweringProcess
from bench.memory import peak_mib

__all__ = ["Answer", "LookupProcess"]

TOPIC: Final = "t"
_CACHE_SIZE: Final = 2 << 30
LookUp = Callable[[str], str | None]
LookUpMany = Callable[[list[str]], dict[str, str | None]]


class Answer(NamedTuple):
    """The values found, the milliseconds of each, and the memory."""

    values: list[str | None]
    ms: list[float]
    mib: float


class LookupProcess(AnsweringProcess):
    """The process, as its parent sees it."""

    def __init__(self, way: str, path: Path) -> None:
        super().__init__(__name__, way, str(path))

    def look_up(self, keys: Sequence[str]) -> Answer:
        """Look keys up, one after the other."""
        return Answer(*self.ask(json.dumps(keys)))


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


def serve_at_once(look_up: LookUpMany) -> None:
    """Answer list by list, the keys of each at once."""
    for line in sys.stdin:
        keys = json.loads(line)
        start = time.perf_counter()
        found = look_up(keys)
        took_ms = (time.perf_counter() - start) * 1000
        answer = Answer([found.get(key) for key in keys], [took_ms / len(keys)], peak_mib())
        print(json.dumps(answer), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Open what is asked for, and answer."""
    way, path = arguments
    if way == "duckdb-at-once":
        import duckdb

        with duckdb.connect(path, read_only=True) as table:
            serve_at_once(lambda keys: _duckdb_rows(table, keys))
        return
    if way.startswith("sqlite"):
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            # The whole table fits into either: no lookup waits for the disk twice.
            database.execute(f"PRAGMA cache_size = {-_CACHE_SIZE // 1024}")
            database.execute(f"PRAGMA mmap_size = {_CACHE_SIZE}")
            if way == "sqlite":
                serve(lambda key: _row(database, key))
            else:
                serve_at_once(lambda keys: _rows(database, keys))
        return
    from kafkalog import KTable

    with KTable(None, path, TOPIC) as table:
        if way == "kafkalog":
            serve(lambda key: _record(table.lookup(key)))
        else:
            serve_at_once(lambda keys: _records(table.lookup_many(keys)))


def _records(found: Mapping[bytes | str, object]) -> dict[str, str | None]:
    return {str(key): _record(record) for key, record in found.items()}


def _rows(database: sqlite3.Connection, keys: list[str]) -> dict[str, str | None]:
    places = ",".join("?" * len(keys))
    rows = database.execute(
        f"SELECT key, value FROM t WHERE key IN ({places})", [key.encode() for key in keys]
    )
    return {key.decode(): value.decode() for key, value in rows}


def _duckdb_rows(table: Any, keys: list[str]) -> dict[str, str | None]:
    asked = "SELECT key, value FROM t WHERE key IN (SELECT unnest(?::BLOB[]))"
    rows = table.execute(asked, [[key.encode() for key in keys]]).fetchall()
    return {key.decode(): value.decode() for key, value in rows}


def _row(database: sqlite3.Connection, key: str) -> str | None:
    row = database.execute("SELECT value FROM t WHERE key = ?", (key.encode(),)).fetchone()
    return None if row is None else row[0].decode()


def _record(record: object) -> str | None:
    value: bytes | None = getattr(record, "value", None)
    return None if value is None else value.decode()


if __name__ == "__main__":
    main(sys.argv[1:])
