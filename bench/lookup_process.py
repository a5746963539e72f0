"""One side of the lookups, in a process of its own, so that its memory is its alone.

    python -m bench.lookup_process WAY PATH

`WAY` is `kafkalog`, whose topic `t` lies in the log PATH, or `sqlite` or `duckdb`, whose table `t`
lies in the file PATH. Each line on the standard input is a JSON list of keys, answered by a line of
JSON: the values, how many milliseconds each took, the most MiB that the process had resident, and
how many milliseconds of CPU each took, in all threads.
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
    """The values found, the milliseconds of each, the memory, and the CPU time of each."""

    values: list[str | None]
    ms: list[float]
    mib: float
    cpu_ms: list[float]


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
        answer = Answer([], [], 0.0, [])
        for key in json.loads(line):
            start, spent = time.perf_counter(), time.process_time()
            value = look_up(key)
            answer.cpu_ms.append((time.process_time() - spent) * 1000)
            answer.ms.append((time.perf_counter() - start) * 1000)
            answer.values.append(value)
        print(json.dumps(answer._replace(mib=peak_mib())), flush=True)


def serve_at_once(look_up: LookUpMany) -> None:
    """Answer list by list, the keys of each at once."""
    for line in sys.stdin:
        keys = json.loads(line)
        start, spent = time.perf_counter(), time.process_time()
        found = look_up(keys)
        cpu_ms = (time.process_time() - spent) * 1000 / len(keys)
        took_ms = (time.perf_counter() - start) * 1000 / len(keys)
        answer = Answer([found.get(key) for key in keys], [took_ms], peak_mib(), [cpu_ms])
        print(json.dumps(answer), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Open what is asked for, and answer."""
    way, path = arguments
    if way.startswith("duckdb"):
        import duckdb

        with duckdb.connect(path, read_only=True) as table:
            if way == "duckdb":
                serve(lambda key: _duckdb_rows(table, [key]).get(key))
            else:
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
